//! System error numbers: RTRS carries them in immediate data, NBD in its replies.

use core::fmt;
use std::io;

/// Positive Linux error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident $number:literal $doc:literal)*) => {
        impl Errno {
            $(#[doc = $doc] pub const $name: Self = Self($number);)*
        }
    };
}

// `asm-generic/errno-base.h` and `asm-generic/errno.h`.
errnos! {
    EPERM 1 "Not permitted: the device is already open for writing."
    ENOENT 2 "No such export."
    EINTR 4 "Interrupted."
    EIO 5 "The device failed, or the range is beyond its end."
    ENXIO 6 "No such device."
    EAGAIN 11 "Try again."
    ENOMEM 12 "No memory."
    EACCES 13 "The export is read-only."
    ENOTBLK 15 "Neither an image file nor a block device."
    EBUSY 16 "In use."
    EEXIST 17 "Already mapped, or open in this session under another spelling of its name."
    EXDEV 18 "A path leaves its folder."
    ENODEV 19 "No such session."
    ENOTDIR 20 "Part of a path is no folder."
    EISDIR 21 "A folder."
    EINVAL 22 "Malformed or out of range."
    ENFILE 23 "All sessions together have as many devices open as they may have."
    EMFILE 24 "The session has as many devices open as it may have."
    EFBIG 27 "Beyond what the file system can do."
    ENOSPC 28 "No space left below the image."
    EROFS 30 "Write on a device that was opened read-only."
    ERANGE 34 "A number that is too large."
    ENAMETOOLONG 36 "Name too long."
    ENOSYS 38 "No such system call."
    ELOOP 40 "Too many symbolic links."
    EMSGSIZE 90 "More data than one request can have."
    EPROTONOSUPPORT 93 "Neither an IP address nor a GID."
    EOPNOTSUPP 95 "Not supported by this device."
    EADDRINUSE 98 "Somebody has the address's port."
    EADDRNOTAVAIL 99 "No address of this host."
    ECONNABORTED 103 "The session was lost."
    ECONNRESET 104 "The peer does not speak the protocol, or another version of it."
    ENOTCONN 107 "The device is not open in this session."
    ESHUTDOWN 108 "Shutting down."
    ETIMEDOUT 110 "No answer in time."
    EHOSTUNREACH 113 "Nobody there, or no way."
    EALREADY 114 "It is so, or is about to be."
    EDQUOT 122 "The quota below the image is used up."
}

impl Errno {
    /// Converts the number that a peer sent, of either sign. Zero and numbers outside 1..4096 become EIO.
    pub fn from_wire(n: i32) -> Self {
        match n.unsigned_abs() {
            n @ 1..=4095 => Self(n as i32),
            _ => Self::EIO,
        }
    }

    /// Returns the positive number.
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
        Self::from_raw_os_error(e.raw())
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The C library's text.
        io::Error::from(*self).fmt(f)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

impl core::error::Error for Errno {}

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
