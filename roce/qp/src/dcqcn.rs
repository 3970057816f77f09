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

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A pace of 1 GB/s, whose path has shown so much congestion.
    fn pace(congestion: f64) -> Pace {
        Pace {
            congestion,
            ..Pace::new(at(0), 1e9)
        }
    }

    #[test]
    fn a_cut_depends_on_the_congestion_so_far_and_adds_a_sixteenth_of_the_rest() {
        for (before, rate, after) in [
            (1.0, 0.5e9, 1.0),
            (0.5, 0.75e9, 0.53125),
            (0.0, 1e9, 0.0625),
            (0.2, 0.9e9, 0.25),
        ] {
            let mut pace = pace(before);
            pace.cut(at(1000), us(20));
            assert!((pace.rate - rate).abs() < 1.0, "{pace:?}");
            assert!((pace.congestion - after).abs() < 1e-12, "{pace:?}");
            assert_eq!((pace.target, pace.unit), (1e9, UNIT));
            pace.cut(at(2000), us(300));
            assert_eq!(pace.unit, us(300), "no less than a round trip");
        }
    }

    #[test]
    fn congestion_falls_by_a_sixteenth_in_each_unit_without_a_notification() {
        let mut pace = pace(1.0);
        for (us, falls) in [(54, 0), (55, 1), (60, 1), (109, 1), (110, 2), (275, 5)] {
            pace.advance(at(us));
            let expected = (15.0_f64 / 16.0).powi(falls);
            assert!((pace.congestion - expected).abs() < 1e-12, "{us} us: {pace:?}");
        }
    }

    #[test]
    fn the_rate_grows_by_halves_then_by_additions_then_by_more() {
        for (by_time, by_bytes, faster) in [
            (1, 0, 0.0),
            (5, 0, 0.0),
            (5, 5, 0.0),
            (6, 0, ADDITIVE),
            (5, 6, ADDITIVE),
            (6, 6, HYPER),
            (9, 7, HYPER),
        ] {
            let mut pace = Pace {
                rate: 0.5e9,
                by_time,
                by_bytes,
                ..pace(1.0)
            };
            pace.grow();
            assert_eq!(pace.target, 1e9 + faster, "{by_time} {by_bytes}");
            assert_eq!(pace.rate, (0.5e9 + pace.target) / 2.0);
        }
    }

    #[test]
    fn time_and_bytes_are_counted_for_growth_and_credit() {
        let mut pace = Pace { rate: 1e8, ..pace(1.0) };
        pace.advance(at(165));
        assert_eq!((pace.by_time, pace.by_bytes), (3, 0));
        // Half of the way to 1 GB/s, three times; credit of the rate until then.
        assert!((pace.rate - 887_500_000.0).abs() < 1.0, "{pace:?}");
        assert!((pace.credit - 16_500.0).abs() < 1e-3, "{pace:?}");
        for _ in 0..2 {
            pace.on_sent(GROW_BYTES as usize - 1);
            assert_eq!(pace.bytes, GROW_BYTES - 1);
            pace.on_sent(1);
        }
        assert_eq!((pace.bytes, pace.by_bytes), (0, 2));
        // No more than a burst is saved up; what was sent too much is paid for.
        pace.credit = 0.0;
        pace.advance(at(1_000_000));
        assert_eq!(pace.credit, BURST);
    }

    #[test]
    fn a_pause_ends_when_a_quarter_of_a_burst_is_earned() {
        for (credit, us) in [(0.0, 16), (-16_000.0, 32), (-84_000.0, 100)] {
            let mut point = notified();
            point.pace = Some(Pace { credit, ..pace(1.0) });
            assert_eq!(point.may_send(at(0)), Err(at(us)), "{credit}");
        }
    }

    #[test]
    fn the_rate_is_cut_once_in_a_unit() {
        let mut point = notified();
        let pace = |point: &ReactionPoint| point.pace.unwrap();
        let first = pace(&point);
        assert_eq!((first.cut, first.unit), (at(1100), UNIT));
        point.on_notified(at(1154), RTT);
        assert_eq!(pace(&point).cut, at(1100));
        point.on_notified(at(1155), RTT);
        assert_eq!(pace(&point).cut, at(1155));
        assert!(pace(&point).rate < first.rate);
    }

    /// Sent bytes, time of the second notification, and the rate that is cut then.
    #[test]
    fn the_rate_is_measured_from_50_us_to_10_ms() {
        for (sent, us, rate) in [
            (50_000, 49, None),
            (50_000, 50, Some(1e9)),
            (50_000, 10_000, Some(5e6)),
            (50_000, 10_001, None),
            (0, 1000, None),
            (0, 10_000, None),
            (10, 1000, Some(LEAST)),
        ] {
            let mut point = ReactionPoint::new(at(0));
            point.on_sent(sent);
            point.on_notified(at(us), RTT);
            assert_eq!(point.pace.map(|pace| pace.target), rate, "{sent} bytes in {us} us");
            // A measurement that took too long begins again, any other goes on.
            let (measured, counted) = if us > 10_000 { (at(us), 0) } else { (at(0), sent as u64) };
            assert_eq!((point.measured, point.sent), (measured, counted));
            assert_eq!(point.notified, at(us));
        }
    }

    #[test]
    fn half_a_second_after_a_notification_it_has_no_effect() {
        let point = ReactionPoint::new(at(7));
        assert!(!point.is_over(at(500_007)));
        assert!(point.is_over(at(500_008)));
    }
}
