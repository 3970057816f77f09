//! Counts of operations.

use lnet::Failure;

/// Counts of peers' operations on an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EntryCounts {
    /// Operations that have ended well.
    pub done: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Operations that have failed.
    pub failed: u64,
}

impl EntryCounts {
    pub(crate) fn add(&mut self, result: &Result<u32, Failure>) {
        match result {
            Ok(len) => {
                self.done += 1;
                self.bytes += u64::from(*len);
            }
            Err(_) => self.failed += 1,
        }
    }
}
