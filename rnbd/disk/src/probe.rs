//! Choice of the way of operations on a file.

use std::{
    fs::{self, File},
    os::fd::AsRawFd,
};

use rnbd::Errno;

use crate::sys;

/// How an operation is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Way {
    /// By a system call in the loop: for file systems in memory that is not swapped, where it waits for nothing.
    InPlace,
    /// Data in the page cache by a system call in the loop (`RWF_NOWAIT`), the rest by the ring, or the pool where there is none.
    TryNow,
    /// By io_uring.
    Ring,
    /// By a thread that waits.
    Pool,
}

/// The ways of a file's operations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ways {
    /// Way of reads.
    pub read: Way,
    /// Way of writes, discards and ranges of zeroes.
    pub write: Way,
    /// Way of flushes.
    pub flush: Way,
    /// Way of block status. io_uring does not seek, and how long it takes depends on the file's size, in memory too.
    pub status: Way,
}

// `linux/magic.h`.
const TMPFS: u32 = 0x0102_1994;
const RAMFS: u32 = 0x8584_58f6;
const HUGETLBFS: u32 = 0x9584_58f6;

/// Properties of a file that its way depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Traits {
    /// Its bytes are in memory, and stay there.
    pub(crate) memory: bool,
    /// Reads can be told not to wait. tmpfs can't: io_uring hands every one of its requests to a worker thread.
    pub(crate) nowait: bool,
    /// It is read and written without the page cache.
    pub(crate) direct: bool,
}

impl Traits {
    /// Looks at an open file. `regular`: it is no device. A device's file system is the one of its name, which says nothing.
    pub(crate) fn of(file: &File, regular: bool, direct: bool) -> Self {
        Self {
            memory: regular && stays_in_memory(file),
            nowait: !direct && can_refuse_to_wait(file),
            direct,
        }
    }
}

/// Whether a regular file's bytes are in memory and nowhere else.
pub(crate) fn is_in_memory(file: &impl AsRawFd) -> bool {
    sys::file_system(file).is_ok_and(|magic| matches!(magic, TMPFS | RAMFS | HUGETLBFS))
}

/// Whether no access to a regular file waits for a device. hugetlbfs and ramfs are never swapped.
fn stays_in_memory(file: &impl AsRawFd) -> bool {
    match sys::file_system(file) {
        Ok(TMPFS) => !has_swap(&fs::read_to_string("/proc/swaps").unwrap_or_default()),
        Ok(RAMFS | HUGETLBFS) => true,
        _ => false,
    }
}

/// Whether there is swap space, by the text of `/proc/swaps`: a line of headings, and one for each.
fn has_swap(swaps: &str) -> bool {
    swaps.lines().nth(1).is_some()
}

/// Asked with a block: a read of nothing succeeds everywhere.
fn can_refuse_to_wait(file: &File) -> bool {
    let mut block = [0; 512];
    // SAFETY: the array's own memory.
    let read = unsafe { sys::read_now(file.as_raw_fd(), block.as_mut_ptr(), block.len(), 0) };
    matches!(read, Ok(_) | Err(Errno::EAGAIN))
}

impl Ways {
    /// The same way for everything.
    pub const fn all(way: Way) -> Self {
        Self {
            read: way,
            write: way,
            flush: way,
            status: way,
        }
    }

    /// The ways of a file where there is io_uring.
    pub(crate) fn of(traits: Traits) -> Self {
        let (read, rest) = match traits {
            Traits {
                memory: true,
                direct: false,
                ..
            } => (Way::InPlace, Way::InPlace),
            Traits { nowait: true, .. } => (Way::TryNow, Way::Ring),
            _ => (Way::Ring, Way::Ring),
        };
        Self {
            read,
            status: Way::Pool,
            ..Self::all(rest)
        }
    }

    /// Whether any of them leads through io_uring.
    pub(crate) fn need_ring(self) -> bool {
        let ways = [self.read, self.write, self.flush];
        ways.iter().any(|way| matches!(way, Way::TryNow | Way::Ring))
    }

    /// The same where there is none.
    pub(crate) fn without_ring(self) -> Self {
        let way = |way| match way {
            Way::Ring => Way::Pool,
            way => way,
        };
        Self {
            read: way(self.read),
            write: way(self.write),
            flush: way(self.flush),
            status: way(self.status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_follow_what_the_file_can() {
        let (memory, nowait, direct) = (true, true, true);
        let plain = Traits {
            memory: false,
            nowait: false,
            direct: false,
        };
        let ways = |read, rest| Ways {
            read,
            status: Way::Pool,
            ..Ways::all(rest)
        };
        let (in_place, by_ring, by_pool) = (
            ways(Way::InPlace, Way::InPlace),
            ways(Way::Ring, Way::Ring),
            ways(Way::Pool, Way::Pool),
        );
        for (traits, expected, without) in [
            (Traits { memory, ..plain }, in_place, in_place),
            (
                Traits { nowait, ..plain },
                ways(Way::TryNow, Way::Ring),
                ways(Way::TryNow, Way::Pool),
            ),
            (plain, by_ring, by_pool),
            (Traits { direct, ..plain }, by_ring, by_pool),
        ] {
            let ways = Ways::of(traits);
            assert_eq!(ways, expected, "{traits:?}");
            assert_eq!(ways.without_ring(), without, "{traits:?}");
            assert_eq!(ways.need_ring(), !traits.memory, "{traits:?}");
        }
    }

    #[test]
    fn files_in_memory_are_told_from_others() {
        let shm = tempfile::tempfile_in("/dev/shm").unwrap();
        assert!(is_in_memory(&shm));
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        assert_eq!(Traits::of(&shm, true, false).memory, !has_swap(&swaps));
        let device = File::open("/dev/null").unwrap();
        assert!(!Traits::of(&device, false, false).memory, "its name lies in a tmpfs");
        let proc = File::open("/proc/self/status").unwrap();
        assert!(!Traits::of(&proc, true, false).memory);
    }

    #[test]
    fn memory_may_be_swapped_where_there_is_swap_space() {
        let none = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!has_swap(none) && !has_swap(""));
        assert!(has_swap(&format!("{none}/dev/dm-1 partition\t8388604\t\t0\t\t-2\n")));
    }
}
