//! Frames around entry points: they keep errno, report errors as each verb does, and stop panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::c_int;

pub(crate) use crate::errno::{Errno, Result};
use crate::{
    cancel::{self, Disabled, Wait},
    config, log,
};

/// State of the calling thread that an entry point restores when it returns.
///
/// System calls within an entry point change errno. Programs expect it unchanged after success: librdmacm reports the errno
/// of a command that failed after it has called `ibv_modify_qp`. Many of them are cancellation points, too.
struct Caller {
    errno: c_int,
    _cancellation: Disabled,
}

impl Caller {
    #[inline(always)]
    fn enter() -> Self {
        Self {
            // SAFETY: the location belongs to the calling thread.
            errno: unsafe { *libc::__errno_location() },
            _cancellation: Disabled::new(),
        }
    }
}

impl Drop for Caller {
    #[inline(always)]
    fn drop(&mut self) {
        Errno(self.errno).set();
    }
}

/// Runs the body of an entry point: errno stays as it was, the thread is not cancelled, and a panic does not unwind into C.
///
/// Returns None after a panic, which is a bug of ferroce and is reported on standard error.
pub(crate) fn guard<T>(body: impl FnOnce() -> T) -> Option<T> {
    let _caller = Caller::enter();
    catch_panic(body)
}

/// Runs a body; a panic does not unwind into C.
fn catch_panic<T>(body: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(done) => Some(done),
        Err(payload) => {
            let _caller = Caller::enter();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("no reason");
            config::complain(format_args!(
                "a verb has failed by a bug of ferroce ({text}); the program gets an I/O error (EIO) or nothing"
            ));
            None
        }
    }
}

/// Runs a verb; a panic becomes EIO.
pub(crate) fn run<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    guard(body).unwrap_or(Err(Errno::IO))
}

/// Logs the failed verb whose body is `F`, and sets errno.
#[cold]
fn fail<F, T>(e: Errno, returned: T) -> T {
    log::failed_verb::<F>(e);
    e.set();
    returned
}

/// Runs a verb that returns an object, or NULL and sets errno.
pub(crate) fn pointer<T, F: FnOnce() -> Result<*mut T>>(body: F) -> *mut T {
    run(body).unwrap_or_else(|e| fail::<F, _>(e, std::ptr::null_mut()))
}

/// Runs a verb that returns 0 or a positive error number. It sets errno too, as system calls do.
pub(crate) fn code<F: FnOnce() -> Result<()>>(body: F) -> c_int {
    run(body).map_or_else(|e| fail::<F, _>(e, e.0), |()| 0)
}

/// Runs a verb that returns a number, or -1 and sets errno.
pub(crate) fn minus_one<F: FnOnce() -> Result<c_int>>(body: F) -> c_int {
    run(body).unwrap_or_else(|e| fail::<F, _>(e, -1))
}

/// Runs a verb that can't fail; returns `fallback` after a panic.
pub(crate) fn value<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    guard(body).unwrap_or(fallback)
}

/// Runs a verb that makes no system call and can't fail; returns `fallback` after a panic.
pub(crate) fn leaf<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    catch_panic(body).unwrap_or(fallback)
}

/// Runs a call that blocks: attempts it until it succeeds, and waits in between for the descriptor that the attempt names.
/// Returns 0, or -1 and sets errno.
///
/// The attempt learns whether the descriptor was read before it. It is `Copy`, and thus has nothing to drop.
pub(crate) fn blocking<F: Fn(bool) -> Result<Option<Wait>> + Copy>(attempt: F) -> c_int {
    cancel::point();
    let mut waited = false;
    loop {
        match run(|| attempt(waited)) {
            Ok(None) => return 0,
            Ok(Some(wait)) if wait.read() => waited = true,
            Ok(Some(_)) => return -1,
            Err(e) => return fail::<F, _>(e, -1),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::c_void,
        io,
        os::fd::RawFd,
        ptr,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[test]
    fn errno_changes_with_failures_only() {
        let calls_the_system = || Errno::AGAIN.set();
        let before = Errno(12345);
        before.set();
        assert_eq!(
            code(|| {
                calls_the_system();
                Ok(())
            }),
            0
        );
        value((), calls_the_system);
        assert_eq!(Errno::last(), before);
        assert_eq!(
            minus_one(|| {
                calls_the_system();
                Err(Errno::INVAL)
            }),
            -1
        );
        assert_eq!(Errno::last(), Errno::INVAL);
    }

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
