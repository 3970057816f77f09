//! Settings of the process.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use roce::JoinConfig;

use crate::program;

/// Limits of programs. Beyond them a request is refused with `ENOBUFS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Sockets of a process.
    pub process_sockets: usize,
    /// Sockets of all.
    pub sockets: usize,
    /// Bytes of the send and receive buffers of a process's sockets together.
    pub process_buffers: usize,
    /// The same of all.
    pub buffers: usize,
    /// Control connections of a process.
    pub process_connections: usize,
    /// Bytes that wait in a socket's pair for its program; longer messages go there as memory files. Without the right to exceed
    /// `net.core.wmem_max` that is the limit.
    pub pair: usize,
    /// Regions of memory of a process's sockets, whose bytes are not pinned.
    pub process_regions: usize,
    /// Regions of all.
    pub regions: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            process_sockets: 1024,
            sockets: 16_384,
            process_buffers: 512 << 20,
            buffers: 2 << 30,
            process_connections: 128,
            pair: program::MAX_RECORD,
            process_regions: 16_384,
            regions: 65_536,
        }
    }
}

/// Settings of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of its socket and state files.
    pub dir: PathBuf,
    /// Time that it stays without programs; `None`: until it is stopped.
    pub linger: Option<Duration>,
    /// Longest time that it stays then because peers have not acknowledged all messages.
    pub flush: Duration,
    /// Addresses to open at the start. Others are opened when a socket is bound to them.
    pub addrs: Vec<IpAddr>,
    /// Limits of programs.
    pub limits: Limits,
    /// Settings of the protocol. The first sequence number is the time of each address's opening.
    pub rds: rds::Config,
    /// Broker to share addresses by; `None`: it has them alone.
    pub join: Option<JoinConfig>,
    /// Start again in the background and return. Only for a program that has opened nothing.
    pub detach: bool,
    /// Say on standard output when it can be connected to, or why not, and close that.
    pub announce: bool,
}

/// Seconds that helpers stay when nobody needs them; tests shorten it.
const LINGER_VARIABLE: &str = "FERROCE_BROKER_LINGER";
/// Time that it stays otherwise.
const LINGER: Duration = Duration::from_secs(5);

impl Config {
    /// Returns the usual settings for a directory.
    pub fn new(dir: PathBuf) -> Self {
        let given = roce_net::environment::var(LINGER_VARIABLE).and_then(|text| text.parse().ok());
        let given = given.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Self {
            dir,
            linger: Some(given.unwrap_or(LINGER)),
            flush: Duration::from_secs(30),
            addrs: Vec::new(),
            limits: Limits::default(),
            rds: rds::Config::default(),
            join: JoinConfig::from_env(),
            detach: false,
            announce: false,
        }
    }
}
