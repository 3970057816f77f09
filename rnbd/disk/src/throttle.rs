//! Log messages that a peer can cause at will are limited to one a second.

use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// When the first throttle was used.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Decides which messages are logged, with the system's clock and for all threads.
#[derive(Debug)]
pub(crate) struct Throttle(Mutex<rtrs::throttle::Throttle>);

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(rtrs::throttle::Throttle::new(Duration::from_secs(1))))
    }

    /// `Some(n)` when a message may be logged now, `n` having been left out since the last one.
    pub(crate) fn pass(&self) -> Option<u64> {
        let now = roce_verbs::Instant::ZERO + START.elapsed();
        self.0.lock().pass(now)
    }
}
