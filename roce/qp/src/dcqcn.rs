//! The reaction point of DCQCN (Zhu et al., SIGCOMM 2015): how a queue pair slows down when its peer tells, by congestion
//! notification packets, that a switch has marked its packets (IBTA Annex A17.9), and how it becomes fast again.

use core::time::Duration;

use roce_verbs::Instant;

/// Weight of one notification in the estimate of congestion.
const GAIN: f64 = 1.0 / 16.0;
/// The rate is cut no more than once in so much time, without a notification for as long the estimate falls, and the rate
/// grows. Unlike the paper's it is no less than a round trip, which is far longer here than between adapters: what was sent
/// before a cut can't tell of it.
const UNIT: Duration = Duration::from_micros(55);
/// It grows after so many bytes, too.
const GROW_BYTES: u64 = 10 << 20;
/// So many times half way back to the rate before the last cut (fast recovery), …
const FAST: u32 = 5;
/// … then by so many bytes per second further each time, …
const ADDITIVE: f64 = 5e6;
/// … and by so many when both time and bytes have come that far.
const HYPER: f64 = 50e6;
/// Never slower, bytes per second.
const LEAST: f64 = 1e6;
/// The first notification begins a measurement of the rate that the queue pair has; it takes so long at least and is of no use any
/// more after so long.
const MEASURE: Duration = Duration::from_micros(50);
const MEASURE_MOST: Duration = Duration::from_millis(10);
/// Bytes that may be sent at once.
const BURST: f64 = 64e3;
/// Without a notification for so long there is no limit any more.
const OVER: Duration = Duration::from_millis(500);

/// A queue pair whose peer has notified it of congestion.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct ReactionPoint {
    /// The last notification.
    notified: Instant,
    pace: Option<Pace>,
    /// Since `measured`, as long as there is no pace.
    sent: u64,
    measured: Instant,
}

/// Rates are in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Pace {
    rate: f64,
    /// The rate before the last cut, which it recovers to.
    target: f64,
    /// Congestion of the path, from 0 to 1.
    congestion: f64,
    decayed: Instant,
    unit: Duration,
    cut: Instant,
    /// Growth by time and by bytes since the last cut: when, how much, and how often.
    grown: Instant,
    bytes: u64,
    by_time: u32,
    by_bytes: u32,
    /// Bytes that may be sent; less than zero: too many were.
    credit: f64,
    at: Instant,
}

impl ReactionPoint {
    /// Creates it at the first notification.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            notified: now,
            pace: None,
            sent: 0,
            measured: now,
        }
    }

    /// Processes a further notification. `rtt`: the round trip, as far as it is known.
    pub(crate) fn on_notified(&mut self, now: Instant, rtt: Duration) {
        self.notified = now;
        if let Some(pace) = &mut self.pace {
            pace.advance(now);
            if now.saturating_since(pace.cut) >= pace.unit {
                pace.cut(now, rtt);
            }
            return;
        }
        let took = now.saturating_since(self.measured);
        if took >= MEASURE && took <= MEASURE_MOST && self.sent > 0 {
            let mut pace = Pace::new(now, self.sent as f64 / took.as_secs_f64());
            pace.cut(now, rtt);
            self.pace = Some(pace);
        } else if took > MEASURE_MOST {
            (self.measured, self.sent) = (now, 0);
        }
    }

    /// Returns whether the last notification is so old that it has no effect any more.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now.saturating_since(self.notified) > OVER
    }

    /// Checks whether the queue pair may send now.
    ///
    /// # Errors
    /// The time from when on it may.
    pub(crate) fn may_send(&mut self, now: Instant) -> Result<(), Instant> {
        let Some(pace) = &mut self.pace else {
            return Ok(());
        };
        pace.advance(now);
        if pace.credit > 0.0 {
            return Ok(());
        }
        // A quarter of a burst at a time: a timer per packet would cost more than it brings.
        let missing = BURST / 4.0 - pace.credit;
        Err(now + Duration::from_secs_f64(missing / pace.rate).max(Duration::from_micros(1)))
    }

    /// Records sent bytes.
    pub(crate) fn on_sent(&mut self, bytes: usize) {
        match &mut self.pace {
            Some(pace) => pace.on_sent(bytes),
            None => self.sent += bytes as u64,
        }
    }
}

impl Pace {
    fn new(now: Instant, rate: f64) -> Self {
        Self {
            rate: rate.max(LEAST),
            target: rate.max(LEAST),
            congestion: 1.0,
            decayed: now,
            unit: UNIT,
            cut: now,
            grown: now,
            bytes: 0,
            by_time: 0,
            by_bytes: 0,
            credit: 0.0,
            at: now,
        }
    }

    fn cut(&mut self, now: Instant, rtt: Duration) {
        self.unit = rtt.max(UNIT);
        self.cut = now;
        self.target = self.rate;
        self.rate = (self.rate * (1.0 - self.congestion / 2.0)).max(LEAST);
        self.congestion = (1.0 - GAIN) * self.congestion + GAIN;
        (self.decayed, self.grown) = (now, now);
        (self.bytes, self.by_time, self.by_bytes) = (0, 0, 0);
    }

    /// Lets time pass.
    fn advance(&mut self, now: Instant) {
        let earned = now.saturating_since(self.at).as_secs_f64() * self.rate;
        self.credit = (self.credit + earned).min(BURST);
        self.at = now;
        let decays = periods(now, self.decayed, self.unit);
        self.congestion *= (1.0 - GAIN).powi(decays as i32);
        self.decayed = self.decayed + self.unit * decays;
        let times = periods(now, self.grown, self.unit);
        self.grown = self.grown + self.unit * times;
        for _ in 0..times {
            self.by_time = self.by_time.saturating_add(1);
            self.grow();
        }
    }

    fn on_sent(&mut self, bytes: usize) {
        self.credit -= bytes as f64;
        self.bytes += bytes as u64;
        if self.bytes >= GROW_BYTES {
            self.bytes = 0;
            self.by_bytes = self.by_bytes.saturating_add(1);
            self.grow();
        }
    }

    fn grow(&mut self) {
        let (less, more) = (self.by_time.min(self.by_bytes), self.by_time.max(self.by_bytes));
        if less > FAST {
            self.target += HYPER;
        } else if more > FAST {
            self.target += ADDITIVE;
        }
        self.rate = (self.rate + self.target) / 2.0;
    }
}

/// Returns the number of whole periods that have passed, bounded because further ones have no effect.
fn periods(now: Instant, since: Instant, period: Duration) -> u32 {
    let passed = now.saturating_since(since).min(OVER).as_nanos();
    (passed / period.as_nanos()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_micros(50);

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    /// Sends packets of 4 KB as allowed until a time; returns bytes per second.
    fn send(point: &mut ReactionPoint, from: u64, us: u64) -> f64 {
        let (mut now, end) = (at(from), at(from + us));
        let mut sent = 0;
        while now < end {
            match point.may_send(now) {
                Ok(()) => {
                    point.on_sent(4000);
                    sent += 4000;
                    // No faster than 1 GB/s.
                    now = now + Duration::from_micros(4);
                }
                Err(at) => {
                    assert!(at > now);
                    now = at;
                }
            }
        }
        f64::from(sent) / us as f64 * 1e6
    }

    /// A queue pair of 1 GB/s that has been notified twice.
    fn notified() -> ReactionPoint {
        let mut point = ReactionPoint::new(at(1000));
        let rate = send(&mut point, 1000, 100);
        assert!(
            (0.9e9..1.1e9).contains(&rate),
            "the first notification only starts a measurement: {rate:e}"
        );
        point.on_notified(at(1100), RTT);
        point
    }

    #[test]
    fn a_notification_halves_the_rate_and_it_comes_back() {
        let mut point = notified();
        let rate = send(&mut point, 1100, 200);
        assert!((0.4e9..0.95e9).contains(&rate), "{rate:e}");
        let rate = send(&mut point, 1300, 3000);
        assert!((0.8e9..1.05e9).contains(&rate), "fast recovery: {rate:e}");
    }

    #[test]
    fn notifications_in_a_row_make_it_slow_but_never_stop_it() {
        let mut point = notified();
        for n in 1..2000 {
            point.on_notified(at(1100 + n * 50), RTT);
        }
        let rate = send(&mut point, 101_100, 100_000);
        // It recovers meanwhile by 5 MB/s every 300 us.
        assert!((1e6..1.1e9).contains(&rate), "{rate:e}");
        let slowest = point.pace.map(|p| p.target).unwrap();
        assert!(slowest >= LEAST);
        let mut point = notified();
        for n in 1..2000 {
            point.on_notified(at(1100 + n * 50), RTT);
        }
        assert!(point.pace.is_some_and(|p| p.rate <= LEAST * 1.01), "{point:?}");
    }

    #[test]
    fn rare_notifications_cost_little() {
        let mut point = notified();
        let mut now = 1100;
        for _ in 0..20 {
            now += 10_000;
            send(&mut point, now - 10_000, 10_000);
            point.on_notified(at(now), RTT);
        }
        let rate = send(&mut point, now, 10_000);
        assert!(rate > 0.9e9, "{rate:e}");
    }

    #[test]
    fn it_is_forgotten_in_time() {
        let point = notified();
        assert!(!point.is_over(at(400_000)));
        assert!(point.is_over(at(502_000)));
    }

    #[test]
    fn single_notifications_far_apart_limit_nothing() {
        let mut point = ReactionPoint::new(at(0));
        for n in 1..10 {
            point.on_sent(4000);
            point.on_notified(at(n * 20_000), RTT);
            assert_eq!(point.may_send(at(n * 20_000)), Ok(()));
        }
        assert!(point.pace.is_none());
    }
}
