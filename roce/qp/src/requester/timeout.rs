//! Timeouts of requests: probes, and going back to the oldest unacknowledged packet.

use roce_verbs::{Instant, WcStatus};

use super::{
    READ_PROBE, Requester,
    emit::{Request, Unsent},
    timers::attribute,
};
use crate::{
    congestion::Loss,
    context::QpContext,
    ctx::Ctx,
    sendq::{Kind, Progress, SendWqe},
    seq::Seq,
    tx::{Step, TxKind, TxSink},
};

/// Last stage of probe timeouts, counted from 0, that leaves a READ longer than [`READ_PROBE`] alone.
///
/// The responder may only be slow, and would send all of it twice.
const LAST_IDLE_READ_STAGE: u32 = 3;
/// [`LAST_IDLE_READ_STAGE`] with selective ACKs. The responder has reported its buffered packets: the rest is missing.
const LAST_IDLE_SELECTIVE_READ_STAGE: u32 = 0;

/// Reason to go back to the oldest unacknowledged PSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GoBack {
    /// The peer reported a gap, or responses have one.
    Gap,
    /// No answer within the probe timeout: packets may only be late.
    ProbeTimeout,
    /// No answer within the retransmission timeout or the queue pair's `timeout` attribute: packets count as lost.
    Timeout,
    /// RNR NAK: the peer had no receive work request.
    Rnr,
}

impl Requester {
    /// Sends the newest packet again, so that the peer acknowledges all packets or reports a gap.
    ///
    /// If the oldest outstanding request is a READ, its next part is requested instead.
    pub(crate) fn transmit_probe(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        let due = core::mem::take(&mut self.probe_due);
        if !due || self.una >= self.next || self.timers.rnr_until.is_some() {
            return Step::Idle;
        }
        let Some(request) = self.probe_target(qp, ctx) else {
            return Step::Idle;
        };
        match self.emit_request(qp, request, true, TxKind::Retransmission, tx) {
            Err(Unsent::Full) => {
                self.probe_due = true;
                return Step::Full;
            }
            // The memory was deregistered: the next retransmission fails the work request.
            Err(Unsent::Fault(_)) => {}
            Ok(()) => {
                ctx.counters.tail_probes += 1;
                ctx.counters.retransmits += 1;
                let Request { index, from, to } = request;
                let wqe = &self.sq.wqes[index];
                let read = wqe.kind() == Kind::Read;
                self.read_in_parts |= read && to < wqe.request_end(from);
                if read {
                    self.note_probed(qp, ctx, from, to);
                }
                self.probed = read.then_some(to);
                self.tail_probe_sent = (!read).then_some(ctx.now);
            }
        }
        Step::Sent
    }

    /// Returns the packet that a probe sends.
    fn probe_target(&self, qp: &QpContext, ctx: &Ctx<'_>) -> Option<Request> {
        if let Some((index, wqe)) = self.oldest_read() {
            let (from, to) = (self.una, self.read_end(qp, ctx, wqe, self.una));
            return Some(Request { index, from, to });
        }
        let last = self.next.prev();
        let upto = self.cur.saturating_add(1).min(self.sq.wqes.len());
        let is_last = |w: &SendWqe| w.packets > 0 && w.first <= last && last < w.end();
        let index = (0..upto).rev().find(|i| is_last(&self.sq.wqes[*i]))?;
        // Responses to a READ that is not the oldest would be dropped.
        let (from, to) = (last, last.plus(1));
        (self.sq.wqes[index].kind() != Kind::Read).then_some(Request { index, from, to })
    }

    /// Goes back to the oldest unacknowledged PSN (Go-Back-N), or starts selective recovery.
    pub(super) fn go_back(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, reason: GoBack) {
        if qp.is_selective() {
            return self.go_on(qp, ctx, reason);
        }
        ctx.counters.completer_retry_err += u64::from(reason != GoBack::Rnr);
        let weight = core::mem::take(&mut self.in_flight);
        let unanswered = matches!(reason, GoBack::ProbeTimeout | GoBack::Timeout);
        match reason {
            GoBack::Rnr | GoBack::ProbeTimeout => ctx.window.forget(weight),
            GoBack::Timeout => {
                ctx.window.forget(weight);
                ctx.window.on_loss(ctx.now, Loss::Timeout, 0);
            }
            GoBack::Gap => {
                // Only one packet is known to be lost: the receiver drops all packets after a gap.
                let lost = weight.min(qp.mtu());
                ctx.window.forget(weight - lost);
                ctx.window.on_loss(ctx.now, Loss::Gap, lost);
                self.rtt.on_loss();
            }
        }
        self.cautious = match reason {
            // The peer dropped all later packets, and may still have no receive work request.
            GoBack::Rnr => Some(self.una),
            GoBack::Gap => None,
            GoBack::ProbeTimeout | GoBack::Timeout if self.skipped => Some(self.una),
            GoBack::ProbeTimeout | GoBack::Timeout => self.cautious.or(Some(self.next)),
        };
        self.skipped &= unanswered;
        self.timed_out = unanswered && (self.timed_out || reason == GoBack::Timeout);
        self.next = self.una;
        self.cur = 0;
        self.since_ack_req = 0;
        self.sample = None;
        self.probe_due = false;
        self.last_go_back = Some((self.una, ctx.now));
        self.timers.base = ctx.now;
    }

    /// Returns the time when [`Requester::handle_timeout`] must be called next.
    pub(crate) fn next_timeout(&self, qp: &QpContext) -> Option<Instant> {
        let timers = [self.next_request_timeout(qp), self.paced_until];
        timers.into_iter().flatten().min()
    }

    fn next_request_timeout(&self, qp: &QpContext) -> Option<Instant> {
        if !qp.is_sending() {
            return None;
        }
        let timers = &self.timers;
        if timers.rnr_until.is_some() {
            return timers.rnr_until;
        }
        if self.una >= self.next {
            return None;
        }
        let retry = attribute(qp.attr().timeout.unwrap_or(0)).map(|t| timers.interval + t);
        let pause = timers.base + self.rtt.pause();
        Some(retry.map_or(pause, |r| r.min(pause)))
    }

    /// Returns whether the oldest unacknowledged packet was already retransmitted.
    ///
    /// The peer reports a gap only once, so it does not report the loss of the retransmission.
    fn is_recovering(&self) -> bool {
        self.last_go_back.is_some_and(|(at, _)| at == self.una)
    }

    /// Runs the timers that are due. Calling it early is harmless.
    pub(crate) fn handle_timeout(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>) {
        if self.paced_until.is_some_and(|at| at <= ctx.now) {
            self.paced_until = None;
        }
        if self.next_request_timeout(qp).is_none_or(|at| at > ctx.now) {
            return;
        }
        if self.timers.rnr_until.take().is_some() {
            self.timers.base = ctx.now;
            self.timers.interval = ctx.now;
            return;
        }
        let code = qp.attr().timeout.unwrap_or(0);
        let mut timeout = self.rtt.is_timeout(self.timers.backoff);
        if attribute(code).is_some_and(|t| self.timers.interval + t <= ctx.now) {
            let Some(left) = self.retries_left.checked_sub(1) else {
                ctx.counters.retry_exceeded_err += 1;
                self.fail_head(qp, ctx, WcStatus::RetryExceeded);
                return;
            };
            self.retries_left = left;
            self.timers.interval = ctx.now;
            timeout = true;
        }
        self.handle_probe_timeout(qp, ctx, timeout);
    }

    /// Handles a probe timeout in stages: sends a probe, then goes back with one packet at a time.
    ///
    /// With `timeout` the wait was longer than packets can be late: all count as lost.
    fn handle_probe_timeout(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, timeout: bool) {
        let stage = self.timers.backoff;
        self.timers.backoff += 1;
        self.rtt.on_silence();
        self.timers.base = ctx.now;
        // The next answer may be to either transmission (Karn's rule).
        self.sample = None;
        if timeout {
            ctx.counters.timeouts += 1;
            self.go_back(qp, ctx, GoBack::Timeout);
        } else if self.is_recovering() {
            self.go_back(qp, ctx, GoBack::ProbeTimeout);
        } else if self.oldest_is_long_read(qp, ctx) && stage <= self.last_idle_read_stage(qp) {
            // The responses may only be late, and all of them would be sent twice.
        } else if stage == 0 && self.probed != Some(self.una) {
            self.probe_due = true;
        } else {
            self.go_back(qp, ctx, GoBack::ProbeTimeout);
        }
    }

    /// Returns index and work request of the oldest outstanding PSN, if it is a READ.
    fn oldest_read(&self) -> Option<(usize, &SendWqe)> {
        let una = self.una;
        let mut wqes = self.sq.wqes.iter().enumerate();
        let oldest = wqes.find(|(_, w)| w.packets > 0 && una < w.end());
        oldest.filter(|(_, w)| w.kind() == Kind::Read)
    }

    fn last_idle_read_stage(&self, qp: &QpContext) -> u32 {
        match qp.is_selective() {
            true => LAST_IDLE_SELECTIVE_READ_STAGE,
            false => LAST_IDLE_READ_STAGE,
        }
    }

    /// Returns whether retransmitting the oldest packet would request more than [`READ_PROBE`] bytes of a READ.
    fn oldest_is_long_read(&self, qp: &QpContext, ctx: &Ctx<'_>) -> bool {
        let una = self.una;
        let cost = |w: &SendWqe| w.cost(una, self.read_end(qp, ctx, w, una), qp.mtu());
        self.oldest_read().is_some_and(|(_, w)| cost(w) > READ_PROBE)
    }

    /// Ends sending one packet at a time, after an answer.
    ///
    /// If it acknowledges more than was retransmitted, the first transmission was only late: the rest is not
    /// retransmitted (as in F-RTO, RFC 5682).
    pub(super) fn end_caution(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, acknowledged: Seq, resent: Seq) {
        let Some(sent) = self.cautious.take() else {
            return;
        };
        let timed_out = core::mem::take(&mut self.timed_out);
        if qp.is_selective() {
            return;
        }
        if acknowledged <= resent {
            return;
        }
        if timed_out {
            ctx.counters.spurious_timeouts += 1;
            ctx.window.on_spurious_timeout();
        }
        if sent <= self.next {
            return;
        }
        let covered = self.sq.wqes.iter().take_while(|w| w.first < sent);
        let weight: usize = covered.map(|w| w.cost(self.next, sent, qp.mtu())).sum();
        ctx.window.on_sent(weight);
        self.in_flight += weight;
        self.next = sent;
        self.cur = self.sq.wqes.iter().take_while(|w| is_sent(w, sent)).count();
        self.last_go_back = None;
    }
}

/// Returns whether a work request is entirely sent or executed if all PSNs before `to` are.
fn is_sent(wqe: &SendWqe, to: Seq) -> bool {
    matches!(wqe.progress, Progress::Started | Progress::Executed) && wqe.end() <= to
}
