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

/// Bounded queue with a descriptor that is readable while messages wait.
#[derive(Debug)]
pub struct Inbox<T> {
    messages: Mutex<VecDeque<T>>,
    /// Messages wait.
    full: AtomicBool,
    event: EventFd,
    /// Messages lost since the last [`Inbox::take_lost`].
    lost: AtomicUsize,
}

impl<T> Inbox<T> {
    /// Creates an empty inbox.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            messages: Mutex::default(),
            full: AtomicBool::new(false),
            event: EventFd::new()?,
            lost: AtomicUsize::new(0),
        })
    }

    /// Sends a message. Returns false if too many wait already.
    pub fn send(&self, message: T) -> bool {
        let mut messages = self.messages.lock();
        if messages.len() >= MAX_WAITING {
            return false;
        }
        messages.push_back(message);
        let first = messages.len() == 1;
        drop(messages);
        if first {
            self.ring();
        }
        true
    }

    /// Sends a message that must not be lost. The caller bounds how many there are.
    pub fn push(&self, message: T) {
        self.messages.lock().push_back(message);
        self.ring();
    }

    /// Sends a message, or counts it as lost if too many wait already.
    pub fn send_or_lose(&self, message: T) {
        if !self.send(message) {
            self.lost.fetch_add(1, SeqCst);
        }
    }

    /// Makes the descriptor readable.
    fn ring(&self) {
        self.full.store(true, SeqCst);
        self.event.raise();
    }

    /// Takes all messages.
    pub fn take(&self) -> VecDeque<T> {
        if !self.full.load(SeqCst) || !self.full.swap(false, SeqCst) {
            return VecDeque::new();
        }
        // Before the messages are taken, so that the first later one makes the descriptor readable again.
        self.event.clear();
        std::mem::take(&mut *self.messages.lock())
    }

    /// Returns how many messages were lost since the last call.
    pub fn take_lost(&self) -> usize {
        match self.lost.load(SeqCst) {
            0 => 0,
            _ => self.lost.swap(0, SeqCst),
        }
    }
}

impl<T> AsFd for Inbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
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
    fn messages_come_in_order_and_the_first_raises_the_event() {
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
