//! Round trips, and the timeouts that follow from them.

use core::time::Duration;

use roce_verbs::{Instant, attr::ack_timeout};

use crate::seq::Seq;

/// Shortest silence that declares everything in flight lost. A peer on a busy machine may not be scheduled for that long.
/// Probes find actual losses sooner.
const MIN_RTO: Duration = Duration::from_millis(40);
/// First probe timeout before any round trip is measured.
const FIRST_TIMEOUT: Duration = Duration::from_millis(16);
/// Longest probe timeout.
const MAX_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest probe timeout, after losses have shown that probes are needed.
const MIN_TIMEOUT: Duration = Duration::from_millis(1);
/// Doublings of the shortest probe timeout, at first and at most: 16 ms. A peer that is a process may not be scheduled for
/// milliseconds, and a probe then retransmits what was not lost. Each needed probe removes one doubling, each needless one
/// adds one.
const MAX_DOUBLINGS: u32 = 4;
/// Most doublings after a reported loss: 4 ms. The path loses packets, so that silence is likely to be a loss as well.
const LOSSY_DOUBLINGS: u32 = 2;
/// Measurements in a row that silences may spoil before the round trip counts as longer than measured.
const SPOILT: u32 = 8;
/// Shortest local ACK timeout that is honoured: one tick of rdma_rxe. Shorter ones would only measure the scheduler.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(4);
/// Silence that a peer may need that is a process on a busy machine: no hardware answers for it. A retry is consumed no
/// sooner, within [`LENIENCE`].
const BUSY: Duration = Duration::from_millis(250);
/// Largest multiple of the local ACK timeout that IBA 9.7.6.1.3 permits. Losses are repaired long before.
const LENIENCE: u32 = 4;

/// Smoothed round trip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rtt {
    smoothed: Option<Duration>,
    /// Smoothed distance of round trips from the smoothed one.
    variation: Duration,
    least: Option<Duration>,
    /// Probe timeouts that double the next one.
    silences: u32,
    /// Silences in a row that ended with an answer, but without a measured round trip before the next one.
    spoilt: u32,
    /// Doublings of the shortest probe timeout.
    doublings: u32,
    /// No duplicate answer to the last probe has arrived: it was needed, as far as is known.
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
    /// Records a measured round trip.
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

    /// Records that the peer reported a loss.
    pub(crate) fn on_loss(&mut self) {
        self.doublings = self.doublings.min(LOSSY_DOUBLINGS);
    }

    /// Records an answer to a packet that was acknowledged before: the probe that it answers was needless.
    pub(super) fn on_duplicate(&mut self) {
        if core::mem::take(&mut self.needed) {
            self.doublings = (self.doublings + 1).min(MAX_DOUBLINGS);
        }
    }

    /// Records a probe timeout. The next one is twice as long.
    pub(super) fn on_silence(&mut self) {
        if core::mem::replace(&mut self.needed, true) {
            self.doublings = self.doublings.saturating_sub(1);
        }
        self.silences = self.silences.saturating_add(1);
    }

    /// Records an answer.
    ///
    /// After a silence it may answer either transmission, and measures nothing (Karn's rule). If a round trip takes longer
    /// than the timeout, none would ever be measured. So timeouts stay long until one is (RFC 6298 (5.5) to (5.7)): always
    /// before the first measurement, and later, when losses are likelier, only after [`SPOILT`] in a row.
    pub(super) fn on_progress(&mut self) {
        if self.silences > 0 && self.smoothed.is_some() && self.spoilt < SPOILT {
            self.spoilt += 1;
            self.silences = 0;
        }
    }

    /// Returns the smoothed round trip; zero before the first one.
    pub(super) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or_default()
    }

    /// Returns the shortest round trip. An answer within a shorter time answers an earlier packet.
    pub(super) fn least(&self) -> Duration {
        self.least.unwrap_or_default()
    }

    /// Returns how long to wait until a stream of stale packets has passed.
    pub(super) fn settle(&self) -> Duration {
        (self.smoothed.unwrap_or_default() * 2).max(MIN_TIMEOUT)
    }

    /// Returns the probe timeout.
    pub(super) fn probe_timeout(&self) -> Duration {
        let first = match self.smoothed {
            Some(s) => (s + (self.variation * 4).max(s)).max(MIN_TIMEOUT * (1 << self.doublings)),
            None => FIRST_TIMEOUT,
        };
        first
            .saturating_mul(1 << self.silences.min(16))
            .min(MAX_TIMEOUT.max(first))
    }

    /// Returns whether everything in flight is lost after this probe timeout and `before` others without progress.
    pub(super) fn is_timeout(&self, before: u32) -> bool {
        before > 0 && self.probe_timeout() * 2 >= MIN_RTO
    }
}

/// Returns the interval without progress that consumes a retry. `None`: retries are not counted.
pub(crate) fn attribute(code: u8) -> Option<Duration> {
    ack_timeout(code).map(|t| t.max((t * LENIENCE).min(BUSY)).max(MIN_ACK_TIMEOUT))
}

/// Timers of the requester.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timers {
    /// Last progress, retransmission, or start from idle: probe timeouts count from here.
    pub(crate) base: Instant,
    /// Start of the interval that consumes a retry if it ends without progress.
    pub(crate) interval: Instant,
    /// PSN and time of the last retransmission of the oldest packet.
    pub(crate) resent: Option<(Seq, Instant)>,
    /// Probe timeouts since the last progress.
    pub(crate) backoff: u32,
}

impl Timers {
    /// Restarts both intervals.
    pub(super) fn restart(&mut self, now: Instant) {
        (self.base, self.interval) = (now, now);
    }
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
        pauses.map(|n| silent(*rtt, n).probe_timeout()).sum()
    }

    #[test]
    fn pauses_follow_the_round_trip_and_double() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.probe_timeout(), FIRST_TIMEOUT);
        rtt.sample(Duration::from_micros(100));
        // Silences first undo the doublings.
        let pauses: Vec<u128> = (0..6).map(|n| silent(rtt, n).probe_timeout().as_millis()).collect();
        assert_eq!(pauses, [16, 32, 32, 32, 32, 32]);
        assert_eq!(silent(rtt, 30).probe_timeout(), MAX_TIMEOUT);
        for _ in 0..100 {
            rtt.sample(Duration::from_millis(50));
        }
        assert!(rtt.probe_timeout() > Duration::from_millis(95));
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
            rtt.probe_timeout().as_millis()
        };
        // That a probe was needed is known at the next one.
        let shorter: Vec<u128> = (0..6).map(|_| probe(&mut rtt, false)).collect();
        assert_eq!(shorter, [16, 8, 4, 2, 1, 1]);
        let longer: Vec<u128> = (0..6).map(|_| probe(&mut rtt, true)).collect();
        assert_eq!(longer, [2, 4, 8, 16, 16, 16]);
        rtt.on_loss();
        assert_eq!(rtt.probe_timeout().as_millis(), 4);
    }

    #[test]
    fn pauses_stay_long_until_a_round_trip_is_measured() {
        let mut rtt = silent(Rtt::default(), 2);
        rtt.on_progress();
        assert_eq!(rtt.probe_timeout(), FIRST_TIMEOUT * 4);
        rtt.sample(Duration::from_millis(30));
        assert_eq!(rtt.probe_timeout(), Duration::from_millis(90));
        // A loss now and then makes them no longer …
        for _ in 0..SPOILT {
            rtt = silent(rtt, 1);
            rtt.on_progress();
            assert_eq!(rtt.probe_timeout(), Duration::from_millis(90));
        }
        // … but where nothing is measured any more, the path may have become longer.
        rtt = silent(rtt, 1);
        rtt.on_progress();
        assert_eq!(rtt.probe_timeout(), Duration::from_millis(180));
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

    #[test]
    fn answers_without_a_silence_before_them_spoil_no_measurement() {
        let mut rtt = Rtt::default();
        rtt.sample(Duration::from_millis(30));
        (0..2 * SPOILT).for_each(|_| rtt.on_progress());
        let mut rtt = silent(rtt, 1);
        assert_eq!(rtt.probe_timeout(), Duration::from_millis(180));
        rtt.on_progress();
        assert_eq!(rtt.probe_timeout(), Duration::from_millis(90));
    }

    #[test]
    fn waits_follow_from_the_measured_round_trips() {
        let mut rtt = Rtt::default();
        assert_eq!((rtt.smoothed(), rtt.settle()), (Duration::ZERO, MIN_TIMEOUT));
        for ms in [8, 16, 8] {
            rtt.sample(Duration::from_millis(ms));
        }
        // RFC 6298 with 1/8 and 1/4: 8, 9, 8.875 ms; variation 4, 5, 4 ms.
        assert_eq!(rtt.smoothed(), Duration::from_micros(8875));
        assert_eq!(rtt.variation, Duration::from_millis(4));
        assert_eq!(rtt.settle(), Duration::from_micros(17_750));
        assert_eq!(rtt.least(), Duration::from_millis(8));
        assert_eq!(rtt.probe_timeout(), Duration::from_micros(24_875));
        // A silence as long as a probe after the first one reaches the shortest timeout.
        assert!(!rtt.is_timeout(0) && rtt.is_timeout(1));
        rtt.doublings = 0;
        rtt.variation = Duration::from_micros(100);
        rtt.smoothed = Some(Duration::from_millis(6));
        // 2 * 12 ms are less than what a peer may need that is not scheduled.
        assert!(!rtt.is_timeout(1) && silent(rtt, 1).is_timeout(1));
    }

    #[test]
    fn a_retry_takes_the_timeout_of_the_attribute_or_more() {
        assert_eq!(attribute(0), None);
        for (code, us) in [
            (1, 4000),
            (8, 4194),
            (12, 67_108),
            (14, 250_000),
            (15, 250_000),
            (16, 268_435),
            (20, 4_294_967),
        ] {
            assert_eq!(attribute(code).map(|t| t.as_micros()), Some(us), "{code}");
        }
    }
}
