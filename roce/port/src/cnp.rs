//! Congestion notification (IBTA Annex A17.9): the receiver of marked packets notifies the sender, which slows down.
//!
//! Accepts notifications from ferroce peers only. Hardware sends them from another UDP port (ConnectX: 0,
//! `tests/replay/src/made.rs`) and without a PSN, so anyone can forge them. For such peers the rate follows losses and
//! round trips.

use core::time::Duration;

use roce_bth::{Bth, Class, Header, Opcode, Packet};
use roce_qp::{Origin, TxKind, TxSink};
use roce_verbs::Instant;

use crate::{
    batch::{QpSink, TxBatch},
    entry::Notified,
    port::Port,
};

/// ECN codepoint "congestion experienced", set by switches (RFC 3168).
pub(crate) const ECN_CE: u8 = 3;
/// ECN codepoint of a sender that reacts to marks, ECT(0).
const ECT: u8 = 2;
pub(crate) const ECN_BITS: u8 = 3;
/// Traffic class of notifications: DSCP 48, as ConnectX sends.
const CNP_CLASS: u8 = 48 << 2;
/// Shortest interval between two notifications of a queue pair (the notification point of DCQCN).
const INTERVAL: Duration = Duration::from_micros(50);
/// Size of a notification, bytes: BTH and 16 reserved bytes.
const CNP_LEN: usize = 12 + 16;

impl Port {
    /// Sets the traffic class of a queue pair's packets: the application's, to a ferroce peer with ECT.
    ///
    /// ECT makes switches mark packets instead of dropping them.
    pub(crate) fn heed_marks(&mut self, slot: usize) {
        let entry = &mut *self.qps[slot];
        let to_ferroce = entry.qp.uses_selective_ack();
        let Some(path) = &mut entry.path else { return };
        path.tx.tos = path.av.traffic_class;
        if to_ferroce && path.tx.tos & ECN_BITS == 0 && !self.config.is_on_host(&path.av) {
            path.tx.tos |= ECT;
        }
    }

    /// Schedules a notification for a marked packet. Ignores acknowledgements, which don't fill queues.
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
        // Proves to a ferroce peer that we have received its packet; others ignore the PSN.
        let mut header = Header::new(Bth::new(Opcode::Cnp, path.dest, psn));
        header.bth.becn = true;
        let mut sink = QpSink::new(batch, &tx, [entry.qp.qpn(), path.dest], false, 1);
        let Some(bytes) = sink.reserve(TxKind::Ack, CNP_LEN) else {
            return;
        };
        header.emit(bytes);
        sink.commit();
        let staged = sink.staged;
        self.counters.np_cnp_sent += 1;
        self.counters.count_staged(&staged);
    }

    /// Slows down a queue pair that sends with ECT after its peer's notification ([`Origin::Peer`]).
    pub(crate) fn handle_notification(&mut self, now: Instant, slot: usize, origin: Origin) {
        let may_be_marked = self.qps[slot].path.as_ref().is_some_and(|p| p.tx.tos & ECN_BITS != 0);
        if !may_be_marked || origin != Origin::Peer {
            self.counters.rp_cnp_ignored += 1;
            return;
        }
        self.counters.rp_cnp_handled += 1;
        self.with_qp(now, slot, |qp, _| qp.handle_notification(now));
    }
}
