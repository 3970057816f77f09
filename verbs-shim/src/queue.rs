//! Queues of events behind a descriptor that programs poll, read flags of, and block on.

use std::{collections::VecDeque, ffi::c_void, os::fd::RawFd, ptr};

use parking_lot::Mutex;

use crate::{
    bell::Bell,
    cancel::Wait,
    ret::{self, Errno, Result},
};

/// Events and a descriptor that is readable while there are some.
///
/// The program may set the descriptor to O_NONBLOCK. A blocking call reads the descriptor, so that signals behave as with the
/// kernel's: with SA_RESTART it goes on, else it ends with EINTR.
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

    /// Takes the oldest event, or returns the descriptor to wait for; `taken` runs under the queue's lock.
    ///
    /// # Errors
    /// EBADF when there is no event and the program has closed the descriptor.
    pub(crate) fn take(&self, waited: bool, taken: impl FnOnce(&T)) -> Result<std::result::Result<T, Wait>> {
        let mut items = self.items.lock();
        let Some(item) = items.pop_front() else {
            drop(items);
            return match self.bell.is_there() {
                true => Ok(Err(self.wait())),
                false => Err(Errno::BADF.because("the program has closed the descriptor of the events")),
            };
        };
        taken(&item);
        match items.is_empty() {
            true => self.bell.silence(),
            // The count that was read stood for all events, and other threads may wait.
            false if waited => self.bell.ring(),
            false => {}
        }
        Ok(Ok(item))
    }

    fn wait(&self) -> Wait {
        extern "C" fn rearm<T>(queue: *mut c_void) {
            ret::value((), || {
                // SAFETY: the queue's address, by `wait`.
                let queue = unsafe { &*queue.cast::<EventQueue<T>>() };
                let items = queue.items.lock();
                if !items.is_empty() {
                    queue.bell.ring();
                }
            });
        }
        // SAFETY: the program does not destroy the queue's object while it waits for it.
        unsafe { Wait::new(self.bell.fd(), rearm::<T>, ptr::from_ref(self).cast_mut().cast()) }
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
