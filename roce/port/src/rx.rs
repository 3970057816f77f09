//! Receive path: every check between a UDP datagram and a queue pair.

use crate::cm::datagram::{self, GsiDrop, is_default_partition};
use roce_bth::{Class, Packet, Qpn, Service};
use roce_icrc::{Flow, IcrcPrefix, IdSolver, IpPair, Recovery};
use roce_qp::{DatagramSource, Origin};
use roce_verbs::Instant;

use crate::{
    cnp::{ECN_BITS, ECN_CE},
    entry::Binding,
    meta::RxMeta,
    peer::PeerKey,
    port::Port,
    steering::Forwarded,
};

/// Management class of communication management, the second byte of a MAD.
const CM_CLASS: u8 = crate::cm::mad::CLASS;

/// Packet of a datagram or GRO buffer.
struct Arrived<'a> {
    now: Instant,
    meta: &'a RxMeta,
    flow: Flow,
    /// Place in its GRO buffer.
    index: u16,
    bytes: &'a [u8],
}

impl Arrived<'_> {
    /// Returns the network header that queue pairs get, with this Identification.
    fn header(&self, identification: u16) -> DatagramSource {
        let default = DatagramSource::new(self.flow.ip.src(), self.flow.ip.dst());
        DatagramSource {
            traffic_class: self.meta.tos,
            identification,
            hop_limit: match self.meta.hop_limit {
                0 => default.hop_limit,
                given => given,
            },
            ..default
        }
    }

    /// Verifies the ICRC. Recovers an unknown IPv4 Identification, trying `hint` first.
    #[inline(always)]
    fn check_icrc(&self, prefix: &mut IcrcPrefix, solver: &mut IdSolver, hint: u16) -> Option<Ident> {
        let is_v6 = matches!(self.flow.ip, IpPair::V6 { .. });
        if let Some(id) = self.meta.identification.or(is_v6.then_some(0)) {
            let id = id.wrapping_add(self.index);
            return prefix.verify(id, self.bytes).then_some(Ident::Known(id));
        }
        match prefix.recover_with(solver, self.bytes, hint) {
            Recovery::Exact(id) => Some(Ident::Recovered(id)),
            Recovery::Corrupt => None,
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
        let is_ours = |flow: &Flow| flow.ip.dst().is_multicast() || self.config.is_local(flow.ip.dst());
        let Some(flow) = meta.flow().filter(is_ours) else {
            self.counters.drop_local_address += packets;
            return;
        };
        let mut rx = Arrived {
            now,
            meta,
            flow,
            index: 0,
            bytes,
        };
        for (index, packet) in bytes.chunks(step).enumerate() {
            // Can't truncate: a buffer has at most 2^16 bytes. A wrong index would only be a wrong hint.
            (rx.index, rx.bytes) = (index as u16, packet);
            self.handle_packet(&rx);
        }
        self.finish_steps();
    }

    /// Processes a single packet, as [`Port::handle_datagram`] does, but if it needs a receive work request, there is none: a fault on
    /// demand.
    pub fn handle_packet_without_receive(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        let packet = Packet::parse(bytes).ok();
        let slot = packet.and_then(|packet| self.qpns.get(packet.header.bth.dest_qp));
        let hide = |port: &mut Self, from| {
            if let Some(entry) = slot.and_then(|slot| port.qps.get_mut(slot)) {
                entry.qp.hide_receives(from);
            }
        };
        hide(self, packet.as_ref());
        self.handle_datagram(now, meta, bytes);
        hide(self, None);
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

    /// Finds the receiver of a packet.
    fn handle_packet(&mut self, rx: &Arrived<'_>) {
        let packet = match Packet::parse(rx.bytes) {
            Ok(packet) => packet,
            Err(e) => return self.counters.count_unreadable(&e),
        };
        let to_group = rx.flow.ip.dst().is_multicast();
        let qpn = packet.header.bth.dest_qp;
        if to_group || qpn.value() <= Qpn::GSI.value() || qpn == Qpn::MULTICAST {
            // The packet may concern the queue pair of the packets before it: finish those first.
            self.finish_steps();
            return match qpn {
                Qpn::MULTICAST if to_group => self.handle_multicast(rx, &packet),
                Qpn::MULTICAST => self.counters.drop_multicast += 1,
                _ if to_group => self.counters.drop_local_address += 1,
                Qpn::SMI => self.counters.drop_qp0 += 1,
                _ => self.handle_gsi(rx, &packet),
            };
        }
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
        match qp_type.is_datagram() {
            true => self.handle_unconnected(rx, slot, &packet),
            false => self.handle_connected(rx, slot, &packet),
        }
    }

    /// Processes a packet to an application's datagram queue pair.
    fn handle_unconnected(&mut self, rx: &Arrived<'_>, slot: usize, packet: &Packet<'_>) {
        if !is_default_partition(packet.header.bth.pkey) {
            self.counters.drop_pkey += 1;
            return;
        }
        let Ok(id) = self.check_stranger(rx) else {
            return;
        };
        match packet.header.bth.opcode.info().class {
            Class::Cnp => self.counters.rp_cnp_ignored += 1,
            _ => self.give_datagram(rx.now, slot, packet, &rx.header(id)),
        }
    }

    fn give_datagram(&mut self, now: Instant, slot: usize, packet: &Packet<'_>, header: &DatagramSource) {
        self.with_qp(now, slot, |qp, ctx| qp.handle_datagram(ctx, packet, header));
    }

    /// Processes a packet to a connected queue pair.
    fn handle_connected(&mut self, rx: &Arrived<'_>, slot: usize, packet: &Packet<'_>) {
        let entry = &mut *self.qps[slot];
        let Some(path) = &mut entry.path else {
            self.counters.drop_not_connected += 1;
            return;
        };
        let ip = rx.flow.ip;
        if ip.src() != path.av.remote || ip.dst() != path.av.local {
            self.counters.drop_peer_address += 1;
            return;
        }
        if !is_default_partition(packet.header.bth.pkey) {
            self.counters.drop_pkey += 1;
            return;
        }
        let port = rx.flow.src_port;
        let origin = entry.qp.origin(packet, port);
        let class = packet.header.bth.opcode.info().class;
        if origin == Origin::Stranger && class != Class::Cnp {
            self.counters.drop_stranger += 1;
            return;
        }
        let key = path.peer;
        let known = &self.peers.get(key).ident;
        let hint = known.hint(rx.index);
        let Some(ident) = rx.check_icrc(path.rx_prefix(&rx.flow), &mut self.solver, hint) else {
            self.counters.icrc_errors += 1;
            return;
        };
        if origin == Origin::Unproven && !self.qps[slot].qp.learn_source(packet, port) {
            self.counters.drop_stranger += 1;
            return;
        }
        if let Ident::Recovered(id) = ident
            && !known.is_usual(id)
            && !self.judge_connected(rx.now, slot, key, packet, id)
        {
            self.counters.icrc_implausible += 1;
            return;
        }
        if class == Class::Cnp {
            self.handle_notification(rx.now, slot, origin);
            return;
        }
        if rx.meta.tos & ECN_BITS == ECN_CE {
            self.note_mark(rx.now, slot, packet);
        }
        if self.stepped.is_some_and(|(other, _)| other != slot) {
            self.finish_steps();
        }
        let ((), room) = self.run_step(rx.now, slot, |qp, ctx| qp.handle_packet(ctx, packet));
        self.stepped.get_or_insert((slot, room));
        if matches!(self.qps[slot].binding, Binding::HalfOpen(_)) && self.qps[slot].qp.heard() {
            self.finish_steps();
            self.on_first_packet(rx.now, slot);
        }
    }

    /// Returns whether a connected queue pair's peer would send this Identification.
    ///
    /// Learns the peer's numbering only from packets with an expected PSN: others may be forged.
    fn judge_connected(&mut self, now: Instant, slot: usize, key: PeerKey, packet: &Packet<'_>, id: u16) -> bool {
        let ident = &mut self.peers.get_mut(key).ident;
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
    fn handle_multicast(&mut self, rx: &Arrived<'_>, packet: &Packet<'_>) {
        let group = rx.flow.ip.dst();
        let count = self.groups.members(group).len();
        if count == 0 {
            self.counters.drop_multicast += 1;
            return;
        }
        if packet.header.bth.opcode.info().service != Service::Ud {
            self.counters.drop_service += 1;
            return;
        }
        if !is_default_partition(packet.header.bth.pkey) {
            self.counters.drop_pkey += 1;
            return;
        }
        let Ok(id) = self.check_stranger(rx) else {
            return;
        };
        self.counters.rx_multicast += 1;
        let header = rx.header(id);
        for i in 0..count {
            let member = self.groups.members(group).get(i);
            if let Some(slot) = member.and_then(|qpn| self.qpns.get(*qpn)) {
                self.give_datagram(rx.now, slot, packet, &header);
            }
        }
    }

    /// Processes a packet to QP1, for the connection manager or the application's own QP1.
    fn handle_gsi(&mut self, rx: &Arrived<'_>, packet: &Packet<'_>) {
        let c = &mut self.counters;
        let mad = match datagram::check(packet) {
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
        let id = match self.check_stranger(rx) {
            Ok(id) => id,
            Err(Unproven::Corrupt) => return self.look_for_translation(rx),
            Err(Unproven::Implausible) => return,
        };
        self.counters.rx_mads += 1;
        if let Some(slot) = to_program {
            self.give_datagram(rx.now, slot, packet, &rx.header(id));
            return;
        }
        if let Ok(gsi) = self.gsi() {
            gsi.handle_mad(rx.now, rx.flow.ip, packet.payload);
        }
    }

    /// Reports a request that was dropped because of its ICRC if that proves address translation.
    fn look_for_translation(&mut self, rx: &Arrived<'_>) {
        let id = rx.meta.identification.map(|id| id.wrapping_add(rx.index));
        let proven = self
            .gsi()
            .is_ok_and(|gsi| gsi.detect_translation(rx.now, &rx.flow, id, rx.bytes));
        self.counters.icrc_translated += u64::from(proven);
    }

    /// Verifies the ICRC of a packet from an unauthenticated sender; returns its Identification.
    ///
    /// Never changes the state of the peer at that address, which exists only with queue pairs.
    fn check_stranger(&mut self, rx: &Arrived<'_>) -> Result<u16, Unproven> {
        let known = self.peers.find(rx.flow.ip.src());
        let hint = known.map_or(rx.index, |key| self.peers.get(key).ident.hint(rx.index));
        let Some(ident) = rx.check_icrc(&mut rx.flow.prefix(), &mut self.solver, hint) else {
            self.counters.icrc_errors += 1;
            return Err(Unproven::Corrupt);
        };
        let (id, key) = match (ident, known) {
            (Ident::Known(id), _) | (Ident::Recovered(id), None) => return Ok(id),
            (Ident::Recovered(id), Some(key)) => (id, key),
        };
        let peer = self.peers.get_mut(key);
        if peer.ident.judge(rx.now, id) || peer.strangers.admit(rx.now) {
            return Ok(id);
        }
        self.counters.icrc_implausible += 1;
        Err(Unproven::Implausible)
    }
}
