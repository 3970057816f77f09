//! Paces of packets that nothing acknowledges: READ responses, and the services without acknowledgements.

use core::{net::IpAddr, num::NonZeroU64, time::Duration};
use std::collections::HashMap;

use roce_verbs::{AddressHashes, Instant};

/// A loss is held against the pace only if more than this was sent in vain: then something overflowed.
const OVERFLOW: usize = 256 << 10;
/// … if something arrived before that, …
const QUEUE: usize = 32 << 10;
/// … and if the peer noticed only by a timeout: one that sees gaps asks for less.
const BLIND: Duration = Duration::from_millis(50);
/// Smallest burst.
const MIN_BURST: i64 = 128 << 10;
/// One burst goes out in this time.
const PERIOD: Duration = Duration::from_millis(20);
/// After as long without an overflow the burst doubles …
const GROW_AFTER: Duration = Duration::from_secs(1);
/// … and beyond this there is no limit any more.
const NO_LIMIT: i64 = 64 << 20;
/// Pauses end when a period divided by this has been earned: before a requester takes them for a loss.
const SHARES: i64 = 40;

/// Rate of a [`Bucket`].
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// Bytes that may be sent at once, and that are earned in a period.
    burst: i64,
    period: Duration,
    /// A pause ends when a burst divided by this is earned: a timer for each packet would cost more than it brings.
    shares: i64,
}

/// Token bucket.
#[derive(Clone, Copy, Default, Debug)]
struct Bucket {
    /// `None`: no limit.
    rate: Option<Rate>,
    /// Bytes that may be sent; negative after too many.
    credit: i64,
    /// Time to which the credit is up to date.
    at: Instant,
}

impl Bucket {
    /// Creates a full bucket.
    fn new(now: Instant, rate: Option<Rate>) -> Self {
        Self {
            rate,
            credit: rate.map_or(0, |rate| rate.burst),
            at: now,
        }
    }

    fn may_send(&mut self, now: Instant) -> Result<(), Instant> {
        let Some(rate) = self.rate else {
            return Ok(());
        };
        let (burst, period) = (i128::from(rate.burst), rate.period.as_nanos() as i128);
        let passed = now.saturating_since(self.at).min(rate.period * 2).as_nanos() as i128;
        let earned = (passed * burst / period) as i64;
        if earned > 0 {
            self.at = now;
            self.credit = (self.credit + earned).min(rate.burst);
        }
        if self.credit > 0 {
            return Ok(());
        }
        let missing = i128::from(rate.burst / rate.shares - self.credit);
        let nanos = u64::try_from(missing * period / burst).unwrap_or(u64::MAX);
        Err(now + Duration::from_nanos(nanos.max(1)))
    }

    fn on_sent(&mut self, bytes: usize) {
        if self.rate.is_some() {
            self.credit -= bytes as i64;
        }
    }
}

/// Pace of READ responses.
///
/// Nothing on the wire tells a responder how much of them has arrived. A requester such as rdma_rxe requests any amount at once.
/// When that overflows a queue on the way, it requests again, after its timeout, all that is missing, which overflows the same
/// queue again. So a request for what was sent in vain tells how much can be sent in one burst, and from then on responses are
/// sent at that pace.
#[derive(Clone, Default, Debug)]
pub(crate) struct Pace {
    bucket: Bucket,
    /// The last overflow or doubling.
    changed: Instant,
}

impl Pace {
    pub(crate) fn may_send(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(rate) = &mut self.bucket.rate
            && now.saturating_since(self.changed) > GROW_AFTER
        {
            self.changed = now;
            rate.burst *= 2;
        }
        self.bucket.rate = self.bucket.rate.filter(|rate| rate.burst < NO_LIMIT);
        self.bucket.may_send(now)
    }

    pub(crate) fn on_sent(&mut self, bytes: usize) {
        self.bucket.on_sent(bytes);
    }

    pub(crate) fn on_loss(&mut self, now: Instant, silence: Duration, arrived: usize, lost: usize) {
        if lost < OVERFLOW || arrived < QUEUE || silence < BLIND {
            return;
        }
        let most = self.bucket.rate.map_or(NO_LIMIT, |rate| rate.burst / 2);
        let rate = Rate {
            burst: (arrived as i64 / 2).min(most).max(MIN_BURST),
            period: PERIOD,
            shares: SHARES,
        };
        self.bucket = Bucket::new(now, Some(rate));
        self.changed = now;
    }
}

/// Bytes that may be sent at once without acknowledgements: half of a socket buffer of the usual size (212,992 bytes, which Linux doubles
/// for its own bookkeeping).
const FREE_BURST: i64 = 128 << 10;
/// Default rate at which it is earned again, bytes per second: a receiver that is away for half a millisecond loses nothing.
const FREE_RATE: NonZeroU64 = NonZeroU64::new(256 << 20).unwrap();

/// Creates the bucket of datagrams and unreliable connections at so many bytes per second; `None`: no limit.
///
/// No acknowledgement tells whether a receiver keeps up, and a queue pair could send faster than any socket buffer is emptied: messages
/// of a thousand packets would never arrive whole.
fn free_bucket(rate: Option<NonZeroU64>) -> Bucket {
    let rate = rate.map(|rate| Rate {
        burst: FREE_BURST,
        period: Duration::from_nanos((FREE_BURST as u64 * 1_000_000_000).div_ceil(rate.get())),
        shares: 4,
    });
    Bucket::new(Instant::ZERO, rate)
}

/// Most destinations that have a pace of their own; all others share one.
const MOST_PACES: usize = 1024;

/// Paces of the services without acknowledgements, one for each destination address: a slow receiver delays packets to others no
/// more than they share queue pairs.
#[derive(Debug)]
pub struct FreePaces {
    rate: Option<NonZeroU64>,
    paces: HashMap<IpAddr, Bucket, AddressHashes>,
    /// Pace of destinations without their own.
    others: Bucket,
    /// Last removal of those not in use.
    swept: Instant,
}

impl Default for FreePaces {
    fn default() -> Self {
        Self::new(Some(FREE_RATE))
    }
}

impl FreePaces {
    /// Default rate, bytes per second: a receiver that is away for half a millisecond loses nothing.
    pub const USUAL: Option<NonZeroU64> = Some(FREE_RATE);

    /// Creates paces of `rate` bytes per second each; `None`: no limit.
    pub fn new(rate: Option<NonZeroU64>) -> Self {
        Self {
            rate,
            paces: HashMap::default(),
            others: free_bucket(rate),
            swept: Instant::ZERO,
        }
    }

    /// Checks whether a packet may be sent to an address now.
    ///
    /// # Errors
    /// The time from when on it may.
    pub(crate) fn may_send(&mut self, now: Instant, to: IpAddr) -> Result<(), Instant> {
        if self.rate.is_none() {
            return Ok(());
        }
        self.pace(now, to).may_send(now)
    }

    /// Records a sent packet.
    pub(crate) fn on_sent(&mut self, now: Instant, to: IpAddr, bytes: usize) {
        if self.rate.is_some() {
            self.pace(now, to).on_sent(bytes);
        }
    }

    fn pace(&mut self, now: Instant, to: IpAddr) -> &mut Bucket {
        if self.paces.len() >= MOST_PACES && !self.paces.contains_key(&to) {
            self.sweep(now);
            if self.paces.len() >= MOST_PACES {
                return &mut self.others;
            }
        }
        let rate = self.rate;
        self.paces.entry(to).or_insert_with(|| free_bucket(rate))
    }

    /// Removes the paces that have earned all of their burst, where a new one is the same. Not more often than that takes.
    fn sweep(&mut self, now: Instant) {
        let period = self.others.rate.map_or(Duration::ZERO, |rate| rate.period);
        if now.saturating_since(self.swept) >= period {
            self.swept = now;
            self.paces.retain(|_, pace| now.saturating_since(pace.at) < period * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KB: usize = 1 << 10;
    const LATE: Duration = Duration::from_millis(67);

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    /// Sends packets of 1 KiB as allowed until a time; returns how many KiB that were.
    fn send(pace: &mut Pace, now: &mut Instant, until: Instant) -> usize {
        let mut sent = 0;
        while *now < until {
            match pace.may_send(*now) {
                Ok(()) => {
                    pace.on_sent(KB);
                    sent += 1;
                }
                Err(at) => {
                    assert!(at > *now);
                    *now = at;
                }
            }
        }
        sent
    }

    #[test]
    fn there_is_no_limit_until_something_overflows() {
        let mut pace = Pace::default();
        for _ in 0..100_000 {
            assert_eq!(pace.may_send(at(0)), Ok(()));
            pace.on_sent(KB);
        }
        // A few lost packets are not an overflow, and a peer that sees gaps can help itself.
        pace.on_loss(at(1), LATE, 100 * KB, 100 * KB);
        pace.on_loss(at(1), LATE, 0, 7000 * KB);
        pace.on_loss(at(1), BLIND / 2, 1000 * KB, 7000 * KB);
        assert_eq!(pace.may_send(at(1)), Ok(()));
    }

    #[test]
    fn after_an_overflow_half_of_what_arrived_goes_out_in_a_period() {
        let mut pace = Pace::default();
        pace.on_loss(at(100), LATE, 1000 * KB, 7000 * KB);
        let mut now = at(100);
        let first = send(&mut pace, &mut now, at(120));
        assert!((500..=1020).contains(&first), "the burst and a period: {first}");
        let rest = send(&mut pace, &mut now, at(1020));
        assert!((21_500..=23_500).contains(&rest), "{rest}");
        // Again too much: half of it.
        pace.on_loss(at(1020), LATE, 5000 * KB, 1000 * KB);
        let mut now = at(1020);
        send(&mut pace, &mut now, at(1040));
        let rest = send(&mut pace, &mut now, at(1940));
        assert!((10_500..=12_000).contains(&rest), "{rest}");
    }

    #[test]
    fn what_is_not_acknowledged_has_a_burst_and_a_rate() {
        let mut pace = free_bucket(Some(FREE_RATE));
        let period = pace.rate.unwrap().period;
        assert_eq!(period.as_micros(), 488, "128 KiB at 256 MiB/s");
        let mut now = at(5);
        let mut sent = 0;
        while pace.may_send(now).is_ok() {
            pace.on_sent(KB);
            sent += KB;
        }
        assert_eq!(sent as i64, FREE_BURST, "all of the burst, at once");
        let begin = now;
        let mut pauses = 0;
        while now < begin + period * 100 {
            match pace.may_send(now) {
                Ok(()) => {
                    pace.on_sent(KB);
                    sent += KB;
                }
                Err(at) => {
                    assert!(at > now);
                    now = at;
                    pauses += 1;
                }
            }
        }
        let bursts = sent as i64 / FREE_BURST;
        assert!((99..=102).contains(&bursts), "{bursts}");
        assert!(pauses <= 4 * 101, "{pauses}");
        // After a rest the burst is there again, and no more.
        assert_eq!(pace.may_send(now + period * 1000), Ok(()));
        assert_eq!(pace.credit, FREE_BURST);
    }

    #[test]
    fn any_rate_is_kept() {
        for rate in [1u64, 1000, 10 << 20, 10 << 30, u64::MAX] {
            let mut pace = free_bucket(NonZeroU64::new(rate));
            let mut now = at(5);
            let mut sent = 0u64;
            for _ in 0..10_000 {
                match pace.may_send(now) {
                    Ok(()) => {
                        pace.on_sent(4 * KB);
                        sent += 4 << 10;
                    }
                    Err(at) => {
                        assert!(at > now);
                        now = at;
                    }
                }
            }
            let time = now.saturating_since(at(5)).as_nanos();
            let allowed = u128::from(rate) * time / 1_000_000_000 + FREE_BURST as u128 + (4 << 10);
            assert!(u128::from(sent) <= allowed, "rate {rate}: {sent} bytes in {time} ns");
        }
        let mut free = free_bucket(None);
        for _ in 0..10_000 {
            assert_eq!(free.may_send(at(5)), Ok(()));
            free.on_sent(1 << 20);
        }
    }

    #[test]
    fn each_destination_has_its_own() {
        let mut paces = FreePaces::default();
        let to = |n: u32| IpAddr::from(n.to_be_bytes());
        let mut burst = |now, n| {
            let mut sent = 0;
            while paces.may_send(now, to(n)).is_ok() {
                paces.on_sent(now, to(n), KB);
                sent += KB;
            }
            sent as i64
        };
        let most = MOST_PACES as u32;
        let now = at(5);
        for n in 0..most {
            assert_eq!(burst(now, n), FREE_BURST, "{n}");
        }
        // The rest have one together, …
        assert_eq!(burst(now, most), FREE_BURST);
        assert_eq!(burst(now, most + 1), 0);
        // … until others are not in use any more.
        assert_eq!(burst(at(5000), most), FREE_BURST);
        assert_eq!(burst(at(5000), most + 1), FREE_BURST);
        assert_eq!(paces.paces.len(), 2);
    }

    #[test]
    fn without_a_rate_nothing_is_remembered() {
        let mut paces = FreePaces::new(None);
        let to = IpAddr::from([10, 0, 0, 1]);
        paces.on_sent(at(5), to, usize::MAX / 2);
        assert_eq!(paces.may_send(at(5), to), Ok(()));
        assert!(paces.paces.is_empty());
    }

    #[test]
    fn the_limit_wears_off() {
        let mut pace = Pace::default();
        pace.on_loss(at(0), LATE, 100 * KB, 7000 * KB);
        for second in 0..40 {
            let _ = pace.may_send(at(second * 1000));
        }
        assert!(pace.bucket.rate.is_none());
    }

    #[test]
    fn what_is_held_against_the_pace() {
        for (arrived, lost, silence, burst) in [
            (QUEUE, OVERFLOW, BLIND, Some(MIN_BURST)),
            (QUEUE - 1, OVERFLOW, BLIND, None),
            (QUEUE, OVERFLOW - 1, BLIND, None),
            (QUEUE, OVERFLOW, BLIND - Duration::from_nanos(1), None),
            (1000 * KB, 7000 * KB, LATE, Some(500 << 10)),
        ] {
            let mut pace = Pace::default();
            pace.on_loss(at(5), silence, arrived, lost);
            assert_eq!(
                pace.bucket.rate.map(|rate| rate.burst),
                burst,
                "{arrived} {lost} {silence:?}"
            );
        }
    }

    #[test]
    fn a_burst_doubles_after_each_second_until_it_is_no_limit() {
        let mut pace = Pace::default();
        pace.on_loss(at(0), LATE, (16 << 20) * 2, OVERFLOW);
        let mut burst = |now| {
            let _ = pace.may_send(now);
            pace.bucket.rate.map(|rate| rate.burst)
        };
        let ns = Duration::from_nanos;
        assert_eq!(burst(at(1000)), Some(16 << 20));
        assert_eq!(burst(at(1000) + ns(1)), Some(32 << 20));
        assert_eq!(burst(at(2000) + ns(1)), Some(32 << 20));
        assert_eq!(burst(at(2000) + ns(2)), None, "64 MiB");
    }

    /// However often it is asked.
    #[test]
    fn parts_of_a_byte_are_earned_too() {
        let mut pace = free_bucket(NonZeroU64::new(1_000_000));
        let begin = at(5);
        assert_eq!(pace.may_send(begin), Ok(()));
        pace.on_sent(2 * FREE_BURST as usize);
        for n in 0..100 {
            let now = begin + Duration::from_nanos(100 * n);
            assert!(pace.may_send(now).is_err());
        }
        assert_eq!(pace.credit, 9 - FREE_BURST, "1 byte in a microsecond");
    }

    #[test]
    fn a_pace_is_removed_after_two_periods_of_its_last_earning() {
        let mut paces = FreePaces::default();
        let period = paces.others.rate.unwrap().period;
        let to = |n: u32| IpAddr::from(n.to_be_bytes());
        let used = |paces: &mut FreePaces, now, n| {
            let pace = paces.pace(now, to(n));
            pace.at = now;
        };
        let start = at(5);
        used(&mut paces, start, 0);
        used(&mut paces, start + Duration::from_nanos(1), 1);
        // Swept once in a period.
        for (after, left) in [(period, 2), (period * 2 - Duration::from_nanos(1), 2), (period * 2, 1)] {
            paces.sweep(start + after);
            assert_eq!(paces.paces.len(), left, "{after:?}");
        }
        assert_eq!(paces.swept, start + period * 2);
        paces.sweep(start + (period * 3 - Duration::from_nanos(1)));
        assert_eq!((paces.swept, paces.paces.len()), (start + period * 2, 1));
        paces.sweep(start + period * 3);
        assert_eq!((paces.swept, paces.paces.len()), (start + period * 3, 0));
    }
}
