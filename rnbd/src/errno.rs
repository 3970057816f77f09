//! System error numbers as values: what RTRS carries in its immediate data and NBD in its replies.

use core::fmt;
use std::io;

/// A positive Linux error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident $number:literal $text:literal $doc:literal)*) => {
        impl Errno {
            $(#[doc = $doc] pub const $name: Self = Self($number);)*

            /// Text of the C library.
            fn text(self) -> Option<&'static str> {
                Some(match self {
                    $(Self::$name => $text,)*
                    _ => return None,
                })
            }
        }
    };
}

// `asm-generic/errno-base.h` and `asm-generic/errno.h`.
errnos! {
    EPERM 1 "Operation not permitted" "Not permitted: the device is already open for writing."
    ENOENT 2 "No such file or directory" "No such export."
    EINTR 4 "Interrupted system call" "Interrupted."
    EIO 5 "Input/output error" "The device failed, or the range is beyond its end."
    ENXIO 6 "No such device or address" "No such device."
    EAGAIN 11 "Resource temporarily unavailable" "Try again."
    ENOMEM 12 "Cannot allocate memory" "No memory."
    EACCES 13 "Permission denied" "The export is read-only."
    ENOTBLK 15 "Block device required" "Neither an image file nor a block device."
    EBUSY 16 "Device or resource busy" "In use."
    EEXIST 17 "File exists" "Already mapped, or open in this session under another spelling of its name."
    EXDEV 18 "Invalid cross-device link" "A path leaves its folder."
    ENODEV 19 "No such device" "No such session."
    ENOTDIR 20 "Not a directory" "Part of a path is no folder."
    EISDIR 21 "Is a directory" "A folder."
    EINVAL 22 "Invalid argument" "Malformed or out of range."
    ENFILE 23 "Too many open files in system" "All sessions together have as many devices open as they may have."
    EMFILE 24 "Too many open files" "The session has as many devices open as it may have."
    EFBIG 27 "File too large" "Beyond what the file system can do."
    ENOSPC 28 "No space left on device" "No space left below the image."
    EROFS 30 "Read-only file system" "Write on a device that was opened read-only."
    ERANGE 34 "Numerical result out of range" "A number that is too large."
    ENAMETOOLONG 36 "File name too long" "Name too long."
    ENOSYS 38 "Function not implemented" "No such system call."
    ELOOP 40 "Too many levels of symbolic links" "Too many symbolic links."
    EMSGSIZE 90 "Message too long" "More data than one request can have."
    EPROTONOSUPPORT 93 "Protocol not supported" "Neither an IP address nor a GID."
    EOPNOTSUPP 95 "Operation not supported" "Not supported by this device."
    EADDRINUSE 98 "Address already in use" "Somebody has the address's port."
    EADDRNOTAVAIL 99 "Cannot assign requested address" "No address of this host."
    ECONNABORTED 103 "Software caused connection abort" "The session was lost."
    ECONNRESET 104 "Connection reset by peer" "The peer does not speak the protocol, or another version of it."
    ENOTCONN 107 "Transport endpoint is not connected" "The device is not open in this session."
    ESHUTDOWN 108 "Cannot send after transport endpoint shutdown" "Shutting down."
    ETIMEDOUT 110 "Connection timed out" "No answer in time."
    EHOSTUNREACH 113 "No route to host" "Nobody there, or no way."
    EALREADY 114 "Operation already in progress" "It is so, or is about to be."
    EDQUOT 122 "Disk quota exceeded" "The quota below the image is used up."
}

impl Errno {
    /// From the number that a peer sent, either sign. Zero and numbers outside 1..4096 become EIO.
    pub fn from_wire(n: i32) -> Self {
        match n.unsigned_abs() {
            n @ 1..=4095 => Self(n as i32),
            _ => Self::EIO,
        }
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
        Self::from_raw_os_error(e.raw())
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} (os error {})", self.0),
            None => write!(f, "Unknown error {0} (os error {0})", self.0),
        }
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
