//! Completer: processes responses and completes work requests.

use roce_bth::{Aeth, Class, Packet, RnrTimer, Syndrome};
use roce_verbs::{AsyncEvent, Completion, QpState, SendFlags, WcFlags, WcStatus};

use super::{Requester, phase::Event, retransmit::GoBack};
use crate::{
    context::Call,
    refusal::nak_status,
    sendq::{Kind, Progress},
    seq::Seq,
};

/// RNR retry count without limit (IBA 9.9.2.4.1.1).
const RNR_FOR_EVER: u8 = 7;

impl Requester {
    /// Processes an acknowledgement or a response.
    pub(crate) fn handle_response(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        if !call.qp.is_sending() {
            call.counters.dropped_state += 1;
            return;
        }
        let seq = self.una.nearest(packet.header.bth.psn);
        if !(self.una..self.next).contains(&seq) {
            // Stale, or a response to a request that was never sent.
            call.counters.dropped_responses += 1;
            if seq < self.una {
                self.rtt.on_duplicate();
            }
            return;
        }
        call.qp.on_answer();
        match (packet.header.bth.opcode.info().class, packet.header.aeth()) {
            (Class::Acknowledge, Some(aeth)) => self.handle_ack(call, seq, aeth),
            (Class::ReadResponse | Class::AtomicAcknowledge, _) => self.handle_data(call, seq, packet),
            _ => call.counters.dropped_opcode += 1,
        }
    }

    fn handle_ack(&mut self, call: &mut Call<'_>, seq: Seq, aeth: Aeth) {
        match aeth.syndrome {
            Syndrome::Ack(_) => {
                self.acknowledge_up_to(call, seq.plus(1));
            }
            // A refusal acknowledges everything before it.
            Syndrome::Rnr(timer) => {
                call.counters.rcvd_rnr_err += 1;
                if self.acknowledge_up_to(call, seq) {
                    self.handle_rnr(call, timer);
                }
            }
            Syndrome::Nak(code) => match nak_status(code) {
                None => {
                    call.counters.rcvd_seq_err += 1;
                    if self.acknowledge_up_to(call, seq) {
                        self.handle_gap(call);
                    }
                }
                Some(status) => {
                    call.counters.naks_received += 1;
                    if self.acknowledge_up_to(call, seq) {
                        self.fail_head(call, status);
                    }
                }
            },
            Syndrome::Reserved(_) => call.counters.dropped_responses += 1,
        }
    }

    /// Completes everything before `to`. Returns false if the queue pair has failed, or if the response of a READ or atomic
    /// before `to` is missing, which is then requested again (an implied NAK, IBA 9.7.5.1.3).
    pub(super) fn acknowledge_up_to(&mut self, call: &mut Call<'_>, to: Seq) -> bool {
        self.implied = self.implied.max(to);
        let limit = self.response_before(to).unwrap_or(to);
        self.advance(call, limit);
        if limit < to && call.qp.is_sending() {
            self.handle_implied_gap(call);
        }
        limit == to && call.qp.is_sending()
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
    pub(crate) fn advance(&mut self, call: &mut Call<'_>, to: Seq) {
        let from = self.una;
        if to > from {
            let (mut weight, mut answered) = (0, 0);
            let is_known = self.scoreboard.is_active();
            for wqe in self.sq.wqes.iter().take_while(|w| w.first < to) {
                weight += if is_known { 0 } else { wqe.cost(from, to, call.qp.mtu()) };
                answered += wqe.answered(from, to);
            }
            let resent = self.sent_end(call.qp);
            if is_known {
                weight = self.weight_before(call.qp, to);
                self.scoreboard.on_acked(to);
            }
            self.una = to;
            self.in_flight = self.in_flight.saturating_sub(weight);
            self.rd_outstanding = self.rd_outstanding.saturating_sub(answered);
            let rtt = self.take_sample(call.now);
            call.window.on_acked(call.now, weight, rtt);
            self.on_progress(call);
            // The peer has a receive work request again.
            self.rnr_left = call.qp.attr().rnr_retry.unwrap_or(0);
            self.end_caution(call, to, resent);
            self.lose_overtaken(call);
        }
        self.reap(call);
    }

    /// Completes the work requests at the front that are done, or fails the queue pair with the first failed one.
    #[inline]
    pub(super) fn reap(&mut self, call: &mut Call<'_>) {
        while let Some(head) = self.sq.wqes.front() {
            match head.progress {
                Progress::Failed(status) => {
                    self.fail_head(call, status);
                    return;
                }
                Progress::Executed => {}
                Progress::Started if head.end() <= self.una => {}
                Progress::Started | Progress::Posted => break,
            }
            self.cur = self.cur.saturating_sub(1);
            self.complete_send(call, WcStatus::Success);
        }
        self.check_drained(call);
        call.fail_on_overflow();
    }

    /// Reports a drained send queue, once.
    pub(super) fn check_drained(&mut self, call: &mut Call<'_>) {
        let quiet = self.sq.wqes.front().is_none_or(|w| w.progress == Progress::Posted);
        if call.qp.state() == QpState::Sqd && quiet && !self.drained {
            self.drained = true;
            if call.qp.attr().en_sqd_async_notify == Some(true) {
                call.events.push_back(AsyncEvent::SqDrained(call.qp.qpn()));
            }
        }
    }

    /// Fails the oldest work request and the queue pair; of an unacknowledged service, only the send queue.
    pub(super) fn fail_head(&mut self, call: &mut Call<'_>, status: WcStatus) {
        if let Some(wqe) = self.sq.wqes.front() {
            call.note_send_failure(wqe, self.sq.target(0), status);
        }
        self.complete_send(call, status);
        match call.qp.is_reliable() {
            true => call.qp.fail(),
            false => {
                // SQE (IBA 10.3.1): the queue pair goes on receiving.
                call.qp.set_state(QpState::Sqe);
                self.flush(call);
                call.fail_on_overflow();
            }
        }
    }

    /// Removes the oldest work request and completes it.
    #[inline]
    pub(super) fn complete_send(&mut self, call: &mut Call<'_>, status: WcStatus) {
        let Some(wqe) = self.sq.wqes.front() else { return };
        let ok = status == WcStatus::Success;
        if ok && wqe.kind() == Kind::Send {
            call.counters.rdma_sends += 1;
        }
        let silent = ok && !call.qp.config().signal_all && !wqe.flags.contains(SendFlags::SIGNALED);
        let completion = Completion {
            wr_id: wqe.wr_id,
            status,
            opcode: wqe.wc_opcode(),
            byte_len: wqe.len,
            qpn: call.qp.qpn(),
            flags: WcFlags::empty(),
            ..Completion::default()
        };
        self.sq.pop();
        if !silent {
            call.push_send(completion);
        }
    }

    fn handle_rnr(&mut self, call: &mut Call<'_>, timer: RnrTimer) {
        if self.phase.rnr_until().is_some() {
            return;
        }
        if call.qp.attr().rnr_retry != Some(RNR_FOR_EVER) {
            let Some(left) = self.rnr_left.checked_sub(1) else {
                call.counters.retry_rnr_exceeded_err += 1;
                self.fail_head(call, WcStatus::RnrRetryExceeded);
                return;
            };
            self.rnr_left = left;
        }
        self.wait_for_receive(call, call.now + timer.duration());
    }

    /// The peer reported a gap at the oldest unacknowledged PSN.
    fn handle_gap(&mut self, call: &mut Call<'_>) {
        let waiting = self.phase.rnr_until().is_some();
        if waiting || self.went_back_within(call, self.rtt.least()) {
            // It reports an earlier transmission: the retransmission can't have been answered yet.
            return;
        }
        if self.take_retry(call) {
            self.go_back(call, GoBack::Gap);
        }
    }

    /// A response is missing. Requests it once: the responses behind it that are still in flight must not repeat that.
    fn handle_implied_gap(&mut self, call: &mut Call<'_>) {
        let waiting = self.phase.rnr_until().is_some();
        self.reads.skipped = true;
        self.phase.on(Event::MissingResponse(self.una));
        if waiting || self.went_back_within(call, self.rtt.settle()) || !self.take_retry(call) {
            return;
        }
        match call.qp.is_selective() {
            true => self.ask_again(call),
            false => self.go_back(call, GoBack::Gap),
        }
    }

    fn went_back_within(&self, call: &Call<'_>, time: core::time::Duration) -> bool {
        self.timers
            .resent
            .is_some_and(|(at, when)| at == self.una && call.now.saturating_since(when) < time)
    }

    /// Processes a READ response or atomic result.
    fn handle_data(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) {
        if self.is_early(call.qp, seq) {
            return self.take_early(call, seq, packet);
        }
        if !self.acknowledge_up_to(call, seq) {
            return;
        }
        let Some(head) = self.sq.wqes.front() else { return };
        match self.place_response(call.qp, head, seq, packet) {
            Ok(()) => {
                self.advance(call, seq.plus(1));
                self.pass_answered(call);
            }
            Err(status) => self.fail_head(call, status),
        }
    }
}
