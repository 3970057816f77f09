//! Slot 0 of a group: the packets that arrive there, and those that the broker sends.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    sync::Arc,
};

use roce_bth::{ICRC_LEN, Packet, Psn, Qpn, ROCE_UDP_PORT};
use roce_icrc::{Flow, IdSolver, IpPair};
use roce_net::{DEFAULT_HOP_LIMIT, Datapath, OpenError, OpenSockets, Train, UdpConfig, UdpDatapath, packets};
use roce_port::RxMeta;
use roce_port::cm::{
    CmConfig, Manager, OutMad,
    datagram::{self, GsiDrop},
    mad,
};
use roce_verbs::{Instant, Mtu};

use crate::{group::Group, proto::Place};

/// Packets of one receive.
const BUDGET: usize = 256;

/// Receiver of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target<'a> {
    /// QP1: a management datagram.
    Gsi(&'a [u8; mad::MAD_LEN]),
    /// A queue pair of a member.
    Member(Place),
    /// None. The name of the counter.
    Nobody(&'static str),
}

/// Returns the receiver of a packet. Its ICRC is not checked.
pub(super) fn target(bytes: &[u8]) -> Target<'_> {
    let Ok(packet) = Packet::parse(bytes) else {
        return Target::Nobody("drop_malformed");
    };
    match packet.header.bth.dest_qp {
        Qpn::GSI => match datagram::check(&packet) {
            Ok(Some(mad)) => Target::Gsi(mad),
            Err(GsiDrop::PKey) => Target::Nobody("drop_pkey"),
            Ok(None) | Err(GsiDrop::Service | GsiDrop::QKey) => Target::Nobody("drop_bad_mad"),
        },
        Qpn::SMI => Target::Nobody("drop_qp0"),
        Qpn::MULTICAST => Target::Nobody("drop_multicast"),
        qpn => match Place::of_qpn(qpn) {
            place if place.is_valid() => Target::Member(place),
            _ => Target::Nobody("drop_no_qp"),
        },
    }
}

/// QP1 of one address: its group of sockets, and the requests under way.
pub(super) struct Gsi {
    pub(super) group: Group,
    path: UdpDatapath,
    /// Answers datagrams for which there is no member.
    manager: Manager,
    solver: IdSolver,
    psn: Psn,
    /// The user whose process had it opened.
    pub(super) owner: u32,
    /// Time since when no member uses the group.
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
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.path.descriptors()
    }

    /// Returns whether packets to an address arrive here.
    pub(super) fn covers(&self, addr: IpAddr) -> bool {
        let own = self.group.addr();
        own == addr || (own.is_unspecified() && own.is_ipv4() == addr.is_ipv4())
    }

    /// Receives packets.
    pub(super) fn receive(&mut self, out: &mut Vec<(RxMeta, Vec<u8>)>) {
        self.path.receive(BUDGET, &mut |datagram: &RxMeta, bytes: &[u8]| {
            let meta = RxMeta {
                segment_len: 0,
                ..*datagram
            };
            out.extend(packets(datagram, bytes).map(|bytes| (meta, bytes.to_vec())));
        });
    }

    /// Returns whether a packet's ICRC is right, for some IPv4 Identification.
    pub(super) fn is_sound(&mut self, meta: &RxMeta, bytes: &[u8]) -> bool {
        meta.is_sound(&mut self.solver, bytes)
    }

    /// Answers a management datagram that concerns no member (any more).
    pub(super) fn answer(&mut self, now: Instant, meta: &RxMeta, mad: &[u8]) {
        self.manager.handle_mad(now, meta.local, meta.remote.ip(), mad);
        while let Some(mad) = self.manager.poll_mad() {
            self.send(&mad);
        }
        // It has no listeners and no connections of its own.
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
        let train = Train {
            local: out.local,
            remote: SocketAddr::new(out.remote, ROCE_UDP_PORT),
            src_port: ROCE_UDP_PORT,
            tos: 0,
            ttl: DEFAULT_HOP_LIMIT,
            segment_len: bytes.len(),
            bytes: &bytes,
        };
        // What does not go out is lost, as in a network; it is sent again.
        self.path.send(&mut std::iter::once(train));
    }
}

/// Returns a MAD's packet, sealed with Identification 0.
fn wrap(flow: &Flow, psn: Psn, mad: &[u8; mad::MAD_LEN]) -> Vec<u8> {
    let mut bytes = vec![0; datagram::PACKET_LEN + ICRC_LEN];
    datagram::write(psn, mad, &mut bytes);
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
        assert_eq!(target(&bytes), Target::Gsi(&mad));
        let of_partition = |key: u16| {
            let mut bytes = bytes.clone();
            bytes[2..4].copy_from_slice(&key.to_be_bytes());
            bytes
        };
        assert_eq!(target(&of_partition(0x7fff)), Target::Gsi(&mad), "a limited member");
        assert_eq!(target(&of_partition(0x8001)), Target::Nobody("drop_pkey"));
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
