//! 10: sessions with several paths, over two networks; what becomes of them when a network or the other end goes.

mod away;
mod flaps;
mod held;
pub(super) mod kernel_client;
mod orders;
pub(super) mod our_client;
mod our_flaps;
mod our_orders;
mod our_restart;
mod our_wrong_server;
mod policies;
mod restart;
mod server_orders;
mod soak;
mod vm;
mod wrong_server;

use std::{collections::BTreeSet, path::Path, time::Duration};

use serde_json::Value;

use super::{Ctx, Scenario};
use crate::{
    Error,
    connects::{self, Request},
};

pub(super) fn list() -> Vec<Scenario> {
    let lists = [
        kernel_client::list(),
        orders::list(),
        wrong_server::list(),
        flaps::list(),
        away::list(),
        held::list(),
        server_orders::list(),
        restart::list(),
        soak::list(),
    ];
    let ours = [
        our_client::list(),
        our_flaps::list(),
        our_orders::list(),
        our_restart::list(),
        our_wrong_server::list(),
        policies::list(),
        vm::list(),
    ];
    lists.into_iter().chain(ours).flatten().collect()
}

/// How the second network goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// The switch no longer forwards. Both ends keep their carrier.
    Port,
    /// The guest's cable is pulled.
    Carrier,
}

impl Cut {
    pub(super) fn set(self, c: &mut Ctx<'_>, up: bool) -> Result<(), Error> {
        let guest = c.guest()?;
        match self {
            Self::Port => guest.set_port_on(1, up),
            Self::Carrier => guest.set_link_on(1, up),
        }
    }

    /// How long it is gone, s. Without a carrier the kernel knows at once. With one it is told by used up retries (some 17 s)
    /// or, when rdma_rxe has stopped over a repeated registration (`specs/kernel.md`), by heartbeats (35 s at the most):
    /// the path must not be back before.
    const fn seconds(self) -> u64 {
        match self {
            Self::Port => 45,
            Self::Carrier => 10,
        }
    }
}

/// The path on the second network was connected, and later again: see [`attempts`].
fn connected_anew(c: &Ctx<'_>) -> Result<u16, Error> {
    attempts(&connects::requests(Path::new(&c.path("wire-2.pcap")))?)
}

/// The number of the last attempt to connect a path, by all its requests: it was connected several times, kept its identifier, and
/// counted its attempts.
fn attempts(requests: &[Request]) -> Result<u16, Error> {
    let paths: BTreeSet<_> = requests.iter().map(|r| (r.session, r.path)).collect();
    let attempts: Vec<u16> = requests.iter().map(|r| r.recon_cnt).collect();
    let (first, last) = (attempts.first().copied(), attempts.last().copied());
    let connections = |attempt| {
        requests
            .iter()
            .filter(move |r| Some(r.recon_cnt) == attempt)
            .map(|r| r.cid)
    };
    let all = |attempt| connections(attempt).collect::<BTreeSet<_>>() == [0, 1].into();
    match last {
        Some(last) if paths.len() == 1 && first == Some(1) && last > 1 && attempts.is_sorted() && all(Some(last)) => {
            Ok(last)
        }
        _ => Err(format!("connection requests of one path, connected twice, are right: {requests:?}").into()),
    }
}

fn script(c: &mut Ctx<'_>, text: &str, seconds: u32) -> Result<String, Error> {
    let guest = c.guest()?;
    let result = guest.run(text, seconds);
    result.map_err(|e| format!("{e}\ndmesg:\n{}", guest.dmesg()).into())
}

/// The longest that a request of fio took, which wrote and read; an error unless all went well.
pub(super) fn longest(report: &str) -> Result<Duration, Error> {
    longest_of(report, &["read", "write"])
}

/// The same of one that did these, with all its jobs.
pub(super) fn longest_of(report: &str, ways: &[&str]) -> Result<Duration, Error> {
    let json = report.find('{').map_or("", |at| &report[at..]);
    let all: Value = serde_json::from_str(json).map_err(|e| format!("fio left no report: {e}: {report}"))?;
    let jobs = all["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let numbers = |way: &str, field: fn(&Value) -> &Value| {
        let numbers = jobs
            .iter()
            .map(move |job| field(&job[way]).as_u64().unwrap_or_default());
        numbers.collect::<Vec<_>>()
    };
    let idle = |way: &&str| numbers(way, |way| &way["total_ios"]).iter().sum::<u64>() == 0;
    if jobs.iter().any(|job| job["error"] != 0) || ways.iter().any(idle) {
        return Err(format!("fio: {report}").into());
    }
    let longest = ways.iter().flat_map(|way| numbers(way, |way| &way["lat_ns"]["max"]));
    Ok(Duration::from_nanos(longest.max().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::{longest, longest_of};

    #[test]
    fn a_report_with_an_error_or_without_reads_is_none() {
        let report = |error: u32, reads: u32| {
            let way = |ios: u32, max: u64| format!(r#"{{"total_ios": {ios}, "lat_ns": {{"max": {max}}}}}"#);
            let (read, write) = (way(reads, 17_500_000_000), way(9, 3));
            longest(&format!(
                r#"fio: hint {{"jobs": [{{"error": {error}, "read": {read}, "write": {write}}}]}}"#
            ))
        };
        let several = r#"{"jobs": [{"error": 0, "read": {"total_ios": 1, "lat_ns": {"max": 3000000}}},
            {"error": 0, "read": {"total_ios": 0, "lat_ns": {"max": 0}}}]}"#;
        assert_eq!(longest_of(several, &["read"]).unwrap().as_millis(), 3);
        assert!(longest_of(several, &["write"]).is_err());
        assert_eq!(report(0, 5).unwrap().as_millis(), 17_500);
        assert!(report(84, 5).is_err() && report(0, 0).is_err() && longest("").is_err());
    }
}
