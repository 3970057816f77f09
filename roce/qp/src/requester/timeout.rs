//! Timeouts of requests, and the probes that precede retransmission.

use roce_verbs::{Instant, WcStatus};

use super::{
    Hold, Requester,
    phase::{Event, Probe},
    retransmit::GoBack,
    timers::attribute,
    transmit::{Request, Unsent},
};
use crate::{
    context::{Call, QpContext},
    sendq::{Kind, SendWqe},
    tx::{Step, TxKind, TxSink},
};

/// Last stage of probe timeouts, counted from 0, that leaves a long READ alone; without and with selective ACKs.
///
/// The responder may only be slow, and would send all of it twice. With selective ACKs it has reported its buffered packets, so
/// that the rest is missing.
const LAST_IDLE_READ_STAGE: [u32; 2] = [3, 0];

impl Requester {
    /// Sends the newest packet that is no READ again, so that the peer acknowledges all packets or reports a gap.
    ///
    /// If the oldest outstanding request is a READ, its next part is requested instead.
    pub(crate) fn transmit_probe(&mut self, call: &mut Call<'_>, tx: &mut impl TxSink) -> Step {
        if self.probe != Probe::Due {
            return Step::Idle;
        }
        self.probe = Probe::None;
        if !self.awaits_answer(call.qp) {
            return Step::Idle;
        }
        let Some(request) = self.probe_target(call) else {
            return Step::Idle;
        };
        let wqe = &self.sq.wqes[request.index];
        match self.emit_request(call.qp, (wqe, request), true, TxKind::Retransmission, tx) {
            Err(Unsent::Full) => {
                self.probe = Probe::Due;
                return Step::Full;
            }
            // The memory was deregistered: the next retransmission fails the work request.
            Err(Unsent::Fault(_) | Unsent::Paced(_)) => {}
            Ok(()) => {
                call.counters.tail_probes += 1;
                call.counters.retransmits += 1;
                let Request { from, to, .. } = request;
                self.reads.on_requested(wqe, from, to);
                let is_read = wqe.kind() == Kind::Read;
                self.reads.probed = is_read.then_some(to);
                match is_read {
                    true => self.note_probed(call, from, to),
                    false => self.probe = Probe::Sent(call.now),
                }
            }
        }
        Step::Sent
    }

    /// Returns the packet that a probe sends.
    fn probe_target(&self, call: &Call<'_>) -> Option<Request> {
        if let Some((index, wqe)) = self.oldest_read() {
            let (from, to) = (self.una, self.read_end(call, wqe, self.una));
            return Some(Request { index, from, to });
        }
        let end = self.sent_end(call.qp);
        let last = self.sq.index_of(end.prev())?;
        // Responses to a READ that is not the oldest would be dropped.
        let is_probe = |wqe: &SendWqe| wqe.packets > 0 && wqe.kind() != Kind::Read;
        let index = (0..=last).rfind(|&index| is_probe(&self.sq.wqes[index]))?;
        let to = self.sq.wqes[index].end().min(end);
        Some(Request {
            index,
            from: to.prev(),
            to,
        })
    }

    /// Returns the time when [`Requester::handle_timeout`] must be called next.
    pub(crate) fn next_timeout(&self, qp: &QpContext) -> Option<Instant> {
        let paced = match self.hold {
            Hold::Pace(until) => Some(until),
            Hold::None | Hold::Window => None,
        };
        [self.next_request_timeout(qp), paced].into_iter().flatten().min()
    }

    fn next_request_timeout(&self, qp: &QpContext) -> Option<Instant> {
        if !qp.is_sending() {
            return None;
        }
        if let Some(until) = self.phase.rnr_until() {
            return Some(until);
        }
        if !self.awaits_answer(qp) {
            return None;
        }
        let timers = &self.timers;
        let retry = attribute(qp.attr().timeout.unwrap_or(0)).map(|t| timers.interval + t);
        let probe = timers.base + self.rtt.probe_timeout();
        Some(retry.map_or(probe, |r| r.min(probe)))
    }

    /// Returns whether the oldest unacknowledged packet was already retransmitted.
    ///
    /// The peer reports a gap only once, so it does not report the loss of the retransmission.
    fn is_recovering(&self) -> bool {
        self.timers.resent.is_some_and(|(at, _)| at == self.una)
    }

    /// Runs the timers that are due. Calling it early is harmless.
    pub(crate) fn handle_timeout(&mut self, call: &mut Call<'_>) {
        if matches!(self.hold, Hold::Pace(until) if until <= call.now) {
            self.hold = Hold::None;
        }
        if self.next_request_timeout(call.qp).is_none_or(|at| at > call.now) {
            return;
        }
        if self.phase.rnr_until().is_some() {
            self.phase.on(Event::RnrOver);
            self.timers.restart(call.now);
            return;
        }
        let code = call.qp.attr().timeout.unwrap_or(0);
        let mut timeout = self.rtt.is_timeout(self.timers.backoff);
        if attribute(code).is_some_and(|t| self.timers.interval + t <= call.now) {
            if !self.take_retry(call) {
                return;
            }
            timeout = true;
        }
        self.handle_probe_timeout(call, timeout);
    }

    /// Takes a retry, for a timeout or a sequence NAK, also an implied one. Returns false if none was left, which fails the queue pair.
    ///
    /// Progress gives them back (`on_progress`).
    pub(super) fn take_retry(&mut self, call: &mut Call<'_>) -> bool {
        let Some(left) = self.retries_left.checked_sub(1) else {
            call.counters.retry_exceeded_err += 1;
            self.fail_head(call, WcStatus::RetryExceeded);
            return false;
        };
        self.retries_left = left;
        self.timers.interval = call.now;
        true
    }

    /// Handles a probe timeout in stages: sends a probe, then goes back with one packet at a time.
    ///
    /// With `timeout` the wait was longer than packets can be late: all count as lost.
    fn handle_probe_timeout(&mut self, call: &mut Call<'_>, timeout: bool) {
        let stage = self.timers.backoff;
        self.timers.backoff += 1;
        self.rtt.on_silence();
        self.timers.base = call.now;
        // The next answer may be to either transmission (Karn's rule).
        self.sample = None;
        if timeout {
            call.counters.timeouts += 1;
            self.go_back(call, GoBack::Timeout);
        } else if self.is_recovering() {
            self.go_back(call, GoBack::ProbeTimeout);
        } else if self.oldest_is_long_read(call) && stage <= LAST_IDLE_READ_STAGE[usize::from(call.qp.is_selective())] {
            // The responses may only be late, and all of them would be sent twice.
        } else if stage == 0 && self.reads.probed != Some(self.una) {
            self.probe = Probe::Due;
        } else {
            self.go_back(call, GoBack::ProbeTimeout);
        }
    }
}
