//! Requester: turns send work requests into request packets, retransmits them, and completes them when they are
//! acknowledged.

mod completer;
mod phase;
mod reads;
mod retransmit;
mod scoreboard;
mod selective;
mod timeout;
mod timers;
mod transmit;

use core::time::Duration;

use roce_verbs::mem::KeyCache;
use roce_verbs::{Instant, WcStatus};

use self::{
    phase::{Probe, ReadRecovery, RecoveryPhase},
    scoreboard::Scoreboard,
    timers::{Rtt, Timers},
};
use crate::{context::Call, sendq::SendQueue, seq::Seq};

/// Reason why window or pacing permitted no request at the last attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hold {
    None,
    /// The window is closed.
    Window,
    /// Pacing of a service without acknowledgements permits none before this time.
    Pace(Instant),
}

/// Requester: send queue, PSNs, timers and recovery.
#[derive(Debug)]
pub(crate) struct Requester {
    /// Local keys used last.
    keys: KeyCache,
    sq: SendQueue,
    /// Oldest PSN that is not acknowledged; of a READ, whose response has not arrived.
    una: Seq,
    /// PSN to send next for the first time.
    next: Seq,
    /// Index in the send queue of the work request that `next` belongs to.
    cur: usize,
    /// Bytes of `una..next` counted in the window.
    in_flight: usize,
    /// READ and atomic requests sent and not answered.
    rd_outstanding: u32,
    /// Packets since the last acknowledgement request.
    since_ack_req: u32,
    /// Retries left before the work request fails: timeouts and sequence NAKs (IBA 9.9.2.4.1).
    retries_left: u8,
    /// RNR retries left.
    rnr_left: u8,
    timers: Timers,
    rtt: Rtt,
    /// Round trip being measured: one past the PSN of the packet, and the time it was sent.
    sample: Option<(Seq, Instant)>,
    phase: RecoveryPhase,
    probe: Probe,
    reads: ReadRecovery,
    /// States of the packets in flight, once a report or a timeout tells of them.
    scoreboard: Scoreboard,
    /// Reason why the last attempt to send failed.
    hold: Hold,
    /// The drained send queue was reported.
    drained: bool,
    /// PSN before which all requests were executed, as an acknowledgement or response implies.
    implied: Seq,
}

impl Requester {
    pub(crate) fn new(first: Seq) -> Self {
        Self {
            keys: KeyCache::default(),
            sq: SendQueue::new(first),
            una: first,
            next: first,
            cur: 0,
            in_flight: 0,
            rd_outstanding: 0,
            since_ack_req: 0,
            retries_left: 0,
            rnr_left: 0,
            timers: Timers::default(),
            rtt: Rtt::default(),
            sample: None,
            phase: RecoveryPhase::Steady,
            probe: Probe::None,
            reads: ReadRecovery::default(),
            scoreboard: Scoreboard::default(),
            hold: Hold::None,
            drained: false,
            implied: first,
        }
    }

    /// Sets the retry limits that are given. They apply at once, also to outstanding requests.
    pub(crate) fn set_retries(&mut self, retries: Option<u8>, rnr_retries: Option<u8>) {
        self.retries_left = retries.unwrap_or(self.retries_left);
        self.rnr_left = rnr_retries.unwrap_or(self.rnr_left);
    }

    /// Returns the oldest PSN that is not acknowledged.
    pub(crate) fn una(&self) -> Seq {
        self.una
    }

    /// Returns one past the highest PSN ever sent.
    pub(crate) fn next(&self) -> Seq {
        self.next
    }

    /// Returns the number of packets that are posted and not acknowledged. A READ counts its responses.
    pub(crate) fn outstanding_packets(&self) -> u64 {
        self.sq.tail.since(self.una)
    }

    /// Returns the bytes counted in the window.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the usual round trip; zero as long as there was none.
    pub(crate) fn rtt(&self) -> Duration {
        self.rtt.smoothed()
    }

    /// Returns the number of work requests that have not completed.
    pub(crate) fn len(&self) -> usize {
        self.sq.wqes.len()
    }

    /// Returns whether the drained send queue was reported in SQD.
    pub(crate) fn is_drained(&self) -> bool {
        self.drained
    }

    /// Starts draining the send queue on the way to SQD.
    pub(crate) fn drain(&mut self, call: &mut Call<'_>) {
        self.drained = false;
        self.check_drained(call);
    }

    /// Completes the work request just posted to an error state.
    pub(crate) fn flush_posted(&mut self, call: &mut Call<'_>) {
        if let Some(wqe) = self.sq.wqes.front() {
            // A flushed work request consumes no PSN.
            self.sq.tail = wqe.first;
            self.complete_send(call, WcStatus::FlushError);
        }
    }

    /// Completes all work requests with a flush error and starts from idle.
    pub(crate) fn flush(&mut self, call: &mut Call<'_>) {
        while !self.sq.wqes.is_empty() {
            self.complete_send(call, WcStatus::FlushError);
        }
        call.window.forget(self.in_flight);
        *self = Self::new(self.sq.tail);
    }

    /// Restarts timers and retry count after an answer that makes progress.
    fn on_progress(&mut self, call: &Call<'_>) {
        self.retries_left = call.qp.attr().retry_cnt.unwrap_or(0);
        self.timers.restart(call.now);
        self.timers.backoff = 0;
        self.rtt.on_progress();
    }

    /// Completes the round-trip measurement if `una` has reached its packet. Returns the round trip.
    fn take_sample(&mut self, now: Instant) -> Option<Duration> {
        let (seq, sent) = self.sample?;
        if self.una < seq {
            return None;
        }
        self.sample = None;
        let rtt = now.saturating_since(sent);
        self.rtt.sample(rtt);
        Some(rtt)
    }
}
