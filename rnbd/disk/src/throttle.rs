//! Log messages that a peer can cause at will are limited to one a second.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

/// Says which messages to log.
#[derive(Debug)]
pub(crate) struct Throttle {
    start: Instant,
    /// Milliseconds after `start` before which nothing is logged.
    next_ms: AtomicU64,
    suppressed: AtomicU64,
}

impl Throttle {
    const INTERVAL_MS: u64 = 1000;

    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            next_ms: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
        }
    }

    /// `Some(n)` when a message may be logged now, `n` having been left out since the last one.
    pub(crate) fn pass(&self) -> Option<u64> {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let next = self.next_ms.load(Relaxed);
        if now < next
            || self
                .next_ms
                .compare_exchange(next, now + Self::INTERVAL_MS, Relaxed, Relaxed)
                .is_err()
        {
            self.suppressed.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.suppressed.swap(0, Relaxed))
    }
}
