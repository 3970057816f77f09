//! Round trips and the times that follow from them.

use core::time::Duration;

use roce_verbs::{Instant, attr::ack_timeout};

/// The shortest adaptive retransmission timeout.
const MIN_RTO: Duration = Duration::from_millis(5);
/// The retransmission timeout before any round trip was measured.
const FIRST_RTO: Duration = Duration::from_millis(20);
/// The longest retransmission timeout after backing off.
const MAX_RTO: Duration = Duration::from_secs(1);
/// The shortest time before a tail-loss probe.
const MIN_PROBE: Duration = Duration::from_millis(1);
/// The shortest local ACK timeout that is honoured: rdma_rxe's one tick. IBA 9.7.6.1.3 allows up to four times the
/// attribute, and codes below this would only measure the scheduler.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(4);

/// Smoothed round trip.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rtt {
    smoothed: Option<Duration>,
    /// Smoothed distance of round trips from the smoothed one.
    variation: Duration,
    least: Option<Duration>,
}

impl Rtt {
    pub(crate) fn sample(&mut self, rtt: Duration) {
        let smoothed = self.smoothed.unwrap_or(rtt);
        self.variation = match self.smoothed {
            None => rtt / 2,
            Some(s) => (self.variation * 3 + s.abs_diff(rtt)) / 4,
        };
        self.smoothed = Some((smoothed * 7 + rtt) / 8);
        self.least = Some(self.least.map_or(rtt, |l| l.min(rtt)));
    }

    /// An answer to something sent less long ago than this was caused by something else.
    pub(crate) fn least(&self) -> Duration {
        self.least.unwrap_or_default()
    }

    /// How long to wait for a whole stream of stale packets to pass.
    pub(crate) fn settle(&self) -> Duration {
        (self.smoothed.unwrap_or_default() * 2).max(MIN_PROBE)
    }

    /// When to probe for a lost tail, after the last progress.
    pub(crate) fn probe(&self) -> Option<Duration> {
        self.smoothed.map(|s| (s + (self.variation * 4).max(s)).max(MIN_PROBE))
    }

    /// The adaptive timeout after `backoff` expiries without progress; never beyond the attribute's.
    pub(crate) fn rto(&self, backoff: u32, code: u8) -> Duration {
        let base = self.smoothed.map_or(FIRST_RTO, |s| (s * 4).max(MIN_RTO));
        let rto = base.saturating_mul(1 << backoff.min(10)).min(MAX_RTO.max(base));
        match attribute(code) {
            Some(limit) => rto.min(limit),
            None => rto,
        }
    }
}

/// The interval without progress that costs one retry; `None`: retries don't count.
pub(crate) fn attribute(code: u8) -> Option<Duration> {
    ack_timeout(code).map(|t| t.max(MIN_ACK_TIMEOUT))
}

/// Timers of the requester, as data: points in time that other state gives meaning to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timers {
    /// Last progress, retransmission, or start from idle: the adaptive timeout counts from here.
    pub(crate) base: Instant,
    /// Start of the interval that costs a retry when it ends without progress.
    pub(crate) interval: Instant,
    /// No requests before this: the peer had no receive work request.
    pub(crate) rnr_until: Option<Instant>,
    /// Expiries of the adaptive timeout since the last progress.
    pub(crate) backoff: u32,
    /// A tail-loss probe went out since the last progress.
    pub(crate) probed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_the_round_trip_but_not_beyond_the_attribute() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.rto(0, 0), FIRST_RTO);
        rtt.sample(Duration::from_micros(100));
        assert_eq!(rtt.rto(0, 0), MIN_RTO);
        assert_eq!(rtt.rto(2, 0), MIN_RTO * 4);
        assert_eq!(rtt.rto(30, 0), MAX_RTO);
        // Code 11 is 8.4 ms.
        assert_eq!(rtt.rto(5, 11), Duration::from_nanos(4096 << 11));
        for _ in 0..100 {
            rtt.sample(Duration::from_millis(50));
        }
        assert!(rtt.rto(0, 0) > Duration::from_millis(190));
        assert_eq!(rtt.least(), Duration::from_micros(100));
    }

    #[test]
    fn tiny_attributes_are_stretched_to_a_tick() {
        assert_eq!(attribute(0), None);
        assert_eq!(attribute(1), Some(MIN_ACK_TIMEOUT));
        assert_eq!(attribute(14), Some(Duration::from_nanos(4096 << 14)));
    }
}
