//! The broker.

mod addresses;
mod broker;
mod client;
mod config;
mod ended;
#[doc(hidden)]
pub mod fuzz;
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

pub use config::Config;
pub use quota::Quotas;
pub use systemd::Notify;

use std::{
    io,
    io::Write,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use roce_net::socket_file::{Access, Kind, SocketFile};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    error::{Error, context},
    helper::{self, Lock},
    start::{self, LIFE_LOCK, PRIVATE, SHARED, SOCKET},
};

/// Time that a predecessor may take to exit.
const PREDECESSOR: Duration = Duration::from_secs(3);

/// Runs a broker until nobody needs it. With [`Config::detach`]: starts one that is nobody's child and returns.
///
/// # Errors
/// When another one runs in the directory or the system refuses something.
pub fn run(config: &Config) -> Result<(), Error> {
    if config.detach {
        return start::BROKER.detach(&config.dir);
    }
    let kept = systemd::kept_descriptors();
    let outcome = serve(config, kept);
    if let (Err(e), true) = (&outcome, config.announce) {
        // The process that started this one shows it to its user.
        let _ = writeln!(io::stdout(), "{e}");
    }
    outcome
}

fn serve(config: &Config, kept: Vec<OwnedFd>) -> Result<(), Error> {
    let mode = if config.shared.is_some() { SHARED } else { PRIVATE };
    start::prepare_dir(&config.dir, mode)?;
    let deadline = Instant::now() + PREDECESSOR;
    let lock = Lock::take(&config.dir, LIFE_LOCK, deadline).map_err(context("locking the directory"))?;
    let Some(lock) = lock else {
        return Err(Error::Runs(config.dir.clone()));
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
        helper::announce().map_err(context("telling that it is ready"))?;
    }
    tracing::info!(dir = %config.dir.display(), "the broker is ready");
    let outcome = broker.run().map_err(context("waiting for events"));
    // Before the lock goes: the next one's socket must stay.
    drop(file);
    drop(broker);
    drop(lock);
    outcome
}

/// Raises the limit of open files: a member takes three, and a group 128 for moments.
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

/// Creates the listener. A socket file that a dead broker has left is replaced.
fn listen(config: &Config) -> io::Result<SocketFile> {
    let access = config.shared.map_or(Access::Owner, Access::Mode);
    let file = SocketFile::bind(&config.dir.join(SOCKET), Kind::Records, access)?;
    file.listener().set_nonblocking(true)?;
    Ok(file)
}
