//! Receive path: every check between a UDP datagram and a queue pair.

use core::net::{IpAddr, SocketAddr};

use roce_bth::{Class, Packet, ParseError, Qpn, ROCE_UDP_PORT, Service};
use roce_icrc::{Flow, IcrcPrefix, IdSolver, IpPair, Recovery};
use roce_qp::{DatagramSource, Origin};
use roce_verbs::Instant;

use crate::{
    cnp::{ECN_BITS, ECN_CE},
    entry::Binding,
    gsi::{GsiDrop, check_gsi, pkey_matches},
    peer::PeerKey,
    port::Port,
    steering::Forwarded,
};

/// Management class of communication management, the second byte of a MAD.
const CM_CLASS: u8 = roce_cm::mad::CLASS;

/// Metadata of a received datagram.
#[derive(Clone, Copy, Debug)]
pub struct RxMeta {
    /// Destination address (`IP_PKTINFO`).
    pub local: IpAddr,
    /// Sender's address and UDP port.
    pub remote: SocketAddr,
    /// IPv4 Identification of the first packet. `None` from a UDP socket, which hides the IP header.
    pub identification: Option<u16>,
    /// Bytes of each packet but the last in a GRO buffer (`UDP_GRO`); 0 for a single packet.
    pub segment_len: usize,
    /// TOS or traffic class (`IP_RECVTOS`), 0 if unknown.
    pub tos: u8,
    /// TTL or hop limit (`IP_RECVTTL`), 0 if unknown.
    pub hop_limit: u8,
}

impl RxMeta {
    /// Creates the metadata of a single datagram with only its addresses known.
    pub const fn new(local: IpAddr, remote: SocketAddr) -> Self {
        Self {
            local,
            remote,
            identification: None,
            segment_len: 0,
            tos: 0,
            hop_limit: 0,
        }
    }

    /// Returns whether the ICRC of a single packet is right. IPv4 Identifications that the socket does not show are recovered.
    pub fn is_sound(&self, solver: &mut IdSolver, bytes: &[u8]) -> bool {
        let Ok(ip) = IpPair::try_from((self.remote.ip(), self.local)) else {
            return false;
        };
        let flow = Flow {
            ip,
            src_port: self.remote.port(),
            dst_port: ROCE_UDP_PORT,
        };
        match self.identification {
            Some(id) => flow.verify(id, bytes),
            None => matches!(flow.recover_with(solver, bytes, 0), Recovery::Exact(_)),
        }
    }
}

/// Network header of a received datagram.
struct Source {
    flow: Flow,
    identification: Option<u16>,
    tos: u8,
    hop_limit: u8,
}

impl Source {
    /// Returns the network header that queue pairs get, with this Identification.
    fn header(&self, identification: u16) -> DatagramSource {
        let default = DatagramSource::new(self.flow.ip.src(), self.flow.ip.dst());
        DatagramSource {
            traffic_class: self.tos,
            identification,
            hop_limit: match self.hop_limit {
                0 => default.hop_limit,
                given => given,
            },
            ..default
        }
    }
}

/// IPv4 Identification for which a packet's ICRC is correct.
enum Ident {
    /// Known in advance, or absent (IPv6: 0). The ICRC alone proves the packet intact.
    Known(u16),
    /// Recovered from the ICRC. The packet counts only if the peer would send this value.
    Recovered(u16),
}

/// Reason for which a packet of an unauthenticated sender is dropped.
enum Unproven {
    /// Its ICRC is wrong.
    Corrupt,
    /// Its ICRC fits an Identification that the peer would not send.
    Implausible,
}

impl Port {
    /// Processes one UDP payload, or a GRO buffer of several packets from one sender. Accepts any bytes.
    pub fn handle_datagram(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        self.now = now;
        self.counters.rx_datagrams += 1;
        let step = match meta.segment_len {
            0 => bytes.len().max(1),
            len => len,
        };
        let packets = bytes.len().div_ceil(step).max(1) as u64;
        self.counters.rx_packets += packets;
        self.counters.rx_bytes += bytes.len() as u64;
        if meta.tos & ECN_BITS == ECN_CE {
            self.counters.np_ecn_marked_roce_packets += packets;
        }
        if bytes.is_empty() {
            self.counters.drop_truncated += 1;
            return;
        }
        let ip = IpPair::try_from((meta.remote.ip(), meta.local));
        let is_ours = |ip: &IpPair| ip.dst().is_multicast() || self.config.is_local(ip.dst());
        let Some(ip) = ip.ok().filter(is_ours) else {
            self.counters.drop_local_address += packets;
            return;
        };
        let source = Source {
            flow: Flow {
                ip,
                src_port: meta.remote.port(),
                dst_port: ROCE_UDP_PORT,
            },
            identification: meta.identification,
            tos: meta.tos,
            hop_limit: meta.hop_limit,
        };
        for (index, packet) in bytes.chunks(step).enumerate() {
            // Can't truncate: a buffer has at most 2^16 bytes. A wrong index would only be a wrong hint.
            self.handle_packet(now, &source, index as u16, packet);
        }
        self.finish_steps();
    }

    /// Processes a single packet, as [`Port::handle_datagram`] does, but if it needs a receive work request, there is none: a fault on
    /// demand.
    pub fn handle_packet_without_receive(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        let found = Packet::parse(bytes).ok().and_then(|packet| {
            let slot = self.qpns.get(packet.header.bth.dest_qp)?;
            Some((slot, self.qps[slot].qp.hide_receives(&packet)?))
        });
        self.handle_datagram(now, meta, bytes);
        if let Some((slot, hidden)) = found
            && let Some(entry) = self.qps.get_mut(slot)
        {
            entry.qp.restore_receives(hidden);
        }
    }

    /// Counts a received packet of `len` bytes that the driver did not give to this port. A shard counts its packets as received itself.
    pub fn count_forwarded(&mut self, forwarded: Forwarded, len: usize) {
        let c = &mut self.counters;
        let (count, received) = match forwarded {
            Forwarded::Back | Forwarded::Placed => return,
            Forwarded::Shard => (&mut c.handed_over, false),
            Forwarded::Process => (&mut c.handed_over, true),
            Forwarded::Lost => (&mut c.drop_handed_over, true),
            Forwarded::Refused => (&mut c.drop_requests, true),
        };
        *count += 1;
        if received {
            c.rx_packets += 1;
            c.rx_bytes += len as u64;
        }
    }

    fn handle_packet(&mut self, now: Instant, source: &Source, index: u16, bytes: &[u8]) {
        let packet = match Packet::parse(bytes) {
            Ok(packet) => packet,
            Err(e) => {
                let c = &mut self.counters;
                *match e {
                    ParseError::TooShort { .. } | ParseError::HeaderTruncated { .. } => &mut c.drop_truncated,
                    ParseError::UnknownOpcode(_) => &mut c.drop_opcode,
                    ParseError::Version(_) => &mut c.drop_version,
                    ParseError::PadTooLong { .. } | ParseError::Unaligned(_) | ParseError::UnexpectedPayload { .. } => {
                        &mut c.drop_malformed
                    }
                } += 1;
                return;
            }
        };
        let to_group = source.flow.ip.dst().is_multicast();
        let qpn = packet.header.bth.dest_qp;
        if !to_group && qpn.value() > Qpn::GSI.value() && qpn != Qpn::MULTICAST {
            return self.handle_unicast(now, source, index, bytes, qpn, &packet);
        }
        // The packet may concern the queue pair of the packets before it: finish those first.
        self.finish_steps();
        match qpn {
            Qpn::MULTICAST if to_group => self.handle_multicast(now, source, index, bytes, &packet),
            Qpn::MULTICAST => self.counters.drop_multicast += 1,
            _ if to_group => self.counters.drop_local_address += 1,
            Qpn::SMI => self.counters.drop_qp0 += 1,
            _ => self.handle_gsi(now, source, index, bytes, &packet),
        }
    }

    /// Processes a packet to an application's queue pair.
    fn handle_unicast(
        &mut self,
        now: Instant,
        source: &Source,
        index: u16,
        bytes: &[u8],
        qpn: Qpn,
        packet: &Packet<'_>,
    ) {
        let Some(slot) = self.qpns.get(qpn) else {
            self.counters.drop_no_qp += 1;
            return;
        };
        let qp_type = self.qps[slot].qp.config().qp_type;
        let info = packet.header.bth.opcode.info();
        if !info.is_of(qp_type.service()) && info.class != Class::Cnp {
            self.counters.drop_service += 1;
            return;
        }
        if !qp_type.is_datagram() {
            return self.handle_connected(now, source, index, bytes, slot, packet);
        }
        if !pkey_matches(packet.header.bth.pkey) {
            self.counters.drop_pkey += 1;
            return;
        }
        let Ok(id) = self.check_stranger(now, source, index, bytes) else {
            return;
        };
        match info.class {
            Class::Cnp => self.counters.rp_cnp_ignored += 1,
            _ => self.give_datagram(now, slot, packet, &source.header(id)),
        }
    }

    fn give_datagram(&mut self, now: Instant, slot: usize, packet: &Packet<'_>, header: &DatagramSource) {
        self.with_qp(now, slot, |qp, ctx| qp.handle_datagram(ctx, packet, header));
    }

    /// Processes a packet to a connected queue pair.
    fn handle_connected(
        &mut self,
        now: Instant,
        source: &Source,
        index: u16,
        bytes: &[u8],
        slot: usize,
        packet: &Packet<'_>,
    ) {
        let entry = &mut *self.qps[slot];
        let Some(path) = &mut entry.path else {
            self.counters.drop_not_connected += 1;
            return;
        };
        let ip = source.flow.ip;
        if ip.src() != path.av.remote || ip.dst() != path.av.local {
            self.counters.drop_peer_address += 1;
            return;
        }
        if !pkey_matches(packet.header.bth.pkey) {
            self.counters.drop_pkey += 1;
            return;
        }
        let port = source.flow.src_port;
        let origin = entry.qp.origin(packet, port);
        let class = packet.header.bth.opcode.info().class;
        if origin == Origin::Stranger && class != Class::Cnp {
            self.counters.drop_stranger += 1;
            return;
        }
        let key = path.peer;
        let prefix = path.rx_prefix(&source.flow);
        let hint = self.peers.get(key).ident.hint(index);
        let Some(ident) = self.check_icrc(source, prefix, index, bytes, hint) else {
            return;
        };
        if origin == Origin::Unproven && !self.qps[slot].qp.learn_source(packet, port) {
            self.counters.drop_stranger += 1;
            return;
        }
        if let Ident::Recovered(id) = ident
            && !self.judge_connected(now, slot, key, packet, id)
        {
            self.counters.icrc_implausible += 1;
            return;
        }
        if class == Class::Cnp {
            self.handle_notification(now, slot, origin);
            return;
        }
        if source.tos & ECN_BITS == ECN_CE {
            self.note_mark(now, slot, packet);
        }
        self.with_qp_of_train(now, slot, |qp, ctx| qp.handle_packet(ctx, packet));
        if matches!(self.qps[slot].binding, Binding::HalfOpen(_)) && self.qps[slot].qp.heard() {
            self.finish_steps();
            self.on_first_packet(now, slot);
        }
    }

    /// Returns whether a connected queue pair's peer would send this Identification.
    ///
    /// Learns the peer's numbering only from packets with an expected PSN: others may be forged.
    #[inline]
    fn judge_connected(&mut self, now: Instant, slot: usize, key: PeerKey, packet: &Packet<'_>, id: u16) -> bool {
        let ident = &mut self.peers.get_mut(key).ident;
        if ident.is_usual(id) {
            return true;
        }
        let qp = &self.qps[slot].qp;
        if !qp.expects(packet) {
            return ident.judge(now, id);
        }
        if qp.heard() {
            return ident.learn(now, id);
        }
        ident.learn_first(now, id);
        true
    }

    /// Delivers a packet to every member of a multicast group, a sender included (IBA 10.5.2; `rxe_rcv_mcast_pkt`).
    ///
    /// A member that can't accept the packet does not affect the others.
    fn handle_multicast(&mut self, now: Instant, source: &Source, index: u16, bytes: &[u8], packet: &Packet<'_>) {
        let group = source.flow.ip.dst();
        let count = self.groups.members(group).len();
        if count == 0 {
            self.counters.drop_multicast += 1;
            return;
        }
        if packet.header.bth.opcode.info().service != Service::Ud {
            self.counters.drop_service += 1;
            return;
        }
        if !pkey_matches(packet.header.bth.pkey) {
            self.counters.drop_pkey += 1;
            return;
        }
        let Ok(id) = self.check_stranger(now, source, index, bytes) else {
            return;
        };
        self.counters.rx_multicast += 1;
        let header = source.header(id);
        for i in 0..count {
            let member = self.groups.members(group).get(i);
            if let Some(slot) = member.and_then(|qpn| self.qpns.get(*qpn)) {
                self.give_datagram(now, slot, packet, &header);
            }
        }
    }

    /// Processes a packet to QP1, for the connection manager or the application's own QP1.
    fn handle_gsi(&mut self, now: Instant, source: &Source, index: u16, bytes: &[u8], packet: &Packet<'_>) {
        let c = &mut self.counters;
        let mad = match check_gsi(packet) {
            Ok(mad) => mad,
            Err(GsiDrop::Service) => return c.drop_bad_mad += 1,
            Err(GsiDrop::PKey) => return c.drop_pkey += 1,
            Err(GsiDrop::QKey) => return c.drop_qkey += 1,
        };
        let class = packet.payload.get(1).copied();
        let to_program = self.qpns.get(Qpn::GSI).filter(|_| class != Some(CM_CLASS));
        if to_program.is_none() && mad.is_none() {
            c.drop_bad_mad += 1;
            return;
        }
        let id = match self.check_stranger(now, source, index, bytes) {
            Ok(id) => id,
            Err(Unproven::Corrupt) => return self.look_for_translation(now, source, index, bytes),
            Err(Unproven::Implausible) => return,
        };
        self.counters.rx_mads += 1;
        if let Some(slot) = to_program {
            self.give_datagram(now, slot, packet, &source.header(id));
            return;
        }
        if let Ok(gsi) = self.gsi() {
            gsi.handle_mad(now, source.flow.ip, packet.payload);
        }
    }

    /// Reports a request that was dropped because of its ICRC if that proves address translation.
    fn look_for_translation(&mut self, now: Instant, source: &Source, index: u16, bytes: &[u8]) {
        let id = source.identification.map(|id| id.wrapping_add(index));
        let proven = self
            .gsi()
            .is_ok_and(|gsi| gsi.detect_translation(now, &source.flow, id, bytes));
        self.counters.icrc_translated += u64::from(proven);
    }

    /// Verifies the ICRC of a packet from an unauthenticated sender; returns its Identification.
    ///
    /// Never changes the state of the peer at that address, which exists only with queue pairs.
    fn check_stranger(&mut self, now: Instant, source: &Source, index: u16, bytes: &[u8]) -> Result<u16, Unproven> {
        let known = self.peers.find(source.flow.ip.src());
        let hint = known.map_or(index, |key| self.peers.get(key).ident.hint(index));
        let ident = self.check_icrc(source, source.flow.prefix(), index, bytes, hint);
        let ident = ident.ok_or(Unproven::Corrupt)?;
        let (id, key) = match (ident, known) {
            (Ident::Known(id), _) | (Ident::Recovered(id), None) => return Ok(id),
            (Ident::Recovered(id), Some(key)) => (id, key),
        };
        let peer = self.peers.get_mut(key);
        if peer.ident.judge(now, id) || peer.strangers.admit(now) {
            return Ok(id);
        }
        self.counters.icrc_implausible += 1;
        Err(Unproven::Implausible)
    }

    /// Verifies a packet's ICRC. Recovers an unknown IPv4 Identification, trying `hint` first.
    fn check_icrc(
        &mut self,
        source: &Source,
        prefix: IcrcPrefix,
        index: u16,
        bytes: &[u8],
        hint: u16,
    ) -> Option<Ident> {
        let is_v6 = matches!(source.flow.ip, IpPair::V6 { .. });
        let ident = if let Some(id) = source.identification.or(is_v6.then_some(0)) {
            let id = id.wrapping_add(index);
            prefix.verify(id, bytes).then_some(Ident::Known(id))
        } else {
            match prefix.recover_with(&mut self.solver, bytes, hint) {
                Recovery::Exact(id) => Some(Ident::Recovered(id)),
                Recovery::Corrupt => None,
            }
        };
        self.counters.icrc_errors += u64::from(ident.is_none());
        ident
    }
}
