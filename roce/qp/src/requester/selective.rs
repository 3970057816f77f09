//! Reports and responses of a peer that buffers packets beyond a gap.

use roce_bth::Packet;

use super::{
    Requester,
    phase::{Event, Probe},
    scoreboard::{Change, Mark, Report},
};
use crate::{
    context::{Call, QpContext},
    sendq::Progress,
    seq::Seq,
};

impl Requester {
    /// Processes a selective ACK.
    pub(crate) fn handle_selective_ack(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        if !call.qp.is_sending() {
            call.counters.dropped_state += 1;
            return;
        }
        let una = self.una;
        let acked = una.nearest(packet.header.bth.psn);
        let Some(report) = Report::parse(una, packet.payload).filter(|r| r.expected() <= self.next) else {
            call.counters.dropped_responses += 1;
            return;
        };
        if acked >= self.next || una >= self.next {
            call.counters.dropped_responses += 1;
            return;
        }
        call.qp.on_answer();
        call.counters.selective_acks += 1;
        if acked >= una {
            self.acknowledge_up_to(call, acked.plus(1));
            if !call.qp.is_sending() {
                return;
            }
        }
        // Otherwise the sides disagree about selective ACK: only the cumulative part counts.
        if call.qp.is_selective() {
            self.note_report(call, &report);
        }
    }

    fn note_report(&mut self, call: &mut Call<'_>, report: &Report<'_>) {
        let least = self.rtt.least();
        let sure = matches!(self.probe, Probe::Sent(at) if call.now.saturating_since(at) >= least);
        if sure {
            self.probe = Probe::None;
        }
        let outstanding = (self.una, self.next);
        let sq = &self.sq;
        self.scoreboard
            .on_report(outstanding, report, |seq| sq.is_answered(seq), sure);
        let changes = self.scoreboard.take_changes();
        let arrived = changes.iter().any(|c| c.to == Mark::Arrived);
        self.take_selective_sample(call, &changes);
        let timed_out = self.phase.caution().is_some_and(|caution| caution.timed_out);
        if timed_out && changes.iter().any(|c| (c.from, c.to) == (Mark::Lost, Mark::Arrived)) {
            call.counters.spurious_timeouts += 1;
            call.window.on_spurious_timeout();
        }
        self.account(call, changes, true);
        if arrived {
            self.note_progress_beyond(call);
        }
        self.phase.on(Event::Arrived);
    }

    /// Samples the round trip of a packet beyond the gap.
    fn take_selective_sample(&mut self, call: &mut Call<'_>, changes: &[Change]) {
        let Some((seq, sent)) = self.sample else { return };
        let Some(change) = changes.iter().find(|c| c.seq.plus(1) == seq) else {
            return;
        };
        let (_, answered) = self.sq.weigh(change.seq, call.qp.mtu());
        let is_valid = match (change.from, change.to) {
            // The round trip ends with the response.
            (Mark::InFlight, Mark::Arrived) if answered => return,
            (Mark::InFlight, Mark::Arrived) | (Mark::InFlight | Mark::Arrived, Mark::Answered) => true,
            // After a retransmission the round trip is ambiguous (Karn's rule).
            _ => false,
        };
        self.sample = None;
        if is_valid {
            let rtt = call.now.saturating_since(sent);
            self.rtt.sample(rtt);
            call.window.on_acked(call.now, 0, Some(rtt));
        }
    }

    /// Returns the first PSN of `from..to` without a response.
    pub(super) fn first_unanswered(&self, from: Seq, to: Seq) -> Option<Seq> {
        let seq = self.scoreboard.run_end(from, to, |mark| mark == Mark::Answered);
        (seq < to).then_some(seq)
    }

    /// Returns the first PSN of `from..to` with a response, or `to`.
    pub(super) fn first_answered(&self, from: Seq, to: Seq) -> Seq {
        self.scoreboard.run_end(from, to, |mark| mark != Mark::Answered)
    }

    /// Returns whether a response is beyond a gap and should be used.
    pub(super) fn is_early(&self, qp: &QpContext, seq: Seq) -> bool {
        qp.is_selective() && seq > self.una && self.response_before(seq).is_some()
    }

    /// Processes a response beyond a gap by writing its data to memory.
    ///
    /// Drops one that doesn't fit: it is resent in order, or fails then.
    pub(super) fn take_early(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) {
        let missing = self.response_before(seq).unwrap_or(seq);
        self.implied = self.implied.max(seq);
        self.advance(call, missing);
        let fits = call.qp.is_sending() && self.place_early(call.qp, seq, packet);
        if !fits || self.scoreboard.mark(seq) == Mark::Answered {
            call.counters.dropped_responses += u64::from(!fits);
            return;
        }
        let (una, sq) = (self.una, &self.sq);
        self.scoreboard.on_response(una, seq, |at| sq.is_answered(at));
        let changes = self.scoreboard.take_changes();
        self.take_selective_sample(call, &changes);
        self.account(call, changes, true);
        self.lose_overtaken(call);
        self.reads.in_parts = true;
        self.note_progress_beyond(call);
    }

    fn place_early(&self, qp: &QpContext, seq: Seq, packet: &Packet<'_>) -> bool {
        let wqe = self.sq.index_of(seq).map(|index| &self.sq.wqes[index]);
        wqe.filter(|wqe| wqe.progress == Progress::Started)
            .is_some_and(|wqe| self.place_response(qp, wqe, seq, packet).is_ok())
    }

    /// Advances past packets already acknowledged or answered, after the gap before them has closed.
    pub(super) fn pass_answered(&mut self, call: &mut Call<'_>) {
        while call.qp.is_selective() && call.qp.is_sending() && self.scoreboard.is_active() {
            let una = self.una;
            let implied = self.implied.min(self.next);
            let to = self.response_before(implied).unwrap_or(implied).max(una);
            let to = self.scoreboard.run_end(to, self.next, |mark| mark == Mark::Answered);
            if to == una {
                return;
            }
            self.advance(call, to);
        }
    }

    /// Records progress beyond the oldest packet: resets its retry count, but not the RNR timer and count.
    fn note_progress_beyond(&mut self, call: &Call<'_>) {
        self.on_progress(call);
        self.phase.on(Event::Arrived);
    }
}
