//! Histogram of latencies with logarithmic buckets.

use serde::Serialize;

/// Buckets of a power of two, as a power of two: a bucket is 1/16 of its value wide.
const SHIFT: u32 = 4;
/// Power of two from which on all values share a bucket: 18 minutes.
const MAX_POWER: u32 = 40;

/// Latencies of a flow. Percentiles are exact to 4 %, the others are exact.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Latency {
    /// Measured values.
    pub count: u64,
    /// Least, nanoseconds.
    pub min_ns: u64,
    /// Median, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, nanoseconds.
    pub p99_ns: u64,
    /// Most, nanoseconds.
    pub max_ns: u64,
}

/// Counts values by their magnitude. At most 600 buckets, which exist once they have a value.
#[derive(Default, Debug)]
pub(super) struct Histogram {
    /// Bucket and values in it, in the order of the buckets.
    buckets: Vec<(u16, u32)>,
    count: u64,
    min: u64,
    max: u64,
}

impl Histogram {
    pub(super) fn add(&mut self, value: u64) {
        (self.min, self.max) = match self.count {
            0 => (value, value),
            _ => (self.min.min(value), self.max.max(value)),
        };
        self.count += 1;
        let bucket = bucket(value);
        match self.buckets.binary_search_by_key(&bucket, |(known, _)| *known) {
            Ok(at) => self.buckets[at].1 = self.buckets[at].1.saturating_add(1),
            Err(at) => self.buckets.insert(at, (bucket, 1)),
        }
    }

    /// Adds the values of another histogram.
    pub(super) fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        (self.min, self.max) = match self.count {
            0 => (other.min, other.max),
            _ => (self.min.min(other.min), self.max.max(other.max)),
        };
        self.count += other.count;
        for (bucket, n) in &other.buckets {
            match self.buckets.binary_search_by_key(bucket, |(known, _)| *known) {
                Ok(at) => self.buckets[at].1 = self.buckets[at].1.saturating_add(*n),
                Err(at) => self.buckets.insert(at, (*bucket, *n)),
            }
        }
    }

    /// Returns count, extremes and percentiles; `None` without values.
    pub(super) fn latency(&self) -> Option<Latency> {
        (self.count > 0).then(|| Latency {
            count: self.count,
            min_ns: self.min,
            p50_ns: self.percentile(50),
            p99_ns: self.percentile(99),
            max_ns: self.max,
        })
    }

    /// The least value that `percent` of all values don't exceed.
    fn percentile(&self, percent: u64) -> u64 {
        let total: u64 = self.buckets.iter().map(|(_, n)| u64::from(*n)).sum();
        let rank = (total * percent).div_ceil(100).max(1);
        let mut below = 0;
        for (bucket, n) in &self.buckets {
            below += u64::from(*n);
            if below >= rank {
                return middle(*bucket).clamp(self.min, self.max);
            }
        }
        self.max
    }
}

const fn bucket(value: u64) -> u16 {
    let value = if value >> MAX_POWER == 0 { value } else { 1 << MAX_POWER };
    match value.checked_ilog2() {
        Some(power) if power > SHIFT => {
            let shift = power - SHIFT;
            (((shift + 1) << SHIFT) as u64 + ((value >> shift) - (1 << SHIFT))) as u16
        }
        _ => value as u16,
    }
}

/// The middle of a bucket.
const fn middle(bucket: u16) -> u64 {
    let (group, rest) = ((bucket >> SHIFT) as u64, (bucket & ((1 << SHIFT) - 1)) as u64);
    if group < 2 {
        return bucket as u64;
    }
    let shift = group - 1;
    ((rest + (1 << SHIFT)) << shift) + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_near_their_values() {
        let mut last = 0;
        for power in 0..MAX_POWER {
            for step in 0..64 {
                let value = (1u64 << power) + (step << power) / 64;
                let found = bucket(value);
                assert!(found >= last && found - last <= 1, "{value}");
                last = found;
                let distance = middle(found).abs_diff(value);
                assert!(distance * 25 <= value, "{value}: {}", middle(found));
            }
        }
        assert!(bucket(u64::MAX) < 600);
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.latency(), None);
        (1..=1000).for_each(|n| histogram.add(n * 1000));
        let latency = histogram.latency().unwrap();
        assert_eq!((latency.count, latency.min_ns, latency.max_ns), (1000, 1000, 1_000_000));
        assert!(latency.p50_ns.abs_diff(500_000) <= 20_000, "{latency:?}");
        assert!(latency.p99_ns.abs_diff(990_000) <= 40_000, "{latency:?}");
    }

    #[test]
    fn one_value_is_exact_and_merging_adds() {
        let (mut a, mut b) = (Histogram::default(), Histogram::default());
        a.add(123_457);
        b.merge(&a);
        b.merge(&Histogram::default());
        let latency = b.latency().unwrap();
        assert_eq!(
            [latency.min_ns, latency.p50_ns, latency.p99_ns, latency.max_ns],
            [123_457; 4]
        );
        b.add(1);
        b.merge(&a);
        let latency = b.latency().unwrap();
        assert_eq!((latency.count, latency.min_ns, latency.max_ns), (3, 1, 123_457));
        b.add(u64::MAX);
        assert_eq!(b.latency().unwrap().max_ns, u64::MAX);
    }
}
