//! Slot 0 of a group: what arrives there, and what the broker itself has to say.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use roce_bth::{Bth, Deth, Header, ICRC_LEN, Opcode, Packet, Psn, QKey, Qpn, ROCE_UDP_PORT};
use roce_cm::{CmConfig, Manager, OutMad, mad};
use roce_icrc::{Flow, IdSolver, IpPair};
use roce_net::{Burst, DEFAULT_HOP_LIMIT, Datagram, Datapath, OpenError, OpenSockets, UdpConfig, UdpDatapath};
use roce_port::{GsiDrop, RxMeta, check_gsi};
use roce_verbs::{Instant, Mtu};

use crate::{
    group::Group,
    proto::{Meta, Place},
};

/// Packets of one receive.
const BUDGET: usize = 256;

/// A packet that slot 0 received, or that a member handed over.
pub(super) struct Arrival {
    pub(super) meta: Meta,
    pub(super) bytes: Vec<u8>,
}

/// Receiver of a packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Target {
    /// A management datagram.
    Gsi(Box<[u8; mad::MAD_LEN]>),
    /// A queue pair of a member.
    Member(Place),
    /// Nobody; the name of the counter.
    Nobody(&'static str),
}

/// Finds out whom a packet is for. Its ICRC is not checked.
pub(super) fn target(bytes: &[u8]) -> Target {
    let packet = match Packet::parse(bytes) {
        Ok(packet) => packet,
        Err(_) => return Target::Nobody("drop_malformed"),
    };
    match packet.header.bth.dest_qp {
        Qpn::GSI => {}
        Qpn::SMI => return Target::Nobody("drop_qp0"),
        Qpn::MULTICAST => return Target::Nobody("drop_multicast"),
        qpn => {
            let place = Place::of_qpn(qpn);
            return match place.is_valid() {
                true => Target::Member(place),
                false => Target::Nobody("drop_no_qp"),
            };
        }
    }
    match check_gsi(&packet) {
        Ok(Some(mad)) => Target::Gsi(Box::new(*mad)),
        Err(GsiDrop::PKey) => Target::Nobody("drop_pkey"),
        Ok(None) | Err(GsiDrop::Service | GsiDrop::QKey) => Target::Nobody("drop_bad_mad"),
    }
}

/// QP1 of one address: its group of sockets, and the requests under way.
pub(super) struct Gsi {
    pub(super) group: Group,
    path: UdpDatapath,
    /// Answers what nobody is there for.
    manager: Manager,
    solver: IdSolver,
    psn: Psn,
    /// The user whose process had it opened.
    pub(super) owner: u32,
    /// Since when no member uses the group.
    pub(super) idle_since: Option<Instant>,
}

impl Gsi {
    pub(super) fn new(group: Group, owner: u32, seed: [u8; 32]) -> Result<Self, OpenError> {
        let config = UdpConfig {
            addr: group.addr(),
            receive_buffer: 1 << 20,
            send_sockets: 0,
            ..UdpConfig::default()
        };
        let io = |source| OpenError::Io {
            context: "taking the socket of slot 0",
            source,
        };
        let socket = group.broker_socket().map_err(io)?;
        let sockets = OpenSockets {
            receivers: vec![Arc::new(socket)],
            ..OpenSockets::default()
        };
        let path = UdpDatapath::from_sockets(&config, &sockets)?;
        let [a, b, c, d, ..] = seed;
        let guid = u64::from_le_bytes([a, b, c, d, 0, 0, 0, 2]);
        Ok(Self {
            group,
            owner,
            path,
            manager: Manager::new(CmConfig::new(guid, Mtu::B4096), seed),
            solver: IdSolver::new(),
            psn: Psn::new(u32::from_le_bytes([a, b, c, 0])),
            idle_since: None,
        })
    }

    /// Returns the descriptors to watch for input.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        self.path.descriptors().iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// Whether packets to an address arrive here.
    pub(super) fn covers(&self, addr: IpAddr) -> bool {
        let own = self.group.addr();
        own == addr || (own.is_unspecified() && own.is_ipv4() == addr.is_ipv4())
    }

    /// Takes packets. True: more may be waiting.
    pub(super) fn receive(&mut self, out: &mut Vec<Arrival>) -> bool {
        let received = self.path.receive(BUDGET, &mut |d: &Datagram<'_>| {
            let meta = Meta {
                local: d.local,
                remote: d.remote,
                tos: d.traffic_class,
                hop_limit: d.hop_limit,
            };
            out.extend(d.bytes.chunks(d.segment_len.max(1)).map(|bytes| Arrival {
                meta,
                bytes: bytes.to_vec(),
            }));
        });
        received.more
    }

    /// Whether a packet's ICRC is right, with whatever IPv4 Identification.
    pub(super) fn is_sound(&mut self, meta: &Meta, bytes: &[u8]) -> bool {
        RxMeta::from(meta).is_sound(&mut self.solver, bytes)
    }

    /// Answers a management datagram that concerns no member (any more).
    pub(super) fn answer(&mut self, now: Instant, meta: &Meta, mad: &[u8]) {
        self.manager.handle_mad(now, meta.local, meta.remote.ip(), mad);
        while let Some(mad) = self.manager.poll_mad() {
            self.send(&mad);
        }
        // It has no listeners, and connects to nobody.
        while self.manager.poll_event().is_some() {}
    }

    /// Sends a management datagram.
    pub(super) fn send(&mut self, out: &OutMad) {
        let Ok(ip) = IpPair::try_from((out.local, out.remote)) else {
            return;
        };
        let flow = Flow {
            ip,
            src_port: ROCE_UDP_PORT,
            dst_port: ROCE_UDP_PORT,
        };
        let bytes = wrap(&flow, self.psn, &out.mad);
        self.psn = self.psn.next();
        let burst = Burst {
            local: out.local,
            remote: SocketAddr::new(out.remote, ROCE_UDP_PORT),
            src_port: ROCE_UDP_PORT,
            traffic_class: 0,
            hop_limit: DEFAULT_HOP_LIMIT,
            segment_len: bytes.len(),
            bytes: &bytes,
        };
        // What does not go out is lost, as in a network; it is sent again.
        self.path.send(&mut std::iter::once(burst));
    }
}

/// A MAD in a UD SEND ONLY from QP1 to QP1 (IBA 13.5.1), sealed with Identification 0.
fn wrap(flow: &Flow, psn: Psn, mad: &[u8; mad::MAD_LEN]) -> Vec<u8> {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, psn));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    let mut bytes = vec![0; header.wire_len() + mad.len() + ICRC_LEN];
    let at = header.emit(&mut bytes);
    bytes[at..at + mad.len()].copy_from_slice(mad);
    flow.seal(0, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_told_apart() {
        let ip = IpPair::try_from(([127, 0, 0, 1].into(), [127, 0, 0, 2].into())).unwrap();
        let flow = Flow {
            ip,
            src_port: 1,
            dst_port: ROCE_UDP_PORT,
        };
        let mad = [7; mad::MAD_LEN];
        let mut bytes = wrap(&flow, Psn::new(1), &mad);
        assert_eq!(target(&bytes), Target::Gsi(Box::new(mad)));
        let partition = |key: u16| {
            let mut bytes = bytes.clone();
            bytes[2..4].copy_from_slice(&key.to_be_bytes());
            target(&bytes)
        };
        assert_eq!(partition(0x7fff), Target::Gsi(Box::new(mad)), "a limited member");
        assert_eq!(partition(0x8001), Target::Nobody("drop_pkey"));
        assert_eq!(target(&bytes[..40]), Target::Nobody("drop_bad_mad"));
        assert_eq!(target(&bytes[..9]), Target::Nobody("drop_malformed"));
        bytes[7] = 0;
        assert_eq!(target(&bytes), Target::Nobody("drop_qp0"));
        let place = Place { slot: 9, generation: 3 };
        let qpn = place.numbers().qpns().first + 5;
        bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
        assert_eq!(target(&bytes), Target::Member(place));
        bytes[5..8].copy_from_slice(&[0, 0x10, 0]);
        assert_eq!(
            target(&bytes),
            Target::Nobody("drop_no_qp"),
            "slot 0 has no queue pairs"
        );
        bytes[5..8].copy_from_slice(&[255; 3]);
        assert_eq!(target(&bytes), Target::Nobody("drop_multicast"));
    }
}
