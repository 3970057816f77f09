//! Queues of events behind a descriptor that programs poll, read flags of, and block on.

use std::{collections::VecDeque, ffi::c_void, os::fd::RawFd, ptr};

use parking_lot::Mutex;

use crate::{
    cancel::Wait,
    ready_fd::ReadyFd,
    ret::{self, Errno, Result},
};

/// Events and a descriptor that is readable while there are some.
///
/// The program may set the descriptor to O_NONBLOCK. A blocking call reads the descriptor, so that signals behave as with the
/// kernel's: with SA_RESTART it continues, else it fails with EINTR.
pub(crate) struct EventQueue<T> {
    items: Mutex<VecDeque<T>>,
    ready: ReadyFd,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            items: Mutex::new(VecDeque::new()),
            ready: ReadyFd::new()?,
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.ready.fd()
    }

    /// Adds an event, unless `dead` (called under the queue's lock) returns true.
    pub(crate) fn push_unless(&self, item: T, dead: impl FnOnce() -> bool) {
        let mut items = self.items.lock();
        if dead() {
            return;
        }
        items.push_back(item);
        self.ready.raise();
    }

    /// Adds an event.
    pub(crate) fn push(&self, item: T) {
        self.push_unless(item, || false);
    }

    /// Takes the oldest event, or returns the descriptor to wait for; `taken` runs under the queue's lock.
    ///
    /// # Errors
    /// EBADF when there is no event and the program has closed the descriptor.
    pub(crate) fn take(&self, waited: bool, taken: impl FnOnce(&T)) -> Result<std::result::Result<T, Wait>> {
        let mut items = self.items.lock();
        let Some(item) = items.pop_front() else {
            drop(items);
            return match self.is_intact() {
                true => Ok(Err(self.wait())),
                false => Err(Errno::BADF.because("the program has closed the descriptor of the events")),
            };
        };
        taken(&item);
        match items.is_empty() {
            true => self.ready.clear(),
            // The count that was read stood for all events, and other threads may wait.
            false if waited => self.ready.raise(),
            false => {}
        }
        Ok(Ok(item))
    }

    fn wait(&self) -> Wait {
        extern "C" fn rearm<T>(queue: *mut c_void) {
            ret::value((), || {
                // SAFETY: the queue's address, by `wait`.
                unsafe { &*queue.cast::<EventQueue<T>>() }.rearm();
            });
        }
        // SAFETY: the program does not destroy the queue's object while it waits for it.
        unsafe { Wait::new(self.ready.fd(), rearm::<T>, ptr::from_ref(self).cast_mut().cast()) }
    }

    /// Makes the descriptor readable again if events are left after it was read, which stood for all of them.
    pub(crate) fn rearm(&self) {
        let items = self.items.lock();
        if !items.is_empty() {
            self.ready.raise();
        }
    }

    /// Events waiting.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.items.lock().len()
    }

    /// Whether the program has left the descriptor alone.
    pub(crate) fn is_intact(&self) -> bool {
        self.ready.is_intact()
    }

    /// Gives the descriptor up without closing it.
    pub(crate) fn forget(self) {
        self.ready.forget();
    }

    /// Removes and returns events; `first` runs before, under the queue's lock.
    pub(crate) fn purge(&self, first: impl FnOnce(), unwanted: impl Fn(&T) -> bool) -> Vec<T> {
        let mut items = self.items.lock();
        first();
        let (out, left): (Vec<T>, Vec<T>) = items.drain(..).partition(unwanted);
        *items = left.into();
        if items.is_empty() {
            self.ready.clear();
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let q = EventQueue::new().unwrap_or_else(|e| panic!("{e:?}"));
        let pop = || q.take(false, |_| ()).ok().and_then(std::result::Result::ok);
        assert!(!readable(q.fd()));
        for n in 0..3 {
            q.push(n);
        }
        assert_eq!(pop(), Some(0));
        assert_eq!(q.purge(|| (), |n| *n == 1), [1]);
        assert!(readable(q.fd()));
        assert_eq!(pop(), Some(2));
        assert!(!readable(q.fd()));
        q.push(3);
        assert_eq!(q.purge(|| (), |_| true).len(), 1);
        assert!(!readable(q.fd()), "removed events don't count");
        q.push(4);
        q.push(5);
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        assert_eq!(unsafe { libc::read(q.fd(), (&raw mut count).cast(), 8) }, 8);
        assert!(!readable(q.fd()));
        q.rearm();
        assert!(readable(q.fd()), "another reader has its event, too");
    }
}
