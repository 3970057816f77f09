//! A port that threads share: a lock, and a thread in the background. Which of them advances it is the [`Handover`]'s.
//!
//! **Lock order.** The port's lock comes first. Below it, each on its own: the memory table, a completion queue, a receive queue, and
//! the locks inside of an [`EventSink`] or a notifier. Whoever holds one of those calls nothing of the driver. Of ports with siblings
//! ([`roce_port::Siblings`]) the first one's lock comes before the others'.

use std::{
    io,
    net::IpAddr,
    os::fd::AsFd,
    sync::Arc,
    thread::{self, ThreadId},
    time::Duration,
};

use mio::{Events, Poll};
use parking_lot::Mutex;
use roce_port::{Port, PortCounters, RxMeta};
use roce_verbs::Instant;

use crate::{
    attend::Attendance,
    clock,
    datapath::{Datapath, DatapathCounters},
    engine::{Engine, EventSink, Message},
    handover::{Closed, Handover, Moves, Surroundings, Watch},
    inbox::Inbox,
    links::LinkWatch,
    motor::{Motor, Own, Tap},
    persist::{Persister, Report},
    spin::{Spin, SpinMode},
    sys,
    wake::{TOKEN_INBOX, TOKEN_LINKS, TOKEN_SOCKETS, TOKEN_TIMER, Wake},
};

/// How a port is driven.
pub struct DriverConfig {
    /// Run a background thread. Without one the port advances only while the application posts and polls.
    pub background: bool,
    /// How long the background thread looks for packets before it sleeps. [`SpinMode::Auto`]: it does not, because it would do so beside
    /// threads of the program, of which nothing is known, and those that bring it packets.
    pub spin: SpinMode,
    /// Bytes of the staging slab: what is sent with one round of system calls.
    pub batch_bytes: usize,
    /// Sees all packets.
    pub tap: Option<Box<dyn Tap>>,
    /// Names the background thread.
    pub name: String,
    /// Changes of interfaces, which the background thread brings to the event sink.
    pub links: Option<LinkWatch>,
    /// Which packets are for this port, when others share the address: those for them are strays.
    pub own: Option<Own>,
    /// What other ports of the device have for this one.
    pub inbox: Option<Arc<Inbox<Message>>>,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            background: true,
            spin: SpinMode::default(),
            batch_bytes: 256 << 10,
            tap: None,
            name: "roce".into(),
            links: None,
            own: None,
            inbox: None,
        }
    }
}

/// What a port that is shared is in.
pub(crate) struct Around {
    pub(crate) wake: Arc<Wake>,
    sink: Arc<dyn EventSink>,
    /// The process that it was made in ([`sys::generation`]).
    born: u32,
}

impl Surroundings for Around {
    fn now(&self) -> Instant {
        clock::now()
    }

    fn watch(&self, what: Watch) {
        self.wake.watch(what);
    }

    fn watching(&self) -> Watch {
        self.wake.watching()
    }

    fn set_alarm(&self, now: Instant, at: Instant) {
        self.wake.set_alarm(now, at);
    }

    fn postpone(&self, now: Instant, at: Instant) {
        self.wake.postpone(now, at);
    }

    fn is_inherited(&self) -> bool {
        self.born != sys::generation_now()
    }

    fn closed(&self) {
        self.sink.closed();
    }
}

pub(crate) type Shared = Handover<Engine, Around>;

/// A port in motion. Shared by reference between threads; dropping it stops the background thread.
pub struct Driver {
    pub(crate) shared: Arc<Shared>,
    persister: Arc<Persister>,
    thread: Mutex<Option<sys::Thread>>,
    thread_id: Option<ThreadId>,
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
            Wake::also(poll, links.as_fd(), TOKEN_LINKS)?;
        }
        if let (Some(poll), Some(inbox)) = (&poll, &config.inbox) {
            Wake::also(poll, inbox.as_fd(), TOKEN_INBOX)?;
        }
        let motor = Motor::new(path, tap, config.batch_bytes, config.own);
        let persister = Arc::<Persister>::default();
        let engine = Engine::new(port, motor, sink.clone(), wake.clone(), persister.clone(), config.inbox);
        let around = Around {
            wake,
            sink,
            born: sys::generation(),
        };
        let shared = Arc::new(Shared::new(engine, around));
        shared.lock_anyway().report = Some(reporter(&shared));
        let theirs = shared.clone();
        let start = |poll| {
            let sleep = Sleep::new(poll, config.spin);
            sys::Thread::start(config.name, move || background(&theirs, sleep, links))
        };
        let thread = poll.map(start).transpose()?;
        Ok(Self {
            thread_id: thread.as_ref().map(sys::Thread::id),
            persister,
            shared,
            thread: Mutex::new(thread),
        })
    }

    /// Calls the port, then sends what came of it.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.advance(|engine, now| engine.call(now, call))
    }

    /// The same, but the port is given first what has arrived: for a call that stops a queue pair. Its acknowledgements may be
    /// there already, and what they acknowledge has not failed.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_arrived<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.advance(|engine, now| {
            let now = engine.catch_up(now);
            engine.call(now, call)
        })
    }

    /// Takes a datagram that reached the host by another socket (another process of the same address forwards it) as if
    /// the network had brought it: after what the own sockets have, which came before it. All checks are made, the ICRC's as
    /// well.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), Closed> {
        self.advance(|engine, now| {
            let now = engine.catch_up(now);
            engine.take_datagram(now, datagram, meta);
            engine.settle_in_passing(now);
        })
    }

    /// Calls the port for something that gives it nothing to send.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_quiet<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.advance(|engine, now| {
            let result = call(&mut engine.port, now);
            engine.settle_quietly(now);
            result
        })
    }

    fn advance<R>(&self, call: impl FnOnce(&mut Engine, Instant) -> R) -> Result<R, Closed> {
        let mut guard = self.shared.lock()?;
        let result = call(&mut guard, clock::now());
        drop(guard);
        self.shared.serve_wanted();
        Ok(result)
    }

    /// The application found a completion queue empty: its thread advances the port, unless another does already.
    pub fn empty_poll(&self) {
        self.shared.empty_poll();
    }

    /// The application found completions: it may not come back for long, so that packets wake the background thread again, unless it is
    /// one that polls on.
    pub fn found(&self) {
        if !self.is_inherited() {
            self.shared.found();
        }
    }

    /// The application goes to sleep: packets wake the background thread again.
    pub fn leave_poll(&self) {
        if !self.is_inherited() {
            self.shared.leave_poll();
        }
    }

    /// The calling thread is about to sleep for completions: until the result is dropped it may have to sleep for packets too.
    pub fn attend(&self) -> Attendance<'_> {
        let counted = !self.is_inherited() && self.shared.around().wake.has_thread();
        Attendance {
            driver: self,
            counted,
            attending: counted && self.shared.attend(),
            more: false,
        }
    }

    /// Returns when nobody who held the port's lock at the time of the call holds it any more, and what was being made persistent
    /// then is. So memory that was taken back before is used by nobody.
    pub fn pass_lock(&self) {
        if !self.is_inherited() {
            drop(self.shared.lock_anyway());
            self.persister.pass();
        }
    }

    /// Whether this process was forked from the one that made the driver. Every call fails here, and touches neither locks
    /// nor the wire.
    pub fn is_inherited(&self) -> bool {
        self.shared.around().is_inherited()
    }

    /// Receives what is sent to a multicast group on the interface that has the local address, until as many
    /// [`Driver::leave`]s.
    ///
    /// # Errors
    /// When the system refuses, or the datapath can't.
    pub fn join(&self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        self.check_inherited()?;
        let mut engine = self.shared.lock_anyway();
        engine.motor.path.join(group, local)?;
        let done = self.shared.around().wake.follow(&engine.motor.path.descriptors());
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
        let mut engine = self.shared.lock_anyway();
        engine.motor.path.leave(group, local);
        if let Err(e) = self.shared.around().wake.follow(&engine.motor.path.descriptors()) {
            tracing::error!("watching the sockets failed: {e}");
        }
    }

    /// What the port and its datapath have counted.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        if self.is_inherited() {
            return Default::default();
        }
        let engine = self.shared.lock_anyway();
        (engine.port.counters(), engine.motor.path.counters())
    }

    /// Sets the receive buffer, bytes, and returns what was granted.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_receive_buffer(&self, bytes: usize) -> io::Result<usize> {
        self.check_inherited()?;
        self.shared.lock_anyway().motor.path.set_receive_buffer(bytes)
    }

    fn check_inherited(&self) -> io::Result<()> {
        match self.is_inherited() {
            true => Err(io::ErrorKind::NotConnected.into()),
            false => Ok(()),
        }
    }

    /// Whether it has stopped, or is another process's.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed() || self.is_inherited()
    }

    /// Lets every later call fail, and sends nothing any more. It waits for nobody.
    pub fn stop(&self) {
        if !self.is_inherited() {
            self.shared.close();
            self.shared.around().wake.stop();
        }
    }

    /// Stops: sends what is still to be sent, ends the background thread, and lets every later call fail.
    pub fn close(&self) {
        if self.is_inherited() {
            // The thread is not there to be joined either.
            return;
        }
        if let Ok(mut guard) = self.shared.lock() {
            guard.pass(clock::now());
            guard.settle(clock::now());
            guard.motor.end_tap();
        }
        self.stop();
        self.persister.close();
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

/// Brings the port what was made persistent.
fn reporter(shared: &Arc<Shared>) -> Arc<Report> {
    let shared = Arc::downgrade(shared);
    Arc::new(move |done| {
        let Some(shared) = shared.upgrade() else { return false };
        let Ok(mut guard) = shared.lock() else { return false };
        let now = clock::now();
        guard.port.persisted(now, done);
        guard.settle_in_passing(now);
        drop(guard);
        shared.serve_wanted();
        true
    })
}

/// As many datagrams, at most, come at once to programs that exchange messages, and not to those that move bulk data.
const FEW: u64 = 4;

/// How the background thread waits.
struct Sleep {
    poll: Poll,
    events: Events,
    spin: Spin,
    /// Datagrams that came last.
    brought: u64,
}

impl Sleep {
    fn new(poll: Poll, spin: SpinMode) -> Self {
        let spin = match spin {
            SpinMode::Auto => SpinMode::Off,
            asked => asked,
        };
        Self {
            poll,
            events: Events::with_capacity(16),
            spin: Spin::new(spin),
            brought: 0,
        }
    }

    /// Waits until something happens.
    fn wait(&mut self, shared: &Shared) -> io::Result<()> {
        // Packets that don't wake it are nothing to look for, and where many come at once they had better come together. A program that
        // waits by polling has one processor already.
        let looks =
            (1..=FEW).contains(&self.brought) && shared.around().watching() == Watch::All && !shared.polled_lately();
        if looks && self.spin()? {
            return Ok(());
        }
        self.poll.poll(&mut self.events, None)
    }

    /// Looks for packets for a while, if that pays. True: something has happened.
    fn spin(&mut self) -> io::Result<bool> {
        let Some(spinning) = self.spin.begin(None) else {
            return Ok(false);
        };
        loop {
            self.poll.poll(&mut self.events, Some(Duration::ZERO))?;
            if !self.events.is_empty() || !spinning.goes_on() {
                break;
            }
        }
        let packets = self.events.iter().any(|e| e.token().0 >= TOKEN_SOCKETS);
        self.spin.end(&spinning, packets);
        Ok(!self.events.is_empty())
    }
}

/// The background thread.
fn background(shared: &Shared, mut sleep: Sleep, mut links: Option<LinkWatch>) {
    loop {
        if let Err(e) = sleep.wait(shared)
            && e.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!("waiting for packets failed: {e}");
            shared.close();
        }
        let events = &sleep.events;
        if events.iter().any(|e| e.token() == TOKEN_TIMER) {
            shared.around().wake.alarm_rang();
        }
        if events.iter().any(|e| e.token() == TOKEN_LINKS)
            && let Some(links) = &mut links
        {
            match links.take() {
                Ok(changes) if changes.is_empty() => {}
                Ok(changes) => {
                    let carried = shared.around().sink.links(changes);
                    if let (Some(mtus), Ok(mut guard)) = (carried, shared.lock()) {
                        guard.port.set_path_mtus(mtus);
                    }
                }
                Err(e) => tracing::warn!("looking at the interfaces failed: {e}"),
            }
        }
        sleep.brought = shared.woken();
        if shared.is_closed() {
            return;
        }
    }
}
