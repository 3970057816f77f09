//! Tests of two ports that exchange packets under the control of the test.

mod amplification;
mod connections;
mod datagrams;
mod drops;
mod hostile;
mod marks;
mod parting;
mod planted;
mod segmentation;
mod siblings;
mod strangers;
mod traffic;
mod translated;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_bth::ROCE_UDP_PORT;
use roce_port::{CmEventKind, ConnId, ListenArgs, Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::mem::{MemoryTable, PdHandle, Region};
use roce_verbs::{
    AccessFlags, AddressVector, Completion, Instant, Mtu, Payload, Psn, QpAttr, QpCaps, QpState, QpType, Qpn, RecvWr,
    RemoteAddr, RnrTimer, SendFlags, SendOp, SendWr, Sge, provider::ConnParams,
};

pub(crate) const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

pub(crate) fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

pub(crate) fn ip(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

/// UDP payload on the wire, or an unsplit GSO train.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) src: SocketAddr,
    pub(crate) dst: IpAddr,
    pub(crate) segment_len: usize,
    pub(crate) segments: usize,
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) struct Host {
    pub(crate) addr: IpAddr,
    pub(crate) port: Port,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) pd: PdHandle,
    pub(crate) cq: Arc<CompletionQueue>,
    pub(crate) now: Instant,
    batch: TxBatch,
    events: Vec<CmEventKind>,
}

impl Host {
    pub(crate) fn new(last: u8) -> Self {
        Self::with(last, |_| {})
    }

    pub(crate) fn with(last: u8, change: impl FnOnce(&mut PortConfig)) -> Self {
        let addr = ip(last);
        let mut config = PortConfig::new(vec![addr], Mtu::B1024, u64::from(last));
        change(&mut config);
        let mem = Arc::new(MemoryTable::new([last; 32], &config.limits));
        let pd = mem.alloc_pd().unwrap();
        Self {
            addr,
            port: Port::new(config, mem.clone(), [last; 32]),
            mem,
            pd,
            cq: CompletionQueue::new(0, 1000, None),
            now: at(1),
            batch: TxBatch::new(TxConfig::default()),
            events: Vec::new(),
        }
    }

    pub(crate) fn init(&self) -> QpInit {
        QpInit {
            pd: self.pd,
            qp_type: QpType::Rc,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            caps: QpCaps::default(),
            signal_all: true,
            srq: None,
            xrcd: None,
        }
    }

    pub(crate) fn qp(&mut self) -> Qpn {
        let init = self.init();
        self.port.create_qp(init).unwrap()
    }

    pub(crate) fn region(&self, len: usize) -> Arc<Region> {
        self.mem.alloc_region(self.pd, len, RIGHTS).unwrap()
    }

    /// Returns everything that the port sends now.
    pub(crate) fn take(&mut self) -> Vec<Datagram> {
        let mut out = Vec::new();
        loop {
            let more = self.port.poll_transmit(self.now, &mut self.batch);
            out.extend(self.batch.trains().map(|t| Datagram {
                src: SocketAddr::new(t.local, t.src_port),
                dst: t.remote.ip(),
                segment_len: t.segment_len,
                segments: t.segments(),
                tos: t.tos,
                ttl: t.ttl,
                bytes: t.bytes.to_vec(),
            }));
            self.batch.clear();
            if !more {
                return out;
            }
        }
    }

    /// Delivers a datagram like a UDP socket with GRO.
    pub(crate) fn give(&mut self, d: &Datagram) {
        let meta = RxMeta {
            segment_len: d.segment_len,
            ..RxMeta::new(d.dst, d.src)
        };
        self.port.handle_datagram(self.now, &meta, &d.bytes);
        self.follow();
    }

    pub(crate) fn completions(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        self.cq.poll(&mut out, 1000).unwrap();
        out
    }

    /// Has the port move queue pairs as events of connections demand, and keeps the events for the test.
    fn follow(&mut self) {
        let port = &mut self.port;
        self.events.extend(std::iter::from_fn(|| port.poll_cm_event(self.now)));
    }

    pub(crate) fn events(&mut self) -> Vec<CmEventKind> {
        self.follow();
        std::mem::take(&mut self.events)
    }

    pub(crate) fn send(&mut self, qpn: Qpn, wr_id: u64, op: SendOp, region: &Region, len: u32) {
        let sges = [Sge {
            addr: region.addr(),
            length: len,
            lkey: region.lkey(),
        }];
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.port.post_send(self.now, qpn, &[wr]).unwrap();
    }

    pub(crate) fn receive(&mut self, qpn: Qpn, wr_id: u64, region: &Region) {
        let sges = [Sge {
            addr: region.addr(),
            length: region.len() as u32,
            lkey: region.lkey(),
        }];
        let wr = RecvWr { wr_id, sges: &sges };
        self.port.post_recv(self.now, qpn, &[wr]).unwrap();
    }

    /// Moves a queue pair from RESET to RTS, connected to a peer's.
    pub(crate) fn raise(&mut self, qpn: Qpn, peer: IpAddr, dest: Qpn) {
        self.raise_class(qpn, peer, dest, 0);
    }

    /// Moves a queue pair from RESET to RTS with a traffic class.
    pub(crate) fn raise_class(&mut self, qpn: Qpn, peer: IpAddr, dest: Qpn, traffic_class: u8) {
        let av = AddressVector {
            traffic_class,
            ..AddressVector::new(self.addr, peer)
        };
        let steps = QpAttr {
            access: Some(RIGHTS),
            rq_psn: Some(Psn::new(100)),
            sq_psn: Some(Psn::new(100)),
            min_rnr_timer: Some(RnrTimer::new(1)),
            ..QpAttr::to_rts(av, Mtu::B1024, dest)
        };
        for attr in steps.steps(QpType::Rc) {
            self.port.modify_qp(self.now, qpn, &attr).unwrap();
        }
    }
}

/// End of the wire.
pub(crate) trait End {
    fn take_all(&mut self) -> Vec<Datagram>;
    fn take_in(&mut self, d: &Datagram);
}

impl End for Host {
    fn take_all(&mut self) -> Vec<Datagram> {
        self.take()
    }

    fn take_in(&mut self, d: &Datagram) {
        self.give(d);
    }
}

/// Exchanges packets until neither end sends any.
pub(crate) fn exchange(a: &mut impl End, b: &mut impl End) {
    for _ in 0..1000 {
        let (from_a, from_b) = (a.take_all(), b.take_all());
        if from_a.is_empty() && from_b.is_empty() {
            return;
        }
        from_a.iter().for_each(|d| b.take_in(d));
        from_b.iter().for_each(|d| a.take_in(d));
    }
    panic!("still exchanging packets after 1000 rounds");
}

/// Makes two connected queue pairs learn each other's source ports. Before that they send single packets.
pub(crate) fn acquaint(a: &mut Host, b: &mut Host, qa: Qpn, qb: Qpn) {
    let (ra, rb) = (a.region(8), b.region(8));
    a.send(qa, 0, SendOp::Write(remote(&rb)), &ra, 0);
    b.send(qb, 0, SendOp::Write(remote(&ra)), &rb, 0);
    exchange(a, b);
    assert!(a.completions()[0].is_ok() && b.completions()[0].is_ok());
}

/// Creates two hosts with a connected queue pair each.
pub(crate) fn pair() -> (Host, Host, Qpn, Qpn) {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (qa, qb) = (a.qp(), b.qp());
    a.raise(qa, b.addr, qb);
    b.raise(qb, a.addr, qa);
    (a, b, qa, qb)
}

pub(crate) fn remote(region: &Region) -> RemoteAddr {
    RemoteAddr {
        addr: region.addr(),
        rkey: region.rkey(),
    }
}

pub(crate) fn contents(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    region.read(0, &mut out).unwrap();
    out
}

pub(crate) fn noise(len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

pub(crate) fn params(text: &[u8]) -> ConnParams {
    ConnParams {
        private_data: text.to_vec(),
        ..ConnParams::default()
    }
}

pub(crate) const ROCE: u16 = ROCE_UDP_PORT;
