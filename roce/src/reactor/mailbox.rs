//! Mailbox of a loop, for other threads.

use std::{
    collections::VecDeque,
    mem,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
};

use mio::Waker;
use parking_lot::Mutex;

/// Messages to one loop, from any thread and in the order in which they are sent. Sending rings the loop's waker only when the
/// loop is asleep, and looking for messages takes no lock when there are none.
pub(crate) struct Mailbox<T> {
    /// `None`: the loop has ended.
    messages: Mutex<Option<VecDeque<T>>>,
    /// There are messages.
    full: AtomicBool,
    /// The loop waits for its descriptors, or is about to.
    asleep: AtomicBool,
    waker: Waker,
    rings: AtomicU64,
}

debug!(Mailbox<T>, "Mailbox" [T], |this| full: this.full);

impl<T> Mailbox<T> {
    /// Creates an empty mailbox. `waker` ends the wait of the loop that it is for.
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            messages: Mutex::new(Some(VecDeque::new())),
            full: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            waker,
            rings: AtomicU64::new(0),
        }
    }

    /// Sends a message. After [`close`](Self::close) it is dropped.
    pub(crate) fn send(&self, message: T) {
        match self.messages.lock().as_mut() {
            Some(messages) => messages.push_back(message),
            None => return,
        }
        // The loop says that it sleeps and then looks for messages; here it is the other way round. So at least one of the two
        // sees the other.
        self.full.store(true, SeqCst);
        if self.asleep.swap(false, SeqCst) {
            self.rings.fetch_add(1, Relaxed);
            if let Err(e) = self.waker.wake() {
                tracing::error!("a loop was not woken: {e}");
            }
        }
    }

    /// Whether there are messages.
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(SeqCst)
    }

    /// Moves the messages to `out`. For the loop alone.
    pub(crate) fn take(&self, out: &mut VecDeque<T>) {
        if !self.full.swap(false, SeqCst) {
            return;
        }
        let mut messages = self.messages.lock();
        let Some(messages) = messages.as_mut() else { return };
        if out.is_empty() {
            mem::swap(messages, out);
        } else {
            out.append(messages);
        }
    }

    /// Drops what is there and all that comes, so that threads that wait for an answer learn that there will be none. For the loop
    /// alone, at its end.
    pub(crate) fn close(&self) {
        // Without the lock: a message may hold the last handle of another mailbox.
        let messages = self.messages.lock().take();
        drop(messages);
    }

    /// Has the waker rung for the next message, until [`wake_up`](Self::wake_up). False: there are messages already. For the loop
    /// alone.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, SeqCst);
        !self.is_full()
    }

    /// The loop runs again, and looks for messages by itself.
    pub(crate) fn wake_up(&self) {
        self.asleep.store(false, SeqCst);
    }

    /// Returns how often the waker was rung.
    pub(crate) fn rings(&self) -> u64 {
        self.rings.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, atomic::AtomicU32},
        thread,
        time::Duration,
    };

    use mio::{Events, Poll, Token};

    use super::*;

    const ROUNDS: u32 = 100_000;
    /// Time after which a message counts as lost.
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn mailbox<T>() -> (Poll, Arc<Mailbox<T>>) {
        let poll = Poll::new().unwrap();
        let waker = Waker::new(poll.registry(), Token(0)).unwrap();
        (poll, Arc::new(Mailbox::new(waker)))
    }

    /// Waits until there are messages.
    fn receive<T>(poll: &mut Poll, mailbox: &Mailbox<T>, out: &mut VecDeque<T>) {
        let mut events = Events::with_capacity(4);
        loop {
            mailbox.take(out);
            if !out.is_empty() {
                return;
            }
            if mailbox.fall_asleep() {
                poll.poll(&mut events, Some(TIMEOUT)).unwrap();
                assert!(!events.is_empty(), "nobody rang");
            }
            mailbox.wake_up();
        }
    }

    /// The sender is awake all the time, and sends the next message when the loop is about to fall asleep after the last.
    #[test]
    fn no_wake_up_is_lost() {
        let (mut poll, to) = mailbox();
        let from = to.clone();
        let answered = Arc::new(AtomicU32::new(0));
        let seen = answered.clone();
        let sender = thread::spawn(move || {
            for round in 1..=ROUNDS {
                // A moment that is another every time: a message comes at every point of falling asleep.
                (0..round % 256).for_each(|_| std::hint::spin_loop());
                from.send(round);
                let mut looks = 0;
                while seen.load(SeqCst) < round {
                    looks += 1;
                    // The loop may need this processor.
                    if looks % 100 == 0 {
                        thread::yield_now();
                    }
                }
            }
        });
        let mut messages = VecDeque::new();
        for round in 1..=ROUNDS {
            receive(&mut poll, &to, &mut messages);
            assert_eq!(messages.pop_front(), Some(round));
            answered.store(round, SeqCst);
        }
        sender.join().unwrap();
    }

    #[test]
    fn messages_come_in_order_from_a_sender_that_does_not_wait() {
        let (mut poll, to) = mailbox();
        let from = to.clone();
        let sender = thread::spawn(move || (0..ROUNDS).for_each(|n| from.send(n)));
        let (mut messages, mut expected) = (VecDeque::new(), 0);
        while expected < ROUNDS {
            receive(&mut poll, &to, &mut messages);
            for n in messages.drain(..) {
                assert_eq!(n, expected);
                expected += 1;
            }
        }
        sender.join().unwrap();
    }

    #[test]
    fn a_closed_mailbox_drops_what_is_there_and_what_comes() {
        let (_poll, mailbox) = mailbox();
        let message = Arc::new(());
        mailbox.send(message.clone());
        mailbox.close();
        assert_eq!(Arc::strong_count(&message), 1);
        mailbox.send(message.clone());
        assert_eq!(Arc::strong_count(&message), 1);
        let mut messages = VecDeque::new();
        mailbox.take(&mut messages);
        assert!(messages.is_empty());
    }

    #[test]
    fn a_loop_that_is_awake_is_not_rung() {
        let (_poll, mailbox) = mailbox();
        for n in 0..10 {
            mailbox.send(n);
        }
        assert_eq!(mailbox.rings(), 0);
        assert!(!mailbox.fall_asleep());
        mailbox.wake_up();
        let mut messages = VecDeque::from([100]);
        mailbox.take(&mut messages);
        assert_eq!(messages.len(), 11);
        assert!(mailbox.fall_asleep());
        mailbox.send(11);
        mailbox.send(12);
        mailbox.wake_up();
        assert_eq!(mailbox.rings(), 1, "once is enough");
    }
}
