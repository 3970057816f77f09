//! Time as a plain number, so that nothing below the datapath asks a clock.

use core::time::Duration;

/// A point in time: nanoseconds since an origin that the driver chooses (monotonic clock, simulation start, capture).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Instant {
    ns: u64,
}

impl Instant {
    /// The origin.
    pub const ZERO: Self = Self { ns: 0 };

    /// The point `ns` nanoseconds after the origin.
    pub const fn from_nanos(ns: u64) -> Self {
        Self { ns }
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.ns
    }

    /// Time since `earlier`, zero when that is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.ns.saturating_sub(earlier.ns))
    }
}

impl core::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, d: Duration) -> Self {
        let ns = u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Self {
            ns: self.ns.saturating_add(ns),
        }
    }
}
