//! Sizes and times that hold for the whole run.

use std::time::Duration;

use crate::trouble::LONGEST;

/// Bytes of a device that are read and written; an image never gets smaller.
pub(crate) const BASE: u64 = 32 << 20;
/// Bytes that an image may have beyond those.
pub(crate) const BEYOND: u64 = 16 << 20;
/// Longest time for each step of connecting, seconds.
pub(crate) const CONNECT_TIMEOUT: u64 = 5;
/// Longest time of a request: one outage follows another only after some calm, so it meets two of them at most that leave it without a
/// path; after each a path is found dead (five heartbeats and the one that was due) and connected again, perhaps at the second attempt,
/// as the weather may be bad.
pub(crate) const LIMIT: Duration = Duration::from_secs(2 * (LONGEST.as_secs() + 2 * (7 + CONNECT_TIMEOUT + 3)));
