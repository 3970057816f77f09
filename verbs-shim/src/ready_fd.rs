//! The descriptor of an event channel: readable while there are events, and never writable, as the kernel's are.
//!
//! It is a timer that never expires. The kernel lets its count be set (`TFD_IOC_SET_TICKS`), which wakes each poller every
//! time, so that each event is an edge; it reports POLLIN and nothing else; a read takes the count, and waits for one as
//! O_NONBLOCK and signals demand. Programs may close the descriptor in ways that are not seen here (`dup2`, `close_range`), and
//! have another file under its number. Each timer has a different period, by which it is recognised: another file is neither
//! rung nor read.

use std::{
    mem::{self, ManuallyDrop},
    os::fd::{FromRawFd, OwnedFd, RawFd},
    sync::atomic::{AtomicI64, Ordering},
};

use libc::{c_ulong, itimerspec, timespec};

use crate::ret::{Errno, Result};

/// `_IOW('T', 0, __u64)` of `linux/timerfd.h`.
const TFD_IOC_SET_TICKS: c_ulong = 0x4008_5400;
/// Seconds of a period, and of the time of expiry: 126 and 253 years.
const PERIOD: i64 = 4_000_000_000;
const NEVER: i64 = 8_000_000_000;
const NANOSECONDS: i64 = 1_000_000_000;

/// The descriptor.
pub(crate) struct ReadyFd {
    fd: RawFd,
    /// Nanoseconds of the period beyond [`PERIOD`].
    mark: i64,
}

impl ReadyFd {
    /// # Errors
    /// When the process can't have another descriptor.
    pub(crate) fn new() -> Result<Self> {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        // SAFETY: makes a descriptor, or fails.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC) };
        if fd < 0 {
            return Err(Errno::last());
        }
        let mark = NEXT.fetch_add(1, Ordering::Relaxed) % NANOSECONDS;
        let this = Self { fd, mark };
        this.set(NEVER)?;
        Ok(this)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Sets the time of expiry, in seconds of the machine's life, which also takes the count.
    fn set(&self, expiry: i64) -> Result<()> {
        let part = |tv_sec, tv_nsec| timespec { tv_sec, tv_nsec };
        let value = itimerspec {
            it_value: part(expiry, 1),
            it_interval: part(PERIOD, self.mark),
        };
        // SAFETY: a structure on the stack.
        let done =
            unsafe { libc::timerfd_settime(self.fd, libc::TFD_TIMER_ABSTIME, &raw const value, std::ptr::null_mut()) };
        if done < 0 { Err(Errno::last()) } else { Ok(()) }
    }

    /// Whether the number still is this descriptor's.
    pub(crate) fn is_intact(&self) -> bool {
        // SAFETY: plain numbers, for which zero is a value.
        let mut now: itimerspec = unsafe { mem::zeroed() };
        // SAFETY: fills the structure, or fails for what is no timer.
        let got = unsafe { libc::timerfd_gettime(self.fd, &raw mut now) };
        got == 0 && now.it_interval.tv_sec == PERIOD && now.it_interval.tv_nsec == self.mark
    }

    /// Makes the descriptor readable, and wakes pollers even if it was readable before.
    pub(crate) fn raise(&self) {
        if !self.is_intact() {
            return;
        }
        let one = 1u64;
        // SAFETY: eight bytes of a local.
        if unsafe { libc::ioctl(self.fd, TFD_IOC_SET_TICKS, &raw const one) } < 0 {
            // A kernel without CONFIG_CHECKPOINT_RESTORE: it expires at once, long ago.
            let _ = self.set(0);
        }
    }

    /// Makes the descriptor unreadable; never waits.
    pub(crate) fn clear(&self) {
        if self.is_intact() {
            let _ = self.set(NEVER);
        }
    }

    /// Gives the descriptor up without closing it.
    pub(crate) fn forget(self) {
        let _ = ManuallyDrop::new(self);
    }
}

impl Drop for ReadyFd {
    fn drop(&mut self) {
        if self.is_intact() {
            // SAFETY: ours, and not used again.
            drop(unsafe { OwnedFd::from_raw_fd(self.fd) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready_fd() -> ReadyFd {
        ReadyFd::new().unwrap_or_else(|e| panic!("{e:?}"))
    }

    fn ready(fd: RawFd) -> libc::c_short {
        let mut entry = libc::pollfd {
            fd,
            events: libc::POLLIN | libc::POLLOUT | libc::POLLPRI,
            revents: 0,
        };
        // SAFETY: polls one descriptor, at once.
        unsafe { libc::poll(&raw mut entry, 1, 0) };
        entry.revents
    }

    /// An epoll instance that reports edges of a descriptor.
    fn edges(fd: RawFd) -> OwnedFd {
        let mut how = libc::epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32,
            u64: 0,
        };
        // SAFETY: descriptors that are open, and a structure on the stack.
        unsafe {
            let epoll = OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC));
            assert_eq!(libc::epoll_ctl(raw(&epoll), libc::EPOLL_CTL_ADD, fd, &raw mut how), 0);
            epoll
        }
    }

    fn raw(fd: &OwnedFd) -> RawFd {
        std::os::fd::AsRawFd::as_raw_fd(fd)
    }

    fn edge(epoll: &OwnedFd) -> Option<u32> {
        let mut got = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        let count = unsafe { libc::epoll_wait(raw(epoll), &raw mut got, 1, 0) };
        (count == 1).then_some(got.events)
    }

    /// Takes the count, as readers do.
    fn take(fd: &ReadyFd) -> Result<()> {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        match unsafe { libc::read(fd.fd, (&raw mut count).cast(), 8) } {
            8 => Ok(()),
            _ => Err(Errno::last()),
        }
    }

    #[test]
    fn it_is_readable_when_rung_and_never_writable() {
        let b = ready_fd();
        assert_eq!(ready(b.fd()), 0);
        b.raise();
        b.raise();
        assert_eq!(ready(b.fd()), libc::POLLIN);
        b.clear();
        b.clear();
        assert_eq!(ready(b.fd()), 0);
        b.raise();
        assert_eq!(take(&b), Ok(()));
        assert_eq!(ready(b.fd()), 0);
        // SAFETY: sets a flag.
        unsafe { libc::fcntl(b.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        assert_eq!(take(&b), Err(Errno::AGAIN));
    }

    #[test]
    fn each_ring_is_an_edge() {
        let b = ready_fd();
        let epoll = edges(b.fd());
        assert_eq!(edge(&epoll), None);
        for _ in 0..3 {
            b.raise();
            assert_eq!(edge(&epoll), Some(libc::EPOLLIN as u32));
            assert_eq!(edge(&epoll), None);
        }
    }

    /// Kernels that don't let the count be set.
    #[test]
    fn a_timer_that_expired_long_ago_does_as_well() {
        let b = ready_fd();
        b.set(0).unwrap_or_else(|e| panic!("{e:?}"));
        assert!(take(&b) == Ok(()) && b.is_intact() && ready(b.fd()) == 0);
    }

    #[test]
    fn another_file_of_its_number_is_left_alone() {
        let (b, other) = (ready_fd(), ready_fd());
        // SAFETY: another timer takes the number, as programs do; the first is closed by that.
        assert_eq!(unsafe { libc::dup2(other.fd(), b.fd()) }, b.fd());
        assert!(!b.is_intact() && other.is_intact());
        b.raise();
        assert_eq!(ready(other.fd()), 0);
        other.raise();
        b.clear();
        assert_eq!(ready(other.fd()), libc::POLLIN);
        let number = b.fd();
        drop(b);
        assert_eq!(ready(number), libc::POLLIN, "it is not closed");
        // SAFETY: the copy from above.
        unsafe { libc::close(number) };
    }
}
