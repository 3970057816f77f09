//! Thread cancellation (`pthread_cancel(3)`).
//!
//! A cancelled thread unwinds from the cancellation point that it is in: any system call of the C library that may block. That
//! must not pass Rust frames with destructors or `catch_unwind` (Rust RFC 2945). So every entry point disables cancellation
//! ([`Disabled`], by [`ret::guard`]), which delays it until the program's next cancellation point. Calls that block have
//! cancellation points, as they have with the kernel's descriptors, outside of these frames: [`blocking`] and what calls it
//! own nothing that has to be dropped.

use std::{ffi::c_void, mem::MaybeUninit, os::fd::RawFd};

use libc::c_int;

use crate::{
    log,
    ret::{self, Result},
};

/// `struct _pthread_cleanup_buffer` of `pthread.h`.
#[repr(C)]
struct Cleanup {
    routine: extern "C" fn(*mut c_void),
    arg: *mut c_void,
    cancel_type: c_int,
    previous: *mut Self,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn _pthread_cleanup_push(buffer: *mut Cleanup, routine: extern "C" fn(*mut c_void), arg: *mut c_void);
    fn _pthread_cleanup_pop(buffer: *mut Cleanup, execute: c_int);
}

// Cancellation points: a cancelled thread unwinds from here. `__read` is the C library's own, which no library interposes.
unsafe extern "C-unwind" {
    fn pthread_testcancel();
    #[link_name = "__read"]
    fn libc_read(fd: c_int, buf: *mut c_void, len: usize) -> isize;
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

/// Keeps the calling thread from being cancelled.
pub(crate) struct Disabled {
    before: c_int,
}

impl Disabled {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        let mut before = 0;
        // SAFETY: changes the calling thread only, and writes to a local.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Drop for Disabled {
    #[inline(always)]
    fn drop(&mut self) {
        let mut disabled = 0;
        // SAFETY: as above. With deferred cancellation this is no cancellation point.
        unsafe { pthread_setcancelstate(self.before, &raw mut disabled) };
    }
}

/// A descriptor that a blocking call waits for.
#[derive(Clone, Copy)]
pub(crate) struct Wait {
    fd: RawFd,
    /// Makes the descriptor readable again if events are left.
    rearm: extern "C" fn(*mut c_void),
    arg: *mut c_void,
}

impl Wait {
    /// # Safety
    /// `rearm` may be called with `arg` until the call returns.
    pub(crate) unsafe fn new(fd: RawFd, rearm: extern "C" fn(*mut c_void), arg: *mut c_void) -> Self {
        Self { fd, rearm, arg }
    }

    /// Reads the count of the descriptor as the program has set it (O_NONBLOCK); a cancellation point. Returns false and sets
    /// errno if the read fails.
    ///
    /// The C library may cancel a thread whose read has just taken the count, which other readers wait for: `rearm` runs then.
    pub(crate) fn read(self) -> bool {
        let mut cleanup = MaybeUninit::<Cleanup>::uninit();
        let mut count = 0u64;
        // SAFETY: the buffer is on the stack until it is popped, here or by the C library when the thread is cancelled; by
        // the promise of `new` the routine may be called. The read writes eight bytes to a local. This frame and those
        // above it have nothing to drop.
        unsafe {
            _pthread_cleanup_push(cleanup.as_mut_ptr(), self.rearm, self.arg);
            let got = libc_read(self.fd, (&raw mut count).cast(), 8);
            _pthread_cleanup_pop(cleanup.as_mut_ptr(), 0);
            got == 8
        }
    }
}

/// Cancels the calling thread if that is pending. For frames with nothing to drop.
pub(crate) fn point() {
    // SAFETY: no arguments.
    unsafe { pthread_testcancel() };
}

/// Runs a call that blocks: attempts it until it succeeds, and waits in between for the descriptor that the attempt names.
/// Returns 0, or -1 and sets errno.
///
/// The attempt learns whether the descriptor was read before it. It is `Copy`, and thus has nothing to drop.
pub(crate) fn blocking<F: Fn(bool) -> Result<Option<Wait>> + Copy>(attempt: F) -> c_int {
    point();
    let mut waited = false;
    loop {
        match ret::run(|| attempt(waited)) {
            Ok(None) => return 0,
            Ok(Some(wait)) if wait.read() => waited = true,
            Ok(Some(_)) => return -1,
            Err(e) => {
                log::failed_verb::<F>(e);
                e.set();
                return -1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io, ptr,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> c_int;
    }

    static REARMED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count(_: *mut c_void) {
        REARMED.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for a descriptor that never becomes readable, after a frame that must not be unwound.
    extern "C-unwind" fn waits(fd: *mut c_void) -> *mut c_void {
        let fd = fd.addr() as RawFd;
        // SAFETY: a plain function.
        blocking(|_| Ok(Some(unsafe { Wait::new(fd, count, ptr::null_mut()) })));
        ptr::null_mut()
    }

    #[test]
    fn a_thread_that_waits_is_cancelled() {
        // SAFETY: the thread's function takes a number; threads are cancelled and joined once each.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            for n in 1..=100 {
                let mut thread = 0;
                let start = std::mem::transmute::<
                    extern "C-unwind" fn(*mut c_void) -> *mut c_void,
                    extern "C" fn(*mut c_void) -> *mut c_void,
                >(waits);
                let arg = ptr::without_provenance_mut(fd as usize);
                assert_eq!(libc::pthread_create(&raw mut thread, ptr::null(), start, arg), 0);
                std::thread::sleep(std::time::Duration::from_micros(200 * (n % 5)));
                assert_eq!(pthread_cancel(thread), 0);
                let mut result = ptr::null_mut();
                assert_eq!(libc::pthread_join(thread, &raw mut result), 0);
                assert_eq!(result.addr(), usize::MAX, "PTHREAD_CANCELED");
            }
            libc::close(fd);
        }
        assert!(REARMED.load(Ordering::Relaxed) > 0);
    }
}
