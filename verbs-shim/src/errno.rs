//! Error numbers, and the reason behind the last one for the log.

use std::{cell::RefCell, fmt::Display};

use libc::c_int;
use roce::{PostError, VerbsError};
use tracing::Level;

/// An error number of `errno.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) c_int);

pub(crate) type Result<T> = std::result::Result<T, Errno>;

thread_local! {
    /// Reason of the last error, as long as no verb has reported it.
    static REASON: RefCell<Option<(Errno, String)>> = const { RefCell::new(None) };
}

/// Whether failures are logged.
pub(crate) fn is_logged() -> bool {
    tracing::enabled!(Level::INFO)
}

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
    pub(crate) const NOSYS: Self = Self(libc::ENOSYS);

    /// Returns the calling thread's errno.
    pub(crate) fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// Notes the reason, for the line that reports the failed verb.
    #[cold]
    pub(crate) fn because(self, reason: impl Display) -> Self {
        if is_logged() {
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

impl From<PostError> for Errno {
    fn from(e: PostError) -> Self {
        VerbsError::Post(e).into()
    }
}

impl From<VerbsError> for Errno {
    fn from(e: VerbsError) -> Self {
        let errno = match &e {
            VerbsError::Limit(_) | VerbsError::Post(PostError::QueueFull) => Self::NOMEM,
            VerbsError::Invalid(_) | VerbsError::State(_) | VerbsError::Post(_) => Self::INVAL,
            VerbsError::Busy(_) => Self::BUSY,
            VerbsError::Address(_) => Self(libc::EADDRNOTAVAIL),
            VerbsError::Unsupported(_) => Self::NOTSUP,
            VerbsError::Io { source, .. } => Self(source.raw_os_error().unwrap_or(libc::EIO)),
            _ => Self::IO,
        };
        errno.because(e)
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(e: rustix::io::Errno) -> Self {
        Self(e.raw_os_error()).because(e)
    }
}

impl From<std::io::Error> for Errno {
    fn from(e: std::io::Error) -> Self {
        Self(e.raw_os_error().unwrap_or(libc::EIO)).because(e)
    }
}
