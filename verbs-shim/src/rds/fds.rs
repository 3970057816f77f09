//! Which descriptors may be RDS sockets, by one load and a comparison.
//!
//! A descriptor that was found to be another file stays so: its number becomes an RDS socket's only by calls that this library stands in
//! front of (`socket`, `dup`, `fcntl`, `recvmsg` of `SCM_RIGHTS`), after which it is unknown and looked up again. So descriptors that a
//! program has inherited are found, and one that is closed in a way not seen here does no harm.

use std::{
    os::fd::{BorrowedFd, RawFd},
    sync::atomic::{AtomicU8, Ordering},
};

use rds_local::SocketKey;

const UNKNOWN: u8 = 0;
const OTHER: u8 = 1;
const SOCKET: u8 = 2;

/// Descriptors whose kind is kept; larger ones are looked at each time.
const MAX: usize = 1 << 16;

static KINDS: [AtomicU8; MAX] = [const { AtomicU8::new(UNKNOWN) }; MAX];

fn kind(fd: RawFd) -> Option<&'static AtomicU8> {
    KINDS.get(usize::try_from(fd).ok()?)
}

/// Whether a descriptor is not known to be another file.
pub(crate) fn may_be_socket(fd: RawFd) -> bool {
    kind(fd).is_none_or(|kind| kind.load(Ordering::Relaxed) != OTHER)
}

/// Whether a descriptor was an RDS socket when it was looked at.
pub(crate) fn was_socket(fd: RawFd) -> bool {
    kind(fd).is_some_and(|kind| kind.load(Ordering::Relaxed) == SOCKET)
}

/// The key of an RDS socket; `None` of another file, mostly at once.
pub(crate) fn key(fd: RawFd) -> Option<SocketKey> {
    may_be_socket(fd).then(|| key_of(fd)).flatten()
}

/// The same, looked up again.
pub(crate) fn key_of(fd: RawFd) -> Option<SocketKey> {
    if fd < 0 {
        return None;
    }
    // SAFETY: used for this call, which fails for a number that is no descriptor's.
    let key = SocketKey::of_peer(unsafe { BorrowedFd::borrow_raw(fd) });
    if let Some(kind) = kind(fd) {
        kind.store(if key.is_some() { SOCKET } else { OTHER }, Ordering::Relaxed);
    }
    key
}

/// Has a descriptor looked at when it is used next.
pub(crate) fn forget(fd: RawFd) {
    if let Some(kind) = kind(fd) {
        kind.store(UNKNOWN, Ordering::Relaxed);
    }
}

/// A descriptor has become the copy of another.
pub(crate) fn copied(from: RawFd, to: RawFd) {
    if to >= 0 && may_be_socket(from) {
        forget(to);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn another_file_is_looked_at_once() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        forget(fd);
        assert!(may_be_socket(fd) && key_of(fd).is_none());
        assert!(!may_be_socket(fd) && !was_socket(fd));
        forget(fd);
        assert!(may_be_socket(fd));
        assert!(may_be_socket(-1) && key_of(-1).is_none(), "the system refuses it");
    }

    #[test]
    fn a_copy_of_another_file_is_known() {
        let file = tempfile::tempfile().unwrap();
        let copy = file.try_clone().unwrap();
        assert_eq!((key_of(file.as_raw_fd()), key_of(copy.as_raw_fd())), (None, None));
        copied(file.as_raw_fd(), copy.as_raw_fd());
        assert!(!may_be_socket(copy.as_raw_fd()));
        forget(file.as_raw_fd());
        copied(file.as_raw_fd(), copy.as_raw_fd());
        assert!(may_be_socket(copy.as_raw_fd()));
    }
}
