//! Event channels: the events waiting, and a descriptor that is readable while there are some.

use std::{
    collections::VecDeque,
    os::fd::RawFd,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{Errno, Result, abi::EventResp};
use crate::bell::Bell;

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

/// An event channel.
pub(crate) struct Channel {
    bell: Bell,
    events: VecDeque<Queued>,
}

impl Channel {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            bell: Bell::new()?,
            events: VecDeque::new(),
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.bell.fd()
    }

    /// Gives the descriptor up without closing it: whoever closes it is at it.
    pub(crate) fn give_up(self) {
        self.bell.forget();
    }

    /// Whether the program has left its descriptor alone.
    pub(crate) fn is_there(&self) -> bool {
        self.bell.is_there()
    }

    /// Adds an event and wakes who waits.
    pub(crate) fn push(&mut self, event: Queued) {
        self.events.push_back(event);
        self.bell.ring();
    }

    /// Takes the oldest event.
    pub(crate) fn pop(&mut self) -> Option<Queued> {
        let event = self.events.pop_front();
        self.settle();
        event
    }

    /// Makes the descriptor unreadable if nothing waits.
    fn settle(&self) {
        if self.events.is_empty() {
            self.bell.silence();
        }
    }

    /// Somebody has read the descriptor, which stood for all that is there.
    pub(crate) fn was_read(&self) {
        if !self.events.is_empty() {
            self.bell.ring();
        }
    }

    /// Takes out all events that `which` says.
    pub(crate) fn extract(&mut self, which: impl Fn(&Queued) -> bool) -> Vec<Queued> {
        let (out, keep): (Vec<_>, Vec<_>) = self.events.drain(..).partition(which);
        self.events = keep.into();
        self.settle();
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

    #[test]
    fn the_descriptor_is_readable_while_events_wait() {
        let mut c = Channel::new().unwrap();
        assert!(!readable(c.fd()));
        for id in 0..3 {
            c.push(event(id));
        }
        assert_eq!(c.pop().map(|e| e.id), Some(0));
        assert_eq!(c.extract(|e| e.id == 1).len(), 1);
        assert!(readable(c.fd()));
        assert_eq!(c.pop().map(|e| e.id), Some(2));
        assert!(!readable(c.fd()));
        c.push(event(3));
        assert_eq!(c.extract(|_| true).len(), 1);
        assert!(!readable(c.fd()), "what was taken out counts no more");
        c.push(event(4));
        c.push(event(5));
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        assert_eq!(unsafe { libc::read(c.fd(), (&raw mut count).cast(), 8) }, 8);
        assert!(!readable(c.fd()));
        c.was_read();
        assert!(readable(c.fd()), "another reader has its event, too");
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
