//! Memory that a front end shares by a descriptor, mapped.
//!
//! Who has the descriptor can make the file shorter at any time, and whoever touches a page then that is gone is killed by SIGBUS. So
//! mappings are known to a handler of that signal, which puts zeroed memory in the place of such a mapping: the copy goes on, and the
//! front end is cut off afterwards because its mapping [is gone](Mapped::is_gone). Files that are sealed against it, as QEMU's are by
//! default, can't get there.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::{
        Arc, Once,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use roce_verbs::provider::Memory;

const PAGE: usize = 4096;
/// The largest page that a file's mappings may have to begin with.
const LARGEST_PAGE: usize = 1 << 30;

/// A part of a file in memory, shared with everybody who has the file, to read and write.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// The mapping, which begins and ends on the file's pages.
    base: NonNull<u8>,
    whole: usize,
    /// First byte of ours in it.
    offset: usize,
    len: usize,
    guard: &'static Guard,
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
        // SAFETY: a new mapping, which nobody else knows of.
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
        Ok(Arc::new(Self {
            base,
            whole,
            offset: within,
            len: len as usize,
            guard: Guard::over(base.addr().get(), whole),
        }))
    }

    /// The file has become shorter than the mapping: what is here now is nobody's.
    pub(crate) fn is_gone(&self) -> bool {
        self.guard.hit.load(Ordering::Acquire)
    }

    /// First byte; never make a reference from it.
    pub(crate) fn start(&self) -> *mut u8 {
        self.base.as_ptr().wrapping_add(self.offset)
    }

    /// Bytes.
    pub(crate) fn size(&self) -> usize {
        self.len
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.guard.end();
        // SAFETY: the mapping is ours, and nobody can get at it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.whole) };
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

/// A mapping as the signal handler finds it. They are never freed, but used again.
#[derive(Debug, Default)]
struct Guard {
    /// First byte; 0: it guards nothing.
    start: AtomicUsize,
    len: AtomicUsize,
    /// It was replaced.
    hit: AtomicBool,
    /// Somebody has it.
    taken: AtomicBool,
    next: AtomicPtr<Guard>,
}

/// The first of all guards.
static GUARDS: AtomicPtr<Guard> = AtomicPtr::new(ptr::null_mut());
/// What was done about SIGBUS before, by address of the action; it is never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

impl Guard {
    fn all() -> impl Iterator<Item = &'static Self> {
        let from = |at: &AtomicPtr<Self>| {
            // SAFETY: guards are leaked when they are made, and complete when they are linked.
            unsafe { at.load(Ordering::Acquire).as_ref() }
        };
        core::iter::successors(from(&GUARDS), move |guard| from(&guard.next))
    }

    /// Guards a mapping that nobody has touched yet.
    fn over(start: usize, len: usize) -> &'static Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let free = |guard: &&'static Self| !guard.taken.swap(true, Ordering::AcqRel);
        let guard = Self::all().find(free).unwrap_or_else(Self::link);
        guard.hit.store(false, Ordering::Relaxed);
        guard.len.store(len, Ordering::Relaxed);
        guard.start.store(start, Ordering::Release);
        guard
    }

    /// One more.
    fn link() -> &'static Self {
        let guard: &'static Self = Box::leak(Box::new(Self {
            taken: AtomicBool::new(true),
            ..Self::default()
        }));
        let mut first = GUARDS.load(Ordering::Acquire);
        loop {
            guard.next.store(first, Ordering::Relaxed);
            let this = ptr::from_ref(guard).cast_mut();
            match GUARDS.compare_exchange_weak(first, this, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return guard,
                Err(other) => first = other,
            }
        }
    }

    fn end(&self) {
        self.start.store(0, Ordering::Release);
        self.taken.store(false, Ordering::Release);
    }

    /// Puts zeroed memory in the place of the mapping that an address lies in, if one is guarded. Called by the signal handler: atomics
    /// and one system call.
    fn replace(addr: usize) -> bool {
        for guard in Self::all() {
            let start = guard.start.load(Ordering::Acquire);
            let len = guard.len.load(Ordering::Relaxed);
            if start == 0 || !(start..start.saturating_add(len)).contains(&addr) {
                continue;
            }
            guard.hit.store(true, Ordering::Release);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            // SAFETY: whoever has just touched the mapping keeps it alive, so all of the range is its own, and nothing else is replaced.
            let at = unsafe {
                libc::mmap(
                    ptr::with_exposed_provenance_mut(start),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                )
            };
            return at != libc::MAP_FAILED;
        }
        false
    }
}

fn install() {
    // SAFETY: all-zero is a valid action to fill in.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: as above.
    let mut before: libc::sigaction = unsafe { core::mem::zeroed() };
    // SAFETY: the handler calls nothing but what may be called in one.
    let done = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before) };
    if done == 0 {
        BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release);
    } else {
        let error = io::Error::last_os_error();
        tracing::warn!("a front end that makes its memory's file shorter will end this process: {error}");
    }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the system gives a handler with SA_SIGINFO its information; of SIGBUS that has an address.
    let addr = unsafe { info.as_ref().map(|info| info.si_addr() as usize) };
    // SAFETY: errno is the thread's own, and stays as it was for whoever was interrupted.
    let errno = unsafe { *libc::__errno_location() };
    let replaced = addr.is_some_and(Guard::replace);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !replaced {
        // The instruction is tried again, and meets what was there before us.
        let before = BEFORE.load(Ordering::Acquire);
        if before.is_null() {
            // SAFETY: a plain call.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        } else {
            // SAFETY: an action that the system has given us, never freed.
            unsafe { libc::sigaction(signal, before, ptr::null_mut()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use roce_mem::Pages;
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
        assert!(!mapped.is_gone(), "nobody has touched it");
        let mut out = [1; 4];
        pages(&mapped).read(8192, &mut out).unwrap();
        assert_eq!(out, [0; 4]);
        assert!(mapped.is_gone());
        pages(&mapped).write(12 << 10, b"nobody").unwrap();
        let mut out = [0; 5];
        pages(&beside).read(0, &mut out).unwrap();
        assert_eq!((&out, beside.is_gone()), (b"stays", false));
        // The guard is used again, and begins anew.
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
