//! Options of `ferroce map` for its paths.

use std::time::Duration;

use rnbd::client::OnLoss;
use rnbd_host::control::read_on_loss;
use rtrs::client::{Policy, SessionConfig};

use crate::units::seconds;

/// Reads a number of attempts; -1: no limit.
pub(crate) fn attempts(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(SessionConfig::FOREVER),
        Ok(n) if (0..=i64::from(SessionConfig::MAX_RECONNECTS)).contains(&n) => Ok(n as u32),
        _ => Err("must be -1 (no limit) to 9999".into()),
    }
}

/// Reads a policy.
pub(crate) fn policy(text: &str) -> Result<Policy, String> {
    text.parse().map_err(|e: rtrs::client::policy::NoPolicy| e.to_string())
}

/// Options of paths.
#[derive(Clone, PartialEq, Eq, Debug, clap::Args)]
#[command(next_help_heading = "Paths")]
pub(crate) struct PathArgs {
    /// Which path a request takes: round-robin (rr), min-inflight (mi), or min-latency (ml)
    #[arg(long, value_name = "POLICY", value_parser = policy, default_value = "min-inflight")]
    pub(crate) policy: Policy,
    /// Start as soon as one path is up, and keep connecting the others
    #[arg(long)]
    pub(crate) connect_any: bool,
    /// Delay before a lost path is reconnected, plus up to half of it at random; the kernel's client waits 30
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "2")]
    pub(crate) reconnect_delay: Duration,
    /// Attempts to reconnect a lost path: up to 9999, or -1 for no limit. Exit when every path has used up its attempts
    #[arg(long, value_name = "N", value_parser = attempts, default_value = "-1", allow_negative_numbers = true)]
    pub(crate) max_reconnects: u32,
    /// Loss policy: while no path is up, requests fail at once (`error`, as with the kernel's client) or wait (`queue`), at most for SECONDS
    ///
    /// Requests without an answer are sent again. Writes that were acknowledged before are safe if only paths were lost or the
    /// server's process restarted. If the server's machine restarts, those since the last flush are lost, as with any disk that has
    /// a write cache: the next flush and the next FUA write of each user of the device fail with EIO, and `writes_lost` is
    /// reported. That holds for both policies. A kernel's server does not report whether its machine has restarted: there they fail each
    /// time that all paths were lost, unless its device has no write cache
    #[arg(long, value_name = "error|queue[=SECONDS]", value_parser = read_on_loss, default_value = "error")]
    pub(crate) on_loss: OnLoss,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_said_is_understood() {
        assert_eq!(attempts("-1"), Ok(SessionConfig::FOREVER));
        assert_eq!((attempts("0"), attempts("9999")), (Ok(0), Ok(9999)));
        for wrong in ["-2", "10000", "x", ""] {
            assert!(attempts(wrong).is_err(), "{wrong}");
        }
        assert_eq!(policy("RR"), Ok(Policy::RoundRobin));
        assert!(policy("none").is_err());
    }
}
