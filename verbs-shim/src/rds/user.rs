//! Memory that the program names in calls that are not for data. What can't be accessed is `EFAULT`, as it is with the kernel.

use std::sync::OnceLock;

use libc::{c_void, iovec};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::ret::{Errno, Result};

/// Result of copying so many bytes.
fn copied(result: isize, len: usize) -> Result<()> {
    match usize::try_from(result) {
        Ok(copied) if copied == len => Ok(()),
        Ok(_) => Err(Errno::FAULT),
        Err(_) => Err(Errno::last()),
    }
}

fn piece(base: *const c_void, len: usize) -> iovec {
    iovec {
        iov_base: base.cast_mut(),
        iov_len: len,
    }
}

/// Reads a value from the program's memory.
pub(crate) fn read<T: FromBytes + IntoBytes>(from: *const c_void) -> Result<T> {
    let mut value = T::new_zeroed();
    let bytes = value.as_mut_bytes();
    let (ours, theirs) = (piece(bytes.as_mut_ptr().cast(), bytes.len()), piece(from, bytes.len()));
    // SAFETY: the kernel writes to the value, and looks whether the other memory may be read.
    let result = unsafe { libc::process_vm_readv(libc::getpid(), &raw const ours, 1, &raw const theirs, 1, 0) };
    copied(result, bytes.len()).map(|()| value)
}

/// Writes bytes to the program's memory.
///
/// # Safety
/// The program expects them there.
pub(crate) unsafe fn write(to: *mut c_void, bytes: &[u8]) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let (ours, theirs) = (piece(bytes.as_ptr().cast(), bytes.len()), piece(to, bytes.len()));
    // SAFETY: the kernel reads the bytes, and looks whether the other memory may be written; the caller's promise.
    let result = unsafe { libc::process_vm_writev(libc::getpid(), &raw const ours, 1, &raw const theirs, 1, 0) };
    copied(result, bytes.len())
}

/// Writes a value to the program's memory.
///
/// # Safety
/// As for [`write`].
pub(crate) unsafe fn write_value<T: IntoBytes + Immutable>(to: *mut c_void, value: T) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { write(to, value.as_bytes()) }
}

/// Looks whether memory is there, and may be written if so wanted, and has the system fill its pages, as it would to pin them. Systems
/// before Linux 5.14 don't look.
pub(crate) fn populate(at: u64, len: u64, writes: bool) -> Result<()> {
    // SAFETY: asks for a number.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let first = at - at % page;
    let advice = if writes {
        libc::MADV_POPULATE_WRITE
    } else {
        libc::MADV_POPULATE_READ
    };
    let populate = |from: *mut c_void, len, advice| {
        // SAFETY: it changes no byte.
        unsafe { libc::madvise(from, len, advice) }
    };
    let from = std::ptr::without_provenance_mut(first as usize);
    let len = at.checked_add(len).map(|end| (end - first) as usize);
    if len.is_some_and(|len| populate(from, len, advice) == 0) {
        return Ok(());
    }
    // Either the memory or the advice is not to the system's liking.
    static KNOWN: OnceLock<bool> = OnceLock::new();
    let is_known = || populate(std::ptr::null_mut(), 0, libc::MADV_POPULATE_READ) == 0;
    match Errno::last() {
        Errno::INVAL if !*KNOWN.get_or_init(is_known) => Ok(()),
        _ => Err(Errno::FAULT),
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn memory_that_can_t_be_accessed_is_efault() {
        let mut value = 5u32;
        assert_eq!(read::<u32>((&raw const value).cast()), Ok(5));
        let nowhere = ptr::without_provenance_mut(8);
        assert_eq!(read::<u32>(nowhere), Err(Errno::FAULT));
        // SAFETY: a local, and memory that can't be written.
        unsafe {
            assert_eq!(write_value((&raw mut value).cast(), 7u32), Ok(()));
            assert_eq!(write_value(nowhere, 7u32), Err(Errno::FAULT));
            assert_eq!(write(nowhere, &[]), Ok(()));
        }
        assert_eq!(value, 7);
    }

    #[test]
    fn memory_is_looked_at_before_it_is_used() {
        static CONSTANT: [u8; 3] = *b"abc";
        let at = |ptr: *const u8| ptr.addr() as u64;
        let bytes = vec![1u8; 3 << 12];
        let constant = at(CONSTANT.as_ptr());
        assert_eq!(populate(at(bytes.as_ptr()), bytes.len() as u64, true), Ok(()));
        assert_eq!(populate(constant, 3, false), Ok(()));
        for (at, len, writes) in [
            (constant, 3, true),
            (8, 1, false),
            (u64::MAX, 2, false),
            (1 << 46, 4096, true),
        ] {
            assert_eq!(populate(at, len, writes), Err(Errno::FAULT), "{at:x}");
        }
        assert_eq!(bytes, [1; 3 << 12]);
    }
}
