//! Who advances a port, and when.
//!
//! A port is locked state that whoever holds the lock advances. The application's own threads do it when they post and
//! when they poll an empty completion queue; the background thread does it when packets arrive or time runs out.
//!
//! While an application polls, a thread that is woken for every packet would only get in its way. So after a streak of
//! *empty* polls the sockets no longer wake the background thread (one `epoll_ctl`); arming a queue and waiting on a channel
//! turn that back on at once, because the program sleeps now, and so does a poll that finds something, because it may spin on
//! memory, unless it has come back to polling often enough before anything else was needed ([`Habit`]). A program that simply
//! stops polling is noticed by the alarm clock, within [`TAKEOVER`], or [`PATIENT_TAKEOVER`] if it has polled for long.
//!
//! What is advanced and what wakes the background thread are traits, and locks and atomics come from `crate::sync`: the tests
//! compile this file with a scheduler's own (`tests/handover.rs`).

use std::{thread, time::Duration};

use roce_verbs::Instant;

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, yield_now};

/// How long a port may be without anybody advancing it after its application stopped polling.
pub const TAKEOVER: Duration = Duration::from_millis(1);
/// The same of one that has polled for long: setting the alarm clock costs as much as a round trip, and nothing is lost meanwhile.
const PATIENT_TAKEOVER: Duration = Duration::from_millis(8);
/// Empty polls in a row until the background thread stands back.
const STREAK: u32 = 16;
/// After so many empty polls (some ten microseconds) a polling thread lets others have the processor for a moment: the
/// peer that it waits for may need it.
const PATIENCE: u32 = 64;

/// What is advanced, under the lock.
pub(crate) trait Moves {
    /// Receives, runs timers that are due, and sends. True: there is more to do.
    fn pass(&mut self, now: Instant) -> bool;
    /// The same for a program that calls again at once.
    fn pass_in_program(&mut self, now: Instant);
    /// Runs timers that are due, and no more than that if none is.
    fn keep_time(&mut self, now: Instant);
    /// Packets that it has received so far.
    fn received(&self) -> u64;
}

/// What it is in.
pub(crate) trait Surroundings {
    /// The time.
    fn now(&self) -> Instant;
    /// Lets arriving packets wake the background thread, or not. Those that wait already wake it at once.
    fn watch(&self, on: bool);
    /// Whether they don't.
    fn standing_back(&self) -> bool;
    /// The background thread is to wake up no later than `at`.
    fn set_alarm(&self, now: Instant, at: Instant);
    /// While it stands back it need not look before `at`.
    fn postpone(&self, now: Instant, at: Instant);
    /// Whether this is a child of the process that all of it belongs to. Its locks may be held for ever here.
    fn is_inherited(&self) -> bool;
    /// Nobody gets in any more. Called once.
    fn closed(&self);
}

/// The device has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device is closed")]
pub struct Closed;

/// Whether a program that has found something polls on, or spins on memory that somebody else has to bring packets to. It is told by
/// whether the background thread had to bring any until the program was back.
#[derive(Default)]
struct Habit {
    /// Times in a row that it was back in time.
    returns: AtomicU32,
    /// As many more than [`RETURNS`] are wanted: it has stayed away for once.
    wanted: AtomicU32,
    /// Passes of the background thread that brought packets, and how many there were when the program was back last.
    brought: AtomicU32,
    known: AtomicU32,
}

/// Returns in a row until a program counts as one that polls on.
const RETURNS: u32 = 16;
/// The most that are wanted of one that has stayed away time and again.
const MOST_RETURNS: u32 = 1 << 14;

impl Habit {
    fn polls_on(&self) -> bool {
        let wanted = RETURNS.saturating_add(self.wanted.load(Ordering::Relaxed));
        self.returns.load(Ordering::Relaxed) >= wanted
    }

    /// How long nobody need look after it.
    fn takeover(&self) -> Duration {
        match self.returns.load(Ordering::Relaxed) >= MOST_RETURNS / 16 {
            true => PATIENT_TAKEOVER,
            false => TAKEOVER,
        }
    }

    /// The program has found something and polls again.
    fn returned(&self) {
        let brought = self.brought.load(Ordering::Relaxed);
        let returns = match self.known.swap(brought, Ordering::Relaxed) == brought {
            true => self.returns.load(Ordering::Relaxed).saturating_add(1),
            false => 0,
        };
        self.returns.store(returns, Ordering::Relaxed);
    }

    /// Packets had waited for a program that was taken for one that polls on.
    fn stayed_away(&self) {
        let wanted = self.wanted.load(Ordering::Relaxed);
        self.wanted
            .store((wanted * 2 + RETURNS).min(MOST_RETURNS), Ordering::Relaxed);
        self.returns.store(0, Ordering::Relaxed);
    }
}

/// What threads share: the port behind its lock, and who of them is to advance it.
pub(crate) struct Handover<M: Moves, S: Surroundings> {
    moved: Mutex<M>,
    around: S,
    closed: AtomicBool,
    /// The background thread found the lock taken and went back to sleep: whoever holds it takes the packets that it
    /// was woken for.
    wanted: AtomicBool,
    /// Polls of the application that found nothing, since the last one that found something.
    empty_polls: AtomicU32,
    habit: Habit,
    /// When the application last polled an empty completion queue, nanoseconds.
    last_poll: AtomicU64,
}

/// The lock, which closes the device when its holder panics: the port may be in any state then.
pub(crate) struct Guard<'a, M: Moves, S: Surroundings> {
    moved: MutexGuard<'a, M>,
    handover: &'a Handover<M, S>,
    /// The thread panicked before it took the lock, and now ends what it has: the port is sound.
    unwinding: bool,
}

impl<M: Moves, S: Surroundings> core::ops::Deref for Guard<'_, M, S> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.moved
    }
}

impl<M: Moves, S: Surroundings> core::ops::DerefMut for Guard<'_, M, S> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.moved
    }
}

impl<'a, M: Moves, S: Surroundings> Guard<'a, M, S> {
    fn new(moved: MutexGuard<'a, M>, handover: &'a Handover<M, S>) -> Self {
        let unwinding = thread::panicking();
        Self {
            moved,
            handover,
            unwinding,
        }
    }
}

impl<M: Moves, S: Surroundings> Drop for Guard<'_, M, S> {
    fn drop(&mut self) {
        if thread::panicking() && !self.unwinding {
            self.handover.close();
        }
    }
}

impl<M: Moves, S: Surroundings> Handover<M, S> {
    pub(crate) fn new(moved: M, around: S) -> Self {
        Self {
            moved: Mutex::new(moved),
            around,
            closed: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            empty_polls: AtomicU32::new(0),
            habit: Habit::default(),
            last_poll: AtomicU64::new(0),
        }
    }

    pub(crate) fn around(&self) -> &S {
        &self.around
    }

    /// Lets nobody in any more.
    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.around.closed();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn is_out_of_reach(&self) -> bool {
        self.is_closed() || self.around.is_inherited()
    }

    /// The lock; whoever has had it may have broken the port with a panic.
    pub(crate) fn lock(&self) -> Result<Guard<'_, M, S>, Closed> {
        if self.is_out_of_reach() {
            return Err(Closed);
        }
        let guard = Guard::new(self.moved.lock(), self);
        if self.is_closed() { Err(Closed) } else { Ok(guard) }
    }

    /// The lock even of what is closed, for what reads and ends.
    pub(crate) fn lock_anyway(&self) -> MutexGuard<'_, M> {
        self.moved.lock()
    }

    fn try_lock(&self) -> Option<Guard<'_, M, S>> {
        if self.is_out_of_reach() {
            return None;
        }
        let guard = Guard::new(self.moved.try_lock()?, self);
        (!self.is_closed()).then_some(guard)
    }

    /// Advances the port in the background thread's stead, if that found the lock taken meanwhile. To be called after each call
    /// that held the lock.
    pub(crate) fn serve_wanted(&self) {
        // Looked at with the lock free: whoever takes it next does the same.
        if !self.wanted.load(Ordering::Acquire) {
            return;
        }
        if let Some(mut guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            guard.pass(self.around.now());
            drop(guard);
            // What is still there, or comes from now on, is the background thread's again.
            self.around.watch(true);
        }
    }

    /// The lock for the background thread. While an application's thread is inside that one is asked to take the
    /// packets too: waiting for it here would only cost a second processor.
    fn lock_or_ask(&self) -> Option<Guard<'_, M, S>> {
        if let Some(guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            return Some(guard);
        }
        self.around.watch(false);
        self.wanted.store(true, Ordering::Release);
        // It may have let go before it could see that.
        if let Some(guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            self.around.watch(true);
            return Some(guard);
        }
        let now = self.around.now();
        self.around.set_alarm(now, now + TAKEOVER);
        None
    }

    /// The application found a completion queue empty: its thread advances the port, unless another does already.
    pub(crate) fn empty_poll(&self) {
        let Some(mut guard) = self.try_lock() else {
            // The holder may wait for this processor.
            yield_now();
            return;
        };
        let (around, now) = (&self.around, self.around.now());
        self.last_poll.store(now.as_nanos(), Ordering::Relaxed);
        let empty = self.empty_polls.load(Ordering::Relaxed).saturating_add(1);
        self.empty_polls.store(empty, Ordering::Relaxed);
        if empty == 1 {
            self.habit.returned();
        }
        let streak = if self.habit.polls_on() { 1 } else { STREAK };
        if empty >= streak && !around.standing_back() {
            around.watch(false);
            around.set_alarm(now, now + TAKEOVER);
        }
        around.postpone(now, now + self.habit.takeover());
        match around.standing_back() && self.habit.polls_on() {
            true => guard.pass_in_program(now),
            false => {
                guard.pass(now);
            }
        }
        drop(guard);
        if empty < STREAK {
            self.serve_wanted();
        } else {
            self.wanted.store(false, Ordering::Release);
        }
        if empty.is_multiple_of(PATIENCE) {
            yield_now();
        }
    }

    /// The application found completions: it may not come back for long, so that packets wake the background thread again, unless it is
    /// one that polls on.
    pub(crate) fn found(&self) {
        match self.around.standing_back() && self.habit.polls_on() {
            true => self.empty_polls.store(0, Ordering::Relaxed),
            false => self.leave_poll(),
        }
    }

    /// The application goes to sleep: packets wake the background thread again.
    pub(crate) fn leave_poll(&self) {
        self.empty_polls.store(0, Ordering::Relaxed);
        if self.around.standing_back() {
            self.around.watch(true);
        }
    }

    /// What the background thread does when it was woken.
    pub(crate) fn woken(&self) {
        let Some(mut guard) = self.lock_or_ask() else {
            return;
        };
        let (around, time) = (&self.around, self.around.now());
        let stood_back = around.standing_back();
        if stood_back {
            let until = Instant::from_nanos(self.last_poll.load(Ordering::Relaxed)) + TAKEOVER;
            if time < until {
                guard.keep_time(time);
                around.set_alarm(time, until);
                return;
            }
            around.watch(true);
        }
        let (before, late) = (guard.received(), stood_back && self.habit.polls_on());
        while guard.pass(around.now()) && !self.is_closed() {
            // Application threads that wait for the lock get it first.
            MutexGuard::bump(&mut guard.moved);
        }
        if guard.received() != before {
            self.habit.brought.fetch_add(1, Ordering::Relaxed);
            if late {
                self.habit.stayed_away();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_polls_on_when_it_was_back_often_enough() {
        crate::sync::model(|| {
            let habit = Habit::default();
            for _ in 0..RETURNS {
                assert!(!habit.polls_on());
                habit.returned();
            }
            assert!(habit.polls_on());
            // The background thread brought packets meanwhile: it spins on memory.
            habit.brought.fetch_add(1, Ordering::Relaxed);
            habit.returned();
            assert!(!habit.polls_on());
        });
    }

    #[test]
    fn who_stays_away_has_to_come_back_more_often_and_not_for_ever_more() {
        crate::sync::model(|| {
            let habit = Habit::default();
            let needed = || RETURNS + habit.wanted.load(Ordering::Relaxed);
            let mut before = needed();
            for _ in 0..20 {
                habit.stayed_away();
                assert!(!habit.polls_on());
                let now = needed();
                assert!(now > before || now == RETURNS + MOST_RETURNS, "{now} after {before}");
                before = now;
            }
            assert_eq!(before, RETURNS + MOST_RETURNS);
            habit.returns.store(before, Ordering::Relaxed);
            assert!(habit.polls_on());
        });
    }
}
