//! Congestion notification (IBTA Annex A17.9): who gets packets that a switch has marked tells the sender, once in a while, and who
//! is told slows down.

use core::time::Duration;

use roce_bth::{Bth, Class, Header, Opcode, Packet, Psn};
use roce_qp::{TxKind, TxSink};
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

/// What a queue pair has notified its peer of.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Notified {
    last: Option<Instant>,
    due: bool,
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

    /// A connected queue pair's packet came with a mark. Only one with a PSN that the queue pair expects counts: others may be
    /// forged. Acknowledgements don't fill queues.
    pub(crate) fn note_mark(&mut self, now: Instant, slot: usize, packet: &Packet<'_>) {
        let entry = &mut *self.qps[slot];
        let class = packet.header.bth.opcode.info().class;
        let is_data = !matches!(class, Class::Acknowledge | Class::SelectiveAcknowledge | Class::Cnp);
        let recently = |last: Instant| now.saturating_since(last) < INTERVAL;
        if !is_data || entry.notifies.due || entry.notifies.last.is_some_and(recently) || !entry.qp.expects(packet) {
            return;
        }
        entry.notifies.due = true;
        self.notifications.push_back(entry.qp.qpn());
    }

    /// Stages the next notification.
    pub(crate) fn stage_notification(&mut self, now: Instant, batch: &mut TxBatch) {
        let slot = self.notifications.pop_front().and_then(|qpn| self.qpns.get(qpn));
        let Some(slot) = slot else { return };
        let entry = &mut *self.qps[slot];
        entry.notifies = Notified {
            last: Some(now),
            due: false,
        };
        let Some(path) = &entry.path else { return };
        let mut tx = path.tx;
        tx.tos = CNP_CLASS;
        let mut header = Header::new(Bth::new(Opcode::Cnp, path.dest, Psn::new(0)));
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

    /// A notification came. It has no PSN, so anybody who can send from the peer's address can forge one: only queue pairs
    /// whose packets may be marked heed it.
    pub(crate) fn handle_notification(&mut self, now: Instant, slot: usize) {
        let marked = self.qps[slot].path.as_ref().is_some_and(|p| p.tx.tos & ECN_BITS != 0);
        if !marked {
            self.counters.rp_cnp_ignored += 1;
            return;
        }
        self.counters.rp_cnp_handled += 1;
        self.with_qp(now, slot, |qp, _| qp.handle_notification(now));
    }
}
