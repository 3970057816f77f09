//! Bulk tests of lnet_selftest between two nodes of ours, next to WRITEs of `ferroce bench`.

use std::{path::Path, process::Stdio, time::Duration};

use serde_json::Value;

use super::{
    PageArgs,
    figure::{Columns, Figure, Target},
    transport::{bench, json_lines, number},
};
use crate::{
    Result,
    process::{self, Guard},
};

/// NID of the node that is tested, and address of the one that tests: addresses that no other part has, as a node or a broker of one may
/// still be about to end.
const NODE: &str = "127.0.0.11@o2ib";
const CONSOLE: &str = "127.0.0.12";
/// Kinds of tests, by the operation of the node that is tested.
const TESTS: [(&str, &str); 2] = [("write", "brw write"), ("read", "brw read")];
const REFERENCE: &str = "ferroce bench write";
/// Time until a node listens.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Data a second, of 1 MiB a request with eight requests at a time.
pub(super) fn lnet(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    let mut serve = process::command(ferroce);
    serve.args(["lnet", "serve", "--json", NODE]).stdout(Stdio::piped());
    let mut node = Guard::spawn("ferroce lnet serve", &mut serve)?;
    let lines = node.stdout_lines();
    lines.recv_timeout(TIMEOUT).map_err(|e| format!("the node: {e}"))?;
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (test, name) in TESTS {
            columns.add(name, bulk(ferroce, test, args.seconds())?);
        }
        let report = bench(ferroce, &["write"], args.seconds())?;
        columns.add(REFERENCE, number(&report, "write", "/gbytes_per_s")?);
    }
    let figure = |name: &str| columns.figure(name, "GB/s", name, REFERENCE, Target::None);
    Ok(TESTS.map(|(_, name)| figure(name)).into())
}

/// Gigabytes a second of a test.
fn bulk(ferroce: &Path, test: &str, seconds: f64) -> Result<f64> {
    let seconds = seconds.to_string();
    let words = ["lnet", "selftest", "--json", "-I", CONSOLE, "--test", test, "-s", "1M"];
    let mut command = process::command(ferroce);
    command.args(words).args(["--concurrency", "8", "-d", &seconds, NODE]);
    let output = process::capture("ferroce lnet selftest", &mut command)?;
    let reports = json_lines(&String::from_utf8_lossy(&output.stdout));
    let summary = reports.iter().find(|report| report["event"] == "summary");
    let of = |key: &str| summary.and_then(|summary| summary[key].as_f64());
    match (of("bytes"), of("seconds"), of("failed")) {
        (Some(bytes), Some(seconds), Some(0.0)) => Ok(bytes / seconds / 1e9),
        _ => Err(format!("ferroce lnet selftest: {}", summary.unwrap_or(&Value::Null))),
    }
}
