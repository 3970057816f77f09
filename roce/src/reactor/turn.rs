//! The event loop: turns, waiting and spinning.

use std::{
    cell::Cell,
    collections::VecDeque,
    io, mem,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
    time::Duration,
};

use crate::{
    Completion, Flush, LocalDevice, Spin, SpinMode,
    verbs::{
        Instant,
        provider::{Event, QpId, VerbsError},
    },
};
use mio::{Events, Poll, Token, Waker};

use crate::reactor::{
    counters::Counters,
    jobs::{JobResult, Jobs},
    mailbox::Mailbox,
    service::{DEVICE, RESERVED, Readiness, Service, Sockets, TurnCx},
};

/// Token of the mailbox.
const MAILBOX: Token = Token(RESERVED + 1);
/// Token of RDMA devices' events.
const DEVICE_EVENTS: Token = Token(RESERVED + 2);

/// Rounds of a turn, and how long they may take together: then what was posted is sent.
const ROUNDS: usize = 4;
const TURN: Duration = Duration::from_micros(300);
/// Batches of completions, and events, of one round.
const BATCHES: usize = 16;
const BATCH: usize = 256;
/// Flushes at the end of the last turn.
const LAST_FLUSHES: usize = 64;

/// Settings of a loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReactorConfig {
    /// Whether it spins before it sleeps.
    pub spin: SpinMode,
    /// Packets that it receives in a turn, about.
    pub packets: usize,
}

impl Default for ReactorConfig {
    fn default() -> Self {
        Self {
            spin: SpinMode::default(),
            packets: 128,
        }
    }
}

/// Error that ended a loop.
#[derive(Debug, thiserror::Error)]
pub enum ReactorError {
    /// The system refused to wait, or to watch a descriptor.
    #[error("waiting failed: {0}")]
    Wait(#[from] io::Error),
    /// The device can't be used any more.
    #[error(transparent)]
    Device(#[from] VerbsError),
}

/// Message of another thread.
enum Message<C, J> {
    Command(C),
    Done(JobResult<J>),
}

/// Handle of a loop for other threads. Messages to one that has ended are dropped.
pub struct Handle<C, J>(Arc<Mailbox<Message<C, J>>>);

impl<C, J> Clone for Handle<C, J> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

debug!(Handle<C, J>, "Handle" [C, J], |this| mailbox: this.0);

impl<C, J> Handle<C, J> {
    /// Sends a command to the service. Commands arrive in the order in which they are given.
    pub fn command(&self, command: C) {
        self.0.send(Message::Command(command));
    }

    /// Returns how often the loop was woken for a message.
    pub fn rings(&self) -> u64 {
        self.0.rings()
    }
}

/// A loop that is not running yet: it is made in one thread, which keeps a [`Handle`], and run in another.
pub struct Reactor<S: Service> {
    config: ReactorConfig,
    poll: Poll,
    mailbox: Arc<Mailbox<Message<S::Command, S::Output>>>,
    jobs: Jobs<S::Output>,
}

impl<S: Service> Drop for Reactor<S> {
    fn drop(&mut self) {
        // Nothing stays in there when the loop is gone.
        self.mailbox.close();
    }
}

debug!(Reactor<S>, "Reactor" [S: Service], |this| config: this.config);

impl<S: Service> Reactor<S> {
    /// Creates a loop.
    ///
    /// # Errors
    /// When the system gives no descriptors.
    pub fn new(config: ReactorConfig) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), MAILBOX)?;
        let mailbox = Arc::new(Mailbox::new(waker));
        let results = mailbox.clone();
        Ok(Self {
            config,
            poll,
            mailbox,
            jobs: Jobs::new(move |done| results.send(Message::Done(done))),
        })
    }

    /// Returns a handle for other threads.
    pub fn handle(&self) -> Handle<S::Command, S::Output> {
        Handle(self.mailbox.clone())
    }

    /// Runs the loop in this thread, until the service [stops](TurnCx::stop) it, and returns the service. `start` makes the
    /// service here.
    ///
    /// # Errors
    /// When the system refuses to wait, or the device fails.
    pub fn run(
        self,
        devices: LocalDevice,
        start: impl FnOnce(&mut TurnCx<'_, S::Output>) -> S,
    ) -> Result<S, ReactorError> {
        let Driven { mut turns, mut service } = self.drive(devices, start)?;
        loop {
            turns.turn(&mut service)?;
            if turns.stop {
                turns.last_flush();
                return Ok(service);
            }
            turns.wait(&service)?;
        }
    }

    /// Prepares the loop for turns in the caller's loop instead of running it. `start` makes the service.
    ///
    /// # Errors
    /// When the system refuses to watch a descriptor.
    pub fn drive(
        self,
        devices: LocalDevice,
        start: impl FnOnce(&mut TurnCx<'_, S::Output>) -> S,
    ) -> Result<Driven<S>, ReactorError> {
        let mut turns = Loop::new(self, devices)?;
        let service = start(&mut turns.cx());
        Ok(Driven { turns, service })
    }
}

/// A loop that the caller drives: it has one descriptor, and each call runs one turn and returns.
///
/// ```no_run
/// # use std::os::fd::{AsRawFd, RawFd};
/// # use roce::reactor::{Driven, Service, Turned};
/// # fn wait_readable(fd: RawFd, timeout: Option<std::time::Duration>) {}
/// # fn run<S: Service>(mut driven: Driven<S>) -> Result<(), Box<dyn std::error::Error>> {
/// while let Turned::Wait(timeout) = driven.turn()? {
///     // By poll, epoll, mio or tokio's AsyncFd, next to the caller's own descriptors.
///     wait_readable(driven.as_raw_fd(), timeout);
/// }
/// # Ok(())
/// # }
/// ```
pub struct Driven<S: Service> {
    turns: Loop<S>,
    service: S,
}

/// Next step after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turned {
    /// The next turn is due when the descriptor is readable, and after this time; `None`: there is no time.
    Wait(Option<Duration>),
    /// The service has [stopped](TurnCx::stop) the loop.
    Stopped,
}

debug!(Driven<S>, "Driven" [S: Service]);

impl<S: Service> Driven<S> {
    /// Runs one turn, without waiting. To be called when the descriptor is readable, when the time of the last turn is over, and after
    /// the service was given something to do.
    ///
    /// # Errors
    /// When the system fails, or the device.
    pub fn turn(&mut self) -> Result<Turned, ReactorError> {
        self.turns.after_wait()?;
        self.turns.turn(&mut self.service)?;
        if self.turns.stop {
            self.turns.last_flush();
            return Ok(Turned::Stopped);
        }
        self.turns.before_wait(&self.service).map(Turned::Wait)
    }

    /// Returns the service that runs on the loop.
    pub fn service(&mut self) -> &mut S {
        &mut self.service
    }
}

impl<S: Service> AsRawFd for Driven<S> {
    /// Returns the descriptor that is readable when a turn has something to do. It is the loop's own: not to be read or closed.
    fn as_raw_fd(&self) -> RawFd {
        self.turns.reactor.poll.as_raw_fd()
    }
}

/// A loop that runs.
struct Loop<S: Service> {
    device: LocalDevice,
    reactor: Reactor<S>,
    events: Events,
    spin: Spin,
    now: Instant,
    /// Messages that were taken out.
    messages: VecDeque<Message<S::Command, S::Output>>,
    /// The service's descriptors that are ready.
    ready: VecDeque<(Token, Readiness)>,
    /// The device has packets, as far as is known.
    readable: bool,
    /// RDMA devices have events, as far as is known.
    device_events: bool,
    /// The send buffer was full, and no descriptor of the device was ready since.
    blocked: bool,
    /// There is something to do at once.
    again: bool,
    completions: Vec<(QpId, Completion)>,
    event: Option<Event>,
    counters: Counters,
    changes: Cell<u64>,
    stop: bool,
}

impl<S: Service> Loop<S> {
    fn new(reactor: Reactor<S>, device: LocalDevice) -> io::Result<Self> {
        let mut made = Self {
            spin: Spin::new(reactor.config.spin),
            reactor,
            device,
            events: Events::with_capacity(256),
            now: crate::now(),
            messages: VecDeque::new(),
            ready: VecDeque::new(),
            readable: true,
            device_events: true,
            blocked: false,
            again: false,
            completions: Vec::with_capacity(BATCH),
            event: None,
            counters: Counters::default(),
            changes: Cell::new(0),
            stop: false,
        };
        let sockets = Sockets::new(made.reactor.poll.registry(), &made.changes);
        sockets.watch_device(&made.device.descriptors(), DEVICE)?;
        sockets.watch_device(&made.device.hardware_descriptors(), DEVICE_EVENTS)?;
        Ok(made)
    }

    fn cx(&mut self) -> TurnCx<'_, S::Output> {
        TurnCx {
            now: self.now,
            device: &mut self.device,
            sockets: Sockets::new(self.reactor.poll.registry(), &self.changes),
            jobs: &self.reactor.jobs,
            counters: &self.counters,
            stop: &mut self.stop,
        }
    }

    /// Runs one turn: takes messages and packets, delivers their completions and events, and sends what was posted.
    fn turn(&mut self, service: &mut S) -> Result<(), ReactorError> {
        self.counters.turns += 1;
        self.counters.interests = self.changes.get();
        self.now = crate::now();
        let begun = self.now;
        // A command may connect, after a long sleep.
        self.device.set_now(begun);
        self.read_messages(service);
        if self.readable {
            self.counters.receives += 1;
            self.readable = self.device.receive(self.now, self.reactor.config.packets);
        }
        if self.device_events {
            self.device_events = self.device.poll_hardware()?;
        }
        self.device.run_timers(self.now, self.readable);
        while let Some((token, readiness)) = self.ready.pop_front() {
            service.ready(&mut self.cx(), token, readiness);
        }
        let quiet = self.rounds(service, begun)?;
        service.end(&mut self.cx());
        let flushed = self.flush();
        let more = service.sent(&mut self.cx());
        // Sending can complete work requests, and ending a turn can post what completes at once.
        let provider = self.device.provider();
        let left = provider.poll_completions(&mut self.completions, BATCH)?;
        if left == 0 && self.event.is_none() {
            self.event = provider.poll_event();
        }
        self.again = !quiet
            || more
            || self.readable
            || self.device_events
            || flushed == Flush::More
            || left > 0
            || self.event.is_some();
        Ok(())
    }

    /// Delivers completions and events until there are none, or it is time to send. True: there are none.
    fn rounds(&mut self, service: &mut S, begun: Instant) -> Result<bool, ReactorError> {
        for _ in 0..ROUNDS {
            self.counters.rounds += 1;
            let mut busy = self.deliver(service)?;
            busy |= service.work(&mut self.cx());
            if service.next_timeout().is_some_and(|at| at <= self.now) {
                service.timeout(&mut self.cx());
                busy = true;
            }
            if !busy {
                return Ok(true);
            }
            self.now = crate::now();
            if self.now.saturating_since(begun) > TURN {
                self.counters.cut += 1;
                break;
            }
        }
        Ok(false)
    }

    fn read_messages(&mut self, service: &mut S) {
        self.reactor.mailbox.take(&mut self.messages);
        while let Some(message) = self.messages.pop_front() {
            match message {
                Message::Command(command) => {
                    self.counters.commands += 1;
                    service.command(&mut self.cx(), command);
                }
                Message::Done(done) => {
                    self.counters.jobs += 1;
                    service.job_done(&mut self.cx(), done);
                }
            }
        }
    }

    /// Delivers completions and events in their order. True: there were some.
    fn deliver(&mut self, service: &mut S) -> Result<bool, ReactorError> {
        let mut any = false;
        for _ in 0..BATCHES {
            // An event that was taken at the end of a turn: all that was completed before it has been handed on.
            if let Some(event) = self.event.take() {
                service.event(&mut self.cx(), event);
                any = true;
            }
            if self.completions.is_empty() {
                self.device.provider().poll_completions(&mut self.completions, BATCH)?;
            }
            if self.completions.is_empty() {
                self.event = self.device.provider().poll_event();
                if self.event.is_none() {
                    return Ok(any);
                }
                continue;
            }
            let mut completions = mem::take(&mut self.completions);
            self.counters.completions += completions.len() as u64;
            service.completions(&mut self.cx(), &completions);
            completions.clear();
            self.completions = completions;
            any = true;
        }
        Ok(true)
    }

    /// Sends what there is to send, unless the send buffer is full.
    fn flush(&mut self) -> Flush {
        if self.blocked {
            return Flush::Blocked;
        }
        let flushed = self.device.flush(self.now);
        self.blocked = flushed == Flush::Blocked;
        self.counters.blocked += u64::from(self.blocked);
        flushed
    }

    /// Sends what the last turn has left, as far as there is room.
    fn last_flush(&mut self) {
        for _ in 0..LAST_FLUSHES {
            if self.device.flush(crate::now()) != Flush::More {
                return;
            }
        }
    }

    /// The caller of a [driven](crate::reactor::Driven) loop has waited: takes what is ready.
    fn after_wait(&mut self) -> io::Result<()> {
        self.reactor.mailbox.wake_up();
        self.look().map(drop)
    }

    /// Returns how long the caller of a [driven](crate::reactor::Driven) loop may wait for the loop's descriptor; `None`: for ever.
    fn before_wait(&mut self, service: &S) -> Result<Option<Duration>, ReactorError> {
        let limit = self.limit(service, crate::now());
        self.fall_asleep(limit)
    }

    /// Lets messages and devices wake the loop. Returns how long it may sleep: `limit`, or not at all if there is something to do.
    fn fall_asleep(&mut self, limit: Option<Duration>) -> Result<Option<Duration>, ReactorError> {
        if limit == Some(Duration::ZERO) {
            return Ok(limit);
        }
        self.device.arm()?;
        if self.completed()? || !self.reactor.mailbox.fall_asleep() {
            return Ok(Some(Duration::ZERO));
        }
        self.counters.sleeps += 1;
        Ok(limit)
    }

    /// Between two turns: looks what is ready, and waits for it if there is nothing to do.
    fn wait(&mut self, service: &S) -> Result<(), ReactorError> {
        let begun = crate::now();
        let mut limit = self.limit(service, begun);
        if limit != Some(Duration::ZERO) {
            if self.spin(limit)? {
                return Ok(());
            }
            limit = limit.map(|limit| limit.saturating_sub(crate::now().saturating_since(begun)));
        }
        let limit = self.fall_asleep(limit)?;
        self.counters.looks += u64::from(limit == Some(Duration::ZERO));
        let polled = self.reactor.poll.poll(&mut self.events, limit);
        self.reactor.mailbox.wake_up();
        self.take_events(polled)?;
        Ok(())
    }

    /// Asks devices that need no packet to complete something whether they have.
    fn completed(&mut self) -> Result<bool, VerbsError> {
        if !self.device.has_hardware() {
            return Ok(false);
        }
        let provider = self.device.provider();
        Ok(provider.poll_completions(&mut self.completions, BATCH)? > 0)
    }

    /// Returns how long there is nothing to do, as far as is known; `None`: for ever.
    fn limit(&mut self, service: &S, now: Instant) -> Option<Duration> {
        if self.again || self.reactor.mailbox.is_full() {
            return Some(Duration::ZERO);
        }
        let service = service.next_timeout().map(|at| at.saturating_since(now));
        let device = self.device.next_timeout(now);
        service.into_iter().chain(device).min()
    }

    /// Looks for something to do for a while, if that pays. True: there is something.
    fn spin(&mut self, limit: Option<Duration>) -> Result<bool, ReactorError> {
        let Some(spinning) = self.spin.begin(limit) else {
            return Ok(false);
        };
        self.counters.spins += 1;
        let found = loop {
            if self.reactor.mailbox.is_full() || self.look()? || self.completed()? {
                break true;
            }
            self.counters.yields += 1;
            if !spinning.goes_on() {
                break false;
            }
        };
        self.counters.spins_won += u64::from(found);
        self.spin.end(&spinning, found);
        Ok(found)
    }

    /// Looks at the descriptors. True: one is ready.
    fn look(&mut self) -> io::Result<bool> {
        self.counters.looks += 1;
        let looked = self.reactor.poll.poll(&mut self.events, Some(Duration::ZERO));
        self.take_events(looked)
    }

    fn take_events(&mut self, polled: io::Result<()>) -> io::Result<bool> {
        match polled {
            // By a signal, or by io_uring, which has something to do in this thread.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(true),
            polled => polled?,
        }
        for event in &self.events {
            match event.token() {
                DEVICE => {
                    // An error is that of a request that ICMP reports as undeliverable.
                    self.readable |= event.is_readable() || event.is_error();
                    self.blocked = false;
                }
                DEVICE_EVENTS => self.device_events = true,
                MAILBOX => {}
                token => self.ready.push_back((token, Readiness::from(event))),
            }
        }
        Ok(!self.events.is_empty())
    }
}
