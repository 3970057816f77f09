//! Queues of events behind a descriptor that programs poll, read flags of, and block on.

use std::{
    collections::VecDeque,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use parking_lot::Mutex;

use crate::ret::{Errno, Result};

/// Events and an eventfd that is readable while there are some.
///
/// The descriptor may be set to O_NONBLOCK by the program. A blocking take really reads the descriptor, so that signals
/// behave as with the kernel's: with SA_RESTART it goes on, else it ends with EINTR.
pub(crate) struct EventQueue<T> {
    items: Mutex<VecDeque<T>>,
    fd: OwnedFd,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: makes a descriptor, or fails.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(Errno::last());
        }
        Ok(Self {
            items: Mutex::new(VecDeque::new()),
            // SAFETY: just made and ours alone.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn raise(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes of a local. It can only fail when the counter is near 2^64.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// Makes the descriptor unreadable. Called with the items locked.
    fn clear(&self) {
        let mut count = 0u64;
        let iov = libc::iovec {
            iov_base: (&raw mut count).cast(),
            iov_len: 8,
        };
        // A blocked reader may have taken the count already, so this must not wait whatever the program has set.
        // SAFETY: reads into eight bytes of a local.
        unsafe { libc::preadv2(self.fd(), &raw const iov, 1, -1, libc::RWF_NOWAIT) };
    }

    /// Adds an event, unless `dead` says (under the queue's lock) that it is not wanted any more.
    pub(crate) fn push_unless(&self, item: T, dead: impl FnOnce() -> bool) {
        let mut items = self.items.lock();
        if dead() {
            return;
        }
        items.push_back(item);
        if items.len() == 1 {
            self.raise();
        }
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
            self.clear();
        }
        Some(item)
    }

    /// Takes the oldest event, waiting as the descriptor's flags say.
    ///
    /// # Errors
    /// EAGAIN when the descriptor is non-blocking and nothing is there; EINTR.
    pub(crate) fn take(&self, mut taken: impl FnMut(&T)) -> Result<T> {
        loop {
            if let Some(item) = self.try_take(&mut taken) {
                return Ok(item);
            }
            let mut count = 0u64;
            // SAFETY: reads eight bytes into a local.
            let got = unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
            if got < 0 {
                return Err(Errno::last());
            }
            // Several may wait: what was read stands for all that is there.
            if !self.items.lock().is_empty() {
                self.raise();
            }
        }
    }

    /// Removes events; `first` runs before, under the queue's lock.
    pub(crate) fn purge(&self, first: impl FnOnce(), mut unwanted: impl FnMut(&T) -> bool) {
        let mut items = self.items.lock();
        first();
        items.retain(|item| !unwanted(item));
        if items.is_empty() {
            self.clear();
        }
    }
}
