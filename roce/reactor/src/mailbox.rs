//! Mailbox of a loop, for other threads.

use std::{
    collections::VecDeque,
    fmt, mem,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
};

use mio::Waker;
use parking_lot::Mutex;

/// Letters to one loop, from any thread and in the order in which they are sent. Sending rings the loop's waker only when the
/// loop is asleep, and looking for letters takes no lock when there are none.
pub struct Mailbox<T> {
    /// `None`: nobody will look any more.
    letters: Mutex<Option<VecDeque<T>>>,
    /// There are letters.
    full: AtomicBool,
    /// The loop waits for its descriptors, or is about to.
    asleep: AtomicBool,
    waker: Waker,
    rings: AtomicU64,
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox")
            .field("full", &self.full)
            .finish_non_exhaustive()
    }
}

impl<T> Mailbox<T> {
    /// An empty one. `waker` ends the wait of the loop that it is for.
    pub fn new(waker: Waker) -> Self {
        Self {
            letters: Mutex::new(Some(VecDeque::new())),
            full: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            waker,
            rings: AtomicU64::new(0),
        }
    }

    /// Sends a letter. After [`close`](Self::close) it is dropped.
    pub fn send(&self, letter: T) {
        match self.letters.lock().as_mut() {
            Some(letters) => letters.push_back(letter),
            None => return,
        }
        // The loop says that it sleeps and then looks for letters; here it is the other way round. So at least one of the two
        // sees the other.
        self.full.store(true, SeqCst);
        if self.asleep.swap(false, SeqCst) {
            self.rings.fetch_add(1, Relaxed);
            if let Err(e) = self.waker.wake() {
                tracing::error!("a loop was not woken: {e}");
            }
        }
    }

    /// Whether there are letters.
    pub fn is_full(&self) -> bool {
        self.full.load(SeqCst)
    }

    /// Moves the letters to `out`. For the loop alone.
    pub fn take(&self, out: &mut VecDeque<T>) {
        if !self.full.swap(false, SeqCst) {
            return;
        }
        let mut letters = self.letters.lock();
        let Some(letters) = letters.as_mut() else { return };
        if out.is_empty() {
            mem::swap(letters, out);
        } else {
            out.append(letters);
        }
    }

    /// Drops what is there and all that comes, so that who waits for an answer learns that there will be none. For the loop
    /// alone, at its end.
    pub fn close(&self) {
        // Without the lock: a letter may hold the last handle of another mailbox.
        let letters = self.letters.lock().take();
        drop(letters);
    }

    /// Runs `wait`, which a letter's arrival ends; it is told whether it may wait at all, or letters are there already. For
    /// the loop alone.
    pub fn asleep<R>(&self, wait: impl FnOnce(bool) -> R) -> R {
        let result = wait(self.fall_asleep());
        self.wake_up();
        result
    }

    /// Has the waker rung for the next letter, until [`wake_up`](Self::wake_up). False: there are letters already. For the loop
    /// alone.
    pub fn fall_asleep(&self) -> bool {
        self.asleep.store(true, SeqCst);
        !self.is_full()
    }

    /// The loop runs again, and looks for letters by itself.
    pub fn wake_up(&self) {
        self.asleep.store(false, SeqCst);
    }

    /// How often the waker was rung.
    pub fn rings(&self) -> u64 {
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
    const PATIENCE: Duration = Duration::from_secs(60);

    fn mailbox<T>() -> (Poll, Arc<Mailbox<T>>) {
        let poll = Poll::new().unwrap();
        let waker = Waker::new(poll.registry(), Token(0)).unwrap();
        (poll, Arc::new(Mailbox::new(waker)))
    }

    /// Waits until there are letters.
    fn receive<T>(poll: &mut Poll, mailbox: &Mailbox<T>, out: &mut VecDeque<T>) {
        let mut events = Events::with_capacity(4);
        loop {
            mailbox.take(out);
            if !out.is_empty() {
                return;
            }
            let lost = mailbox.asleep(|may_wait| {
                if !may_wait {
                    return false;
                }
                poll.poll(&mut events, Some(PATIENCE)).unwrap();
                events.is_empty()
            });
            assert!(!lost, "nobody rang");
        }
    }

    /// The sender is awake all the time, and sends the next letter when the loop is about to fall asleep after the last.
    #[test]
    fn no_wake_up_is_lost() {
        let (mut poll, to) = mailbox();
        let from = to.clone();
        let answered = Arc::new(AtomicU32::new(0));
        let seen = answered.clone();
        let sender = thread::spawn(move || {
            for round in 1..=ROUNDS {
                // A moment that is another every time: a letter comes at every point of falling asleep.
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
        let mut letters = VecDeque::new();
        for round in 1..=ROUNDS {
            receive(&mut poll, &to, &mut letters);
            assert_eq!(letters.pop_front(), Some(round));
            answered.store(round, SeqCst);
        }
        sender.join().unwrap();
    }

    #[test]
    fn letters_come_in_order_from_a_sender_that_does_not_wait() {
        let (mut poll, to) = mailbox();
        let from = to.clone();
        let sender = thread::spawn(move || (0..ROUNDS).for_each(|n| from.send(n)));
        let (mut letters, mut expected) = (VecDeque::new(), 0);
        while expected < ROUNDS {
            receive(&mut poll, &to, &mut letters);
            for n in letters.drain(..) {
                assert_eq!(n, expected);
                expected += 1;
            }
        }
        sender.join().unwrap();
    }

    #[test]
    fn a_closed_mailbox_drops_what_is_there_and_what_comes() {
        let (_poll, mailbox) = mailbox();
        let letter = Arc::new(());
        mailbox.send(letter.clone());
        mailbox.close();
        assert_eq!(Arc::strong_count(&letter), 1);
        mailbox.send(letter.clone());
        assert_eq!(Arc::strong_count(&letter), 1);
        let mut letters = VecDeque::new();
        mailbox.take(&mut letters);
        assert!(letters.is_empty());
    }

    #[test]
    fn a_loop_that_is_awake_is_not_rung() {
        let (_poll, mailbox) = mailbox();
        for n in 0..10 {
            mailbox.send(n);
        }
        assert_eq!(mailbox.rings(), 0);
        mailbox.asleep(|may_wait| assert!(!may_wait));
        let mut letters = VecDeque::from([100]);
        mailbox.take(&mut letters);
        assert_eq!(letters.len(), 11);
        mailbox.asleep(|may_wait| {
            assert!(may_wait);
            mailbox.send(11);
            mailbox.send(12);
        });
        assert_eq!(mailbox.rings(), 1, "once is enough");
    }
}
