//! Tracks whether the writes to an open device are durable, and whether they still can become so.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};

use crate::{block::BlockOp, errno::Errno};

/// Durability of the writes to an open device. The disk calls [`check`](Self::check) before and after each operation, and reports
/// changes, syncs and failures.
///
/// A system drops pages that it could not write, and its next sync reports success. So a failed sync is remembered: every later
/// operation that must make data durable fails.
#[derive(Debug, Default)]
pub struct SyncState {
    /// Changes begun; those that were durable when they ended are taken off again.
    begun: AtomicU64,
    /// Changes ended that only a sync makes durable.
    ended: AtomicU64,
    /// Changes covered by a sync: the highest [`Covered`] of all syncs that succeeded.
    synced: AtomicU64,
    /// Acknowledged data was lost. Shared by all who have the file open.
    failed: Arc<AtomicBool>,
}

/// Changes that a sync makes durable: those that had ended when it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Covered(u64);

impl SyncState {
    /// State without writes that shares the failure flag with other handles of the same file or device.
    pub fn sharing(failed: Arc<AtomicBool>) -> Self {
        Self {
            failed,
            ..Self::default()
        }
    }

    /// Checks an operation before it starts and after it has succeeded. The second check is needed because a system reports lost data
    /// once, possibly to another operation in flight.
    ///
    /// # Errors
    /// EIO if the operation makes data durable, and data was lost.
    pub fn check(&self, op: BlockOp) -> Result<(), Errno> {
        match op.makes_durable() && self.failed.load(SeqCst) {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }

    /// Records the start of a change.
    pub fn change_begins(&self) {
        self.begun.fetch_add(1, SeqCst);
    }

    /// Records the end of a change, successful or not: a sync that begins later covers it.
    pub fn change_ends(&self) {
        self.ended.fetch_add(1, SeqCst);
    }

    /// Records the end of a change that is durable without a sync. Replaces [`change_ends`](Self::change_ends).
    pub fn change_is_durable(&self) {
        self.begun.fetch_sub(1, SeqCst);
    }

    /// Returns the changes that a sync covers if it begins now.
    pub fn sync_begins(&self) -> Covered {
        Covered(self.ended.load(SeqCst))
    }

    /// Records the success of a sync.
    pub fn sync_ends(&self, covered: Covered) {
        self.synced.fetch_max(covered.0, SeqCst);
    }

    /// Records the failure of a sync.
    pub fn sync_failed(&self) {
        self.failed.store(true, SeqCst);
    }

    /// Records the failure of a write that would have been durable. EIO counts as a failed sync: other data may be lost with it.
    pub fn durable_write_failed(&self, e: Errno) {
        if e == Errno::EIO {
            self.sync_failed();
        }
    }

    /// Whether the device must be synced when it is closed: a change is not covered by a sync, and no client may be left to flush it.
    pub fn wants_sync(&self) -> bool {
        self.begun.load(SeqCst) > self.synced.load(SeqCst) && !self.failed.load(SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLUSH: BlockOp = BlockOp::Flush;
    const PLAIN: BlockOp = BlockOp::Write { fua: false };
    const FORCED: BlockOp = BlockOp::Write { fua: true };
    const ZEROES: BlockOp = BlockOp::WriteZeroes {
        fua: true,
        may_unmap: true,
    };

    #[test]
    fn after_data_loss_no_operation_is_durable() {
        let state = SyncState::default();
        assert!([FLUSH, PLAIN, FORCED, ZEROES].iter().all(|op| state.check(*op).is_ok()));
        state.sync_failed();
        for op in [FLUSH, FORCED, ZEROES] {
            assert_eq!(state.check(op), Err(Errno::EIO), "{op:?}");
        }
        for op in [BlockOp::Read, PLAIN, BlockOp::Discard] {
            assert_eq!(state.check(op), Ok(()), "{op:?}");
        }
    }

    #[test]
    fn only_eio_of_a_durable_write_counts_as_a_failed_sync() {
        let state = SyncState::default();
        state.durable_write_failed(Errno::ENOSPC);
        assert_eq!(state.check(FLUSH), Ok(()));
        state.durable_write_failed(Errno::EIO);
        assert_eq!(state.check(FLUSH), Err(Errno::EIO));
    }

    #[test]
    fn a_change_wants_a_sync_unless_data_is_lost() {
        let state = SyncState::default();
        assert!(!state.wants_sync());
        state.change_begins();
        assert!(state.wants_sync());
        state.change_ends();
        assert!(state.wants_sync());
        state.sync_failed();
        assert!(!state.wants_sync());
    }

    #[test]
    fn a_sync_covers_changes_that_ended_before_it_began() {
        let state = SyncState::default();
        state.change_begins();
        state.change_begins();
        state.change_ends();
        let first = state.sync_begins();
        state.change_ends();
        state.sync_ends(first);
        assert!(state.wants_sync(), "one change was in flight when the sync began");
        let second = state.sync_begins();
        state.sync_ends(second);
        state.sync_ends(first);
        assert!(!state.wants_sync());
    }

    #[test]
    fn a_durable_change_needs_no_sync_and_covers_no_other() {
        let state = SyncState::default();
        state.change_begins();
        state.change_is_durable();
        assert!(!state.wants_sync());
        state.change_begins();
        state.change_begins();
        state.change_is_durable();
        assert!(state.wants_sync());
    }
}
