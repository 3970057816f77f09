//! The broker.

mod addresses;
mod broker;
mod client;
mod ended;
mod gsi;
mod orphans;
mod ports;
mod quota;
mod requests;
mod route;
mod slots;
mod state;
mod systemd;
#[cfg(test)]
mod tests;
mod translations;

#[cfg(test)]
pub(crate) use {client::MAX_WAITING_BYTES, ended::MAX_SETS, requests::MAX_NAME};

pub use quota::Quotas;
pub use systemd::Notify;

use std::{
    ffi::OsStr,
    fs, io,
    io::Write,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use roce_net::socket_file::{Access, Kind, SocketFile};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    start::{self, LIFE_LOCK, Lock, PRIVATE, READY, RUNS_ALREADY, SHARED, SOCKET, StartError},
    sys,
};

/// Seconds that a broker stays when nobody needs it; tests shorten it.
pub const LINGER_VARIABLE: &str = "FERROCE_BROKER_LINGER";
/// How long it stays otherwise.
const LINGER: Duration = Duration::from_secs(5);
/// How long a predecessor may take to end.
const PREDECESSOR: Duration = Duration::from_secs(3);

/// How a broker runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of its socket.
    pub dir: PathBuf,
    /// How long it stays when nobody needs it; `None`: for ever.
    pub linger: Option<Duration>,
    /// How long it keeps an address open that nobody uses.
    pub idle: Duration,
    /// Limits of one user.
    pub quotas: Quotas,
    /// Keep users from receiving each other's packets, if it serves several and may load programs (CAP_BPF).
    pub isolate: bool,
    /// Serve other users too, and give the socket these permissions.
    pub shared: Option<u32>,
    /// Leave the process group and close what the starting program left open. Only for a program that has not opened
    /// anything itself.
    pub detach: bool,
    /// Say on standard output when it can be connected to (or why not), and close that.
    pub announce: bool,
}

impl Config {
    /// A broker of this user alone.
    pub fn new(dir: PathBuf) -> Self {
        let given = roce_net::environment::var(LINGER_VARIABLE).and_then(|t| t.parse().ok());
        let linger = given.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let linger = linger.unwrap_or(LINGER);
        Self {
            dir,
            linger: Some(linger),
            idle: linger,
            quotas: Quotas::PRIVATE,
            isolate: true,
            shared: None,
            detach: false,
            announce: false,
        }
    }
}

/// Why a broker does not run.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Another one has the directory.
    #[error("{RUNS_ALREADY} in {}", .0.display())]
    Runs(PathBuf),
    /// The directory can't be used.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A system call failed.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed.
        context: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

fn context(context: &'static str) -> impl Fn(io::Error) -> BrokerError {
    move |source| BrokerError::Io { context, source }
}

/// Runs a broker until nobody needs it. With [`Config::detach`]: starts one that is nobody's child and returns.
///
/// # Errors
/// When another one runs in the directory or the system refuses something.
pub fn run(config: &Config) -> Result<(), BrokerError> {
    if config.detach {
        return detach(config);
    }
    let kept = systemd::kept_descriptors();
    let outcome = serve(config, kept);
    if let (Err(e), true) = (&outcome, config.announce) {
        // Whoever started us tells its user.
        let _ = writeln!(io::stdout(), "{e}");
    }
    outcome
}

fn serve(config: &Config, kept: Vec<OwnedFd>) -> Result<(), BrokerError> {
    let mode = if config.shared.is_some() { SHARED } else { PRIVATE };
    start::prepare_dir(&config.dir, mode)?;
    let deadline = Instant::now() + PREDECESSOR;
    let lock = Lock::take(&config.dir, LIFE_LOCK, deadline).map_err(context("locking the directory"))?;
    let Some(lock) = lock else {
        return Err(BrokerError::Runs(config.dir.clone()));
    };
    start::sweep(&config.dir);
    raise_limits();
    let file = listen(config).map_err(context("making the socket"))?;
    let listener = file
        .as_fd()
        .try_clone_to_owned()
        .map_err(context("making the socket"))?;
    let notify = systemd::Notify::from_env();
    let mut broker = broker::Broker::new(config, listener, kept, notify).map_err(context("starting"))?;
    broker.notify_ready();
    if config.announce {
        announce().map_err(context("telling that it is ready"))?;
    }
    tracing::info!(dir = %config.dir.display(), "the broker is ready");
    let outcome = broker.run().map_err(context("waiting for events"));
    // Before the lock goes: the next one's socket must stay.
    drop(file);
    drop(broker);
    drop(lock);
    outcome
}

/// Parses a packet's bytes as a broker does. For fuzzing.
pub(crate) fn classify(bytes: &[u8]) {
    if let gsi::Target::Gsi(mad) = gsi::target(bytes) {
        let _ = roce_cm::mad::Mad::parse(mad.as_slice());
    }
}

/// Reads the state of a former broker. For fuzzing.
pub(crate) fn read_state(text: &[u8]) -> bool {
    let Some(mut slots) = state::parse(text) else {
        return false;
    };
    slots.inherit(0, 0, |p| p.pid % 2 == 0);
    for (place, _) in slots.absent() {
        slots.release(0, place, true);
    }
    let tenant = slots::Tenant {
        process: slots::Process { pid: 1, start: 1 },
        uid: 1,
        token: 1,
    };
    let _ = slots.allocate(0, tenant, 0);
    true
}

/// A member is three descriptors, and a group 128 for moments.
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

/// A socket that a dead broker has left is replaced.
fn listen(config: &Config) -> io::Result<SocketFile> {
    let access = config.shared.map_or(Access::Owner, Access::Mode);
    let file = SocketFile::bind(&config.dir.join(SOCKET), Kind::Records, access)?;
    file.listener().set_nonblocking(true)?;
    Ok(file)
}

/// Tells whoever waits for it, which ends its waiting.
fn announce() -> io::Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{READY}")?;
    out.flush()?;
    let null = fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(null)?;
    Ok(())
}

fn detach(config: &Config) -> Result<(), BrokerError> {
    // SAFETY: `Config::detach` says that this program has opened nothing.
    unsafe { sys::close_from(3) }.map_err(context("closing what the starting program left open"))?;
    // Not of the terminal, so that its ctrl-C is none of ours.
    let _ = rustix::process::setsid();
    let program = std::env::current_exe().map_err(context("finding the own program"))?;
    let child = Command::new(program)
        .args([
            OsStr::new("broker"),
            OsStr::new("--announce"),
            OsStr::new("--dir"),
            config.dir.as_os_str(),
        ])
        // It outlives whoever needed it first, and shall keep no file system busy.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::inherit())
        .stderr(Stdio::inherit())
        .spawn();
    child.map(drop).map_err(context("starting the broker"))
}
