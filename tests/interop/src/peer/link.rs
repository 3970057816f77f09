//! One queue pair with its completion queues, brought up by hand.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

use roce::{Cq, Device, Pd, Qp, QpInit};
use roce_verbs::{AccessFlags, AddressVector, Completion, Mtu, Psn, QpAttr, QpCaps, QpState, Qpn, RnrTimer};

use crate::Error;

/// A GID as an address: IPv4-mapped ones become IPv4.
pub(crate) fn gid_addr(gid: Ipv6Addr) -> IpAddr {
    gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4)
}

/// An address as a GID.
pub(crate) fn addr_gid(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    }
}

/// What the two sides tell each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Far {
    pub(crate) qpn: Qpn,
    pub(crate) psn: Psn,
    pub(crate) addr: IpAddr,
}

/// Attributes that both ends agree on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    pub(crate) mtu: Mtu,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rd_atomic: u8,
}

/// A queue pair and its queues.
pub(crate) struct Link {
    pub(crate) pd: Pd,
    pub(crate) qp: Qp,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
}

impl Link {
    /// Makes a queue pair in INIT.
    pub(crate) fn new(provider: &Device, caps: QpCaps) -> Result<Self, Error> {
        let all = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        Self::with_access(provider, caps, all)
    }

    /// Makes a queue pair in INIT whose peer has these rights.
    pub(crate) fn with_access(provider: &Device, caps: QpCaps, access: AccessFlags) -> Result<Self, Error> {
        let link = Self::unconnected(provider, caps)?;
        link.qp.modify(&QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(access),
            ..QpAttr::default()
        })?;
        Ok(link)
    }

    /// Makes a queue pair in RESET, for the connection manager to bring up.
    pub(crate) fn unconnected(provider: &Device, caps: QpCaps) -> Result<Self, Error> {
        let pd = provider.alloc_pd()?;
        let send_cq = provider.create_cq(caps.max_send_wr + 16, None, 0)?;
        let recv_cq = provider.create_cq(caps.max_recv_wr + 16, None, 1)?;
        let init = QpInit {
            send_cq: &send_cq,
            recv_cq: &recv_cq,
            caps,
            signal_all: false,
        };
        let qp = provider.create_qp(&pd, &init)?;
        Ok(Self {
            pd,
            qp,
            send_cq,
            recv_cq,
        })
    }

    /// INIT to RTR to RTS.
    pub(crate) fn bring_up(&self, local: IpAddr, psn: Psn, far: Far, wire: Wire) -> Result<(), Error> {
        self.to_rtr(local, far, wire.mtu, wire.rd_atomic)?;
        self.to_rts(psn, wire)
    }

    /// INIT to RTR.
    pub(crate) fn to_rtr(&self, local: IpAddr, far: Far, mtu: Mtu, rd_atomic: u8) -> Result<(), Error> {
        self.qp.modify(&QpAttr {
            state: Some(QpState::Rtr),
            av: Some(AddressVector::new(local, far.addr)),
            path_mtu: Some(mtu),
            dest_qpn: Some(far.qpn),
            rq_psn: Some(far.psn),
            max_dest_rd_atomic: Some(rd_atomic),
            min_rnr_timer: Some(RnrTimer::new(12)),
            ..QpAttr::default()
        })?;
        Ok(())
    }

    /// RTR to RTS.
    pub(crate) fn to_rts(&self, psn: Psn, wire: Wire) -> Result<(), Error> {
        self.qp.modify(&QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(psn),
            timeout: Some(wire.timeout),
            retry_cnt: Some(wire.retry_cnt),
            rnr_retry: Some(wire.rnr_retry),
            max_rd_atomic: Some(wire.rd_atomic),
            ..QpAttr::default()
        })?;
        Ok(())
    }

    /// Waits for one completion of a queue.
    pub(crate) fn wait_one(cq: &Cq, timeout: Duration) -> Result<Completion, Error> {
        let mut out = Vec::with_capacity(1);
        let until = Instant::now() + timeout;
        while cq.poll(&mut out, 1)? == 0 {
            if Instant::now() > until {
                return Err(format!("no completion within {timeout:?}").into());
            }
            std::hint::spin_loop();
        }
        Ok(out[0])
    }

    /// Waits for one successful completion of a queue.
    pub(crate) fn expect_ok(cq: &Cq, what: &str) -> Result<Completion, Error> {
        let wc = Self::wait_one(cq, Duration::from_secs(60)).map_err(|e| format!("{what}: {e}"))?;
        if wc.is_ok() {
            Ok(wc)
        } else {
            Err(format!("{what}: {:?}", wc.status).into())
        }
    }
}
