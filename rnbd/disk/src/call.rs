//! One system call of an operation.

use std::os::fd::RawFd;

use rnbd::Errno;

use crate::sys;

/// A system call, to be made at once or given to io_uring.
#[derive(Debug)]
pub(crate) enum Call {
    /// Reads at an offset.
    Read { offset: u64, to: *mut u8, len: usize },
    /// Writes at an offset; `dsync`: durable when it returns.
    Write {
        offset: u64,
        from: *const u8,
        len: usize,
        dsync: bool,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate`.
    Allocate { mode: i32, offset: u64, len: u64 },
    /// A request of block devices that takes a range; io_uring has none of them.
    Range { request: u64, offset: u64, len: u64 },
    /// `lseek`, which io_uring has not: it returns a position.
    Seek { offset: u64, whence: i32 },
}

impl Call {
    /// Returns the cost for its caller, in bytes that are copied meanwhile.
    pub(crate) fn cost(&self) -> u64 {
        match self {
            Self::Read { len, .. } | Self::Write { len, .. } => *len as u64,
            Self::Sync | Self::Seek { .. } => 0,
            // Pages that are given back cost about a thirtieth of pages that are copied.
            Self::Allocate { len, .. } | Self::Range { len, .. } => *len >> 5,
        }
    }

    /// Makes the call and returns bytes, a position, or 0. Waits for the disk.
    ///
    /// # Safety
    /// The memory is valid for writes of a read, for reads of a write.
    pub(crate) unsafe fn make(&self, fd: RawFd) -> Result<usize, Errno> {
        match self {
            // SAFETY: the caller's memory.
            Self::Read { offset, to, len } => unsafe { sys::read(fd, *to, *len, *offset) },
            Self::Write {
                offset,
                from,
                len,
                dsync,
            } => {
                // SAFETY: the caller's memory.
                unsafe { sys::write(fd, *from, *len, *offset, *dsync) }
            }
            Self::Sync => sys::sync(fd).map(|()| 0),
            Self::Allocate { mode, offset, len } => sys::allocate(fd, *mode, *offset, *len).map(|()| 0),
            Self::Range { request, offset, len } => sys::range_ioctl(fd, *request, *offset, *len).map(|()| 0),
            Self::Seek { offset, whence } => sys::seek(fd, *offset, *whence),
        }
    }
}
