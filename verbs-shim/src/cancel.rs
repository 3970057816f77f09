//! Thread cancellation (`pthread_cancel(3)`).
//!
//! A cancelled thread unwinds from the cancellation point that it is in: any system call of the C library that may block. That
//! must not pass Rust frames with destructors or `catch_unwind` (Rust RFC 2945). So every entry point disables cancellation
//! ([`Disabled`]), which delays it until the program's next cancellation point. Calls that block have cancellation points, as
//! they have with the kernel's descriptors, outside of these frames: they own nothing that has to be dropped.

use std::{ffi::c_void, mem::MaybeUninit, os::fd::RawFd};

use libc::c_int;

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
