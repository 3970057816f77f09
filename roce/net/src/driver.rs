//! Who advances a port, and when.
//!
//! A port is locked state that whoever holds the lock advances. The application's own threads do it when they post and
//! when they poll an empty completion queue; the background thread does it when packets arrive or time runs out.
//!
//! While an application polls, a thread that is woken for every packet would only get in its way. So after a streak of
//! *empty* polls the sockets no longer wake the background thread (one `epoll_ctl`); a poll that finds something, arming a
//! queue and waiting on a channel turn that back on at once, because the program may now spin on memory or sleep. A
//! program that simply stops polling is noticed by the alarm clock, within [`TAKEOVER`].
//!
//! **Lock order.** The port's lock comes first. Below it, each on its own: the memory table, a completion queue, and the
//! locks inside of an [`EventSink`] or a notifier. Whoever holds one of those calls nothing of the driver.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle, ThreadId},
    time::Duration,
};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use parking_lot::{Mutex, MutexGuard};
use roce_port::{Port, PortCounters};
use roce_verbs::Instant;

use crate::{
    clock::now,
    datapath::{Datapath, DatapathCounters},
    engine::{Engine, EventSink, TOKEN_SOCKETS, Tap, Wakeup},
    sys::{self, EventFd, TimerFd},
};

/// How long a port may be without anybody advancing it after its application stopped polling.
pub const TAKEOVER: Duration = Duration::from_millis(1);
/// Empty polls in a row until the background thread stands back.
const STREAK: u32 = 16;
/// Datagrams (or merged buffers) that an application's thread handles in one call.
const APPLICATION_BUDGET: usize = 8;
/// The same for the background thread, between two looks at who else wants the lock.
const BACKGROUND_BUDGET: usize = 16;

const TOKEN_TIMER: Token = Token(0);
const TOKEN_STOP: Token = Token(1);

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
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            background: true,
            batch_bytes: 256 << 10,
            tap: None,
            name: "roce".into(),
        }
    }
}

/// The device has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device is closed")]
pub struct Closed;

struct Shared {
    engine: Mutex<Engine>,
    closed: AtomicBool,
    /// Whether the sockets don't wake the background thread: read without the lock by polls that found something.
    standing_back: AtomicBool,
    /// Polls of the application that found nothing, since the last one that found something.
    empty_polls: AtomicU32,
    sink: Arc<dyn EventSink>,
    stop: Option<EventFd>,
}

/// A port in motion. Shared by reference between threads; dropping it stops the background thread.
pub struct Driver {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: Option<ThreadId>,
}

/// The lock, which closes the device when its holder panics: the port may be in any state then.
struct Guard<'a> {
    engine: MutexGuard<'a, Engine>,
    shared: &'a Shared,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.shared.close();
        }
    }
}

impl Shared {
    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.sink.closed();
        }
    }

    fn lock(&self) -> Result<Guard<'_>, Closed> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Closed);
        }
        let engine = self.engine.lock();
        Ok(Guard { engine, shared: self })
    }

    fn try_lock(&self) -> Option<Guard<'_>> {
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        let engine = self.engine.try_lock()?;
        Some(Guard { engine, shared: self })
    }

    fn watch(&self, engine: &mut Engine, on: bool) {
        engine.watch(on);
        self.standing_back.store(!engine.watching(), Ordering::Release);
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
        let tap = config.tap.take();
        if !config.background {
            let engine = Engine::new(port, path, sink.clone(), tap, None, config.batch_bytes);
            return Ok(Self {
                shared: Arc::new(Shared {
                    engine: Mutex::new(engine),
                    closed: AtomicBool::new(false),
                    standing_back: AtomicBool::new(false),
                    empty_polls: AtomicU32::new(0),
                    sink,
                    stop: None,
                }),
                thread: Mutex::new(None),
                thread_id: None,
            });
        }
        let poll = Poll::new()?;
        let (timer, stop) = (TimerFd::new()?, EventFd::new()?);
        let register = |fd: &dyn AsRawFd, token| {
            poll.registry()
                .register(&mut SourceFd(&fd.as_raw_fd()), token, Interest::READABLE)
        };
        register(&timer.as_fd(), TOKEN_TIMER)?;
        register(&stop.as_fd(), TOKEN_STOP)?;
        // The engine changes what is watched while the thread waits.
        let epoll = sys::epoll_of(&poll)?;
        let wakeup = Wakeup { epoll, timer };
        let engine = Engine::new(port, path, sink.clone(), tap, Some(wakeup), config.batch_bytes);
        for (i, fd) in engine.descriptors().into_iter().enumerate() {
            register(&fd, Token(TOKEN_SOCKETS + i))?;
        }
        let shared = Arc::new(Shared {
            engine: Mutex::new(engine),
            closed: AtomicBool::new(false),
            standing_back: AtomicBool::new(false),
            empty_polls: AtomicU32::new(0),
            sink,
            stop: Some(stop),
        });
        let theirs = shared.clone();
        let thread = thread::Builder::new()
            .name(config.name)
            .spawn(move || background(&theirs, poll))?;
        Ok(Self {
            thread_id: Some(thread.thread().id()),
            shared,
            thread: Mutex::new(Some(thread)),
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
            guard.engine.set_alarm(now, now);
        }
        Ok(result)
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
        Ok(result)
    }

    /// The application found a completion queue empty: its thread advances the port, unless another does already.
    pub fn empty_poll(&self) {
        let Some(mut guard) = self.shared.try_lock() else {
            return;
        };
        let now = now();
        let engine = &mut *guard.engine;
        engine.last_poll = now;
        let empty = self.shared.empty_polls.load(Ordering::Relaxed).saturating_add(1);
        self.shared.empty_polls.store(empty, Ordering::Relaxed);
        if empty >= STREAK && engine.watching() {
            self.shared.watch(engine, false);
            engine.set_alarm(now, now + TAKEOVER);
        }
        engine.pass(now, APPLICATION_BUDGET);
    }

    /// The application found completions, or goes to sleep: it may not come back for long, so that packets wake the
    /// background thread again.
    pub fn leave_poll(&self) {
        self.shared.empty_polls.store(0, Ordering::Relaxed);
        if !self.shared.standing_back.load(Ordering::Acquire) {
            return;
        }
        if let Ok(mut guard) = self.shared.lock() {
            let engine = &mut *guard.engine;
            self.shared.watch(engine, true);
        }
    }

    /// Returns when nobody who held the port's lock at the time of the call holds it any more.
    pub fn pass_lock(&self) {
        drop(self.shared.engine.lock());
    }

    /// What the port and its datapath have counted.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        let engine = self.shared.engine.lock();
        (engine.port.counters(), engine.path.counters())
    }

    /// Sets the receive buffer, bytes, and returns what was granted.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_receive_buffer(&self, bytes: usize) -> io::Result<usize> {
        self.shared.engine.lock().path.set_receive_buffer(bytes)
    }

    /// Whether it has stopped.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Stops: sends what is still to be sent, ends the background thread, and lets every later call fail.
    pub fn close(&self) {
        if let Ok(mut guard) = self.shared.lock() {
            let engine = &mut *guard.engine;
            engine.pass(now(), APPLICATION_BUDGET);
        }
        self.shared.close();
        if let Some(stop) = &self.shared.stop {
            stop.raise();
        }
        if self.thread_id == Some(thread::current().id()) {
            return;
        }
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the background thread had panicked");
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.close();
    }
}

/// The background thread.
fn background(shared: &Shared, mut poll: Poll) {
    let mut events = Events::with_capacity(16);
    loop {
        if let Err(e) = poll.poll(&mut events, None)
            && e.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!("waiting for packets failed: {e}");
            shared.close();
        }
        let Ok(mut guard) = shared.lock() else {
            return;
        };
        if events.iter().any(|e| e.token() == TOKEN_TIMER) {
            guard.engine.alarm_rang();
        }
        let time = now();
        if !guard.engine.watching() {
            let until = guard.engine.last_poll + TAKEOVER;
            if time < until {
                guard.engine.run_timers(time);
                guard.engine.settle(time);
                guard.engine.set_alarm(time, until);
                continue;
            }
            shared.watch(&mut guard.engine, true);
        }
        while guard.engine.pass(now(), BACKGROUND_BUDGET) && !shared.closed.load(Ordering::Acquire) {
            // Application threads that wait for the lock get it first.
            MutexGuard::bump(&mut guard.engine);
        }
    }
}
