//! The event loop: turns, waiting and spinning.

use std::{
    cell::Cell,
    collections::VecDeque,
    fmt, io, mem,
    ops::Deref,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
    time::Duration,
};

use mio::{Events, Interest, Poll, Token, Waker, unix::SourceFd};
use roce::{
    Completion, Flush, LocalDevice, RxMeta, Spin, SpinMode,
    verbs::{
        Instant,
        provider::{Event, QpId, VerbsError},
    },
};

use crate::{
    counters::Counters,
    jobs::{Helper, JobResult, Jobs, Line, line},
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
    /// A datagram for a device that reached the host by another socket.
    Datagram(usize, RxMeta, Vec<u8>),
}

/// Handle of a loop for other threads. Messages to one that has ended are dropped.
pub struct Handle<C, J>(Arc<Mailbox<Message<C, J>>>);

impl<C, J> Clone for Handle<C, J> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C, J> fmt::Debug for Handle<C, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.0).finish()
    }
}

impl<C, J> Handle<C, J> {
    /// Sends a command to the service. Commands arrive in the order in which they are given.
    pub fn command(&self, command: C) {
        self.0.send(Message::Command(command));
    }

    /// Passes on a datagram that reached the host by another socket, for the device of this number; see
    /// [`LocalDevice::inject`].
    pub fn inject(&self, device: usize, meta: RxMeta, datagram: Vec<u8>) {
        self.0.send(Message::Datagram(device, meta, datagram));
    }

    /// Returns how often the loop was woken for a message.
    pub fn rings(&self) -> u64 {
        self.0.rings()
    }
}

/// A loop that is not running yet: it is made in one thread, which keeps a [`Handle`] and a [`Helper`], and run in another.
pub struct Reactor<S: Service> {
    config: ReactorConfig,
    poll: Poll,
    mailbox: Inbox<Message<S::Command, S::Output>>,
    jobs: Jobs<S::Output>,
}

/// The loop's own side of its mailbox: when the loop is gone, nothing stays in there.
struct Inbox<T>(Arc<Mailbox<T>>);

impl<T> Deref for Inbox<T> {
    type Target = Mailbox<T>;

    fn deref(&self) -> &Mailbox<T> {
        &self.0
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<S: Service> fmt::Debug for Reactor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reactor")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl<S: Service> Reactor<S> {
    /// Creates a loop, and the helper that does its jobs, which is for this thread or one more.
    ///
    /// # Errors
    /// When the system gives no descriptors.
    pub fn new(config: ReactorConfig) -> io::Result<(Self, Helper<S::Output>)> {
        let (line, helper) = line();
        Ok((Self::of(config, &line)?, helper))
    }

    /// Creates so many loops, each for a thread of its own, and one helper for all of them.
    ///
    /// # Errors
    /// When the system gives no descriptors.
    pub fn several(config: ReactorConfig, loops: usize) -> io::Result<(Vec<Self>, Helper<S::Output>)> {
        let (line, helper) = line();
        let made = (0..loops).map(|_| Self::of(config, &line));
        Ok((made.collect::<io::Result<_>>()?, helper))
    }

    fn of(config: ReactorConfig, line: &Line<S::Output>) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), MAILBOX)?;
        let mailbox = Arc::new(Mailbox::new(waker));
        let results = mailbox.clone();
        Ok(Self {
            config,
            poll,
            mailbox: Inbox(mailbox),
            jobs: line.jobs(move |done| results.send(Message::Done(done))),
        })
    }

    /// Returns a handle for other threads.
    pub fn handle(&self) -> Handle<S::Command, S::Output> {
        Handle(self.mailbox.0.clone())
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
        let mut turns = Loop::new(self, devices)?;
        let mut service = start(&mut turns.cx());
        loop {
            turns.turn(&mut service)?;
            if turns.stop {
                turns.last_flush();
                return Ok(service);
            }
            turns.wait(&service)?;
        }
    }
}

/// A loop that runs.
pub(crate) struct Loop<C, J> {
    config: ReactorConfig,
    device: LocalDevice,
    poll: Poll,
    events: Events,
    mailbox: Inbox<Message<C, J>>,
    jobs: Jobs<J>,
    spin: Spin,
    now: Instant,
    /// Messages that were taken out.
    messages: VecDeque<Message<C, J>>,
    /// The service's descriptors that are ready.
    ready: Vec<(Token, Readiness)>,
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
    pub(crate) stop: bool,
}

impl<C, J> AsRawFd for Loop<C, J> {
    fn as_raw_fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }
}

impl<C, J> Loop<C, J> {
    pub(crate) fn new<S>(reactor: Reactor<S>, device: LocalDevice) -> io::Result<Self>
    where
        S: Service<Command = C, Output = J>,
    {
        let mut made = Self {
            spin: Spin::new(reactor.config.spin),
            config: reactor.config,
            device,
            poll: reactor.poll,
            events: Events::with_capacity(256),
            mailbox: reactor.mailbox,
            jobs: reactor.jobs,
            now: roce::now(),
            messages: VecDeque::new(),
            ready: Vec::new(),
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
        for fd in made.device.descriptors() {
            made.changes.set(made.changes.get() + 1);
            let fd = fd.as_raw_fd();
            let registry = made.poll.registry();
            registry.register(&mut SourceFd(&fd), DEVICE, Interest::READABLE)?;
        }
        for fd in made.device.hardware_descriptors() {
            made.changes.set(made.changes.get() + 1);
            let fd = fd.as_raw_fd();
            made.poll
                .registry()
                .register(&mut SourceFd(&fd), DEVICE_EVENTS, Interest::READABLE)?;
        }
        Ok(made)
    }

    pub(crate) fn cx(&mut self) -> TurnCx<'_, J> {
        TurnCx {
            now: self.now,
            device: &mut self.device,
            sockets: Sockets::new(self.poll.registry(), &self.changes),
            jobs: &self.jobs,
            counters: &self.counters,
            stop: &mut self.stop,
        }
    }

    /// Runs one turn: takes messages and packets, delivers their completions and events, and sends what was posted.
    pub(crate) fn turn<S>(&mut self, service: &mut S) -> Result<(), ReactorError>
    where
        S: Service<Command = C, Output = J>,
    {
        self.counters.turns += 1;
        self.counters.interests = self.changes.get();
        self.now = roce::now();
        let begun = self.now;
        self.read_messages(service);
        if self.readable {
            self.counters.receives += 1;
            self.readable = self.device.receive(self.now, self.config.packets);
        }
        if self.device_events {
            self.device_events = self.device.poll_hardware()?;
        }
        self.device.run_timers(self.now, self.readable);
        let mut ready = mem::take(&mut self.ready);
        for (token, readiness) in ready.drain(..) {
            service.ready(&mut self.cx(), token, readiness);
        }
        self.ready = ready;
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
    fn rounds<S>(&mut self, service: &mut S, begun: Instant) -> Result<bool, ReactorError>
    where
        S: Service<Command = C, Output = J>,
    {
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
            self.now = roce::now();
            if self.now.saturating_since(begun) > TURN {
                self.counters.cut += 1;
                break;
            }
        }
        Ok(false)
    }

    fn read_messages<S>(&mut self, service: &mut S)
    where
        S: Service<Command = C, Output = J>,
    {
        let mut messages = mem::take(&mut self.messages);
        self.mailbox.take(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Command(command) => {
                    self.counters.commands += 1;
                    service.command(&mut self.cx(), command);
                }
                Message::Done(done) => {
                    self.counters.jobs += 1;
                    service.job_done(&mut self.cx(), done);
                }
                Message::Datagram(device, meta, bytes) => self.device.inject(self.now, device, &bytes, &meta),
            }
        }
        self.messages = messages;
    }

    /// Delivers completions and events in their order. True: there were some.
    fn deliver<S>(&mut self, service: &mut S) -> Result<bool, ReactorError>
    where
        S: Service<Command = C, Output = J>,
    {
        let mut any = false;
        for _ in 0..BATCHES {
            // An event that was taken at the end of a turn: all that was completed before it has been handed on.
            if let Some(event) = self.event.take() {
                service.event(&mut self.cx(), event);
                any = true;
            }
            let mut completions = mem::take(&mut self.completions);
            if completions.is_empty() {
                self.device.provider().poll_completions(&mut completions, BATCH)?;
            }
            if completions.is_empty() {
                self.event = self.device.provider().poll_event();
                if self.event.is_none() {
                    self.completions = completions;
                    return Ok(any);
                }
            } else {
                self.counters.completions += completions.len() as u64;
                service.completions(&mut self.cx(), &completions);
                completions.clear();
                any = true;
            }
            self.completions = completions;
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
    pub(crate) fn last_flush(&mut self) {
        for _ in 0..LAST_FLUSHES {
            if self.device.flush(roce::now()) != Flush::More {
                return;
            }
        }
    }

    /// The caller of a [driven](crate::Driven) loop has waited: takes what is ready.
    pub(crate) fn after_wait(&mut self) -> io::Result<()> {
        self.mailbox.wake_up();
        self.look().map(drop)
    }

    /// Returns how long the caller of a [driven](crate::Driven) loop may wait for the loop's descriptor; `None`: for ever.
    pub(crate) fn before_wait<S>(&mut self, service: &S) -> Result<Option<Duration>, ReactorError>
    where
        S: Service<Command = C, Output = J>,
    {
        let limit = self.limit(service, roce::now());
        if limit == Some(Duration::ZERO) || self.completed_before_sleep()? || !self.mailbox.fall_asleep() {
            return Ok(Some(Duration::ZERO));
        }
        self.counters.sleeps += 1;
        Ok(limit)
    }

    /// Between two turns: looks what is ready, and waits for it if there is nothing to do.
    fn wait<S>(&mut self, service: &S) -> Result<(), ReactorError>
    where
        S: Service<Command = C, Output = J>,
    {
        let begun = roce::now();
        let limit = self.limit(service, begun);
        if limit == Some(Duration::ZERO) {
            self.look()?;
            return Ok(());
        }
        if !self.spin(limit)? && !self.completed_before_sleep()? {
            let limit = limit.map(|limit| limit.saturating_sub(roce::now().saturating_since(begun)));
            self.sleep(limit)?;
        }
        Ok(())
    }

    /// Has the devices wake the loop for the next completion. True: there is one already.
    fn completed_before_sleep(&mut self) -> Result<bool, VerbsError> {
        self.device.arm()?;
        self.completed()
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
    fn limit<S>(&mut self, service: &S, now: Instant) -> Option<Duration>
    where
        S: Service<Command = C, Output = J>,
    {
        if self.again || self.mailbox.is_full() {
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
            if self.mailbox.is_full() || self.look()? || self.completed()? {
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
        let looked = self.poll.poll(&mut self.events, Some(Duration::ZERO));
        self.take_events(looked)
    }

    /// Waits for a descriptor, a message or the end of the time.
    fn sleep(&mut self, limit: Option<Duration>) -> io::Result<bool> {
        let (poll, events, counters) = (&mut self.poll, &mut self.events, &mut self.counters);
        let waited = self.mailbox.asleep(|may_wait| {
            if may_wait {
                counters.sleeps += 1;
                poll.poll(events, limit)
            } else {
                counters.looks += 1;
                poll.poll(events, Some(Duration::ZERO))
            }
        });
        self.take_events(waited)
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
                token => self.ready.push((token, Readiness::from(event))),
            }
        }
        Ok(!self.events.is_empty())
    }
}
