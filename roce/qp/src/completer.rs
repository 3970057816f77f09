//! Completer: processes responses and completes work requests.

use core::cmp::Ordering;

use roce_bth::{Aeth, NakCode, Packet, Position, RnrTimer, Syndrome};
use roce_verbs::{AsyncEvent, Completion, QpState, SendFlags, WcFlags, WcStatus};

use crate::{
    ctx::Ctx,
    qp::QueuePair,
    requester::{GoBack, compare_outstanding},
    sendq::{Kind, Progress, SendWqe},
    seq::Seq,
};

/// RNR retry count without limit (IBA 9.9.2.4.1.1).
const RNR_FOR_EVER: u8 = 7;

/// Returns the status that a NAK causes at the requester (IBA table 58). A sequence error causes none.
pub(crate) const fn nak_status(code: NakCode) -> Option<WcStatus> {
    match code {
        NakCode::PsnSequenceError => None,
        NakCode::InvalidRequest => Some(WcStatus::RemoteInvalidRequestError),
        NakCode::RemoteAccessError => Some(WcStatus::RemoteAccessError),
        NakCode::RemoteOperationalError => Some(WcStatus::RemoteOperationError),
        NakCode::InvalidRdRequest => Some(WcStatus::RemoteInvalidRdRequest),
    }
}

impl QueuePair {
    /// Processes an acknowledgement or a response.
    pub(crate) fn handle_response(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        use roce_bth::Class;
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            ctx.counters.dropped_state += 1;
            return;
        }
        let seq = self.req.una.nearest(packet.header.bth.psn);
        let order = compare_outstanding(seq, self.req.una, self.req.top);
        if order != Ordering::Equal {
            // Stale, or a response to a request that was never sent.
            ctx.counters.dropped_responses += 1;
            if order == Ordering::Less {
                self.req.rtt.on_duplicate();
            }
            return;
        }
        self.resp.established = true;
        match (packet.header.bth.opcode.info().class, packet.header.aeth()) {
            (Class::Acknowledge, Some(aeth)) => self.handle_ack(ctx, seq, aeth),
            (Class::ReadResponse, aeth) => self.handle_read_response(ctx, seq, aeth, packet),
            (Class::AtomicAcknowledge, Some(aeth)) => self.handle_atomic_response(ctx, seq, aeth, packet),
            _ => ctx.counters.dropped_opcode += 1,
        }
    }

    fn handle_ack(&mut self, ctx: &mut Ctx<'_>, seq: Seq, aeth: Aeth) {
        match aeth.syndrome {
            Syndrome::Ack(_) => {
                self.acknowledge_up_to(ctx, seq.plus(1));
            }
            // A refusal acknowledges everything before it.
            Syndrome::Rnr(timer) => {
                ctx.counters.rcvd_rnr_err += 1;
                if self.acknowledge_up_to(ctx, seq) {
                    self.handle_rnr(ctx, timer);
                }
            }
            Syndrome::Nak(code) => match nak_status(code) {
                None => {
                    ctx.counters.rcvd_seq_err += 1;
                    if self.acknowledge_up_to(ctx, seq) {
                        self.handle_gap(ctx);
                    }
                }
                Some(status) => {
                    ctx.counters.naks_received += 1;
                    if self.acknowledge_up_to(ctx, seq) {
                        self.fail_head(ctx, status);
                    }
                }
            },
            Syndrome::Reserved(_) => ctx.counters.dropped_responses += 1,
        }
    }

    /// Completes everything before `to`. Returns false if the queue pair has failed, or if the response of a READ or atomic
    /// before `to` is missing, which is then requested again (an implied NAK, IBA 9.7.5.1.3).
    pub(crate) fn acknowledge_up_to(&mut self, ctx: &mut Ctx<'_>, to: Seq) -> bool {
        self.req.implied = self.req.implied.max(to);
        let limit = self.response_before(to).unwrap_or(to);
        self.advance(ctx, limit);
        if limit < to && self.is_sending() {
            self.handle_implied_gap(ctx);
        }
        limit == to && self.is_sending()
    }

    pub(crate) fn is_sending(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd)
    }

    /// Returns the first PSN before `to` whose response is missing.
    pub(crate) fn response_before(&self, to: Seq) -> Option<Seq> {
        if self.req.rd_outstanding == 0 {
            return None;
        }
        let before = self.sq.wqes.iter().take_while(|w| w.first < to);
        before
            .filter(|w| w.has_response())
            .find_map(|w| self.first_unanswered(w.first.max(self.req.una), w.end()))
            .filter(|s| *s < to)
    }

    /// Advances the oldest outstanding PSN and completes the work requests before it.
    pub(crate) fn advance(&mut self, ctx: &mut Ctx<'_>, to: Seq) {
        let (from, next) = (self.req.una, self.req.next);
        if to > from {
            let upto = to.min(next);
            let (mut weight, mut answered) = (0, 0);
            let told = self.req.recovery.is_active();
            for wqe in self.sq.wqes.iter().take_while(|w| w.first < to) {
                weight += if told { 0 } else { wqe.cost(from, upto, self.mtu) };
                answered += wqe.answered(from, to);
            }
            if told {
                weight = self.weight_before(upto);
                self.req.recovery.acked(to);
            }
            self.req.una = to;
            self.req.next = next.max(to);
            self.req.in_flight = self.req.in_flight.saturating_sub(weight);
            self.req.rd_outstanding = self.req.rd_outstanding.saturating_sub(answered);
            let rtt = self.req.take_sample(ctx.now);
            ctx.window.on_acked(ctx.now, weight, rtt);
            self.made_progress(ctx);
            self.end_caution(ctx, to, next);
            self.lose_overtaken(ctx);
        }
        self.reap(ctx);
    }

    /// Restarts retry counts and timers after progress.
    fn made_progress(&mut self, ctx: &mut Ctx<'_>) {
        let req = &mut self.req;
        req.on_progress(ctx.now, self.attr.retry_cnt.unwrap_or(0));
        req.rnr_left = self.attr.rnr_retry.unwrap_or(0);
        // The progress proves that the peer has a receive work request again.
        req.timers.rnr_until = None;
    }

    /// Completes the work requests at the front that are done, or fails the queue pair with the first failed one.
    pub(crate) fn reap(&mut self, ctx: &mut Ctx<'_>) {
        while let Some(head) = self.sq.wqes.front() {
            match head.progress {
                Progress::Failed(status) => {
                    self.fail_head(ctx, status);
                    return;
                }
                Progress::Executed => {}
                Progress::Started if head.end() <= self.req.una => {}
                Progress::Started | Progress::Posted => break,
            }
            self.req.cur = self.req.cur.saturating_sub(1);
            self.complete_send(ctx, WcStatus::Success);
        }
        self.check_drained(ctx);
        self.fail_on_overflow(ctx);
    }

    /// Reports a drained send queue, once.
    pub(crate) fn check_drained(&mut self, ctx: &mut Ctx<'_>) {
        let quiet = self.sq.wqes.front().is_none_or(|w| w.progress == Progress::Posted);
        if self.state == QpState::Sqd && quiet && !self.req.drained {
            self.req.drained = true;
            if self.attr.en_sqd_async_notify == Some(true) {
                ctx.events.push_back(AsyncEvent::SqDrained(self.config.qpn));
            }
        }
    }

    /// Fails the oldest work request and the queue pair; of an unacknowledged service, only the send queue.
    pub(crate) fn fail_head(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) {
        self.note_send_failure(ctx, status);
        self.complete_send(ctx, status);
        match self.reliable {
            true => self.enter_error(ctx),
            false => self.enter_send_error(ctx),
        }
    }

    /// Removes the oldest work request and completes it.
    pub(crate) fn complete_send(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) {
        let Some(wqe) = self.sq.wqes.front() else { return };
        let ok = status == WcStatus::Success;
        if ok && wqe.kind() == Kind::Send {
            ctx.counters.rdma_sends += 1;
        }
        let silent = ok && !self.config.signal_all && !wqe.flags.contains(SendFlags::SIGNALED);
        let completion = Completion {
            wr_id: wqe.wr_id,
            status,
            opcode: wqe.wc_opcode(),
            byte_len: wqe.len,
            qpn: self.config.qpn,
            flags: WcFlags::empty(),
            ..Completion::default()
        };
        self.sq.pop();
        if !silent {
            self.push_send(ctx, completion);
        }
    }

    fn handle_rnr(&mut self, ctx: &mut Ctx<'_>, timer: RnrTimer) {
        if self.req.timers.rnr_until.is_some() {
            return;
        }
        if self.attr.rnr_retry != Some(RNR_FOR_EVER) {
            let Some(left) = self.req.rnr_left.checked_sub(1) else {
                ctx.counters.retry_rnr_exceeded_err += 1;
                self.fail_head(ctx, WcStatus::RnrRetryExceeded);
                return;
            };
            self.req.rnr_left = left;
        }
        self.go_back(ctx, GoBack::Rnr);
        self.req.timers.rnr_until = Some(ctx.now + timer.duration());
    }

    /// The peer reported a gap at the oldest unacknowledged PSN.
    fn handle_gap(&mut self, ctx: &mut Ctx<'_>) {
        let waiting = self.req.timers.rnr_until.is_some();
        if waiting || self.went_back_within(ctx, self.req.rtt.least()) {
            // It reports an earlier transmission: the retransmission can't have been answered yet.
            return;
        }
        self.go_back(ctx, GoBack::Gap);
    }

    /// A response is missing. Requests it once: the responses behind it that are still in flight must not repeat that.
    fn handle_implied_gap(&mut self, ctx: &mut Ctx<'_>) {
        let waiting = self.req.timers.rnr_until.is_some();
        self.req.skipped = true;
        if self.req.cautious.is_some() {
            self.req.cautious = Some(self.req.una);
        }
        if waiting || self.went_back_within(ctx, self.req.rtt.settle()) {
            return;
        }
        match self.selective {
            true => self.ask_again(ctx),
            false => self.go_back(ctx, GoBack::Gap),
        }
    }

    fn went_back_within(&self, ctx: &Ctx<'_>, time: core::time::Duration) -> bool {
        self.req
            .last_go_back
            .is_some_and(|(at, when)| at == self.req.una && ctx.now.saturating_since(when) < time)
    }

    fn handle_read_response(&mut self, ctx: &mut Ctx<'_>, seq: Seq, aeth: Option<Aeth>, packet: &Packet<'_>) {
        if self.is_early(seq) {
            return self.take_early(ctx, seq, packet);
        }
        if !self.acknowledge_up_to(ctx, seq) {
            return;
        }
        let Some(head) = self.sq.wqes.front() else { return };
        let Some((offset, len)) = self.read_response_place(head, seq, aeth, packet) else {
            self.fail_head(ctx, WcStatus::BadResponseError);
            return;
        };
        if len > 0 && head.data.write_at(offset, packet.payload).is_err() {
            self.fail_head(ctx, WcStatus::LocalProtectionError);
        } else {
            self.advance(ctx, seq.plus(1));
            self.pass_answered(ctx);
        }
    }

    /// Returns the place of a READ response's payload in a work request's memory, and its bytes; `None`: it is none of its.
    pub(crate) fn read_response_place(
        &self,
        wqe: &SendWqe,
        seq: Seq,
        aeth: Option<Aeth>,
        packet: &Packet<'_>,
    ) -> Option<(usize, usize)> {
        let index = seq.since(wqe.first);
        let (offset, len) = match wqe.kind() {
            Kind::Read => wqe.slice(index, self.mtu),
            _ => (0, 0),
        };
        let last = seq.plus(1) == wqe.request_end(seq);
        let position = packet.header.bth.opcode.info().position;
        // After a repeated request the responses start again at its first packet or continue (rdma_rxe). They may end
        // early, because the READ may have been requested in parts.
        let again = self.req.read_in_parts;
        let fits = wqe.expects(packet.header.bth.opcode.info().class)
            && packet.payload.len() == len
            && (position.ends() || !last)
            && (!position.ends() || last || again)
            && (index > 0 || position.starts())
            && aeth.is_none_or(|a| matches!(a.syndrome, Syndrome::Ack(_)))
            && (position == Position::Middle || aeth.is_some());
        fits.then_some((offset, len))
    }

    fn handle_atomic_response(&mut self, ctx: &mut Ctx<'_>, seq: Seq, aeth: Aeth, packet: &Packet<'_>) {
        if self.is_early(seq) {
            return self.take_early(ctx, seq, packet);
        }
        if !self.acknowledge_up_to(ctx, seq) {
            return;
        }
        let Some(head) = self.sq.wqes.front() else { return };
        let original = packet
            .header
            .atomic_ack()
            .filter(|_| matches!(aeth.syndrome, Syndrome::Ack(_)));
        let Some(original) = original.filter(|_| head.expects(packet.header.bth.opcode.info().class)) else {
            self.fail_head(ctx, WcStatus::BadResponseError);
            return;
        };
        match head.data.write_at(0, &original.to_ne_bytes()) {
            Ok(()) => {
                self.advance(ctx, seq.plus(1));
                self.pass_answered(ctx);
            }
            Err(_) => self.fail_head(ctx, WcStatus::LocalProtectionError),
        }
    }
}
