//! Sessions that have a device open for writing.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    mem,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;
use rnbd::{Errno, proto::AccessMode};

/// Identity of a device, whatever name it is opened by: inode of an image file, or number of a block device.
pub(crate) type DeviceKey = (u32, u64, u64);

/// A lock against writers of other servers (`flock`), as far as the file system has locks.
type FileLock = OnceLock<Result<Option<File>, Errno>>;

/// Called when a writer is closed.
type Released = Box<dyn FnOnce() + Send>;

/// The writers of all devices. The mutex is a leaf lock, and never held while a file system is called.
#[derive(Debug, Default)]
pub(crate) struct WriterTable(Mutex<HashMap<DeviceKey, Writers>>);

/// The writers of a device.
#[derive(Default)]
struct Writers {
    count: u32,
    /// Writers being closed; the file lock counts as one while it is released.
    closing: u32,
    /// All of them came by exports that admit a second writer.
    migrate: bool,
    lock: Arc<FileLock>,
    /// Callbacks to run when a writer has been closed.
    waiting: Vec<Released>,
}

impl fmt::Debug for Writers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writers")
            .field("count", &self.count)
            .field("closing", &self.closing)
            .field("migrate", &self.migrate)
            .finish_non_exhaustive()
    }
}

/// Why a writer is not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// EPERM: there is another writer; EBUSY and others: the file lock can't be taken.
    Errno(Errno),
    /// A writer of the device is being closed.
    Closing(DeviceKey),
}

/// The right to write to a device, returned when it is dropped.
#[derive(Debug)]
pub(crate) struct WriterSlot {
    table: Arc<WriterTable>,
    key: DeviceKey,
    closing: bool,
}

impl WriterTable {
    /// Admits a writer. `migrate`: its export admits a second one, in mode [`AccessMode::Migration`]. `lock` takes the file lock for
    /// the first writer; it may wait for the file system.
    pub(crate) fn admit(
        self: &Arc<Self>,
        key: DeviceKey,
        migrate: bool,
        mode: AccessMode,
        lock: impl FnOnce() -> Result<Option<File>, Errno>,
    ) -> Result<WriterSlot, Refused> {
        let second = migrate && mode == AccessMode::Migration;
        let file_lock = {
            let mut table = self.0.lock();
            match table.get_mut(&key) {
                Some(writers) if second && writers.migrate && writers.count == 1 => {
                    writers.count += 1;
                    writers.lock.clone()
                }
                Some(writers) if writers.closing > 0 => return Err(Refused::Closing(key)),
                Some(_) => return Err(Refused::Errno(Errno::EPERM)),
                None => {
                    let writers = table.entry(key).or_default();
                    (writers.count, writers.migrate) = (1, migrate);
                    writers.lock.clone()
                }
            }
        };
        let slot = WriterSlot {
            table: self.clone(),
            key,
            closing: false,
        };
        // A second writer waits for the first one's lock, outside of the table's.
        match file_lock.get_or_init(lock) {
            Ok(_) => Ok(slot),
            Err(e) => Err(Refused::Errno(*e)),
        }
    }

    /// Calls `released` when a writer of the device has been closed, or at once when none is being closed.
    pub(crate) fn when_closed(&self, key: DeviceKey, released: Released) {
        let mut table = self.0.lock();
        match table.get_mut(&key).filter(|writers| writers.closing > 0) {
            Some(writers) => writers.waiting.push(released),
            None => {
                drop(table);
                released();
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

impl WriterSlot {
    /// Marks the writer as being closed: others wait for it instead of being refused.
    pub(crate) fn begin_close(&mut self) {
        if !mem::replace(&mut self.closing, true)
            && let Some(writers) = self.table.0.lock().get_mut(&self.key)
        {
            writers.closing += 1;
        }
    }
}

impl Drop for WriterSlot {
    fn drop(&mut self) {
        let mut table = self.table.0.lock();
        let Some(writers) = table.get_mut(&self.key) else {
            return;
        };
        writers.count -= 1;
        writers.closing -= u32::from(self.closing);
        let waiting = if writers.count > 0 {
            mem::take(&mut writers.waiting)
        } else {
            // Closing the file releases its lock, and may wait for the file system.
            writers.closing += 1;
            let lock = mem::take(&mut writers.lock);
            drop(table);
            drop(lock);
            table = self.table.0.lock();
            table
                .remove(&self.key)
                .map(|writers| writers.waiting)
                .unwrap_or_default()
        };
        drop(table);
        waiting.into_iter().for_each(|released| released());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{TryRecvError, channel},
        thread,
    };

    use super::*;

    const KEY: DeviceKey = (0, 1, 2);
    const OTHER: DeviceKey = (0, 1, 3);

    fn admit(table: &Arc<WriterTable>, key: DeviceKey, mode: AccessMode) -> Result<WriterSlot, Refused> {
        table.admit(key, true, mode, || Ok(None))
    }

    #[test]
    fn a_writer_that_is_being_closed_is_waited_for() {
        let table = Arc::<WriterTable>::default();
        let mut first = admit(&table, KEY, AccessMode::ReadWrite).unwrap();
        let refused = |mode| admit(&table, KEY, mode).unwrap_err();
        assert_eq!(refused(AccessMode::ReadWrite), Refused::Errno(Errno::EPERM));
        first.begin_close();
        first.begin_close();
        assert_eq!(refused(AccessMode::ReadWrite), Refused::Closing(KEY));
        let (send, released) = channel();
        table.when_closed(KEY, Box::new(move || send.send(()).unwrap()));
        assert_eq!(released.try_recv(), Err(TryRecvError::Empty));
        drop(first);
        assert_eq!(released.try_recv(), Ok(()));
        drop(admit(&table, KEY, AccessMode::ReadWrite).unwrap());
        assert!(table.is_empty());
        let (send, released) = channel();
        table.when_closed(KEY, Box::new(move || send.send(()).unwrap()));
        assert_eq!(released.try_recv(), Ok(()), "nothing is being closed");
    }

    #[test]
    fn of_two_writers_one_may_be_closed() {
        let table = Arc::<WriterTable>::default();
        let mut first = admit(&table, KEY, AccessMode::ReadWrite).unwrap();
        let second = admit(&table, KEY, AccessMode::Migration).unwrap();
        first.begin_close();
        assert_eq!(
            admit(&table, KEY, AccessMode::Migration).unwrap_err(),
            Refused::Closing(KEY)
        );
        drop(first);
        let third = admit(&table, KEY, AccessMode::Migration).unwrap();
        assert_eq!(
            admit(&table, KEY, AccessMode::Migration).unwrap_err(),
            Refused::Errno(Errno::EPERM)
        );
        drop((second, third));
        assert!(table.is_empty());
    }

    #[test]
    fn a_file_lock_that_hangs_keeps_no_other_device() {
        let table = Arc::<WriterTable>::default();
        let (release, held) = channel::<()>();
        let (send, begun) = channel();
        let hanging = table.clone();
        let opening = thread::spawn(move || {
            let lock = || {
                send.send(()).unwrap();
                let _ = held.recv();
                Err(Errno::EBUSY)
            };
            hanging.admit(KEY, false, AccessMode::ReadWrite, lock).map(drop)
        });
        begun.recv().unwrap();
        drop(admit(&table, OTHER, AccessMode::ReadWrite).unwrap());
        assert_eq!(
            admit(&table, KEY, AccessMode::ReadWrite).unwrap_err(),
            Refused::Errno(Errno::EPERM)
        );
        drop(release);
        assert_eq!(opening.join().unwrap(), Err(Refused::Errno(Errno::EBUSY)));
        assert!(table.is_empty());
    }
}
