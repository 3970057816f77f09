//! Memory whose pages are taken away while it is registered, as programs do by `munmap`, `mprotect` and `ftruncate`.

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsRawFd, FromRawFd},
    ptr,
    sync::Arc,
};

use libc::{c_int, c_void};
use roce_verbs::provider::Memory;

/// Bytes of a page.
pub const PAGE: usize = 4096;
const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// How a page is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// `munmap`.
    Unmapped,
    /// `mprotect` without rights.
    Protected,
    /// `mprotect` with the right to read alone.
    ReadOnly,
    /// `ftruncate` of the file: this page and all behind it.
    Truncated,
}

impl Loss {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Unmapped, Self::Protected, Self::ReadOnly, Self::Truncated];

    /// Whether lost pages can still be read.
    pub fn is_readable(self) -> bool {
        self == Self::ReadOnly
    }
}

/// Pages of a file in memory, mapped at one place.
#[derive(Debug)]
pub struct Pages {
    at: *mut u8,
    pages: usize,
    file: File,
}

// SAFETY: the address of a mapping, which is only used by system calls here.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps zeroed pages.
    ///
    /// # Errors
    /// Those of `memfd_create`, `ftruncate` and `mmap`.
    pub fn new(pages: usize) -> io::Result<Arc<Self>> {
        // SAFETY: a C string; and a descriptor that nothing else owns.
        let file = unsafe {
            let fd = libc::memfd_create(c"ferroce-pages".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd)
        };
        file.set_len((pages * PAGE) as u64)?;
        // SAFETY: a new mapping.
        let at = unsafe {
            map(
                ptr::null_mut(),
                pages * PAGE,
                READ_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
            )?
        };
        Ok(Arc::new(Self {
            at: at.cast(),
            pages,
            file,
        }))
    }

    /// As memory to register.
    pub fn memory(self: &Arc<Self>) -> Arc<dyn Memory> {
        self.clone()
    }

    /// Takes pages away.
    ///
    /// # Panics
    /// When they are outside, or a system call fails.
    pub fn lose(&self, pages: Range<usize>, loss: Loss) {
        assert!(pages.end <= self.pages, "{pages:?} of {}", self.pages);
        let (at, len) = (self.at.wrapping_add(pages.start * PAGE).cast(), pages.len() * PAGE);
        // SAFETY: pages of the mapping, in which no Rust objects are.
        let done = unsafe {
            match loss {
                // Keeps the addresses, so that nothing else of this process is mapped there.
                Loss::Unmapped => map(at, len, libc::PROT_NONE, UNMAPPED, -1).map(drop),
                Loss::Protected => checked(libc::mprotect(at, len, libc::PROT_NONE)),
                Loss::ReadOnly => checked(libc::mprotect(at, len, libc::PROT_READ)),
                Loss::Truncated => self.file.set_len((pages.start * PAGE) as u64),
            }
        };
        done.expect("pages are lost");
    }

    /// Gives all pages back. Those that were truncated are zeroed.
    ///
    /// # Panics
    /// When a system call fails.
    pub fn restore(&self) {
        let len = self.pages * PAGE;
        self.file.set_len(len as u64).expect("the file's size");
        // SAFETY: the mapping, in which no Rust objects are.
        let done = unsafe {
            map(
                self.at.cast(),
                len,
                READ_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.file.as_raw_fd(),
            )
        };
        done.expect("pages are back");
    }
}

const UNMAPPED: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;

/// # Safety
/// `at` is null, or an address of pages that may be replaced.
unsafe fn map(at: *mut c_void, len: usize, rights: c_int, flags: c_int, fd: c_int) -> io::Result<*mut c_void> {
    // SAFETY: the caller's promise.
    match unsafe { libc::mmap(at, len, rights, flags, fd, 0) } {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        at => Ok(at),
    }
}

fn checked(status: c_int) -> io::Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping, which nothing uses any more.
        unsafe { libc::munmap(self.at.cast(), self.pages * PAGE) };
    }
}

// SAFETY: mapped at one place until the value is dropped, but for pages that fault.
unsafe impl Memory for Pages {
    fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    fn len(&self) -> usize {
        self.pages * PAGE
    }
}
