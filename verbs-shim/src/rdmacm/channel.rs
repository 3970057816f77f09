//! Event channels: an eventfd that counts the events waiting, and the events.

use std::{
    collections::VecDeque,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::atomic::{AtomicU64, Ordering},
};

use super::{Errno, Result, abi::EventResp};

/// An event that waits to be taken.
pub(crate) struct Queued {
    /// The id that it counts for: of a connect request the listener.
    pub(crate) id: u32,
    /// The new id of a connect request.
    pub(crate) request: Option<u32>,
    /// The membership that it is about.
    pub(crate) member: Option<u32>,
    pub(crate) resp: EventResp,
}

/// An event channel. Its descriptor counts (EFD_SEMAPHORE), so that each blocked reader is woken for one event.
pub(crate) struct Channel {
    fd: OwnedFd,
    events: VecDeque<Queued>,
}

impl Channel {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: makes a descriptor, or fails.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(Errno::last());
        }
        // SAFETY: just made and ours alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self {
            fd,
            events: VecDeque::new(),
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Gives the descriptor up without closing it: whoever closes it is at it.
    pub(crate) fn into_fd(self) -> RawFd {
        use std::os::fd::IntoRawFd;
        self.fd.into_raw_fd()
    }

    /// Adds an event and wakes a reader.
    pub(crate) fn push(&mut self, event: Queued) {
        self.events.push_back(event);
        let one = 1u64;
        // SAFETY: writes eight bytes of a local. It can only fail when the counter is near 2^64.
        unsafe { libc::syscall(libc::SYS_write, self.fd(), &raw const one, 8usize) };
    }

    /// Takes the oldest event. The caller has read the descriptor before, once per event.
    pub(crate) fn pop(&mut self) -> Option<Queued> {
        self.events.pop_front()
    }

    /// Takes out all events that `which` says, and what they counted for on the descriptor.
    pub(crate) fn extract(&mut self, which: impl Fn(&Queued) -> bool) -> Vec<Queued> {
        let (out, keep): (Vec<_>, Vec<_>) = self.events.drain(..).partition(which);
        self.events = keep.into();
        for _ in &out {
            let mut count = 0u64;
            let iov = libc::iovec {
                iov_base: (&raw mut count).cast(),
                iov_len: 8,
            };
            // A reader may be ahead of us and find nothing then: it goes back to sleep, so this must never wait.
            // SAFETY: reads into eight bytes of a local.
            unsafe { libc::preadv2(self.fd(), &raw const iov, 1, -1, libc::RWF_NOWAIT) };
        }
        out
    }

    /// Events waiting.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }
}

/// Which descriptors are event channels. Asked for every `write` and `close` of the program, in signal handlers too: no
/// locks.
pub(crate) struct FdSet([AtomicU64; Self::MAX / 64]);

impl FdSet {
    /// Descriptors from here on can't be channels.
    const MAX: usize = 1 << 16;

    pub(crate) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; Self::MAX / 64])
    }

    fn word(&self, fd: RawFd) -> Option<(&AtomicU64, u64)> {
        let fd = usize::try_from(fd).ok()?;
        Some((self.0.get(fd / 64)?, 1 << (fd % 64)))
    }

    pub(crate) fn contains(&self, fd: RawFd) -> bool {
        self.word(fd)
            .is_some_and(|(w, bit)| w.load(Ordering::Acquire) & bit != 0)
    }

    /// # Errors
    /// EMFILE for a descriptor beyond the set.
    pub(crate) fn insert(&self, fd: RawFd) -> Result<()> {
        let (word, bit) = self.word(fd).ok_or(Errno(libc::EMFILE))?;
        word.fetch_or(bit, Ordering::AcqRel);
        Ok(())
    }

    /// Whether it was in the set.
    pub(crate) fn remove(&self, fd: RawFd) -> bool {
        self.word(fd)
            .is_some_and(|(w, bit)| w.fetch_and(!bit, Ordering::AcqRel) & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdmacm::abi::zeroed;

    fn event(id: u32) -> Queued {
        Queued {
            id,
            request: None,
            member: None,
            resp: zeroed(),
        }
    }

    fn readable(fd: RawFd) -> bool {
        let mut p = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: polls one descriptor, at once.
        unsafe { libc::poll(&raw mut p, 1, 0) == 1 }
    }

    fn token(fd: RawFd) {
        let mut n = 0u64;
        // SAFETY: reads eight bytes into a local.
        assert_eq!(unsafe { libc::read(fd, (&raw mut n).cast(), 8) }, 8);
        assert_eq!(n, 1);
    }

    #[test]
    fn the_descriptor_counts_the_events() {
        let mut c = Channel::new().unwrap();
        assert!(!readable(c.fd()));
        for id in 0..3 {
            c.push(event(id));
        }
        token(c.fd());
        assert_eq!(c.pop().map(|e| e.id), Some(0));
        assert_eq!(c.extract(|e| e.id == 1).len(), 1);
        assert!(readable(c.fd()));
        token(c.fd());
        assert_eq!(c.pop().map(|e| e.id), Some(2));
        assert!(!readable(c.fd()), "what was taken out counts no more");
    }

    #[test]
    fn a_set_of_descriptors() {
        static SET: FdSet = FdSet::new();
        assert!(!SET.contains(3) && !SET.contains(-1) && !SET.contains(i32::MAX));
        SET.insert(3).unwrap();
        assert!(SET.contains(3) && !SET.contains(67));
        assert!(SET.remove(3) && !SET.remove(3));
        assert_eq!(SET.insert(1 << 16), Err(Errno(libc::EMFILE)));
    }
}
