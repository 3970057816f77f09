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

use nix::sys::epoll::EpollEvent;
use parking_lot::Mutex;
use roce_port::{Port, PortCounters, RxMeta, ToShard};
use roce_verbs::{Instant, provider::VerbsError};

use crate::{
    clock,
    datapath::{Datapath, DatapathCounters},
    engine::{Engine, Shared},
    inbox::Inbox,
    links::LinkWatch,
    local::{LocalConfig, LocalDriver},
    persist::{Persister, Report},
    progress::{Advance, Closed, Environment},
    sink::EventSink,
    spin::{Spin, SpinMode},
    sys,
    wait::Waiter,
    wake::{TOKEN_INBOX, TOKEN_LINKS, TOKEN_SOCKETS, TOKEN_TIMER, Wake},
};

/// Configuration of a [`Driver`].
pub struct DriverConfig {
    /// Run a progress thread. Without one the port advances only while the program posts and polls.
    pub background: bool,
    /// Capture, recipients and faults.
    pub local: LocalConfig,
    /// Time for which the progress thread polls the sockets before it sleeps. [`SpinMode::Auto`]: 50 us after packets have come, while
    /// that finds more; none on a single processor.
    pub spin: SpinMode,
    /// Name of the progress thread.
    pub name: String,
    /// Changes of interfaces, which the progress thread reports to the event sink.
    pub links: Option<LinkWatch>,
    /// Messages of other engines of the device.
    pub inbox: Option<Arc<Inbox<ToShard>>>,
    /// Publish counters ([`EventSink::publish`]).
    pub publishes: bool,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            background: true,
            local: LocalConfig::default(),
            spin: SpinMode::default(),
            name: "roce".into(),
            links: None,
            inbox: None,
            publishes: false,
        }
    }
}

impl From<Closed> for VerbsError {
    fn from(_: Closed) -> Self {
        Self::Closed
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
        config: DriverConfig,
    ) -> io::Result<Self> {
        let wake = Arc::new(Wake::new(config.background, &path.descriptors(), sink)?);
        if let Some(links) = &config.links {
            wake.also(links.as_fd(), TOKEN_LINKS)?;
        }
        if let Some(inbox) = &config.inbox {
            wake.also(inbox.as_fd(), TOKEN_INBOX)?;
        }
        let driver = LocalDriver::new(port, path, config.local);
        let persister = Arc::<Persister>::default();
        let engine = Engine::new(driver, wake.clone(), persister.clone(), config.inbox, config.publishes);
        let shared = Arc::new(Shared::new(engine, wake));
        shared.with_closed(|engine| {
            engine.report = Some(reporter(&shared));
            engine.publish(clock::now(), true);
        });
        let theirs = shared.clone();
        let run = move || run(&theirs, Sleep::new(config.spin), config.links);
        let start = config.background.then(|| sys::Thread::start(config.name, run));
        let thread = start.transpose()?;
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
        self.shared.with(|engine, now| engine.call(now, call))
    }

    /// Receives, then calls the port: for a call that stops a queue pair. Its acknowledgements may have arrived, and what they
    /// acknowledge has not failed.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_arrived<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.shared.with(|engine, now| {
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
        self.shared.with(|engine, now| {
            let now = engine.catch_up(now);
            engine.driver.inject(now, meta, datagram);
            engine.flush_once(now);
        })
    }

    /// Calls the port for something that leaves nothing to send.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn with_quiet<R>(&self, call: impl FnOnce(&mut Port, Instant) -> R) -> Result<R, Closed> {
        self.shared.with(|engine, now| {
            let result = call(engine.driver.port(), now);
            engine.report_only(now);
            result
        })
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
        let counted = !self.is_inherited() && self.shared.env().has_thread();
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
        if self.shared.with_closed(|_| ()).is_some() {
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
        let joined = self.shared.with_closed(|engine| {
            engine.driver.join(group, local)?;
            let done = self.shared.env().follow(&engine.driver.descriptors());
            if done.is_err() {
                engine.driver.leave(group, local);
            }
            done
        });
        joined.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))
    }

    /// Undoes one [`Driver::join`].
    pub fn leave(&self, group: IpAddr, local: IpAddr) {
        self.shared.with_closed(|engine| {
            engine.driver.leave(group, local);
            if let Err(e) = self.shared.env().follow(&engine.driver.descriptors()) {
                tracing::error!("epoll_ctl of the progress thread's sockets failed: {e}");
            }
        });
    }

    /// Returns the counters of the port and its datapath.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        let counters = self.shared.with_closed(|engine| engine.driver.counters());
        counters.unwrap_or_default()
    }

    /// Returns whether it has stopped, or is another process's.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed() || self.is_inherited()
    }

    /// Lets every later call fail, and sends nothing any more. Does not block.
    pub fn stop(&self) {
        if !self.is_inherited() {
            self.shared.close();
            self.shared.env().stop();
        }
    }

    /// Stops: sends what is still to be sent, ends the progress thread, and lets every later call fail.
    pub fn close(&self) {
        if self.is_inherited() {
            // A fork has no progress thread to join.
            return;
        }
        // Closed already: a thread panicked under the lock.
        let _ = self.shared.with(|engine, now| {
            engine.pass(now, false);
            engine.flush(clock::now());
            engine.publish(clock::now(), true);
            engine.driver.end_tap();
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
        let reported = shared.with(|engine, now| {
            engine.driver.port().persisted(now, done);
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
    events: [EpollEvent; 16],
    /// Number of those that have come.
    count: usize,
    spin: Spin,
    /// Datagrams that the last wake-up brought.
    received: u64,
}

impl Sleep {
    fn new(spin: SpinMode) -> Self {
        // The peer may run on the machine's only processor.
        let spin = match spin {
            SpinMode::Auto if sys::processors() == Some(1) => SpinMode::Off,
            configured => configured,
        };
        Self {
            events: [EpollEvent::empty(); 16],
            count: 0,
            spin: Spin::new(spin).at_most(HOT),
            received: 0,
        }
    }

    /// Returns the tokens of the events that have come.
    fn tokens(&self) -> impl Iterator<Item = u64> {
        self.events[..self.count].iter().map(EpollEvent::data)
    }

    /// Waits for an event.
    fn wait(&mut self, wake: &Wake) -> io::Result<()> {
        self.count = 0;
        // A parked thread has no packets to poll for, and bulk data is cheaper in large batches.
        let spins = (1..=FEW).contains(&self.received) && wake.watches_sockets();
        if spins && let Some(spinning) = self.spin.begin(None) {
            loop {
                self.count = wake.wait(&mut self.events, false)?;
                if self.count > 0 || !spinning.goes_on() {
                    break;
                }
            }
            let packets = self.tokens().any(|token| token >= TOKEN_SOCKETS);
            self.spin.end(&spinning, packets);
        }
        if self.count == 0 {
            self.count = wake.wait(&mut self.events, true)?;
        }
        Ok(())
    }
}

/// Runs the progress thread.
fn run(shared: &Shared, mut sleep: Sleep, mut links: Option<LinkWatch>) {
    sys::shorten_slice();
    loop {
        if let Err(e) = sleep.wait(shared.env())
            && e.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!("epoll_wait of the progress thread failed: {e}");
            shared.close();
        }
        let expired = sleep.tokens().any(|token| token == TOKEN_TIMER);
        shared.env().after_sleep(expired);
        if sleep.tokens().any(|token| token == TOKEN_LINKS)
            && let Some(links) = &mut links
        {
            match links.take() {
                Ok(changes) if changes.is_empty() => {}
                Ok(changes) => {
                    let mtus = shared.env().sink().links(changes);
                    // Closed: no call needs them any more.
                    let _ = shared.with(|engine, _| engine.links_changed(mtus));
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
