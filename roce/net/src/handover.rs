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
//! A program that sleeps for completions *attends*: its thread sleeps for the packets too, and the background thread has only the
//! timers, so that a packet wakes one thread and not two after each other. One thread at a time does. If it has been back early
//! enough every time, nothing changes hands while it is away, and the alarm clock looks after it as after one that polls.
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
/// Polls of a program that looks once more before and after it asks for an event, and then sleeps.
const LAST_LOOKS: u32 = 2;
/// Empty polls in a row of a program that waits by polling, if at times: it has a processor of its own to spin on, and looks itself.
const INSISTS: u32 = 4;
const INSISTED_LATELY: Duration = Duration::from_millis(10);
/// After so many empty polls (some ten microseconds) a polling thread lets others have the processor for a moment: the
/// peer that it waits for may need it.
const PATIENCE: u32 = 64;

/// What is advanced, under the lock.
pub(crate) trait Moves {
    /// Receives, runs timers that are due, and sends. True: there is more to do.
    fn pass(&mut self, now: Instant) -> bool;
    /// The same for a program that calls again at once.
    fn pass_in_program(&mut self, now: Instant) -> bool;
    /// Runs timers that are due, and no more than that if none is. True: there is more to do.
    fn keep_time(&mut self, now: Instant) -> bool;
    /// Packets that it has received so far.
    fn received(&self) -> u64;
    /// Datagrams that it has received so far: packets that came merged are one.
    fn datagrams(&self) -> u64;
}

/// What the background thread is woken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Watch {
    /// Packets and timers.
    All,
    /// Timers: a thread of the program sleeps for the packets.
    Timers,
    /// Nothing but to look whether the program still polls: it stands back.
    Nothing,
}

/// What it is in.
pub(crate) trait Surroundings {
    /// The time.
    fn now(&self) -> Instant;
    /// What is to wake the background thread. Packets that wait already wake it at once.
    fn watch(&self, what: Watch);
    fn watching(&self) -> Watch;
    /// The background thread is to wake up no later than `at`. While it stands back the alarm that there is will do.
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

/// Whether a program that has found something polls on, or spins on memory that somebody else has to bring packets to; or whether one that
/// was woken soon sleeps again. It is told by whether somebody else had to bring packets until the program was back, or it was back
/// [`SOON`].
#[derive(Default)]
struct Habit {
    /// Times in a row that it was back in time.
    returns: AtomicU32,
    /// As many more than [`RETURNS`] are wanted: it has stayed away for once.
    wanted: AtomicU32,
    /// Passes of others that brought packets, and how many there were when the program was back last.
    brought: AtomicU32,
    known: AtomicU32,
}

/// A program that sleeps again within this time has hardly kept anybody waiting.
const SOON: Duration = Duration::from_micros(50);
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

    /// The program has found something and polls again, or sleeps again.
    fn returned(&self, soon: bool) {
        let brought = self.brought.load(Ordering::Relaxed);
        let returns = match self.known.swap(brought, Ordering::Relaxed) == brought || soon {
            true => self.returns.load(Ordering::Relaxed).saturating_add(1),
            false => 0,
        };
        self.returns.store(returns, Ordering::Relaxed);
    }

    /// Somebody else has brought packets.
    fn note_brought(&self) {
        self.brought.fetch_add(1, Ordering::Relaxed);
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
    /// When the application last polled an empty completion queue, or was woken, nanoseconds.
    last_poll: AtomicU64,
    /// When it last polled in vain [`INSISTS`] times in a row, nanoseconds.
    last_insisted: AtomicU64,
    /// Threads that sleep for completions, and whether one of them attends.
    sleepers: AtomicU32,
    attended: AtomicBool,
    /// Of programs that attend.
    attending: Habit,
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
            last_insisted: AtomicU64::new(0),
            sleepers: AtomicU32::new(0),
            attended: AtomicBool::new(false),
            attending: Habit::default(),
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
            self.resume();
        }
    }

    /// What is still there, or comes from now on, is the background thread's again, or a sleeping program's.
    fn resume(&self) {
        if self.attended.load(Ordering::Acquire) {
            // It may be gone in a moment.
            let now = self.around.now();
            self.around.watch(Watch::Timers);
            self.around.set_alarm(now, now + TAKEOVER);
        } else {
            self.around.watch(Watch::All);
        }
    }

    /// The lock for the background thread. While an application's thread is inside that one is asked to take the
    /// packets too: waiting for it here would only cost a second processor.
    fn lock_or_ask(&self) -> Option<Guard<'_, M, S>> {
        if let Some(guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            return Some(guard);
        }
        let packets = self.around.watching() == Watch::All;
        if packets {
            self.around.watch(Watch::Nothing);
        }
        self.wanted.store(true, Ordering::Release);
        // It may have let go before it could see that.
        if let Some(guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            if packets {
                self.around.watch(Watch::All);
            }
            return Some(guard);
        }
        let now = self.around.now();
        self.around.set_alarm(now, now + TAKEOVER);
        None
    }

    /// The application found a completion queue empty: its thread advances the port, unless another does already.
    pub(crate) fn empty_poll(&self) {
        if self.is_about_to_attend() {
            return;
        }
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
            self.habit.returned(false);
        }
        if empty == INSISTS {
            self.last_insisted.store(now.as_nanos(), Ordering::Relaxed);
        }
        let streak = if self.habit.polls_on() { 1 } else { STREAK };
        if empty >= streak && around.watching() != Watch::Nothing {
            around.watch(Watch::Nothing);
            around.set_alarm(now, now + TAKEOVER);
        }
        around.postpone(now, now + self.habit.takeover());
        match self.polls_on() {
            true => guard.pass_in_program(now),
            false => guard.pass(now),
        };
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
        match self.polls_on() {
            true => self.empty_polls.store(0, Ordering::Relaxed),
            false => self.leave_poll(),
        }
    }

    /// The application goes to sleep: packets wake the background thread again.
    pub(crate) fn leave_poll(&self) {
        self.empty_polls.store(0, Ordering::Relaxed);
        if self.around.watching() == Watch::Nothing {
            self.around.watch(Watch::All);
        }
    }

    fn polls_on(&self) -> bool {
        self.around.watching() == Watch::Nothing && self.habit.polls_on()
    }

    /// The calling thread is about to sleep for completions. True: for the packets too, until [`Handover::leave`].
    pub(crate) fn attend(&self) -> bool {
        let alone = self.sleepers.fetch_add(1, Ordering::AcqRel) == 0;
        if self.around.watching() == Watch::Nothing {
            // Another thread polls.
            self.leave_poll();
            return false;
        }
        self.empty_polls.store(0, Ordering::Relaxed);
        if alone {
            let away = Instant::from_nanos(self.last_poll.load(Ordering::Relaxed));
            self.attending
                .returned(self.around.now().saturating_since(away) <= SOON);
            self.attended.store(true, Ordering::Release);
            self.around.watch(Watch::Timers);
            // What the program has not sent goes before it sleeps.
            if let Some(mut guard) = self.try_lock() {
                let now = self.around.now();
                if guard.keep_time(now) {
                    self.around.set_alarm(now, now);
                }
                drop(guard);
                self.serve_wanted();
            }
        }
        alone
    }

    /// Whether the thread that polls is one that will soon sleep for packets, of which it need not know sooner.
    fn is_about_to_attend(&self) -> bool {
        let away = self.around.watching() == Watch::Timers && !self.attended.load(Ordering::Acquire);
        away && self.attending.polls_on() && self.empty_polls.fetch_add(1, Ordering::Relaxed) < LAST_LOOKS
    }

    /// Whether the thread that attends still is to. If not another one polls, or the background thread has the packets: it sleeps on for
    /// completions only.
    pub(crate) fn still_attends(&self) -> bool {
        let attends = self.around.watching() == Watch::Timers;
        if !attends {
            self.attended.store(false, Ordering::Release);
        }
        attends
    }

    /// The thread that attends has been woken by packets. True: there is more to do.
    pub(crate) fn packets_came(&self) -> bool {
        // Closed: whoever waits is told.
        let Ok(mut guard) = self.lock() else { return false };
        let (before, now) = (guard.received(), self.around.now());
        let more = match self.attending.polls_on() {
            true => guard.pass_in_program(now),
            false => guard.pass(now),
        };
        let some = guard.received() != before;
        drop(guard);
        self.serve_wanted();
        if some {
            self.habit.note_brought();
        }
        more
    }

    /// The calling thread sleeps no more. Whether it attends still, and what [`Handover::packets_came`] said last.
    pub(crate) fn leave(&self, attending: bool, more: bool) {
        if attending {
            self.attended.store(false, Ordering::Release);
        }
        let others = self.sleepers.fetch_sub(1, Ordering::AcqRel) > 1;
        if !attending || self.around.watching() != Watch::Timers {
            return;
        }
        let now = self.around.now();
        self.last_poll.store(now.as_nanos(), Ordering::Relaxed);
        if others || !self.attending.polls_on() {
            self.around.watch(Watch::All);
            if more {
                self.around.set_alarm(now, now);
            }
        } else {
            self.around.set_alarm(now, now + TAKEOVER);
        }
    }

    /// Whether the program has waited by polling lately.
    pub(crate) fn polled_lately(&self) -> bool {
        let insisted = Instant::from_nanos(self.last_insisted.load(Ordering::Relaxed));
        self.around.now().saturating_since(insisted) < INSISTED_LATELY
    }

    /// What the background thread does when it was woken. Returns how many datagrams that brought.
    pub(crate) fn woken(&self) -> u64 {
        let Some(mut guard) = self.lock_or_ask() else { return 0 };
        let (around, time) = (&self.around, self.around.now());
        let watching = around.watching();
        let attended = watching == Watch::Timers && self.attended.load(Ordering::Acquire);
        let until = Instant::from_nanos(self.last_poll.load(Ordering::Relaxed)) + TAKEOVER;
        if attended || (watching != Watch::All && time < until) {
            // A program that polls sends the rest itself.
            while guard.keep_time(around.now()) && watching == Watch::Timers && !self.is_closed() {
                MutexGuard::bump(&mut guard.moved);
            }
            if !attended {
                around.set_alarm(time, until);
            }
            return 0;
        }
        let late = match watching {
            Watch::All => None,
            Watch::Timers => Some(&self.attending),
            Watch::Nothing => Some(&self.habit),
        };
        let late = late.filter(|habit| habit.polls_on());
        around.watch(Watch::All);
        let (before, datagrams) = (guard.received(), guard.datagrams());
        while guard.pass(around.now()) && !self.is_closed() {
            // Application threads that wait for the lock get it first.
            MutexGuard::bump(&mut guard.moved);
        }
        if guard.received() != before {
            self.habit.note_brought();
            self.attending.note_brought();
            late.into_iter().for_each(Habit::stayed_away);
        }
        guard.datagrams() - datagrams
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
                habit.returned(false);
            }
            assert!(habit.polls_on());
            // The background thread brought packets meanwhile: it spins on memory.
            habit.note_brought();
            habit.returned(false);
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
