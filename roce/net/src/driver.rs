//! Who advances a port, and when.
//!
//! A port is locked state that whoever holds the lock advances. The application's own threads do it when they post and
//! when they poll an empty completion queue; the background thread does it when packets arrive or time runs out.
//!
//! While an application polls, a thread that is woken for every packet would only get in its way. So after a streak of
//! *empty* polls the sockets no longer wake the background thread (one `epoll_ctl`); arming a queue and waiting on a channel
//! turn that back on at once, because the program sleeps now, and so does a poll that finds something, because it may spin on
//! memory, unless it has come back to polling often enough before anything else was needed ([`Habit`]). A program that simply
//! stops polling is noticed by the alarm clock, within [`TAKEOVER`].
//!
//! **Lock order.** The port's lock comes first. Below it, each on its own: the memory table, a completion queue, and the
//! locks inside of an [`EventSink`] or a notifier. Whoever holds one of those calls nothing of the driver.

use std::{
    io,
    net::IpAddr,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::Duration,
};

use mio::{Events, Poll};
use parking_lot::{Mutex, MutexGuard};
use roce_port::{Port, PortCounters, QpnRange, RxMeta};
use roce_verbs::Instant;

use crate::{
    clock::now,
    datapath::{Datapath, DatapathCounters},
    engine::{Engine, EventSink},
    links::LinkWatch,
    motor::{Motor, Own, Tap},
    sys,
    wake::{TOKEN_LINKS, TOKEN_TIMER, Wake},
};

/// How long a port may be without anybody advancing it after its application stopped polling.
pub const TAKEOVER: Duration = Duration::from_millis(1);
/// Empty polls in a row until the background thread stands back.
const STREAK: u32 = 16;
/// After so many empty polls (some ten microseconds) a polling thread lets others have the processor for a moment: the
/// peer that it waits for may need it.
const PATIENCE: u32 = 64;
/// Packets, about, that are handled before they are answered, and before others may have the lock: eight merged buffers.
/// More would leave a sender with a window of 1 MiB idle, less would cost it more acknowledgements.
const BUDGET: usize = 128;

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

/// How a port is driven.
pub struct DriverConfig {
    /// Run a background thread. Without one the port advances only while the application posts and polls.
    pub background: bool,
    /// Bytes of the staging slab: what is sent with one round of system calls.
    pub batch_bytes: usize,
    /// Sees all packets.
    pub tap: Option<Box<dyn Tap>>,
    /// Names the background thread.
    pub name: String,
    /// Changes of interfaces, which the background thread brings to the event sink.
    pub links: Option<LinkWatch>,
    /// Our queue pair numbers, when other processes share the address: packets to others are strays.
    pub own: Option<QpnRange>,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            background: true,
            batch_bytes: 256 << 10,
            tap: None,
            name: "roce".into(),
            links: None,
            own: None,
        }
    }
}

/// The device has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device is closed")]
pub struct Closed;

struct Shared {
    engine: Mutex<Engine>,
    wake: Arc<Wake>,
    closed: AtomicBool,
    /// The background thread found the lock taken and went back to sleep: whoever holds it takes the packets that it
    /// was woken for.
    wanted: AtomicBool,
    /// Polls of the application that found nothing, since the last one that found something.
    empty_polls: AtomicU32,
    habit: Habit,
    /// When the application last polled an empty completion queue, nanoseconds.
    last_poll: AtomicU64,
    sink: Arc<dyn EventSink>,
    /// The process that it was made in ([`sys::generation`]).
    born: u32,
}

/// A port in motion. Shared by reference between threads; dropping it stops the background thread.
pub struct Driver {
    shared: Arc<Shared>,
    thread: Mutex<Option<sys::Thread>>,
    thread_id: Option<ThreadId>,
}

/// The lock, which closes the device when its holder panics: the port may be in any state then.
struct Guard<'a> {
    engine: MutexGuard<'a, Engine>,
    shared: &'a Shared,
    /// The thread panicked before it took the lock, and now ends what it has: the port is sound.
    unwinding: bool,
}

impl<'a> Guard<'a> {
    fn new(engine: MutexGuard<'a, Engine>, shared: &'a Shared) -> Self {
        let unwinding = thread::panicking();
        Self {
            engine,
            shared,
            unwinding,
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.unwinding {
            self.shared.close();
        }
    }
}

impl Shared {
    /// This is a child of the process that the driver belongs to. Its locks may be held for ever here, and its sockets are
    /// not ours.
    fn is_inherited(&self) -> bool {
        self.born != sys::generation_now()
    }

    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.sink.closed();
        }
    }

    fn lock(&self) -> Result<Guard<'_>, Closed> {
        if self.closed.load(Ordering::Acquire) || self.is_inherited() {
            return Err(Closed);
        }
        let guard = Guard::new(self.engine.lock(), self);
        self.is_open().then_some(guard).ok_or(Closed)
    }

    /// Whoever had the lock may have broken the port with a panic.
    fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    fn try_lock(&self) -> Option<Guard<'_>> {
        if self.closed.load(Ordering::Acquire) || self.is_inherited() {
            return None;
        }
        let guard = Guard::new(self.engine.try_lock()?, self);
        self.is_open().then_some(guard)
    }

    /// Advances the port in the background thread's stead, if that found the lock taken meanwhile.
    fn serve_wanted(&self) {
        // Looked at with the lock free: whoever takes it next does the same.
        if !self.wanted.load(Ordering::Acquire) {
            return;
        }
        if let Some(mut guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            guard.engine.pass(now(), BUDGET);
            drop(guard);
            // What is still there, or comes from now on, is the background thread's again.
            self.wake.watch(true);
        }
    }

    /// The lock for the background thread. While an application's thread is inside that one is asked to take the
    /// packets too: waiting for it here would only cost a second processor.
    fn lock_or_ask(&self) -> Option<Guard<'_>> {
        if let Some(guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            return Some(guard);
        }
        self.wake.watch(false);
        self.wanted.store(true, Ordering::Release);
        // It may have let go before it could see that.
        if let Some(guard) = self.try_lock() {
            self.wanted.store(false, Ordering::Release);
            self.wake.watch(true);
            return Some(guard);
        }
        let time = now();
        self.wake.set_alarm(time, time + TAKEOVER);
        None
    }
}

impl Driver {
    /// Sets a port in motion.
    ///
    /// # Errors
    /// When the system has no descriptor or thread left.
    pub fn new(
        port: Port,
        path: Box<dyn Datapath>,
        sink: Arc<dyn EventSink>,
        mut config: DriverConfig,
    ) -> io::Result<Self> {
        let (tap, links) = (config.tap.take(), config.links.take());
        let poll = config.background.then(Poll::new).transpose()?;
        let wake = Arc::new(match &poll {
            Some(poll) => Wake::new(poll, &path.descriptors())?,
            None => Wake::nobody(),
        });
        if let (Some(poll), Some(links)) = (&poll, &links) {
            Wake::also(poll, links.as_fd())?;
        }
        let motor = Motor::new(path, tap, config.batch_bytes, config.own.map(Own::Process));
        let engine = Engine::new(port, motor, sink.clone(), wake.clone());
        let shared = Arc::new(Shared {
            engine: Mutex::new(engine),
            wake,
            closed: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            empty_polls: AtomicU32::new(0),
            habit: Habit::default(),
            last_poll: AtomicU64::new(0),
            sink,
            born: sys::generation(),
        });
        let theirs = shared.clone();
        let start = |poll| sys::Thread::start(config.name, move || background(&theirs, poll, links));
        let thread = poll.map(start).transpose()?;
        Ok(Self {
            thread_id: thread.as_ref().map(sys::Thread::id),
            shared,
            thread: Mutex::new(thread),
        })
    }

    /// Calls the port, then sends what came of it.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        let mut guard = self.shared.lock()?;
        let now = now();
        let result = call(&mut guard.engine.port, now);
        if guard.engine.settle(now) {
            // The rest is the background thread's.
            self.shared.wake.set_alarm(now, now);
        }
        drop(guard);
        self.shared.serve_wanted();
        Ok(result)
    }

    /// Takes a datagram that reached the host by another socket (another process of the same address forwards it) as if
    /// the network had brought it. All checks are made, the ICRC's as well.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), Closed> {
        let mut guard = self.shared.lock()?;
        let now = now();
        guard.engine.take_datagram(now, datagram, meta);
        if guard.engine.settle(now) {
            self.shared.wake.set_alarm(now, now);
        }
        drop(guard);
        self.shared.serve_wanted();
        Ok(())
    }

    /// Calls the port for something that gives it nothing to send.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_quiet<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        let mut guard = self.shared.lock()?;
        let now = now();
        let result = call(&mut guard.engine.port, now);
        guard.engine.settle_quietly(now);
        drop(guard);
        self.shared.serve_wanted();
        Ok(result)
    }

    /// The application found a completion queue empty: its thread advances the port, unless another does already.
    pub fn empty_poll(&self) {
        let Some(mut guard) = self.shared.try_lock() else {
            // The holder may wait for this processor.
            thread::yield_now();
            return;
        };
        let shared = &*self.shared;
        let now = now();
        shared.last_poll.store(now.as_nanos(), Ordering::Relaxed);
        let empty = shared.empty_polls.load(Ordering::Relaxed).saturating_add(1);
        shared.empty_polls.store(empty, Ordering::Relaxed);
        if empty == 1 {
            shared.habit.returned();
        }
        if empty == STREAK || (empty > STREAK && !shared.wake.standing_back()) {
            shared.wake.watch(false);
            shared.wake.set_alarm(now, now + TAKEOVER);
        }
        match shared.wake.standing_back() && shared.habit.polls_on() {
            true => guard.engine.pass_in_program(now, BUDGET),
            false => {
                guard.engine.pass(now, BUDGET);
            }
        }
        drop(guard);
        if empty < STREAK {
            shared.serve_wanted();
        } else {
            shared.wanted.store(false, Ordering::Release);
        }
        if empty.is_multiple_of(PATIENCE) {
            thread::yield_now();
        }
    }

    /// The application found completions: it may not come back for long, so that packets wake the background thread again, unless it is
    /// one that polls on.
    pub fn found(&self) {
        match self.shared.wake.standing_back() && self.shared.habit.polls_on() {
            true if !self.is_inherited() => self.shared.empty_polls.store(0, Ordering::Relaxed),
            _ => self.leave_poll(),
        }
    }

    /// The application goes to sleep: packets wake the background thread again.
    pub fn leave_poll(&self) {
        if self.is_inherited() {
            return;
        }
        self.shared.empty_polls.store(0, Ordering::Relaxed);
        if self.shared.wake.standing_back() {
            self.shared.wake.watch(true);
        }
    }

    /// Returns when nobody who held the port's lock at the time of the call holds it any more.
    pub fn pass_lock(&self) {
        if !self.is_inherited() {
            drop(self.shared.engine.lock());
        }
    }

    /// Whether this process was forked from the one that made the driver. Every call fails here, and touches neither locks
    /// nor the wire.
    pub fn is_inherited(&self) -> bool {
        self.shared.is_inherited()
    }

    /// Receives what is sent to a multicast group on the interface that has the local address, until as many
    /// [`Driver::leave`]s.
    ///
    /// # Errors
    /// When the system refuses, or the datapath can't.
    pub fn join(&self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        self.check_inherited()?;
        let mut engine = self.shared.engine.lock();
        engine.motor.path.join(group, local)?;
        let done = self.shared.wake.follow(&engine.motor.path.descriptors());
        if done.is_err() {
            engine.motor.path.leave(group, local);
        }
        done
    }

    /// Takes back one [`Driver::join`].
    pub fn leave(&self, group: IpAddr, local: IpAddr) {
        if self.is_inherited() {
            return;
        }
        let mut engine = self.shared.engine.lock();
        engine.motor.path.leave(group, local);
        if let Err(e) = self.shared.wake.follow(&engine.motor.path.descriptors()) {
            tracing::error!("watching the sockets failed: {e}");
        }
    }

    /// What the port and its datapath have counted.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        if self.is_inherited() {
            return Default::default();
        }
        let engine = self.shared.engine.lock();
        (engine.port.counters(), engine.motor.path.counters())
    }

    /// Sets the receive buffer, bytes, and returns what was granted.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_receive_buffer(&self, bytes: usize) -> io::Result<usize> {
        self.check_inherited()?;
        self.shared.engine.lock().motor.path.set_receive_buffer(bytes)
    }

    fn check_inherited(&self) -> io::Result<()> {
        match self.is_inherited() {
            true => Err(io::ErrorKind::NotConnected.into()),
            false => Ok(()),
        }
    }

    /// Whether it has stopped, or is another process's.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire) || self.is_inherited()
    }

    /// Stops: sends what is still to be sent, ends the background thread, and lets every later call fail.
    pub fn close(&self) {
        if self.is_inherited() {
            // The thread is not there to be joined either.
            return;
        }
        if let Ok(mut guard) = self.shared.lock() {
            let engine = &mut *guard.engine;
            engine.pass(now(), BUDGET);
            engine.motor.end_tap();
        }
        self.shared.close();
        self.shared.wake.stop();
        if self.thread_id == Some(thread::current().id()) {
            return;
        }
        if let Some(thread) = self.thread.lock().take()
            && !thread.finish()
        {
            tracing::error!("the background thread had panicked, or does not end");
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.close();
    }
}

/// The background thread.
fn background(shared: &Shared, mut poll: Poll, mut links: Option<LinkWatch>) {
    let mut events = Events::with_capacity(16);
    loop {
        if let Err(e) = poll.poll(&mut events, None)
            && e.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!("waiting for packets failed: {e}");
            shared.close();
        }
        if events.iter().any(|e| e.token() == TOKEN_TIMER) {
            shared.wake.alarm_rang();
        }
        if events.iter().any(|e| e.token() == TOKEN_LINKS)
            && let Some(links) = &mut links
        {
            match links.take() {
                Ok(changes) if changes.is_empty() => {}
                Ok(changes) => {
                    let carried = shared.sink.links(changes);
                    if let (Some(mtus), Ok(mut guard)) = (carried, shared.lock()) {
                        guard.engine.port.set_path_mtus(mtus);
                    }
                }
                Err(e) => tracing::warn!("looking at the interfaces failed: {e}"),
            }
        }
        let Some(mut guard) = shared.lock_or_ask() else {
            if shared.closed.load(Ordering::Acquire) {
                return;
            }
            continue;
        };
        let time = now();
        let stood_back = shared.wake.standing_back();
        if stood_back {
            let until = Instant::from_nanos(shared.last_poll.load(Ordering::Relaxed)) + TAKEOVER;
            if time < until {
                match guard.engine.timer_due(time) {
                    // What it waits for may have arrived.
                    true => guard.engine.pass(time, BUDGET),
                    false => guard.engine.settle(time),
                };
                shared.wake.set_alarm(time, until);
                continue;
            }
            shared.wake.watch(true);
        }
        let (before, late) = (guard.engine.port.received(), stood_back && shared.habit.polls_on());
        while guard.engine.pass(now(), BUDGET) && !shared.closed.load(Ordering::Acquire) {
            // Application threads that wait for the lock get it first.
            MutexGuard::bump(&mut guard.engine);
        }
        if guard.engine.port.received() != before {
            shared.habit.brought.fetch_add(1, Ordering::Relaxed);
            if late {
                shared.habit.stayed_away();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_polls_on_when_it_was_back_often_enough() {
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
        // Who stays away has to come back more often, and not for ever more often.
        let needed = || {
            let habit = &habit;
            (1..).find(|_| {
                habit.returned();
                habit.polls_on()
            })
        };
        needed();
        let mut before = 0;
        for _ in 0..20 {
            habit.stayed_away();
            let now = needed().expect("some time");
            assert!(now > before || now == RETURNS + MOST_RETURNS, "{now} after {before}");
            before = now;
        }
        assert_eq!(before, RETURNS + MOST_RETURNS);
    }
}
