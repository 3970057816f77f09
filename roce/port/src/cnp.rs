//! Congestion notification (IBTA Annex A17.9): the receiver of packets that a switch has marked notifies their sender, which
//! slows down. Only peers of ours are believed: hardware sends notifications from another port and without a PSN, so that
//! anybody could forge them.
//!
//! ConnectX's come from UDP port 0 (`tests/replay/src/made.rs`); towards cards the rate follows losses and round trips.

use core::time::Duration;

use roce_bth::{Bth, Class, Header, Opcode, Packet, Psn};
use roce_qp::{Origin, TxKind, TxSink};
use roce_verbs::Instant;

use crate::{
    batch::{QpSink, TxBatch},
    port::Port,
};

/// ECN bits of the traffic class when a switch has marked congestion (RFC 3168).
pub(crate) const ECN_CE: u8 = 3;
/// The same of a sender that heeds marks.
const ECT: u8 = 2;
pub(crate) const ECN_BITS: u8 = 3;
/// Traffic class of notifications: DSCP 48, which ConnectX sends.
const CNP_CLASS: u8 = 48 << 2;
/// A queue pair notifies its peer no more often (the notification point of DCQCN).
const INTERVAL: Duration = Duration::from_micros(50);
/// BTH, the 16 reserved bytes of a notification.
const CNP_LEN: usize = 12 + 16;

/// Congestion that a queue pair has notified its peer of.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Notified {
    last: Option<Instant>,
    /// PSN of the marked packet that the next notification is about.
    due: Option<Psn>,
}

impl Port {
    /// The traffic class of what a queue pair sends. Between two of ours marks are heeded, so switches may mark instead of
    /// dropping; others get what the program says.
    pub(crate) fn heed_marks(&mut self, slot: usize) {
        let entry = &mut *self.qps[slot];
        let keeps = entry.qp.keeps_packets();
        let Some(path) = &mut entry.path else { return };
        path.tx.tos = path.av.traffic_class;
        if keeps && path.tx.tos & ECN_BITS == 0 && !self.config.stays_here(&path.av) {
            path.tx.tos |= ECT;
        }
    }

    /// Notes that a connected queue pair's packet came with a mark. Acknowledgements don't count: they don't fill queues.
    pub(crate) fn note_mark(&mut self, now: Instant, slot: usize, packet: &Packet<'_>) {
        let entry = &mut *self.qps[slot];
        let class = packet.header.bth.opcode.info().class;
        let is_data = !matches!(class, Class::Acknowledge | Class::SelectiveAcknowledge | Class::Cnp);
        let recently = |last: Instant| now.saturating_since(last) < INTERVAL;
        if !is_data || entry.notifies.due.is_some() || entry.notifies.last.is_some_and(recently) {
            return;
        }
        entry.notifies.due = Some(packet.header.bth.psn);
        self.notifications.push_back(entry.qp.qpn());
    }

    /// Stages the next notification.
    pub(crate) fn stage_notification(&mut self, now: Instant, batch: &mut TxBatch) {
        let slot = self.notifications.pop_front().and_then(|qpn| self.qpns.get(qpn));
        let Some(slot) = slot else { return };
        let entry = &mut *self.qps[slot];
        let psn = entry.notifies.due.unwrap_or_default();
        entry.notifies = Notified {
            last: Some(now),
            due: None,
        };
        let Some(path) = &entry.path else { return };
        let mut tx = path.tx;
        tx.tos = CNP_CLASS;
        // Only peers of ours look at the PSN: it proves that we have seen their packet.
        let mut header = Header::new(Bth::new(Opcode::Cnp, path.dest, psn));
        header.bth.becn = true;
        let mut sink = QpSink::new(batch, &tx, path.dest, false, 1);
        let Some(bytes) = sink.reserve(TxKind::Ack, CNP_LEN) else {
            return;
        };
        header.emit(bytes);
        sink.commit();
        let staged = sink.staged();
        self.counters.np_cnp_sent += 1;
        self.counters.count_staged(&staged);
    }

    /// Slows a queue pair after a notification that is its peer's ([`Origin::Peer`]), if its packets may be marked at all.
    pub(crate) fn handle_notification(&mut self, now: Instant, slot: usize, origin: Origin) {
        let marked = self.qps[slot].path.as_ref().is_some_and(|p| p.tx.tos & ECN_BITS != 0);
        if !marked || origin != Origin::Peer {
            self.counters.rp_cnp_ignored += 1;
            return;
        }
        self.counters.rp_cnp_handled += 1;
        self.with_qp(now, slot, |qp, _| qp.handle_notification(now));
    }
}
