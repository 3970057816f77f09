//! Queues of events with a descriptor that says whether something is in them.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use roce_net::{EventFd, Waiter};
use roce_verbs::provider::VerbsError;

use crate::error::io_error;

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    closed: bool,
}

/// A queue of events. Its descriptor is readable while an event waits, and for ever once it is closed.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    state: Mutex<State<T>>,
    fd: EventFd,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::new(State {
                items: VecDeque::new(),
                closed: false,
            }),
            fd: EventFd::new()?,
        })
    }

    /// Adds an event. Gives it back when the queue is closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        if state.items.len() == 1 {
            self.fd.raise();
        }
        Ok(())
    }

    /// Takes the oldest event.
    ///
    /// # Errors
    /// When none is left and the queue is closed.
    pub(crate) fn pop(&self) -> Result<Option<T>, VerbsError> {
        let mut state = self.state.lock();
        let item = state.items.pop_front();
        match &item {
            None if state.closed => return Err(VerbsError::Closed),
            Some(_) if state.items.is_empty() && !state.closed => self.fd.clear(),
            _ => {}
        }
        Ok(item)
    }

    /// Drops the events that wait and that `keep` does not want.
    pub(crate) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let mut state = self.state.lock();
        if state.items.is_empty() {
            return;
        }
        state.items.retain(keep);
        if state.items.is_empty() && !state.closed {
            self.fd.clear();
        }
    }

    /// Events waiting.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().items.len()
    }

    /// Lets nothing more in, and wakes whoever waits.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.fd.raise();
    }

    /// Sleeps until the descriptor is readable, at most until `deadline`, and for `slice`. Handles packets of the ports that come in that
    /// time. False: the deadline is past.
    pub(crate) fn sleep(
        &self,
        deadline: Option<Instant>,
        slice: Option<Duration>,
        ports: &mut [Waiter<'_>],
    ) -> Result<bool, VerbsError> {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(false);
        }
        let timeout = left.into_iter().chain(slice).min();
        roce_net::wait(self.fd.as_fd(), ports, timeout).map_err(io_error("waiting for an event"))?;
        Ok(true)
    }
}

impl<T> AsFd for EventQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the point in time after `timeout`; `None` is never.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|t| Instant::now().checked_add(t))
}
