//! The frame around every entry point: what it must leave as it was, how it reports errors, and what becomes of a panic.

use std::{
    cell::RefCell,
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
};

use libc::c_int;
use roce::{PostError, VerbsError};

use crate::{cancel::Disabled, config, log};

/// An error number of `errno.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) c_int);

pub(crate) type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    pub(crate) const INVAL: Self = Self(libc::EINVAL);
    pub(crate) const NOMEM: Self = Self(libc::ENOMEM);
    pub(crate) const NOTSUP: Self = Self(libc::EOPNOTSUPP);
    pub(crate) const IO: Self = Self(libc::EIO);
    pub(crate) const BUSY: Self = Self(libc::EBUSY);
    pub(crate) const FAULT: Self = Self(libc::EFAULT);
    pub(crate) const AGAIN: Self = Self(libc::EAGAIN);
    pub(crate) const NODEV: Self = Self(libc::ENODEV);
    pub(crate) const NODATA: Self = Self(libc::ENODATA);
    pub(crate) const NOENT: Self = Self(libc::ENOENT);
    pub(crate) const BADF: Self = Self(libc::EBADF);

    /// Returns the calling thread's errno.
    pub(crate) fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// Notes why it is returned, for the line that reports the failed verb.
    #[cold]
    pub(crate) fn because(self, reason: impl Display) -> Self {
        if log::is_on() {
            // While the thread's variables are destroyed there is no place for it.
            let _ = REASON.try_with(|slot| slot.replace(Some((self, reason.to_string()))));
        }
        self
    }

    /// Takes the reason that was noted last on this thread, if it is that of this error.
    pub(crate) fn take_reason(self) -> Option<String> {
        let last = REASON.try_with(RefCell::take).ok().flatten();
        last.filter(|(error, _)| *error == self).map(|(_, reason)| reason)
    }

    /// Sets the calling thread's errno.
    pub(crate) fn set(self) {
        // SAFETY: the location belongs to the calling thread.
        unsafe { *libc::__errno_location() = self.0 }
    }
}

thread_local! {
    /// Reason of the last error, as long as no verb has reported it.
    static REASON: RefCell<Option<(Errno, String)>> = const { RefCell::new(None) };
}

impl From<PostError> for Errno {
    fn from(e: PostError) -> Self {
        let errno = match e {
            PostError::QueueFull => Self::NOMEM,
            _ => Self::INVAL,
        };
        errno.because(e)
    }
}

impl From<VerbsError> for Errno {
    fn from(e: VerbsError) -> Self {
        let errno = match &e {
            VerbsError::Invalid(_) | VerbsError::State(_) => Self::INVAL,
            VerbsError::Limit(_) => Self::NOMEM,
            VerbsError::Busy(_) => Self::BUSY,
            VerbsError::Address(_) => Self(libc::EADDRNOTAVAIL),
            VerbsError::Unsupported(_) => Self::NOTSUP,
            VerbsError::Post(PostError::QueueFull) => Self::NOMEM,
            VerbsError::Post(_) => Self::INVAL,
            VerbsError::Io { source, .. } => Self(source.raw_os_error().unwrap_or(libc::EIO)),
            _ => Self::IO,
        };
        errno.because(e)
    }
}

impl From<std::io::Error> for Errno {
    fn from(e: std::io::Error) -> Self {
        Self(e.raw_os_error().unwrap_or(libc::EIO)).because(e)
    }
}

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
/// Returns None after a panic, which is a bug of ferroce; the user is told.
pub(crate) fn guard<T>(body: impl FnOnce() -> T) -> Option<T> {
    let _caller = Caller::enter();
    caught(body)
}

/// Runs something; a panic does not unwind into C.
fn caught<T>(body: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(done) => Some(done),
        Err(payload) => {
            let _caller = Caller::enter();
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("no reason");
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

/// Runs a verb that returns an object, or NULL and sets errno.
pub(crate) fn pointer<T, F: FnOnce() -> Result<*mut T>>(body: F) -> *mut T {
    run(body).unwrap_or_else(|e| {
        log::failed_verb::<F>(e);
        e.set();
        std::ptr::null_mut()
    })
}

/// Runs a verb that returns 0 or a positive error number. It sets errno too, as system calls do.
pub(crate) fn code<F: FnOnce() -> Result<()>>(body: F) -> c_int {
    match run(body) {
        Ok(()) => 0,
        Err(e) => {
            log::failed_verb::<F>(e);
            e.set();
            e.0
        }
    }
}

/// Runs a verb that returns a number, or -1 and sets errno.
pub(crate) fn minus_one<F: FnOnce() -> Result<c_int>>(body: F) -> c_int {
    run(body).unwrap_or_else(|e| {
        log::failed_verb::<F>(e);
        e.set();
        -1
    })
}

/// Runs a verb that can't fail; returns `fallback` after a panic.
pub(crate) fn value<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    guard(body).unwrap_or(fallback)
}

/// Runs a verb that makes no system call and can't fail; returns `fallback` after a panic.
pub(crate) fn leaf<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    caught(body).unwrap_or(fallback)
}

#[cfg(test)]
mod tests {
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
}
