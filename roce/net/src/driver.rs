//! Drives one port from several threads: a mutex around the port plus a progress thread. [`Progress`] decides which thread advances it.
//!
//! **Lock order.** The port's lock comes first. Leaf locks below it: the memory table, a completion queue, a receive queue, and the
//! locks inside an [`EventSink`] or a notifier. A thread that holds one of those calls nothing of the driver, and no thread holds
//! two ports' locks: ports of one address exchange messages ([`ToShard`]).

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
use roce_fault::Network;
use roce_port::{Port, PortCounters, Recipients, RxMeta, ToShard};
use roce_verbs::Instant;

use crate::{
    clock,
    datapath::{Datapath, DatapathCounters, Tap},
    engine::{Engine, EventSink},
    inbox::Inbox,
    links::LinkWatch,
    motor::Motor,
    persist::{Persister, Report},
    progress::{Advance, Closed, Environment},
    runtime::{Runtime, Shared},
    spin::{Spin, SpinMode},
    sys,
    wait::Waiter,
    wake::{TOKEN_INBOX, TOKEN_LINKS, TOKEN_SOCKETS, TOKEN_TIMER, Wake},
};

/// Configuration of a [`Driver`].
pub struct DriverConfig {
    /// Run a progress thread. Without one the port advances only while the program posts and polls.
    pub background: bool,
    /// Time for which the progress thread polls the sockets before it sleeps. [`SpinMode::Auto`]: 50 us after packets have come, while
    /// that finds more; none on a single processor.
    pub spin: SpinMode,
    /// Bytes of the staging slab, which one round of system calls sends.
    pub batch_bytes: usize,
    /// Capture of all packets.
    pub tap: Option<Box<dyn Tap>>,
    /// Name of the progress thread.
    pub name: String,
    /// Changes of interfaces, which the progress thread reports to the event sink.
    pub links: Option<LinkWatch>,
    /// Recipients of packets, if others share the address.
    pub recipients: Option<Recipients>,
    /// Messages of other engines of the device.
    pub inbox: Option<Arc<Inbox<ToShard>>>,
    /// Faults on demand.
    pub faults: Option<Network>,
    /// Publish counters ([`EventSink::publish`]).
    pub publishes: bool,
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
            recipients: None,
            inbox: None,
            faults: None,
            publishes: false,
        }
    }
}

/// Port that several threads drive. Dropping it stops the progress thread.
pub struct Driver {
    pub(crate) shared: Arc<Shared>,
    persister: Arc<Persister>,
    thread: Mutex<Option<sys::Thread>>,
    thread_id: Option<ThreadId>,
}

impl Driver {
    /// Starts driving a port.
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
            None => Wake::without_thread(),
        });
        if let (Some(poll), Some(links)) = (&poll, &links) {
            Wake::also(poll, links.as_fd(), TOKEN_LINKS)?;
        }
        if let (Some(poll), Some(inbox)) = (&poll, &config.inbox) {
            Wake::also(poll, inbox.as_fd(), TOKEN_INBOX)?;
        }
        let motor = Motor::new(path, tap, config.batch_bytes, config.recipients, config.faults);
        let persister = Arc::<Persister>::default();
        let (inbox, publishes) = (config.inbox, config.publishes);
        let engine = Engine::new(
            port,
            motor,
            sink.clone(),
            wake.clone(),
            persister.clone(),
            inbox,
            publishes,
        );
        let runtime = Runtime {
            wake,
            sink,
            born: sys::generation(),
        };
        let shared = Arc::new(Shared::new(engine, runtime));
        shared.with_closed(|engine| {
            engine.report = Some(reporter(&shared));
            engine.publish(clock::now(), true);
        });
        let theirs = shared.clone();
        let start = |poll| {
            let sleep = Sleep::new(poll, config.spin);
            sys::Thread::start(config.name, move || run(&theirs, sleep, links))
        };
        let thread = poll.map(start).transpose()?;
        Ok(Self {
            thread_id: thread.as_ref().map(sys::Thread::id),
            persister,
            shared,
            thread: Mutex::new(thread),
        })
    }

    /// Calls the port, then sends all that is due.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.advance(|engine, now| engine.call(now, call))
    }

    /// Receives, then calls the port: for a call that stops a queue pair. Its acknowledgements may have arrived, and what they
    /// acknowledge has not failed.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_arrived<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.advance(|engine, now| {
            let now = engine.catch_up(now);
            engine.call(now, call)
        })
    }

    /// Takes a datagram that another process of the same address forwards, as if the network had brought it. The own sockets come first:
    /// what they hold is older. All checks are made, that of the ICRC too.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), Closed> {
        self.advance(|engine, now| {
            let now = engine.catch_up(now);
            engine.take_datagram(now, datagram, meta);
            engine.flush_once(now);
        })
    }

    /// Calls the port for something that leaves nothing to send.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_quiet<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.advance(|engine, now| {
            let result = call(&mut engine.port, now);
            engine.report_only(now);
            result
        })
    }

    fn advance<R>(&self, call: impl FnOnce(&mut Engine, Instant) -> R) -> Result<R, Closed> {
        self.shared.with(|engine| call(engine, clock::now()))
    }

    /// Advances the port after a poll of an empty completion queue, unless another thread does already.
    pub fn poll(&self) {
        self.shared.poll();
    }

    /// Hands the port to the progress thread: the program is about to sleep.
    pub fn stop_polling(&self) {
        if !self.is_inherited() {
            self.shared.stop_polling();
        }
    }

    /// Begins a wait for an event, which ends when the result is dropped.
    pub fn begin_wait(&self) -> Waiter<'_> {
        let counted = !self.is_inherited() && self.shared.env().wake.has_thread();
        Waiter {
            shared: &self.shared,
            counted,
            owns: counted && self.shared.begin_wait(),
            more: false,
        }
    }

    /// Returns when every current holder of the port's lock has released it, and the persister has finished its current job. No thread
    /// uses memory any more that was deregistered before the call.
    pub fn pass_lock(&self) {
        if !self.is_inherited() {
            self.shared.with_closed(|_| ());
            self.persister.pass();
        }
    }

    /// Returns whether this process is a fork of the one that made the driver. Every call fails here, and touches neither locks nor the
    /// wire.
    pub fn is_inherited(&self) -> bool {
        self.shared.env().is_inherited()
    }

    /// Joins a multicast group on the interface that has the local address, until as many [`Driver::leave`]s.
    ///
    /// # Errors
    /// When the system refuses, or the datapath can't.
    pub fn join(&self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        self.check_inherited()?;
        self.shared.with_closed(|engine| {
            engine.motor.path.join(group, local)?;
            let done = self.shared.env().wake.follow(&engine.motor.path.descriptors());
            if done.is_err() {
                engine.motor.path.leave(group, local);
            }
            done
        })
    }

    /// Undoes one [`Driver::join`].
    pub fn leave(&self, group: IpAddr, local: IpAddr) {
        if self.is_inherited() {
            return;
        }
        self.shared.with_closed(|engine| {
            engine.motor.path.leave(group, local);
            if let Err(e) = self.shared.env().wake.follow(&engine.motor.path.descriptors()) {
                tracing::error!("epoll_ctl of the progress thread's sockets failed: {e}");
            }
        });
    }

    /// Returns the counters of the port and its datapath.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        if self.is_inherited() {
            return Default::default();
        }
        self.shared
            .with_closed(|engine| (engine.port.counters(), engine.motor.path.counters()))
    }

    /// Sets the receive buffer, bytes, and returns the size that the system granted.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_receive_buffer(&self, bytes: usize) -> io::Result<usize> {
        self.check_inherited()?;
        self.shared
            .with_closed(|engine| engine.motor.path.set_receive_buffer(bytes))
    }

    fn check_inherited(&self) -> io::Result<()> {
        match self.is_inherited() {
            true => Err(io::ErrorKind::NotConnected.into()),
            false => Ok(()),
        }
    }

    /// Returns whether it has stopped, or is another process's.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed() || self.is_inherited()
    }

    /// Lets every later call fail, and sends nothing any more. Does not block.
    pub fn stop(&self) {
        if !self.is_inherited() {
            self.shared.close();
            self.shared.env().wake.stop();
        }
    }

    /// Stops: sends what is still to be sent, ends the progress thread, and lets every later call fail.
    pub fn close(&self) {
        if self.is_inherited() {
            // A fork has no progress thread to join.
            return;
        }
        // Closed already: a thread panicked under the lock.
        let _ = self.shared.with(|engine| {
            engine.pass(clock::now());
            engine.flush(clock::now());
            engine.publish(clock::now(), true);
            engine.motor.end_tap();
        });
        self.stop();
        self.persister.close();
        if self.thread_id == Some(thread::current().id()) {
            return;
        }
        if let Some(thread) = self.thread.lock().take()
            && !thread.finish()
        {
            tracing::error!("the progress thread panicked, or does not end");
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.close();
    }
}

/// Returns the callback that reports finished jobs of the persister to the port.
fn reporter(shared: &Arc<Shared>) -> Arc<Report> {
    let shared = Arc::downgrade(shared);
    Arc::new(move |done| {
        let Some(shared) = shared.upgrade() else { return false };
        let reported = shared.with(|engine| {
            let now = clock::now();
            engine.port.persisted(now, done);
            engine.flush_once(now);
        });
        reported.is_ok()
    })
}

/// Datagrams of one wake-up, at most, after which spinning may pay: bulk data arrives in more.
const FEW: u64 = 4;
/// Time for which the progress thread polls after packets: a wake-up takes as long in virtual machines.
const HOT: Duration = Duration::from_micros(50);

/// Sleep of the progress thread.
struct Sleep {
    poll: Poll,
    events: Events,
    spin: Spin,
    /// Datagrams that the last wake-up brought.
    received: u64,
}

impl Sleep {
    fn new(poll: Poll, spin: SpinMode) -> Self {
        // The peer may run on the machine's only processor.
        let spin = match spin {
            SpinMode::Auto if sys::processors() == 1 => SpinMode::Off,
            configured => configured,
        };
        Self {
            poll,
            events: Events::with_capacity(16),
            spin: Spin::new(spin).at_most(HOT),
            received: 0,
        }
    }

    /// Waits for an event.
    fn wait(&mut self, shared: &Shared) -> io::Result<()> {
        // A parked thread has no packets to poll for, and bulk data is cheaper in large batches.
        let spins = (1..=FEW).contains(&self.received) && shared.env().watches_sockets();
        if spins && self.spin()? {
            return Ok(());
        }
        shared.env().wake.before_sleep();
        self.poll.poll(&mut self.events, None)
    }

    /// Polls for a while, if that pays. True: an event has come.
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

/// Runs the progress thread.
fn run(shared: &Shared, mut sleep: Sleep, mut links: Option<LinkWatch>) {
    sys::shorten_slice();
    loop {
        if let Err(e) = sleep.wait(shared)
            && e.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!("epoll_wait of the progress thread failed: {e}");
            shared.close();
        }
        let events = &sleep.events;
        shared
            .env()
            .wake
            .after_sleep(events.iter().any(|e| e.token() == TOKEN_TIMER));
        if events.iter().any(|e| e.token() == TOKEN_LINKS)
            && let Some(links) = &mut links
        {
            match links.take() {
                Ok(changes) if changes.is_empty() => {}
                Ok(changes) => {
                    let mtus = shared.env().sink.links(changes);
                    // Closed: no call needs them any more.
                    let _ = shared.with(|engine| engine.links_changed(mtus));
                }
                Err(e) => tracing::warn!("reading changes of interfaces failed: {e}"),
            }
        }
        sleep.received = shared.woken();
        if shared.is_closed() {
            return;
        }
    }
}
