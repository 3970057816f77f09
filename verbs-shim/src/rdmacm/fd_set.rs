//! Sets of descriptors that are looked up without a lock.

use std::{
    os::fd::RawFd,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{Errno, Result};

/// Set of descriptors, such as those of event channels. Looked up for every `write` and `close` of the program, in signal handlers
/// too.
pub(crate) struct FdSet([AtomicU64; Self::MAX / 64]);

impl FdSet {
    /// Larger descriptors can't be channels.
    const MAX: usize = 1 << 16;

    pub(crate) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; Self::MAX / 64])
    }

    fn word(&self, fd: RawFd) -> Option<(&AtomicU64, u64)> {
        let fd = usize::try_from(fd).ok()?;
        Some((self.0.get(fd / 64)?, 1 << (fd % 64)))
    }

    pub(crate) fn contains(&self, fd: RawFd) -> bool {
        self.word(fd)
            .is_some_and(|(w, bit)| w.load(Ordering::Acquire) & bit != 0)
    }

    /// # Errors
    /// EMFILE for a descriptor beyond the set.
    pub(crate) fn insert(&self, fd: RawFd) -> Result<()> {
        let (word, bit) = self.word(fd).ok_or(Errno(libc::EMFILE))?;
        word.fetch_or(bit, Ordering::AcqRel);
        Ok(())
    }

    /// Whether it was in the set.
    pub(crate) fn remove(&self, fd: RawFd) -> bool {
        self.word(fd)
            .is_some_and(|(w, bit)| w.fetch_and(!bit, Ordering::AcqRel) & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_descriptors() {
        static SET: FdSet = FdSet::new();
        assert!(!SET.contains(3) && !SET.contains(-1) && !SET.contains(i32::MAX));
        SET.insert(3).unwrap();
        assert!(SET.contains(3) && !SET.contains(67));
        assert!(SET.remove(3) && !SET.remove(3));
        assert_eq!(SET.insert(1 << 16), Err(Errno(libc::EMFILE)));
    }
}
