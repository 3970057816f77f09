//! Failed syncs of files and devices, for as long as the process runs.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;

use crate::writers::DeviceKey;

/// The failed syncs of all files and devices.
///
/// A system reports lost data to one sync. Those who have the file open then are told by the flag that they share. Those who open it
/// after that would hear of nothing: they are told by the number, which is part of the file's
/// [instance](rnbd::proto::instance::Instance).
#[derive(Debug, Default)]
pub(crate) struct SyncFailures(Mutex<HashMap<DeviceKey, Failures>>);

/// One for all servers of a process: it is the system that reports lost data once.
static OF_PROCESS: LazyLock<SyncFailures> = LazyLock::new(SyncFailures::default);

/// Failures of a file or device.
#[derive(Debug, Default)]
struct Failures {
    /// A sync has failed since the file was opened by the first of those who have it open.
    failed: Arc<AtomicBool>,
    /// How often that was so before.
    before: u64,
}

impl Failures {
    fn is_open(&self) -> bool {
        Arc::strong_count(&self.failed) > 1
    }
}

impl SyncFailures {
    /// Failures that this process has met.
    pub(crate) fn of_process() -> &'static Self {
        &OF_PROCESS
    }

    /// The flag that whoever opens this file or device now shares with the others, and how often it had a failed sync so far.
    pub(crate) fn open(&self, key: DeviceKey) -> (Arc<AtomicBool>, u64) {
        let mut all = self.0.lock();
        all.retain(|_, of| of.is_open() || of.before > 0 || of.failed.load(SeqCst));
        let of = all.entry(key).or_default();
        if !of.is_open() && of.failed.load(SeqCst) {
            *of = Failures {
                before: of.before + 1,
                ..Failures::default()
            };
        }
        let now = u64::from(of.failed.load(SeqCst));
        (of.failed.clone(), of.before + now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: DeviceKey = (0, 1, 2);

    #[test]
    fn who_opens_a_file_after_a_failed_sync_gets_another_number() {
        let failures = SyncFailures::default();
        let (one, before) = failures.open(KEY);
        let (two, _) = failures.open(KEY);
        one.store(true, SeqCst);
        assert!(two.load(SeqCst), "all who have it open share it");
        let (three, now) = failures.open(KEY);
        assert!(three.load(SeqCst) && now == before + 1);
        drop((one, two, three));
        for _ in 0..2 {
            let (flag, after) = failures.open(KEY);
            assert!(!flag.load(SeqCst) && after == now);
        }
        failures.open(KEY).0.store(true, SeqCst);
        assert_eq!(failures.open(KEY).1, now + 1);
        assert_eq!(failures.open((0, 1, 3)).1, 0);
    }

    #[test]
    fn files_without_failures_are_forgotten() {
        let failures = SyncFailures::default();
        (0..100).for_each(|inode| drop(failures.open((0, 1, inode))));
        assert_eq!(failures.0.lock().len(), 1);
    }
}
