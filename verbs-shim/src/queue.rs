//! Queues of events behind a descriptor that programs poll, read flags of, and block on.

use std::{collections::VecDeque, os::fd::RawFd};

use parking_lot::Mutex;

use crate::{bell::Bell, ret::Result};

/// Events and a descriptor that is readable while there are some.
///
/// The descriptor may be set to O_NONBLOCK by the program. A blocking take really reads the descriptor, so that signals
/// behave as with the kernel's: with SA_RESTART it goes on, else it ends with EINTR.
pub(crate) struct EventQueue<T> {
    items: Mutex<VecDeque<T>>,
    bell: Bell,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            items: Mutex::new(VecDeque::new()),
            bell: Bell::new()?,
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.bell.fd()
    }

    /// Adds an event, unless `dead` says (under the queue's lock) that it is not wanted any more.
    pub(crate) fn push_unless(&self, item: T, dead: impl FnOnce() -> bool) {
        let mut items = self.items.lock();
        if dead() {
            return;
        }
        items.push_back(item);
        self.bell.ring();
    }

    /// Adds an event.
    pub(crate) fn push(&self, item: T) {
        self.push_unless(item, || false);
    }

    /// Takes the oldest event if there is one; `taken` runs under the queue's lock.
    pub(crate) fn try_take(&self, taken: impl FnOnce(&T)) -> Option<T> {
        let mut items = self.items.lock();
        let item = items.pop_front()?;
        taken(&item);
        if items.is_empty() {
            self.bell.silence();
        }
        Some(item)
    }

    /// Takes the oldest event, waiting as the descriptor's flags say.
    ///
    /// # Errors
    /// EAGAIN when the descriptor is non-blocking and nothing is there; EINTR; EBADF when nothing is there and the program
    /// has closed it.
    pub(crate) fn take(&self, mut taken: impl FnMut(&T)) -> Result<T> {
        loop {
            if let Some(item) = self.try_take(&mut taken) {
                return Ok(item);
            }
            self.bell.wait()?;
            // Several may wait: what was read stands for all that is there.
            let items = self.items.lock();
            if !items.is_empty() {
                self.bell.ring();
            }
        }
    }

    /// Removes events; `first` runs before, under the queue's lock.
    pub(crate) fn purge(&self, first: impl FnOnce(), mut unwanted: impl FnMut(&T) -> bool) {
        let mut items = self.items.lock();
        first();
        items.retain(|item| !unwanted(item));
        if items.is_empty() {
            self.bell.silence();
        }
    }
}
