//! The clock that drives a port.

use std::{sync::OnceLock, time::Instant as StdInstant};

use roce_verbs::Instant;

/// Monotonic time since the first call in this process: what completions are stamped with.
pub fn now() -> Instant {
    static ORIGIN: OnceLock<StdInstant> = OnceLock::new();
    let origin = ORIGIN.get_or_init(StdInstant::now);
    // 2^64 ns are 584 years.
    Instant::from_nanos(origin.elapsed().as_nanos() as u64)
}
