//! Notification that a full send buffer has room again, or that what a packet waits for has changed.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};

/// Epoll instance that is readable once a watched socket can be written to, or another descriptor be read.
///
/// It is one descriptor for the sockets that a datapath sends from, which need not be those that it receives on.
#[derive(Debug)]
pub(crate) struct RoomWatch {
    epoll: Epoll,
    armed: bool,
}

impl RoomWatch {
    /// Creates one that watches nothing.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { epoll, armed: false })
    }

    /// Watches a socket until it can be written to, once.
    ///
    /// # Errors
    /// When the kernel has no memory, or the user too many watches.
    pub(crate) fn arm(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.watch(socket, EpollFlags::EPOLLOUT)
    }

    /// Watches a descriptor until it can be read, once.
    ///
    /// # Errors
    /// When the kernel has no memory, or the user too many watches.
    pub(crate) fn arm_input(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.watch(fd, EpollFlags::EPOLLIN)
    }

    /// Ends watching a descriptor.
    pub(crate) fn disarm(&mut self, fd: BorrowedFd<'_>) {
        // It fails only when the descriptor was never watched.
        let _ = self.epoll.modify(fd, &mut EpollEvent::new(EpollFlags::empty(), 0));
        self.armed = false;
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, until: EpollFlags) -> io::Result<()> {
        // Once: a socket reports each packet that leaves its buffer.
        let mut event = EpollEvent::new(until | EpollFlags::EPOLLONESHOT, 0);
        match self.epoll.modify(fd, &mut event) {
            Err(Errno::ENOENT) => self.epoll.add(fd, event)?,
            done => done?,
        }
        self.armed = true;
        Ok(())
    }

    /// Takes the notification. Returns whether there was one.
    pub(crate) fn clear(&mut self) -> bool {
        const SOCKETS: usize = 4;
        if !self.armed {
            return false;
        }
        let mut events = [EpollEvent::empty(); SOCKETS];
        let taken = self.epoll.wait(&mut events, EpollTimeout::ZERO);
        let fired = taken.is_ok_and(|taken| taken > 0);
        self.armed = !fired;
        fired
    }
}

impl AsFd for RoomWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::{fd::AsRawFd, unix::net::UnixStream},
    };

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
