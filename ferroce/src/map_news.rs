//! Events of `ferroce map` about its paths and its devices.

use std::time::Duration;

use rnbd::client::OnLoss;
use rnbd_host::{control::read_on_loss, map::MapNews};
use rtrs::client::{Policy, SessionConfig};
use serde_json::{Value, json};

use crate::{
    output::{self, Failure},
    report::Reporter,
    units::seconds,
};

/// Tells one thing, as an event with `--json`, and else as a line.
pub(crate) fn tell(reporter: &Reporter, news: &MapNews) -> Result<(), Failure> {
    let (name, fields, text) = shown(news);
    reporter.event(name, fields, &text)
}

fn shown(news: &MapNews) -> (&'static str, Value, String) {
    match news {
        MapNews::PathUp { path, again } => {
            let text = if *again { "is up again" } else { "is up" };
            let fields = json!({ "path": path.to_string(), "again": again });
            ("path_up", fields, format!("path {path} {text}"))
        }
        MapNews::PathDown { path, why } => (
            "path_down",
            json!({ "path": path.to_string(), "why": why.to_string() }),
            format!("path {path} is down: {why}"),
        ),
        MapNews::TookOver { path, requests } => (
            "failover",
            json!({ "path": path.to_string(), "requests": requests }),
            format!("path {path} has taken over {requests} requests"),
        ),
        MapNews::AttemptFailed { path, error } => (
            "reconnect_failed",
            json!({ "path": path.to_string(), "why": error.to_string() }),
            format!("path {path} could not be connected: {error}"),
        ),
        MapNews::PathClosed { path, why } => (
            "path_closed",
            json!({ "path": path.to_string(), "why": why.to_string() }),
            format!("path {path} stays down: {why}"),
        ),
        MapNews::Lost(why) => (
            "session_lost",
            json!({ "why": why.to_string() }),
            format!("no path is up: {why}"),
        ),
        MapNews::Back(info) => (
            "session_back",
            json!({ "queue_depth": info.queue_depth, "max_io_bytes": info.max_io_size }),
            "the session is back".to_owned(),
        ),
        MapNews::Remapped { device } => (
            "remapped",
            json!({ "device": device }),
            format!("the server has opened {device} again"),
        ),
        MapNews::NotRemapped { device, error } => (
            "not_remapped",
            json!({ "device": device, "why": error.to_string() }),
            format!("the server has not opened {device} again: {error}"),
        ),
        MapNews::WritesLost { device, writes, cause } => (
            "writes_lost",
            json!({ "device": device, "writes": writes, "why": cause.name() }),
            format!("{writes} writes to {device} may be lost, the next flush fails: {cause}"),
        ),
        MapNews::Changed { device, geometry } => (
            "resized",
            json!({
                "device": device,
                "bytes": geometry.size,
                "block_size": geometry.logical_block_size,
                "read_only": geometry.read_only,
            }),
            format!("{device} has {}", output::bytes(geometry.size)),
        ),
        MapNews::Unmapped { device, why } => {
            let text = match why {
                None => format!("unmapped {device}"),
                Some(why) => format!("unmapped {device}: {why}"),
            };
            ("unmapped", json!({ "device": device, "why": why }), text)
        }
        MapNews::EventsLost(events) => (
            "events_lost",
            json!({ "events": events }),
            format!("{events} events were lost"),
        ),
    }
}

/// Reads a number of attempts, -1 for those without end.
pub(crate) fn attempts(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(SessionConfig::FOREVER),
        Ok(n) if (0..=i64::from(SessionConfig::MAX_RECONNECTS)).contains(&n) => Ok(n as u32),
        _ => Err("must be -1 (without end) to 9999".into()),
    }
}

/// Reads a policy.
pub(crate) fn policy(text: &str) -> Result<Policy, String> {
    text.parse().map_err(|e: rtrs::client::policy::NoPolicy| e.to_string())
}

/// What is done about a path that is lost.
#[derive(Clone, PartialEq, Eq, Debug, clap::Args)]
#[command(next_help_heading = "Paths")]
pub(crate) struct PathArgs {
    /// Which path a request takes: round-robin (rr), min-inflight (mi), or min-latency (ml)
    #[arg(long, value_name = "POLICY", value_parser = policy, default_value = "min-inflight")]
    pub(crate) policy: Policy,
    /// Begin as soon as one of the paths is up, and go on trying the others
    #[arg(long)]
    pub(crate) connect_any: bool,
    /// Time until a lost path is connected again, of which up to half more is drawn at random; the kernel's client takes 30
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "2")]
    pub(crate) reconnect_delay: Duration,
    /// Attempts to connect a lost path again, up to 9999, or -1: without end. Exit when every path has used up its attempts
    #[arg(long, value_name = "N", value_parser = attempts, default_value = "-1", allow_negative_numbers = true)]
    pub(crate) max_reconnects: u32,
    /// What becomes of requests while no path is up: they fail at once, as with the kernel's client, or wait, optionally for so many seconds at most
    ///
    /// Requests without an answer are sent again. Writes that were acknowledged before are safe if only paths were lost, or the
    /// server's process restarted. If the server's machine restarts, those since the last flush are lost, as with any disk that has
    /// a write cache: the next flush and the next FUA write of each user of the device fail with EIO, and `writes_lost` is
    /// reported. With `error` it is the same. A kernel's server does not say whether its machine has restarted: there they fail each
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
