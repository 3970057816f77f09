//! Events of loops, for the thread that has the handle: a bounded queue that drops what is not read, and counts it.

use std::{
    collections::VecDeque,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

/// Events that wait to be read at most; further ones are dropped.
const MAX_EVENTS: usize = 1024;

struct Shared<E> {
    state: Mutex<State<E>>,
    added: Condvar,
    /// Makes the event that reports dropped ones.
    notice: fn(u64) -> E,
}

struct State<E> {
    events: VecDeque<E>,
    /// Events dropped since the last notice.
    lost: u64,
}

/// The loops' end.
pub(crate) struct EventSender<E>(Arc<Shared<E>>);

/// The reader's end.
pub(crate) struct EventReceiver<E>(Arc<Shared<E>>);

/// Makes a queue; `notice` makes the event that says how many were dropped.
pub(crate) fn queue<E>(notice: fn(u64) -> E) -> (EventSender<E>, EventReceiver<E>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            events: VecDeque::new(),
            lost: 0,
        }),
        added: Condvar::new(),
        notice,
    });
    (EventSender(shared.clone()), EventReceiver(shared))
}

impl<E> EventSender<E> {
    /// Queues an event, or drops and counts it when there is no room.
    pub(crate) fn report(&self, event: E) {
        self.add(event, MAX_EVENTS);
    }

    /// Queues an event that is never dropped: there are few of its kind.
    pub(crate) fn send(&self, event: E) {
        self.add(event, usize::MAX);
    }

    fn add(&self, event: E, room: usize) {
        let mut state = self.0.state.lock();
        if state.events.len() >= room {
            state.lost += 1;
            return;
        }
        self.0.add_notice(&mut state);
        state.events.push_back(event);
        self.0.added.notify_one();
    }
}

impl<E> Shared<E> {
    fn add_notice(&self, state: &mut State<E>) {
        if state.lost > 0 {
            let notice = (self.notice)(std::mem::take(&mut state.lost));
            state.events.push_back(notice);
        }
    }
}

impl<E> EventReceiver<E> {
    /// The next event; `None` after this time.
    pub(crate) fn next(&self, time: Duration) -> Option<E> {
        let until = Instant::now() + time;
        let mut state = self.0.state.lock();
        loop {
            if state.events.is_empty() {
                self.0.add_notice(&mut state);
            }
            let event = state.events.pop_front();
            if event.is_some() || self.0.added.wait_until(&mut state, until).timed_out() {
                return event.or_else(|| state.events.pop_front());
            }
        }
    }
}

impl<E> Clone for EventSender<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<E> fmt::Debug for EventSender<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventSender").finish_non_exhaustive()
    }
}

impl<E> fmt::Debug for EventReceiver<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventReceiver").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_read_is_dropped_and_counted() {
        let (send, receive) = queue(|lost| 1_000_000 + lost);
        (0..MAX_EVENTS as u64 + 7).for_each(|n| send.report(n));
        send.send(42);
        let next = || receive.next(Duration::ZERO);
        assert!((0..MAX_EVENTS as u64).all(|n| next() == Some(n)));
        assert_eq!((next(), next()), (Some(1_000_007), Some(42)));
        assert_eq!(next(), None);
        (0..=MAX_EVENTS as u64).for_each(|n| send.report(n));
        assert!((0..MAX_EVENTS as u64).all(|n| next() == Some(n)));
        assert_eq!((next(), next()), (Some(1_000_001), None));
    }

    #[test]
    fn an_event_wakes_its_reader() {
        let (send, receive) = queue(|lost| lost);
        let reader = std::thread::spawn(move || receive.next(Duration::from_secs(60)));
        send.report(5);
        assert_eq!(reader.join().unwrap(), Some(5));
    }
}
