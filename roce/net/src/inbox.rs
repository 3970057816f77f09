//! Input from other parts of the process for the thread that drives a port.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

use parking_lot::Mutex;

use crate::sys::EventFd;

/// Limit of queued packets that came by the wrong socket, and of management datagrams. Both come again if they are lost.
const MAX_WAITING: usize = 1024;

/// A bounded queue whose descriptor is readable when something waits in it.
#[derive(Debug)]
pub struct Inbox<T> {
    letters: Mutex<VecDeque<T>>,
    /// There are letters.
    full: AtomicBool,
    bell: EventFd,
    /// Packets that there was no room for, and that nobody has counted yet.
    lost: AtomicUsize,
}

impl<T> Inbox<T> {
    /// An empty one.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            letters: Mutex::default(),
            full: AtomicBool::new(false),
            bell: EventFd::new()?,
            lost: AtomicUsize::new(0),
        })
    }

    /// False: too much waits already.
    pub fn send(&self, letter: T) -> bool {
        let mut letters = self.letters.lock();
        if letters.len() >= MAX_WAITING {
            return false;
        }
        letters.push_back(letter);
        let first = letters.len() == 1;
        drop(letters);
        if first {
            self.ring();
        }
        true
    }

    /// Sends a message that must not be lost. The caller bounds how many there are.
    pub fn push(&self, letter: T) {
        self.letters.lock().push_back(letter);
        self.ring();
    }

    /// Like [`send`](Self::send); what there is no room for is counted.
    pub fn send_or_lose(&self, letter: T) {
        if !self.send(letter) {
            self.lost.fetch_add(1, SeqCst);
        }
    }

    /// Wakes whoever waits for the descriptor.
    pub fn ring(&self) {
        self.full.store(true, SeqCst);
        self.bell.raise();
    }

    /// Takes all letters.
    pub fn take(&self) -> VecDeque<T> {
        if !self.full.load(SeqCst) || !self.full.swap(false, SeqCst) {
            return VecDeque::new();
        }
        // Before the letters are taken: the first that comes afterwards rings again.
        self.bell.clear();
        std::mem::take(&mut *self.letters.lock())
    }

    /// How many were lost since the last call.
    pub fn take_lost(&self) -> usize {
        match self.lost.load(SeqCst) {
            0 => 0,
            _ => self.lost.swap(0, SeqCst),
        }
    }
}

impl<T> AsFd for Inbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sys::wait_readable;

    fn rings(inbox: &Inbox<u32>) -> bool {
        wait_readable(inbox.as_fd(), Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn letters_come_in_order_and_the_bell_rings_for_the_first() {
        let inbox = Inbox::new().unwrap();
        assert!(!rings(&inbox) && inbox.take().is_empty());
        assert!(inbox.send(1) && inbox.send(2));
        assert!(rings(&inbox));
        assert_eq!(inbox.take(), [1, 2]);
        assert!(!rings(&inbox));
        assert!(inbox.send(3) && rings(&inbox));
    }

    #[test]
    fn what_there_is_no_room_for_is_counted_once() {
        let inbox = Inbox::new().unwrap();
        (0..MAX_WAITING as u32 + 2).for_each(|n| inbox.send_or_lose(n));
        assert_eq!([inbox.take_lost(), inbox.take_lost()], [2, 0]);
        assert_eq!(inbox.take().len(), MAX_WAITING);
        assert!(inbox.send(0));
    }
}
