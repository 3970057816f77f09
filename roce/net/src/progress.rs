//! Decides which thread advances a port.
//!
//! A port is state behind a lock. One thread at a time *owns* it: packets concern that thread only.
//!
//! - A *poller* owns it during each poll of an empty completion queue, and for a lease afterwards. Meanwhile the progress thread is
//!   *parked*: packets do not wake it, and a timer does when the lease ends. It parks itself when it wakes during a lease, so that most
//!   polls cost no system call for it. Polls in the last quarter of the lease put the timer off.
//! - A *waiter*, a thread that sleeps for an event, owns it while it sleeps and for a lease afterwards.
//! - The progress thread owns it at all other times, and sleeps in epoll on the sockets.
//!
//! A lease lasts [`LEASE`]: a packet waits no longer, and a wake-up, after the program stops polling. Arming a timer takes a microsecond
//! on most machines, but 20 to 50 us in some virtual ones, unless it is further away than the kernel's next tick; there leases of 100 us
//! would cost a poller half of its processor. In those a lease lasts a [`STREAK_SHARE`]th of the time that the program has polled without
//! a pause, at most [`LONGEST_LEASE`]; a pause divides that by [`KEPT_SHARE`].
//!
//! Every pass is whole: it receives, runs timers that are due, and sends all that is due.
//!
//! A call of the program takes the lock and sends at once. The progress thread does not wait for the lock: it sets `wanted`, and the
//! holder makes a pass in its stead ([`Progress::serve_wanted`]).
//!
//! The port and its environment are traits, and locks and atomics come from `crate::sync`: `tests/progress.rs` compiles this file with
//! shuttle's.

use std::{sync::Arc, thread, time::Duration};

use roce_verbs::Instant;

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, fence, yield_now};

/// Time for which a thread of the program owns the port after its last poll.
pub(crate) const LEASE: Duration = Duration::from_micros(100);
/// Longest lease, where arming a near timer takes [`EXPENSIVE_TIMER`]. Half of it is still beyond the next tick of most kernels.
const LONGEST_LEASE: Duration = Duration::from_millis(8);
pub(crate) const EXPENSIVE_TIMER: Duration = Duration::from_micros(4);
/// Part of the time for which a program has polled that its peers may wait, once, when it stops.
const STREAK_SHARE: u32 = 16;
/// Time without a poll that counts as a pause: longer than most preemptions.
const PAUSE: Duration = Duration::from_micros(250);
/// Part of its streak that a program keeps after a pause.
const KEPT_SHARE: u32 = 4;
/// Empty polls from one `sched_yield` to the next: the peer may need this processor.
const POLLS_PER_YIELD: u32 = 64;

/// Work that a pass leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    /// Nothing.
    None,
    /// A timer expires so soon that waiting awake costs less than a sleep.
    Soon,
    /// There is more to receive or to send.
    More,
}

/// Port that threads advance under the lock.
pub(crate) trait Advance {
    /// Receives, runs timers that are due, and sends all that is due. `polls`: in a poller, which calls again soon.
    fn pass(&mut self, now: Instant, polls: bool) -> Work;
    /// Wakes the progress thread for the next timer.
    fn arm(&mut self, now: Instant);
    /// Returns the number of datagrams received so far.
    fn datagrams(&self) -> u64;
}

/// Clock and wake-ups of the progress thread.
pub(crate) trait Environment {
    /// Returns the time.
    fn now(&self) -> Instant;
    /// Lets packets wake the progress thread, or not. Packets that are waiting wake it at once.
    fn watch_sockets(&self, on: bool);
    /// Returns whether packets wake the progress thread.
    fn watches_sockets(&self) -> bool;
    /// Wakes the progress thread no later than `at`, whatever timer is pending.
    fn wake_by(&self, now: Instant, at: Instant);
    /// Wakes the progress thread at the end of the program's lease, in place of the end set before.
    fn set_lease(&self, now: Instant, end: Instant);
    /// Notes whether the progress thread is parked: then it wakes at the end of the lease, and timers of the port wait for that.
    /// Returns whether it was.
    fn park(&self, on: bool) -> bool;
    /// Returns whether the progress thread is parked.
    fn is_parked(&self) -> bool;
    /// Returns how long it takes to arm the timer behind these two, if it is near.
    fn timer_cost(&self) -> Duration;
    /// Returns whether this process is a fork of the one that made the port. Locks may be held for ever here.
    fn is_inherited(&self) -> bool;
    /// Reports that the port is closed. Called once.
    fn closed(&self);
}

/// The device has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device is closed")]
pub struct Closed;

/// Port behind its lock, and the state that decides who advances it.
pub(crate) struct Progress<P: Advance, E: Environment> {
    port: Mutex<P>,
    env: Arc<E>,
    closed: AtomicBool,
    /// Set by the progress thread when it finds the lock taken.
    wanted: AtomicBool,
    /// Whether a poller makes a pass. Written under the lock.
    polling: AtomicBool,
    /// Time of the last empty poll, nanoseconds; 0 when the program has said that it stops polling.
    last_poll: AtomicU64,
    /// Time when a waiter last woke up, nanoseconds.
    last_wait: AtomicU64,
    /// Whether a waiter owns the port.
    waiting: AtomicBool,
    /// Threads that sleep for events.
    sleepers: AtomicU32,
    /// Polls since packets came last.
    polls: AtomicU32,
    /// End of the lease that the progress thread wakes at, nanoseconds.
    lease_set: AtomicU64,
    /// Begin of the time in which no lease has ended without a poll or a wait, nanoseconds; 0 after one has.
    streak: AtomicU64,
}

/// Lock guard that closes the port when its holder panics: the port may be in any state then.
struct Guard<'a, P: Advance, E: Environment> {
    port: MutexGuard<'a, P>,
    progress: &'a Progress<P, E>,
    /// The thread panicked before it took the lock: the port is sound.
    unwinding: bool,
}

impl<P: Advance, E: Environment> Drop for Guard<'_, P, E> {
    fn drop(&mut self) {
        if thread::panicking() && !self.unwinding {
            self.progress.close();
        }
    }
}

impl<P: Advance, E: Environment> Guard<'_, P, E> {
    /// Releases the lock to the thread that has waited longest.
    fn release(mut self) {
        MutexGuard::bump(&mut self.port);
    }
}

impl<P: Advance, E: Environment> Progress<P, E> {
    pub(crate) fn new(port: P, env: Arc<E>) -> Self {
        Self {
            port: Mutex::new(port),
            env,
            closed: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            polling: AtomicBool::new(false),
            last_poll: AtomicU64::new(0),
            last_wait: AtomicU64::new(0),
            waiting: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            polls: AtomicU32::new(0),
            lease_set: AtomicU64::new(0),
            streak: AtomicU64::new(0),
        }
    }

    pub(crate) fn env(&self) -> &E {
        &self.env
    }

    /// Lets every later call fail.
    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.env.closed();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn guard<'a>(&'a self, port: MutexGuard<'a, P>) -> Option<Guard<'a, P, E>> {
        let guard = Guard {
            port,
            progress: self,
            unwinding: thread::panicking(),
        };
        (!self.is_closed()).then_some(guard)
    }

    fn try_lock(&self) -> Option<Guard<'_, P, E>> {
        if self.is_closed() || self.env.is_inherited() {
            return None;
        }
        self.guard(self.port.try_lock()?)
    }

    /// Calls the port under the lock, with the time.
    ///
    /// # Errors
    /// When the port is closed, or another process's.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut P, Instant) -> R) -> Result<R, Closed> {
        if self.is_closed() || self.env.is_inherited() {
            return Err(Closed);
        }
        let mut guard = self.guard(self.port.lock()).ok_or(Closed)?;
        let result = call(&mut guard.port, self.env.now());
        drop(guard);
        self.serve_wanted();
        Ok(result)
    }

    /// Calls the port under the lock even if it is closed: for reading, and for clean-up. `None`: it is another process's.
    pub(crate) fn with_closed<R>(&self, call: impl FnOnce(&mut P) -> R) -> Option<R> {
        if self.env.is_inherited() {
            return None;
        }
        let result = call(&mut self.port.lock());
        self.serve_wanted();
        Some(result)
    }

    /// Makes a pass for the progress thread if it found the lock taken. Called after each release of the lock.
    fn serve_wanted(&self) {
        loop {
            // Pairs with the fence in `lock_or_ask`: either this thread sees the flag, or that one the free lock.
            fence(Ordering::SeqCst);
            if !self.wanted.load(Ordering::Relaxed) {
                return;
            }
            // The next holder serves, if there is one.
            let Some(mut guard) = self.try_lock() else { return };
            self.wanted.store(false, Ordering::Relaxed);
            let now = self.env.now();
            if guard.port.pass(now, false) != Work::None {
                self.env.wake_by(now, now);
            }
        }
    }

    /// Takes the lock for the progress thread, or asks its holder to make the pass.
    fn lock_or_ask(&self) -> Option<Guard<'_, P, E>> {
        let guard = self.try_lock().or_else(|| {
            self.wanted.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            self.try_lock()
        })?;
        self.wanted.store(false, Ordering::Relaxed);
        Some(guard)
    }

    /// Returns the end of the program's lease.
    fn lease_end(&self) -> Instant {
        let last = self
            .last_poll
            .load(Ordering::Acquire)
            .max(self.last_wait.load(Ordering::Acquire));
        match last {
            0 => Instant::ZERO,
            last => Instant::from_nanos(last) + self.lease(Instant::from_nanos(last)),
        }
    }

    /// Returns the length of a lease that begins at `now`.
    fn lease(&self, now: Instant) -> Duration {
        match self.streak.load(Ordering::Relaxed) {
            0 => LEASE,
            _ if self.env.timer_cost() < EXPENSIVE_TIMER => LEASE,
            begin => (now.saturating_since(Instant::from_nanos(begin)) / STREAK_SHARE).clamp(LEASE, LONGEST_LEASE),
        }
    }

    /// Parks the progress thread until the end of the lease.
    fn set_lease(&self, now: Instant, end: Instant) {
        self.lease_set.store(end.as_nanos(), Ordering::Relaxed);
        self.env.set_lease(now, end);
    }

    /// Shortens the leases of a program that polls again after a pause: the progress thread may have slept through it.
    fn note_pause(&self, now: Instant) {
        let last = self.last_poll.load(Ordering::Relaxed);
        let begin = self.streak.load(Ordering::Relaxed);
        if last == 0 || begin == 0 || now.saturating_since(Instant::from_nanos(last)) < PAUSE {
            return;
        }
        let kept = Instant::from_nanos(last).saturating_since(Instant::from_nanos(begin)) / KEPT_SHARE;
        self.streak
            .store(now.as_nanos().saturating_sub(kept.as_nanos() as u64), Ordering::Relaxed);
    }

    /// Sets the end of the lease again when a poll at `now` comes in its last quarter, which costs less than to wake the progress thread,
    /// or when the end is further away than a lease.
    fn renew_lease(&self, now: Instant) {
        let lease = self.lease(now);
        let left = Instant::from_nanos(self.lease_set.load(Ordering::Relaxed)).saturating_since(now);
        if self.env.is_parked() && !left.is_zero() && !(lease / 4..=lease).contains(&left) {
            self.set_lease(now, now + lease);
        }
    }

    /// Notes that the program polled or waits at the end of its lease.
    fn continue_streak(&self, now: Instant) {
        if self.streak.load(Ordering::Relaxed) == 0 {
            self.streak.store(now.as_nanos(), Ordering::Relaxed);
        }
    }

    /// Advances the port in a thread that found a completion queue empty, unless another thread holds the lock.
    pub(crate) fn poll(&self) {
        let Some(mut guard) = self.try_lock() else {
            // The holder may need this processor.
            yield_now();
            return;
        };
        let now = self.env.now();
        self.polling.store(true, Ordering::Release);
        self.note_pause(now);
        self.renew_lease(now);
        let before = guard.port.datagrams();
        let work = guard.port.pass(now, true);
        let received = guard.port.datagrams() != before;
        // A pass of bulk data takes longer than a lease.
        let end = if received { self.env.now() } else { now };
        self.last_poll.store(end.as_nanos(), Ordering::Release);
        self.polling.store(false, Ordering::Release);
        drop(guard);
        // A parked progress thread looks at the end of the lease.
        if work != Work::None && !self.env.is_parked() {
            self.env.wake_by(now, now + self.lease(now));
        }
        self.serve_wanted();
        let polls = if received {
            0
        } else {
            self.polls.load(Ordering::Relaxed).wrapping_add(1)
        };
        self.polls.store(polls, Ordering::Relaxed);
        if polls % POLLS_PER_YIELD == POLLS_PER_YIELD - 1 {
            yield_now();
        }
    }

    /// Leaves the port's timers to the progress thread: the program is about to sleep.
    fn unpark(&self) {
        // Whoever has the lock arms the timer before it releases it.
        if self.env.park(false)
            && let Some(mut guard) = self.try_lock()
        {
            guard.port.arm(self.env.now());
            drop(guard);
            self.serve_wanted();
        }
    }

    /// Ends the program's lease: it is about to sleep outside of this crate.
    pub(crate) fn stop_polling(&self) {
        self.last_poll.store(0, Ordering::Release);
        self.unpark();
        if self.env.watches_sockets() || self.waiting.load(Ordering::Acquire) {
            return;
        }
        // A program that has just waited here is about to do so again.
        if self.env.now() >= self.lease_end() {
            self.env.watch_sockets(true);
        }
    }

    /// Begins a wait for an event. True: packets wake the calling thread until [`Progress::end_wait`].
    pub(crate) fn begin_wait(&self) -> bool {
        let first = self.sleepers.fetch_add(1, Ordering::AcqRel) == 0;
        if first {
            self.last_poll.store(0, Ordering::Release);
            self.waiting.store(true, Ordering::Release);
            if self.env.watches_sockets() {
                self.env.watch_sockets(false);
            }
            self.unpark();
        }
        first
    }

    /// Advances the port in the waiter, woken by packets. True: there is more to do. `None`: another thread polls, and packets concern
    /// the waiter no more.
    pub(crate) fn advance_waiter(&self) -> Option<bool> {
        let now = self.env.now();
        let polled = self.last_poll.load(Ordering::Acquire);
        if polled > 0 && now < Instant::from_nanos(polled) + LEASE {
            self.waiting.store(false, Ordering::Release);
            self.env.wake_by(now, now + LEASE);
            return None;
        }
        self.with(|port, now| port.pass(now, false) != Work::None).ok()
    }

    /// Ends a wait. `owns`: packets woke the calling thread. `more`: its last pass left something to do.
    pub(crate) fn end_wait(&self, owns: bool, more: bool) {
        let others = self.sleepers.fetch_sub(1, Ordering::AcqRel) > 1;
        if !owns {
            return;
        }
        let now = self.env.now();
        if others {
            self.waiting.store(false, Ordering::Release);
            self.env.watch_sockets(true);
        } else {
            self.last_wait.store(now.as_nanos(), Ordering::Release);
            self.waiting.store(false, Ordering::Release);
        }
        let at = if more && others { now } else { now + self.lease(now) };
        self.env.wake_by(now, at);
    }

    /// Parks the progress thread if a thread of the program owns the port.
    fn parks(&self) -> bool {
        let polling = self.polling.load(Ordering::Acquire);
        let now = self.env.now();
        let until = match polling {
            true => now + self.lease(now),
            false => self.lease_end(),
        };
        let leased = now < until;
        if leased {
            self.continue_streak(now);
            self.env.park(true);
            self.env.watch_sockets(false);
            self.set_lease(now, until);
        }
        leased
    }

    /// Does what the progress thread was woken for. Returns the number of datagrams that it received.
    pub(crate) fn woken(&self) -> u64 {
        if self.parks() {
            return 0;
        }
        self.env.park(false);
        let waits = self.waiting.load(Ordering::Acquire);
        if !waits {
            self.streak.store(0, Ordering::Relaxed);
        }
        // A waiter has the packets, but not the timers. Before the pass: packets that come after its last look wake this thread.
        self.env.watch_sockets(!waits);
        let (mut received, mut yielded) = (0, false);
        while let Some(mut guard) = self.lock_or_ask() {
            if self.parks() {
                break;
            }
            let before = guard.port.datagrams();
            let work = guard.port.pass(self.env.now(), false);
            received += guard.port.datagrams() - before;
            guard.release();
            if work == Work::None || self.is_closed() {
                break;
            }
            // Once: the program may need this processor to answer. Each yield costs this thread its next wake-up's priority.
            if work == Work::Soon && !yielded {
                yielded = true;
                yield_now();
            }
        }
        received
    }
}
