//! Round trips and the times that follow from them.

use core::time::Duration;

use roce_verbs::{Instant, attr::ack_timeout};

use crate::seq::Seq;

/// Silence shorter than this is never taken for the loss of everything in flight: a peer on a busy machine may not be
/// scheduled for as long. What is really lost is found sooner, by probes.
const MIN_RTO: Duration = Duration::from_millis(40);
/// First pause before any round trip was measured.
const FIRST_PAUSE: Duration = Duration::from_millis(16);
/// Longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Shortest pause, where losses have shown that probes are needed.
const MIN_PAUSE: Duration = Duration::from_millis(1);
/// Doublings of the shortest pause at first and at most, 16 ms: a peer that is a process may not be scheduled for milliseconds,
/// and a probe then retransmits what was not lost. Each needed probe takes one doubling away, each needless one adds one.
const MAX_DOUBLINGS: u32 = 4;
/// Doublings at most after a reported loss, 4 ms: the path loses packets, so silence is likely to be a loss as well.
const LOSSY_DOUBLINGS: u32 = 2;
/// Measurements in a row that silences may spoil until the round trip is taken for longer than is known.
const SPOILT: u32 = 8;
/// The shortest local ACK timeout that is honoured: rdma_rxe's one tick. Codes below this would only measure the scheduler.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(4);
/// A peer that is a process on a busy machine may be silent for as long, and nobody answers in its stead …
const BUSY: Duration = Duration::from_millis(250);
/// … so that a retry is spent no sooner, within as many times the attribute as IBA 9.7.6.1.3 allows. Losses are repaired long
/// before.
const LENIENCE: u32 = 4;

/// Smoothed round trip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rtt {
    smoothed: Option<Duration>,
    /// Smoothed distance of round trips from the smoothed one.
    variation: Duration,
    least: Option<Duration>,
    /// Pauses that have passed, and count for how long the next one is.
    silences: u32,
    /// Times in a row that something came after a silence, and no round trip was measured before the next one.
    spoilt: u32,
    /// Doublings of the shortest pause.
    doublings: u32,
    /// The last probe has brought no duplicate answer so far: it was needed, as far as is known.
    needed: bool,
}

impl Default for Rtt {
    fn default() -> Self {
        Self {
            smoothed: None,
            variation: Duration::ZERO,
            least: None,
            silences: 0,
            spoilt: 0,
            doublings: MAX_DOUBLINGS,
            needed: false,
        }
    }
}

impl Rtt {
    pub(super) fn sample(&mut self, rtt: Duration) {
        let smoothed = self.smoothed.unwrap_or(rtt);
        self.variation = match self.smoothed {
            None => rtt / 2,
            Some(s) => (self.variation * 3 + s.abs_diff(rtt)) / 4,
        };
        self.smoothed = Some((smoothed * 7 + rtt) / 8);
        self.least = Some(self.least.map_or(rtt, |l| l.min(rtt)));
        (self.silences, self.spoilt) = (0, 0);
    }

    /// Notes that the peer reported a loss.
    pub(crate) fn on_loss(&mut self) {
        self.doublings = self.doublings.min(LOSSY_DOUBLINGS);
    }

    /// Notes an answer to a packet that was acknowledged before: the probe that it answers was needless.
    pub(super) fn on_duplicate(&mut self) {
        if core::mem::take(&mut self.needed) {
            self.doublings = (self.doublings + 1).min(MAX_DOUBLINGS);
        }
    }

    /// Notes that a pause has passed: a probe is sent, and the next pause is twice as long.
    pub(super) fn on_silence(&mut self) {
        if core::mem::replace(&mut self.needed, true) {
            self.doublings = self.doublings.saturating_sub(1);
        }
        self.silences = self.silences.saturating_add(1);
    }

    /// Something has come. After a silence it may answer either transmission, and measures nothing (Karn's rule). Where a round trip takes
    /// longer than a pause that is so for ever, unless pauses stay long until one is measured (RFC 6298 (5.5) to (5.7)): always so as
    /// long as none is known; later on, where losses are a likelier reason, only if it comes about again and again.
    pub(super) fn on_progress(&mut self) {
        if self.silences > 0 && self.smoothed.is_some() && self.spoilt < SPOILT {
            self.spoilt += 1;
            self.silences = 0;
        }
    }

    /// The usual round trip; zero as long as there was none.
    pub(super) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or_default()
    }

    /// An answer to something sent less long ago than this was caused by something else.
    pub(super) fn least(&self) -> Duration {
        self.least.unwrap_or_default()
    }

    /// How long to wait for a whole stream of stale packets to pass.
    pub(super) fn settle(&self) -> Duration {
        (self.smoothed.unwrap_or_default() * 2).max(MIN_PAUSE)
    }

    /// How long to bear silence.
    pub(super) fn pause(&self) -> Duration {
        let first = match self.smoothed {
            Some(s) => (s + (self.variation * 4).max(s)).max(MIN_PAUSE * (1 << self.doublings)),
            None => FIRST_PAUSE,
        };
        first
            .saturating_mul(1 << self.silences.min(16))
            .min(MAX_PAUSE.max(first))
    }

    /// Whether this pause, which follows `before` others without progress, ends a silence so long that everything in flight must be lost.
    pub(super) fn is_timeout(&self, before: u32) -> bool {
        let usual = self.smoothed.unwrap_or_default() + self.variation * 4;
        before > 0 && self.pause() * 2 >= usual.max(MIN_RTO)
    }
}

/// The interval without progress that costs one retry; `None`: retries don't count.
pub(crate) fn attribute(code: u8) -> Option<Duration> {
    ack_timeout(code).map(|t| t.max((t * LENIENCE).min(BUSY)).max(MIN_ACK_TIMEOUT))
}

/// Timers of the requester, as data: points in time that other state gives meaning to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timers {
    /// Last progress, action on silence, or start from idle: pauses count from here.
    pub(crate) base: Instant,
    /// Start of the interval that costs a retry when it ends without progress.
    pub(crate) interval: Instant,
    /// PSN and time of the last retransmission of the oldest packet.
    pub(crate) resent: Option<(Seq, Instant)>,
    /// Pauses since the last progress: the stage of a silence.
    pub(crate) backoff: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After so many silences.
    fn silent(mut rtt: Rtt, times: u32) -> Rtt {
        (0..times).for_each(|_| rtt.on_silence());
        rtt
    }

    /// The silence until the first timeout.
    fn until_timeout(rtt: &Rtt) -> Duration {
        let pauses = (0..).take_while(|n| *n == 0 || !silent(*rtt, n - 1).is_timeout(n - 1));
        pauses.map(|n| silent(*rtt, n).pause()).sum()
    }

    #[test]
    fn pauses_follow_the_round_trip_and_double() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.pause(), FIRST_PAUSE);
        rtt.sample(Duration::from_micros(100));
        // Silences first undo the doublings.
        let pauses: Vec<u128> = (0..6).map(|n| silent(rtt, n).pause().as_millis()).collect();
        assert_eq!(pauses, [16, 32, 32, 32, 32, 32]);
        assert_eq!(silent(rtt, 30).pause(), MAX_PAUSE);
        for _ in 0..100 {
            rtt.sample(Duration::from_millis(50));
        }
        assert!(rtt.pause() > Duration::from_millis(95));
        assert_eq!(rtt.least(), Duration::from_micros(100));
    }

    #[test]
    fn needed_probes_make_the_shortest_pause_shorter_and_needless_ones_longer() {
        let mut rtt = Rtt::default();
        rtt.sample(Duration::from_micros(100));
        let probe = |rtt: &mut Rtt, needless: bool| {
            rtt.on_silence();
            rtt.sample(Duration::from_micros(100));
            // Only the first copy counts.
            (0..2).filter(|_| needless).for_each(|_| rtt.on_duplicate());
            rtt.pause().as_millis()
        };
        // That a probe was needed is known at the next one.
        let shorter: Vec<u128> = (0..6).map(|_| probe(&mut rtt, false)).collect();
        assert_eq!(shorter, [16, 8, 4, 2, 1, 1]);
        let longer: Vec<u128> = (0..6).map(|_| probe(&mut rtt, true)).collect();
        assert_eq!(longer, [2, 4, 8, 16, 16, 16]);
        rtt.on_loss();
        assert_eq!(rtt.pause().as_millis(), 4);
    }

    #[test]
    fn pauses_stay_long_until_a_round_trip_is_measured() {
        let mut rtt = silent(Rtt::default(), 2);
        rtt.on_progress();
        assert_eq!(rtt.pause(), FIRST_PAUSE * 4);
        rtt.sample(Duration::from_millis(30));
        assert_eq!(rtt.pause(), Duration::from_millis(90));
        // A loss now and then makes them no longer …
        for _ in 0..SPOILT {
            rtt = silent(rtt, 1);
            rtt.on_progress();
            assert_eq!(rtt.pause(), Duration::from_millis(90));
        }
        // … but where nothing is measured any more, the path may have become longer.
        rtt = silent(rtt, 1);
        rtt.on_progress();
        assert_eq!(rtt.pause(), Duration::from_millis(180));
    }

    #[test]
    fn a_timeout_takes_longer_than_a_peer_that_is_not_scheduled() {
        let mut rtt = Rtt::default();
        assert!(!rtt.is_timeout(0) && silent(rtt, 1).is_timeout(1));
        rtt.sample(Duration::from_micros(50));
        assert!(until_timeout(&rtt) >= MIN_RTO);
        assert!(until_timeout(&rtt) < MIN_RTO * 2);
        for n in 0..100 {
            // Round trips that vary between 20 and 60 ms.
            rtt.sample(Duration::from_millis(20 + 40 * (n & 1)));
        }
        assert!(until_timeout(&rtt) > Duration::from_millis(200));
    }
}
