//! Configuration of a broker.

use std::{path::PathBuf, time::Duration};

use super::quota::Quotas;

/// Seconds that a broker stays when nobody needs it; tests shorten it.
const LINGER_VARIABLE: &str = "FERROCE_BROKER_LINGER";
/// Time that it stays otherwise.
const LINGER: Duration = Duration::from_secs(5);

/// How a broker runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of its socket.
    pub dir: PathBuf,
    /// Time that it stays when nobody needs it; `None`: for ever.
    pub linger: Option<Duration>,
    /// Time that it keeps an address open that nobody uses.
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
