//! Memory that a front end shares by a descriptor, mapped.
//!
//! Who has the descriptor can truncate the file at any time, and an access behind its end is a SIGBUS. So each mapping has a
//! [`Guard`], which puts zeroed memory in its place: the copy goes on, and the front end is cut off afterwards because its mapping
//! [is gone](Mapped::is_gone). Files that are sealed against it, as QEMU's are by default, can't get there.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use roce_verbs::mem::fault::Guard;
use roce_verbs::provider::Memory;

const PAGE: usize = 4096;
/// The largest page that a file's mappings may have to begin with.
const LARGEST_PAGE: usize = 1 << 30;

/// A mapping, which begins and ends on the file's pages.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing uses it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A part of a file in memory, shared with everybody who has the file, to read and write.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Dropped before the mapping, whose place others may take then.
    guard: Guard,
    mapping: Mapping,
    /// First byte of ours in it.
    offset: usize,
    len: usize,
}

// SAFETY: the memory is shared with other processes anyway; it is only read and written by raw copies and atomics.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `len` bytes of a file from `offset` on, which is a multiple of 4096.
    ///
    /// # Errors
    /// When the file has not as many bytes; those of `fstat` and `mmap`.
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Arc<Self>> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let stat = nix::sys::stat::fstat(file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if len == 0 || !offset.is_multiple_of(PAGE as u64) || offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(invalid(format!("{len} bytes at {offset} of a file of {size} bytes")));
        }
        // Of hugetlbfs the block is the page.
        let page = usize::try_from(stat.st_blksize).unwrap_or(PAGE);
        let page = match page.is_power_of_two() && (PAGE..=LARGEST_PAGE).contains(&page) {
            true => page,
            false => PAGE,
        };
        let begin = offset - offset % page as u64;
        let within = (offset - begin) as usize;
        let whole = usize::try_from(len).ok().and_then(|len| len.checked_add(within));
        let whole = whole.and_then(|whole| whole.checked_next_multiple_of(page));
        let (Some(whole), Ok(begin)) = (whole, libc::off_t::try_from(begin)) else {
            return Err(invalid(format!("{len} bytes at {offset} can't be mapped")));
        };
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                whole,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                file.as_raw_fd(),
                begin,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| invalid("a mapping at address zero".into()))?;
        let mapping = Mapping { base, len: whole };
        Ok(Arc::new(Self {
            // SAFETY: the new mapping, of whole pages, which lives longer than its guard.
            guard: unsafe { Guard::new(base.as_ptr(), whole) },
            mapping,
            offset: within,
            len: len as usize,
        }))
    }

    /// The file has become shorter than the mapping: what is here now is nobody's.
    pub(crate) fn is_gone(&self) -> bool {
        self.guard.is_hit()
    }

    /// First byte; never make a reference from it.
    pub(crate) fn start(&self) -> *mut u8 {
        self.mapping.base.as_ptr().wrapping_add(self.offset)
    }

    /// Bytes.
    pub(crate) fn size(&self) -> usize {
        self.len
    }
}

// SAFETY: mapped until the value is dropped, at the same place, and replaced by other memory rather than taken away.
unsafe impl Memory for Mapped {
    fn as_ptr(&self) -> *mut u8 {
        self.start()
    }

    fn len(&self) -> usize {
        self.size()
    }
}

/// A file in memory of so many bytes, whose size nobody can change.
///
/// # Errors
/// Those of `memfd_create` and of sealing.
pub(crate) fn sealed_file(len: u64) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let file = rustix::fs::memfd_create("ferroce-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use roce_verbs::mem::Pages;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn file(len: u64) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        file
    }

    fn pages(mapped: &Arc<Mapped>) -> Arc<Pages> {
        let memory: Arc<dyn Memory> = mapped.clone();
        Pages::of(&memory).unwrap()
    }

    #[test]
    fn a_mapping_is_the_file() {
        let file = file(16 << 10);
        let mapped = Mapped::new(file.as_fd(), 4096, 8192).unwrap();
        pages(&mapped).write(8190, b"ab").unwrap();
        let mut out = [0; 2];
        rustix::io::pread(&file, &mut out, 4096 + 8190).unwrap();
        assert_eq!(&out, b"ab");
        assert!(pages(&mapped).write(8191, b"ab").is_err());
        for (offset, len) in [(0, 0), (0, 16385), (4096, 12289), (512, 512), (!4095, 8192)] {
            assert!(Mapped::new(file.as_fd(), offset, len).is_err(), "{offset} {len}");
        }
    }

    #[test]
    fn a_file_that_becomes_shorter_takes_its_mapping_along_and_nothing_else() {
        let (file, other) = (file(16 << 10), file(4096));
        let mapped = Mapped::new(file.as_fd(), 0, 16 << 10).unwrap();
        let beside = Mapped::new(other.as_fd(), 0, 4096).unwrap();
        pages(&beside).write(0, b"stays").unwrap();
        pages(&mapped).write(0, b"goes").unwrap();
        ftruncate(&file, 4096).unwrap();
        assert!(!mapped.is_gone(), "nothing has touched it");
        let mut out = [1; 4];
        pages(&mapped).read(8192, &mut out).unwrap();
        assert_eq!(out, [0; 4]);
        assert!(mapped.is_gone());
        pages(&mapped).write(12 << 10, b"nobody").unwrap();
        let mut out = [0; 5];
        pages(&beside).read(0, &mut out).unwrap();
        assert_eq!((&out, beside.is_gone()), (b"stays", false));
        // The guard is used for another file, and starts over.
        drop(mapped);
        let again = Mapped::new(other.as_fd(), 0, 4096).unwrap();
        assert!(!again.is_gone());
    }

    #[test]
    fn a_sealed_file_keeps_its_size() {
        let file = sealed_file(8192).unwrap();
        assert!(ftruncate(&file, 4096).is_err() && ftruncate(&file, 16384).is_err());
        assert!(Mapped::new(file.as_fd(), 0, 8192).is_ok());
    }
}
