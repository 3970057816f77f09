//! Notification that a full send buffer has room again.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use super::check;

/// Epoll instance that is readable once a watched socket can be written to.
///
/// It is one descriptor for the sockets that a datapath sends from, which need not be those that it receives on.
#[derive(Debug)]
pub(crate) struct RoomWatch {
    epoll: OwnedFd,
    armed: bool,
}

impl RoomWatch {
    /// Creates one that watches nothing.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor is new and owned by nothing else.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { epoll, armed: false })
    }

    /// Watches a socket until it can be written to, once.
    ///
    /// # Errors
    /// When the kernel has no memory, or the user too many watches.
    pub(crate) fn arm(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let again = self.control(libc::EPOLL_CTL_MOD, socket);
        match again {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => self.control(libc::EPOLL_CTL_ADD, socket)?,
            other => other?,
        }
        self.armed = true;
        Ok(())
    }

    fn control(&self, action: libc::c_int, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut event = libc::epoll_event {
            // Once: a socket reports each packet that leaves its buffer.
            events: (libc::EPOLLOUT | libc::EPOLLONESHOT) as u32,
            u64: 0,
        };
        // SAFETY: one epoll_event on the stack; both descriptors are borrowed for the call.
        let rc = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), action, socket.as_raw_fd(), &raw mut event) };
        check(rc).map(drop)
    }

    /// Takes the notification, if there is one.
    pub(crate) fn clear(&mut self) {
        const SOCKETS: usize = 4;
        if !self.armed {
            return;
        }
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; SOCKETS];
        // SAFETY: room for as many events as are asked for; a timeout of 0 does not wait.
        let taken = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), SOCKETS as _, 0) };
        self.armed = taken <= 0;
    }
}

impl AsFd for RoomWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, io::Write, os::unix::net::UnixStream};

    use super::*;
    use crate::sys::wait_any_readable;

    fn is_readable(watch: &RoomWatch) -> bool {
        wait_any_readable(&[watch.as_fd().as_raw_fd()], Some(std::time::Duration::ZERO)).unwrap()[0]
    }

    #[test]
    fn room_is_reported_once() {
        let (mut full, mut peer) = UnixStream::pair().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.write(&[0; 4096]).is_ok() {}
        let mut watch = RoomWatch::new().unwrap();
        assert!(!is_readable(&watch));
        for _ in 0..2 {
            watch.arm(full.as_fd()).unwrap();
            watch.clear();
            assert!(!is_readable(&watch), "the buffer is full");
            let mut read = vec![0; 1 << 20];
            while full.write(&[0]).is_err() {
                assert!(peer.read(&mut read).unwrap() > 0);
            }
            assert!(is_readable(&watch));
            watch.clear();
            assert!(!is_readable(&watch));
            while full.write(&[0; 4096]).is_ok() {}
            while full.write(&[0]).is_ok() {}
        }
    }
}
