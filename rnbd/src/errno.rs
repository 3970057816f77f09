//! System error numbers as values: what RTRS carries in its immediate data and NBD in its replies.

use std::{fmt, io};

/// A positive Linux error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident $doc:literal)*) => {
        impl Errno {
            $(#[doc = $doc] pub const $name: Self = Self(libc::$name);)*
        }
    };
}

errnos! {
    EPERM "Not permitted: the device is already open for writing."
    ENOENT "No such export."
    EIO "The device failed, or the range is beyond its end."
    ENXIO "No such device."
    EAGAIN "Try again."
    ENOMEM "No memory."
    EACCES "The export is read-only."
    ENOTBLK "Neither an image file nor a block device."
    EBUSY "In use."
    EEXIST "Already mapped, or open in this session under another spelling of its name."
    EMFILE "The session has as many devices open as it may have."
    ENFILE "All sessions together have as many devices open as they may have."
    EINVAL "Malformed or out of range."
    ENOSPC "No space left below the image."
    EROFS "Write on a device that was opened read-only."
    ENAMETOOLONG "Name too long."
    ELOOP "Too many symbolic links."
    EXDEV "A path leaves its folder."
    EOPNOTSUPP "Not supported by this device."
    ENOTCONN "The device is not open in this session."
    ETIMEDOUT "No answer in time."
    ECONNABORTED "The session was lost."
    ESHUTDOWN "Shutting down."
    EINTR "Interrupted."
    ENOSYS "No such system call."
}

impl Errno {
    /// From the number that a peer sent, either sign. Zero and numbers outside 1..4096 become EIO.
    pub fn from_wire(n: i32) -> Self {
        match n.unsigned_abs() {
            n @ 1..=4095 => Self(n as i32),
            _ => Self::EIO,
        }
    }

    /// The last error of a system call on this thread.
    pub(crate) fn last() -> Self {
        io::Error::last_os_error().into()
    }

    /// The positive number.
    pub fn raw(self) -> i32 {
        self.0
    }
}

impl From<io::Error> for Errno {
    fn from(e: io::Error) -> Self {
        e.raw_os_error().map_or(Self::EIO, Self::from_wire)
    }
}

impl From<Errno> for io::Error {
    fn from(e: Errno) -> Self {
        Self::from_raw_os_error(e.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

impl std::error::Error for Errno {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_peer_are_tamed() {
        assert_eq!(Errno::from_wire(-5), Errno::EIO);
        assert_eq!(Errno::from_wire(28), Errno::ENOSPC);
        for bad in [0, 4096, i32::MIN, i32::MAX] {
            assert_eq!(Errno::from_wire(bad), Errno::EIO);
        }
    }
}
