//! Requester's selective retransmission: resends only what a selective ACK peer is missing.

use roce_bth::Packet;
use roce_verbs::WcStatus;

use super::{
    Requester,
    emit::{Request, Unsent},
    scoreboard::{Change, Mark, Report},
    timeout::GoBack,
};
use crate::{
    congestion::Loss,
    context::QpContext,
    ctx::Ctx,
    sendq::{Kind, PACKET_OVERHEAD, Progress, SendWqe},
    seq::Seq,
    tx::{Step, TxKind, TxSink},
};

impl Requester {
    /// Processes a selective ACK.
    pub(crate) fn handle_selective_ack(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        if !qp.is_sending() {
            ctx.counters.dropped_state += 1;
            return;
        }
        let una = self.una;
        let acked = una.nearest(packet.header.bth.psn);
        let Some(report) = Report::parse(una, packet.payload).filter(|r| r.expected() <= self.top) else {
            ctx.counters.dropped_responses += 1;
            return;
        };
        if acked >= self.top || una >= self.next {
            ctx.counters.dropped_responses += 1;
            return;
        }
        qp.on_answer();
        ctx.counters.selective_acks += 1;
        if acked >= una {
            self.acknowledge_up_to(qp, ctx, acked.plus(1));
            if !qp.is_sending() {
                return;
            }
        }
        // Otherwise the sides disagree about selective ACK: only the cumulative part counts.
        if qp.is_selective() {
            self.note_report(qp, ctx, &report);
        }
    }

    fn note_report(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, report: &Report<'_>) {
        let least = self.rtt.least();
        let probed = self.tail_probe_sent.filter(|at| ctx.now.saturating_since(*at) >= least);
        let sure = probed.is_some();
        if sure {
            self.tail_probe_sent = None;
        }
        let outstanding = (self.una, self.next);
        let sq = &self.sq;
        self.scoreboard
            .on_report(outstanding, report, |seq| sq.is_answered(seq), sure);
        let changes = self.scoreboard.take_changes();
        let arrived = changes.iter().any(|c| c.to == Mark::Arrived);
        self.take_selective_sample(qp, ctx, &changes);
        if self.timed_out && changes.iter().any(|c| (c.from, c.to) == (Mark::Lost, Mark::Arrived)) {
            self.timed_out = false;
            ctx.counters.spurious_timeouts += 1;
            ctx.window.on_spurious_timeout();
        }
        self.account(qp, ctx, changes, true);
        if arrived {
            self.note_progress_beyond(qp, ctx);
        }
        self.cautious = None;
    }

    /// Samples the round trip of a packet beyond the gap.
    fn take_selective_sample(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, changes: &[Change]) {
        let Some((seq, sent)) = self.sample else { return };
        let Some(change) = changes.iter().find(|c| c.seq.plus(1) == seq) else {
            return;
        };
        let (_, answered) = self.sq.weigh(change.seq, qp.mtu());
        let is_valid = match (change.from, change.to) {
            // The round trip ends with the response.
            (Mark::InFlight, Mark::Arrived) if answered => return,
            (Mark::InFlight, Mark::Arrived) | (Mark::InFlight | Mark::Arrived, Mark::Answered) => true,
            // After a retransmission the round trip is ambiguous (Karn's rule).
            _ => false,
        };
        self.sample = None;
        if is_valid {
            let rtt = ctx.now.saturating_since(sent);
            self.rtt.sample(rtt);
            ctx.window.on_acked(ctx.now, 0, Some(rtt));
        }
    }

    /// Returns the cost of the packets of `una..to` in flight.
    pub(super) fn weight_before(&self, qp: &QpContext, to: Seq) -> usize {
        let (mut seq, mut weight) = (self.una, 0);
        while seq < to {
            let (cost, answered) = self.sq.weigh(seq, qp.mtu());
            if self.scoreboard.mark(seq).is_in_flight(answered) {
                weight += cost;
            }
            seq = seq.plus(1);
        }
        weight
    }

    /// Accounts for state changes of packets. `congested`: losses count as congestion.
    fn account(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, changes: Vec<Change>, congested: bool) {
        let (mut acked, mut lost, mut resumed, mut unsent) = (0, 0, 0, 0);
        let mut unsent_upto = self.una;
        for change in &changes {
            let (cost, answered) = self.sq.weigh(change.seq, qp.mtu());
            match (change.from.is_in_flight(answered), change.to.is_in_flight(answered)) {
                (true, false) if change.to != Mark::Lost => acked += cost,
                (true, false) if change.seq < unsent_upto => unsent += cost,
                (true, false) => {
                    lost += cost;
                    unsent_upto = self.lost_request_end(change.seq).unwrap_or(unsent_upto);
                }
                (false, true) => resumed += cost,
                _ => {}
            }
        }
        self.scoreboard.reuse(changes);
        self.in_flight = (self.in_flight + resumed).saturating_sub(acked + lost + unsent);
        ctx.window.forget(unsent);
        if unsent > 0 {
            // Later requests wait for the retransmission, so they don't measure a round trip.
            self.sample = None;
        }
        ctx.window.on_sent(resumed);
        if acked > 0 {
            ctx.window.on_acked(ctx.now, acked, None);
        }
        match lost {
            0 => {}
            _ if congested => {
                self.rtt.on_loss();
                ctx.window.on_loss(ctx.now, Loss::Told, lost);
            }
            _ => ctx.window.forget(lost),
        }
    }

    /// Returns the end of a READ without any response, if `seq` is its first PSN.
    ///
    /// Then the request was lost, a single packet, and no response was ever sent.
    fn lost_request_end(&self, seq: Seq) -> Option<Seq> {
        let wqe = &self.sq.wqes[self.sq.index_of(seq)?];
        let end = wqe.request_end(seq);
        let is_whole = wqe.kind() == Kind::Read && seq == wqe.request_start(seq);
        (is_whole && self.first_answered(seq, end) == end).then_some(end)
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
    pub(super) fn take_early(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) {
        let missing = self.response_before(seq).unwrap_or(seq);
        self.implied = self.implied.max(seq);
        self.advance(qp, ctx, missing);
        let fits = qp.is_sending() && self.place_early(qp, seq, packet);
        if !fits || self.scoreboard.mark(seq) == Mark::Answered {
            ctx.counters.dropped_responses += u64::from(!fits);
            return;
        }
        let (una, sq) = (self.una, &self.sq);
        self.scoreboard.on_response(una, seq, |at| sq.is_answered(at));
        let changes = self.scoreboard.take_changes();
        self.take_selective_sample(qp, ctx, &changes);
        self.account(qp, ctx, changes, true);
        self.lose_overtaken(qp, ctx);
        self.read_in_parts = true;
        self.note_progress_beyond(qp, ctx);
    }

    /// Declares packets lost that were sent before a retransmission that has been answered.
    pub(super) fn lose_overtaken(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        if !self.scoreboard.has_returns() {
            return;
        }
        let (una, sq) = (self.una, &self.sq);
        self.scoreboard.judge_by_returns(una, |at| sq.is_answered(at));
        let changes = self.scoreboard.take_changes();
        self.account(qp, ctx, changes, true);
    }

    /// Accounts for a probe: `from..to` of the oldest READ was requested again after a probe timeout.
    pub(super) fn note_probed(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, from: Seq, to: Seq) {
        if qp.is_selective() {
            let to = self.first_answered(from, to);
            self.account_resent(qp, ctx, from, to, true);
        }
    }

    fn place_early(&self, qp: &QpContext, seq: Seq, packet: &Packet<'_>) -> bool {
        let Some(wqe) = self.sq.index_of(seq).map(|index| &self.sq.wqes[index]) else {
            return false;
        };
        if wqe.progress != Progress::Started {
            return false;
        }
        let header = packet.header;
        match (header.atomic_ack(), wqe.kind()) {
            (Some(value), Kind::Atomic) => wqe.data.write_at(0, &value.to_ne_bytes()).is_ok(),
            (None, Kind::Read | Kind::AtomicWrite | Kind::Flush) => {
                let place = self.read_response_place(qp, wqe, seq, header.aeth(), packet);
                place.is_some_and(|(offset, len)| len == 0 || wqe.data.write_at(offset, packet.payload).is_ok())
            }
            _ => false,
        }
    }

    /// Advances past packets already acknowledged or answered, after the gap before them has closed.
    pub(super) fn pass_answered(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>) {
        while qp.is_sending() && self.scoreboard.is_active() {
            let una = self.una;
            let implied = self.implied.min(self.next);
            let to = self.response_before(implied).unwrap_or(implied).max(una);
            let to = self.scoreboard.run_end(to, self.next, |mark| mark == Mark::Answered);
            if to == una {
                return;
            }
            self.advance(qp, ctx, to);
        }
    }

    /// Records progress beyond the oldest packet: resets its retry count, but not the RNR timer and count.
    fn note_progress_beyond(&mut self, qp: &QpContext, ctx: &Ctx<'_>) {
        self.on_progress(ctx.now, qp.attr().retry_cnt.unwrap_or(0));
        self.cautious = None;
    }

    /// Starts recovery towards a selective ACK peer, as [`Requester::go_back`] does towards others.
    pub(super) fn go_on(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, why: GoBack) {
        ctx.counters.completer_retry_err += u64::from(why != GoBack::Rnr);
        let (una, next) = (self.una, self.next);
        match why {
            // Even if it arrived, the oldest packet was not executed.
            GoBack::Rnr | GoBack::Gap => self.scoreboard.lose(una, una),
            GoBack::ProbeTimeout | GoBack::Timeout => {
                self.lose(qp, una, next);
                // The oldest packet may have arrived and its response been lost.
                self.scoreboard.lose(una, una);
            }
        }
        let changes = self.scoreboard.take_changes();
        self.account(qp, ctx, changes, why == GoBack::Gap);
        if why == GoBack::Timeout {
            ctx.window.on_loss(ctx.now, Loss::Timeout, 0);
        }
        if matches!(why, GoBack::ProbeTimeout | GoBack::Timeout) {
            self.cautious = Some(next);
            self.timed_out |= why == GoBack::Timeout;
        }
        self.sample = None;
        self.tail_probe_sent = None;
        self.forget_probe();
        self.timers.base = ctx.now;
    }

    /// Schedules the unanswered rest of the oldest READ or atomic for retransmission.
    pub(super) fn ask_again(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        let una = self.una;
        let Some(index) = self.sq.index_of(una) else { return };
        let end = self.sq.wqes[index].request_end(una).min(self.next);
        self.lose(qp, una, end);
        let changes = self.scoreboard.take_changes();
        self.account(qp, ctx, changes, true);
        self.last_go_back = Some((una, ctx.now));
        self.sample = None;
        self.timers.base = ctx.now;
    }

    /// Declares lost all packets of `from..to` that, or whose responses, are in flight.
    fn lose(&mut self, qp: &QpContext, from: Seq, to: Seq) {
        let una = self.una;
        let mut seq = from;
        while seq < to {
            let (_, answered) = self.sq.weigh(seq, qp.mtu());
            if self.scoreboard.mark(seq).is_in_flight(answered) {
                self.scoreboard.lose(una, seq);
            }
            seq = seq.plus(1);
        }
    }

    /// Retransmits one lost packet. Returns `None` if there is none.
    pub(crate) fn transmit_lost(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        tx: &mut impl TxSink,
    ) -> Option<Step> {
        if !qp.is_selective() || !qp.is_sending() || self.timers.rnr_until.is_some() {
            return None;
        }
        let request = self.lost_request(qp, ctx)?;
        let Request { index, from: seq, to } = request;
        let wanted = self.scoreboard.is_wanted(seq);
        if self.cautious.is_some() && self.in_flight > 0 {
            return Some(Step::Idle);
        }
        let wqe = &self.sq.wqes[index];
        let (kind, cost) = (wqe.kind(), wqe.cost(seq, to, qp.mtu()));
        // The packet that the peer waits for ignores the window: READ responses that fill it may wait for that packet.
        if !wanted && !self.fits(qp, ctx, kind, cost) {
            self.note_window_closed();
            return Some(Step::Blocked);
        }
        match self.emit_request(qp, request, true, TxKind::Retransmission, tx) {
            Err(Unsent::Full) => return Some(Step::Full),
            Err(Unsent::Fault(status)) => {
                self.fail_lost(qp, ctx, index, seq, status);
                return Some(Step::Sent);
            }
            Ok(()) => {}
        }
        ctx.counters.retransmits += 1;
        self.read_in_parts |= kind == Kind::Read && to < self.sq.wqes[index].request_end(seq);
        if self.in_flight == 0 {
            self.timers.base = ctx.now;
        }
        self.account_resent(qp, ctx, seq, to, false);
        Some(Step::Sent)
    }

    /// Accounts for the retransmission of `from..to`. `probe`: sent after a probe timeout.
    fn account_resent(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, from: Seq, to: Seq, probe: bool) {
        let (una, next) = (self.una, self.next);
        let (mut at, mut more) = (from, 0);
        while at < to {
            let (cost, answered) = self.sq.weigh(at, qp.mtu());
            let counted = self.scoreboard.mark(at).is_in_flight(answered);
            more += if counted { 0 } else { cost };
            match probe {
                true => self.scoreboard.on_probed(una, at, next),
                false => self.scoreboard.on_resent(at, next, answered),
            }
            at = at.plus(1);
        }
        ctx.window.on_sent(more);
        self.in_flight += more;
        if !self
            .sq
            .index_of(from)
            .is_some_and(|index| self.sq.wqes[index].kind() == Kind::Read)
        {
            qp.note_sent(more);
        }
    }

    /// Marks a work request as failed, to complete in order: its memory can't be read any more.
    fn fail_lost(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, index: usize, seq: Seq, status: WcStatus) {
        ctx.counters.send_err += 1;
        self.sq.wqes[index].progress = Progress::Failed(status);
        self.account_resent(qp, ctx, seq, seq.plus(1), false);
        self.reap(qp, ctx);
    }

    /// Returns the next request packet to retransmit.
    ///
    /// Prefers the packet that the peer waits for, else takes the oldest.
    fn lost_request(&mut self, qp: &QpContext, ctx: &Ctx<'_>) -> Option<Request> {
        let from = self.scoreboard.next_resend(self.una)?;
        let index = self.sq.index_of(from)?;
        let wqe = &self.sq.wqes[index];
        let to = match wqe.kind() {
            Kind::Read => self.lost_run(qp, ctx, wqe, from),
            _ => from.plus(1),
        };
        Some(Request { index, from, to })
    }

    /// Returns how far to request a READ again from `seq` on.
    ///
    /// Repeats the whole READ if the peer may never have seen it, else only consecutive lost packets.
    fn lost_run(&self, qp: &QpContext, ctx: &Ctx<'_>, wqe: &SendWqe, seq: Seq) -> Seq {
        let end = wqe.request_end(seq);
        let at = self.first_answered(seq, end);
        if seq == wqe.request_start(seq) && at == end {
            return end;
        }
        let most = (ctx.window.read_limit() / (qp.mtu() + PACKET_OVERHEAD)).max(1) as u64;
        self.scoreboard
            .run_end(seq, at.min(seq.plus(most)), |mark| mark == Mark::Lost)
    }
}
