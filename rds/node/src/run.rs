//! Start and end of the process.

use std::{
    io::{self, Write},
    net::IpAddr,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{self, Builder, JoinHandle},
    time::{Duration, Instant},
};

use rand::{SeedableRng, rngs::StdRng};
use rds_local::NODE;
use roce::{
    Arrival, DeviceConfig, Hardware, LocalDevice, Placement,
    reactor::{Handle, Reactor, ReactorConfig},
};
use roce_broker::{
    Error, PRIVATE,
    helper::{self, Lock},
    prepare_dir,
};
use roce_net::socket_file::{Access, Kind, SocketFile};
use roce_verbs::provider::VerbsError;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    config::{Config, Limits},
    event::{Events, NodeEvent},
    opening::{Command, Opened},
    server::Server,
    stats::NodeStats,
};

/// Held by the process as long as it lives.
const LIFE_LOCK: &str = "rds.lock";
/// Time that a predecessor may take to end.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// Time within which it answers other threads.
const ANSWER: Duration = Duration::from_secs(5);
/// Time between two questions whether to stop.
const PAUSE: Duration = Duration::from_millis(100);

/// Everything is for the one loop.
struct Alone;

impl Placement for Alone {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}

/// Process that runs in a thread.
#[derive(Debug)]
pub struct Running {
    control: NodeControl,
    events: Receiver<NodeEvent>,
    thread: JoinHandle<io::Result<()>>,
}

/// Handle of a running process for other threads.
#[derive(Clone, Debug)]
pub struct NodeControl(Handle<Command, Opened>);

impl NodeControl {
    /// Returns the present numbers; `None`: it has ended, or does not answer in time.
    pub fn stats(&self) -> Option<NodeStats> {
        let (to, answer) = channel();
        self.0.command(Command::Stats(to));
        answer.recv_timeout(ANSWER).ok()
    }

    /// Opens an address. [`NodeEvent::Opened`] or [`NodeEvent::NotOpened`] follows.
    pub fn open(&self, addr: IpAddr) {
        self.0.command(Command::Open(addr));
    }

    /// Sets the limits of programs. What they have already stays.
    pub fn set_limits(&self, limits: Limits) {
        self.0.command(Command::SetLimits(limits));
    }
}

impl Running {
    /// Asks it to end: connections are ended, programs' sockets closed.
    pub fn stop(&self) {
        self.control.0.command(Command::Stop);
    }

    /// Returns a handle for other threads.
    pub fn control(&self) -> &NodeControl {
        &self.control
    }

    /// Waits for the next event, at most so long.
    pub fn next(&self, timeout: Duration) -> Option<NodeEvent> {
        match self.events.recv_timeout(timeout) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // It has ended, or is about to.
                thread::sleep(timeout.min(PAUSE));
                None
            }
        }
    }

    /// Returns whether it has ended.
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// Why it could not go on.
    pub fn wait(self) -> io::Result<()> {
        self.thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread of the RDS node panicked")))
    }
}

fn context(what: &str) -> impl Fn(io::Error) -> Error + use<'_> {
    move |source| Error::Io {
        context: what.to_owned(),
        source,
    }
}

/// Starts it in a thread. Addresses of RDMA devices are served on those, all others in software.
///
/// # Errors
/// When another one runs in the directory, or the system or the broker refuses.
pub fn start(config: Config, rdma: Option<Box<dyn Hardware>>) -> Result<Running, Error> {
    prepare_dir(&config.dir, PRIVATE)?;
    let lock = Lock::take(&config.dir, LIFE_LOCK, Instant::now() + PREDECESSOR);
    let lock = lock.map_err(context("locking the directory"))?;
    let lock = lock.ok_or_else(|| Error::Runs(config.dir.clone()))?;
    raise_limits();
    let file = SocketFile::bind(&config.dir.join(rds_local::SOCKET), Kind::Records, Access::Owner)
        .and_then(|file| file.listener().set_nonblocking(true).map(|()| file))
        .map_err(context("making the socket"))?;
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|e| context("drawing random numbers")(io::Error::other(e.to_string())))?;
    let device = devices(&config).map_err(|e| context("joining the broker")(io::Error::other(e)))?;
    let device = match rdma {
        Some(rdma) => device.with_hardware(rdma),
        None => device,
    };
    let reactor = Reactor::<Server>::new(ReactorConfig::default()).map_err(context("starting the loop"))?;
    let control = NodeControl(reactor.handle());
    config.addrs.iter().for_each(|addr| control.open(*addr));
    let (sender, events) = Events::new();
    let run = move || {
        let dir = config.dir.clone();
        let ran = reactor.run(device, |turn| {
            Server::new(turn, config, file, (StdRng::from_seed(seed), sender))
        });
        tracing::info!(dir = %dir.display(), "the RDS node ends");
        // With the socket file, before the lock: the next one's must stay.
        let ran = ran.map(drop);
        drop(lock);
        ran.map_err(io::Error::other)
    };
    let thread = Builder::new().name("rds-node".into()).spawn(run);
    let thread = thread.map_err(context("starting the thread"))?;
    Ok(Running {
        control,
        events,
        thread,
    })
}

/// Runs it until no program needs it, or `stop` says so, and reports its events. With [`Config::detach`]: starts one that is nobody's child
/// and returns.
///
/// # Errors
/// As [`start`], and why it could not go on.
pub fn run(
    config: Config,
    rdma: Option<Box<dyn Hardware>>,
    stop: impl Fn() -> bool,
    mut report: impl FnMut(NodeEvent),
) -> Result<(), Error> {
    if config.detach {
        return NODE.detach(&config.dir);
    }
    let announces = config.announce;
    let started = start(config, rdma).and_then(|running| match announces {
        true => helper::announce()
            .map_err(context("telling that it is ready"))
            .map(|()| running),
        false => Ok(running),
    });
    match started {
        Ok(running) => {
            while !running.is_over() {
                if let Some(event) = running.next(PAUSE) {
                    report(event);
                }
                if stop() {
                    running.stop();
                }
            }
            running.wait().map_err(context("running"))
        }
        Err(e) => {
            if announces {
                // The process that started this one shows it to its user.
                let _ = writeln!(io::stdout(), "{e}");
            }
            Err(e)
        }
    }
}

fn devices(config: &Config) -> Result<LocalDevice, VerbsError> {
    let none: &[DeviceConfig] = &[];
    match &config.join {
        Some(join) => LocalDevice::open_shared(none, 1, Arc::new(Alone), join)?
            .pop()
            .ok_or(VerbsError::Closed),
        None => LocalDevice::open(none),
    }
}

/// Raises the limit of open files: a socket takes two.
fn raise_limits() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(e) = setrlimit(Resource::Nofile, raised) {
        tracing::info!("the limit of open files stays as it is: {e}");
    }
}
