//! Whether what was written to an open device can still be made durable.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use crate::{block::BlockOp, errno::Errno};

/// What has become of the writes of an open device. Whoever works on the device asks before each operation and after it, and says
/// what has failed.
///
/// A system drops what it could not write, and its next sync reports success, so a failed sync is remembered: what would have to make
/// data durable fails from then on.
#[derive(Debug, Default)]
pub struct SyncState {
    /// Something was written.
    dirty: AtomicBool,
    /// Data was lost after its write was acknowledged: of all who have the file open.
    failed: Arc<AtomicBool>,
}

impl SyncState {
    /// Nothing was written; whether a sync has failed is shared with others of the same file or device.
    pub fn sharing(failed: Arc<AtomicBool>) -> Self {
        Self {
            dirty: AtomicBool::new(false),
            failed,
        }
    }

    /// Before an operation, and after it has succeeded: a system tells of lost data once, perhaps to another operation that was under
    /// way at the same time.
    ///
    /// # Errors
    /// EIO if it makes data durable, and data was lost.
    pub fn check(&self, op: BlockOp) -> Result<(), Errno> {
        match op.makes_durable() && self.failed.load(SeqCst) {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }

    /// A change begins.
    pub fn changed(&self) {
        self.dirty.store(true, SeqCst);
    }

    /// A sync has failed.
    pub fn sync_failed(&self) {
        self.failed.store(true, SeqCst);
    }

    /// A write that is durable when it ends has failed with this error. It can have been its sync that failed, and with it other
    /// data.
    pub fn durable_write_failed(&self, e: Errno) {
        if e == Errno::EIO {
            self.sync_failed();
        }
    }

    /// Whether a sync is due when the device is closed: nobody may be able to flush its writes later.
    pub fn wants_sync(&self) -> bool {
        self.dirty.load(SeqCst) && !self.failed.load(SeqCst)
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
    fn after_lost_data_nothing_is_promised_any_more() {
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
    fn only_what_can_have_been_the_sync_counts_as_one() {
        let state = SyncState::default();
        state.durable_write_failed(Errno::ENOSPC);
        assert_eq!(state.check(FLUSH), Ok(()));
        state.durable_write_failed(Errno::EIO);
        assert_eq!(state.check(FLUSH), Err(Errno::EIO));
    }

    #[test]
    fn what_was_written_is_synced_at_the_end_unless_it_is_lost() {
        let state = SyncState::default();
        assert!(!state.wants_sync());
        state.changed();
        assert!(state.wants_sync());
        state.sync_failed();
        assert!(!state.wants_sync());
    }
}
