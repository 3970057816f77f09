//! Completer: processes responses and completes work requests.

use core::cmp::Ordering;

use roce_bth::{Aeth, Class, Packet, RnrTimer, Syndrome};
use roce_verbs::{AsyncEvent, Completion, QpState, SendFlags, WcFlags, WcStatus};

use super::{Requester, compare_outstanding, phase::Event, retransmit::GoBack};
use crate::{
    context::QpContext,
    ctx::Ctx,
    refusal::nak_status,
    sendq::{Kind, Progress},
    seq::Seq,
};

/// RNR retry count without limit (IBA 9.9.2.4.1.1).
const RNR_FOR_EVER: u8 = 7;

impl Requester {
    /// Processes an acknowledgement or a response.
    pub(crate) fn handle_response(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        if !qp.is_sending() {
            ctx.counters.dropped_state += 1;
            return;
        }
        let seq = self.una.nearest(packet.header.bth.psn);
        let order = compare_outstanding(seq, self.una, self.next);
        if order != Ordering::Equal {
            // Stale, or a response to a request that was never sent.
            ctx.counters.dropped_responses += 1;
            if order == Ordering::Less {
                self.rtt.on_duplicate();
            }
            return;
        }
        qp.on_answer();
        match (packet.header.bth.opcode.info().class, packet.header.aeth()) {
            (Class::Acknowledge, Some(aeth)) => self.handle_ack(qp, ctx, seq, aeth),
            (Class::ReadResponse, aeth) => self.handle_read_response(qp, ctx, seq, aeth, packet),
            (Class::AtomicAcknowledge, Some(aeth)) => self.handle_atomic_response(qp, ctx, seq, aeth, packet),
            _ => ctx.counters.dropped_opcode += 1,
        }
    }

    fn handle_ack(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, seq: Seq, aeth: Aeth) {
        match aeth.syndrome {
            Syndrome::Ack(_) => {
                self.acknowledge_up_to(qp, ctx, seq.plus(1));
            }
            // A refusal acknowledges everything before it.
            Syndrome::Rnr(timer) => {
                ctx.counters.rcvd_rnr_err += 1;
                if self.acknowledge_up_to(qp, ctx, seq) {
                    self.handle_rnr(qp, ctx, timer);
                }
            }
            Syndrome::Nak(code) => match nak_status(code) {
                None => {
                    ctx.counters.rcvd_seq_err += 1;
                    if self.acknowledge_up_to(qp, ctx, seq) {
                        self.handle_gap(qp, ctx);
                    }
                }
                Some(status) => {
                    ctx.counters.naks_received += 1;
                    if self.acknowledge_up_to(qp, ctx, seq) {
                        self.fail_head(qp, ctx, status);
                    }
                }
            },
            Syndrome::Reserved(_) => ctx.counters.dropped_responses += 1,
        }
    }

    /// Completes everything before `to`. Returns false if the queue pair has failed, or if the response of a READ or atomic
    /// before `to` is missing, which is then requested again (an implied NAK, IBA 9.7.5.1.3).
    pub(super) fn acknowledge_up_to(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, to: Seq) -> bool {
        self.implied = self.implied.max(to);
        let limit = self.response_before(to).unwrap_or(to);
        self.advance(qp, ctx, limit);
        if limit < to && qp.is_sending() {
            self.handle_implied_gap(qp, ctx);
        }
        limit == to && qp.is_sending()
    }

    /// Returns the first PSN before `to` whose response is missing.
    pub(super) fn response_before(&self, to: Seq) -> Option<Seq> {
        if self.rd_outstanding == 0 {
            return None;
        }
        let before = self.sq.wqes.iter().take_while(|w| w.first < to);
        before
            .filter(|w| w.has_response())
            .find_map(|w| self.first_unanswered(w.first.max(self.una), w.end()))
            .filter(|s| *s < to)
    }

    /// Advances the oldest outstanding PSN and completes the work requests before it.
    pub(crate) fn advance(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, to: Seq) {
        let from = self.una;
        if to > from {
            let (mut weight, mut answered) = (0, 0);
            let is_known = self.scoreboard.is_active();
            for wqe in self.sq.wqes.iter().take_while(|w| w.first < to) {
                weight += if is_known { 0 } else { wqe.cost(from, to, qp.mtu()) };
                answered += wqe.answered(from, to);
            }
            let resent = self.sent_end(qp);
            if is_known {
                weight = self.weight_before(qp, to);
                self.scoreboard.on_acked(to);
            }
            self.una = to;
            self.in_flight = self.in_flight.saturating_sub(weight);
            self.rd_outstanding = self.rd_outstanding.saturating_sub(answered);
            let rtt = self.take_sample(ctx.now);
            ctx.window.on_acked(ctx.now, weight, rtt);
            self.made_progress(qp, ctx);
            self.end_caution(qp, ctx, to, resent);
            self.lose_overtaken(qp, ctx);
        }
        self.reap(qp, ctx);
    }

    /// Restarts retry counts and timers after progress. It also proves that the peer has a receive work request again.
    fn made_progress(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        self.on_progress(ctx.now, qp.attr().retry_cnt.unwrap_or(0));
        self.rnr_left = qp.attr().rnr_retry.unwrap_or(0);
    }

    /// Completes the work requests at the front that are done, or fails the queue pair with the first failed one.
    pub(super) fn reap(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>) {
        while let Some(head) = self.sq.wqes.front() {
            match head.progress {
                Progress::Failed(status) => {
                    self.fail_head(qp, ctx, status);
                    return;
                }
                Progress::Executed => {}
                Progress::Started if head.end() <= self.una => {}
                Progress::Started | Progress::Posted => break,
            }
            self.cur = self.cur.saturating_sub(1);
            self.complete_send(qp, ctx, WcStatus::Success);
        }
        self.check_drained(qp, ctx);
        qp.fail_on_overflow(ctx);
    }

    /// Reports a drained send queue, once.
    pub(super) fn check_drained(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        let quiet = self.sq.wqes.front().is_none_or(|w| w.progress == Progress::Posted);
        if qp.state() == QpState::Sqd && quiet && !self.drained {
            self.drained = true;
            if qp.attr().en_sqd_async_notify == Some(true) {
                ctx.events.push_back(AsyncEvent::SqDrained(qp.qpn()));
            }
        }
    }

    /// Fails the oldest work request and the queue pair; of an unacknowledged service, only the send queue.
    pub(super) fn fail_head(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, status: WcStatus) {
        if let Some(wqe) = self.sq.wqes.front() {
            qp.note_send_failure(ctx, wqe, self.sq.target(0), status);
        }
        self.complete_send(qp, ctx, status);
        match qp.is_reliable() {
            true => qp.fail(),
            false => {
                // SQE (IBA 10.3.1): the queue pair goes on receiving.
                qp.set_state(QpState::Sqe);
                self.flush(qp, ctx);
                qp.fail_on_overflow(ctx);
            }
        }
    }

    /// Removes the oldest work request and completes it.
    pub(super) fn complete_send(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, status: WcStatus) {
        let Some(wqe) = self.sq.wqes.front() else { return };
        let ok = status == WcStatus::Success;
        if ok && wqe.kind() == Kind::Send {
            ctx.counters.rdma_sends += 1;
        }
        let silent = ok && !qp.config().signal_all && !wqe.flags.contains(SendFlags::SIGNALED);
        let completion = Completion {
            wr_id: wqe.wr_id,
            status,
            opcode: wqe.wc_opcode(),
            byte_len: wqe.len,
            qpn: qp.qpn(),
            flags: WcFlags::empty(),
            ..Completion::default()
        };
        self.sq.pop();
        if !silent {
            qp.push_send(ctx, completion);
        }
    }

    fn handle_rnr(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, timer: RnrTimer) {
        if self.phase.rnr_until().is_some() {
            return;
        }
        if qp.attr().rnr_retry != Some(RNR_FOR_EVER) {
            let Some(left) = self.rnr_left.checked_sub(1) else {
                ctx.counters.retry_rnr_exceeded_err += 1;
                self.fail_head(qp, ctx, WcStatus::RnrRetryExceeded);
                return;
            };
            self.rnr_left = left;
        }
        self.wait_for_receive(qp, ctx, ctx.now + timer.duration());
    }

    /// The peer reported a gap at the oldest unacknowledged PSN.
    fn handle_gap(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        let waiting = self.phase.rnr_until().is_some();
        if waiting || self.went_back_within(ctx, self.rtt.least()) {
            // It reports an earlier transmission: the retransmission can't have been answered yet.
            return;
        }
        self.go_back(qp, ctx, GoBack::Gap);
    }

    /// A response is missing. Requests it once: the responses behind it that are still in flight must not repeat that.
    fn handle_implied_gap(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        let waiting = self.phase.rnr_until().is_some();
        self.reads.on_skipped();
        self.phase.on(Event::MissingResponse(self.una));
        if waiting || self.went_back_within(ctx, self.rtt.settle()) {
            return;
        }
        match qp.is_selective() {
            true => self.ask_again(qp, ctx),
            false => self.go_back(qp, ctx, GoBack::Gap),
        }
    }

    fn went_back_within(&self, ctx: &Ctx<'_>, time: core::time::Duration) -> bool {
        self.timers
            .resent
            .is_some_and(|(at, when)| at == self.una && ctx.now.saturating_since(when) < time)
    }

    fn handle_read_response(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        aeth: Option<Aeth>,
        packet: &Packet<'_>,
    ) {
        if self.is_early(qp, seq) {
            return self.take_early(qp, ctx, seq, packet);
        }
        if !self.acknowledge_up_to(qp, ctx, seq) {
            return;
        }
        let Some(head) = self.sq.wqes.front() else { return };
        let Some((offset, len)) = self.read_response_place(qp, head, seq, aeth, packet) else {
            self.fail_head(qp, ctx, WcStatus::BadResponseError);
            return;
        };
        if len > 0 && head.data.write_at(offset, packet.payload).is_err() {
            self.fail_head(qp, ctx, WcStatus::LocalProtectionError);
        } else {
            self.advance(qp, ctx, seq.plus(1));
            self.pass_answered(qp, ctx);
        }
    }

    fn handle_atomic_response(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        aeth: Aeth,
        packet: &Packet<'_>,
    ) {
        if self.is_early(qp, seq) {
            return self.take_early(qp, ctx, seq, packet);
        }
        if !self.acknowledge_up_to(qp, ctx, seq) {
            return;
        }
        let Some(head) = self.sq.wqes.front() else { return };
        let original = packet
            .header
            .atomic_ack()
            .filter(|_| matches!(aeth.syndrome, Syndrome::Ack(_)));
        let Some(original) = original.filter(|_| head.expects(packet.header.bth.opcode.info().class)) else {
            self.fail_head(qp, ctx, WcStatus::BadResponseError);
            return;
        };
        match head.data.write_at(0, &original.to_ne_bytes()) {
            Ok(()) => {
                self.advance(qp, ctx, seq.plus(1));
                self.pass_answered(qp, ctx);
            }
            Err(_) => self.fail_head(qp, ctx, WcStatus::LocalProtectionError),
        }
    }
}
