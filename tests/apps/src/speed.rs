//! The speed of unmodified programs beside `ferroce bench`, which uses the transport without the C ABI in between: both in
//! one run and in turns, because machines and their load differ.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};
use serde::Serialize;

use crate::{
    Result,
    cases::{Case, PERFTEST, find},
    process::{Group, Setup, interrupted},
};

/// Round trips of a program's latency test.
const ROUND_TRIPS: &str = "20000";
/// How long the others measure, seconds.
const SECONDS: &str = "2";
/// How long one measurement may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// What is measured, and with what on either side.
struct Measure {
    program: &'static str,
    arguments: &'static [&'static str],
    /// The operation of `ferroce bench`, …
    operation: &'static str,
    /// … what its line is called, …
    line: &'static str,
    /// … and its further arguments.
    bench: &'static [&'static str],
    what: &'static str,
    unit: Unit,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
enum Unit {
    /// Half a round trip.
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "GB/s")]
    Gigabytes,
}

impl Unit {
    const fn text(self) -> &'static str {
        match self {
            Self::Microseconds => "us",
            Self::Gigabytes => "GB/s",
        }
    }
}

const LATENCY: [&str; 4] = ["-s", "64", "-n", ROUND_TRIPS];
const BANDWIDTH: [&str; 7] = ["-s", "1048576", "-t", "16", "--report_gbits", "-D", SECONDS];

const MEASURES: [Measure; 3] = [
    Measure {
        program: "ib_send_lat",
        arguments: &LATENCY,
        operation: "latency",
        line: "send_lat",
        bench: &["-s", "64"],
        what: "64 bytes, half a round trip, typical",
        unit: Unit::Microseconds,
    },
    Measure {
        program: "ib_write_lat",
        arguments: &LATENCY,
        operation: "latency",
        line: "write_lat",
        bench: &["-s", "64"],
        what: "64 bytes, half a round trip, typical",
        unit: Unit::Microseconds,
    },
    Measure {
        program: "ib_write_bw",
        arguments: &BANDWIDTH,
        operation: "write",
        line: "write",
        bench: &["-s", "1M", "-d", "16"],
        what: "1 MiB, 16 outstanding",
        unit: Unit::Gigabytes,
    },
];

/// Where the two sides run.
#[derive(Clone, Copy)]
struct Placement {
    name: &'static str,
    /// Processors of the passive and of the active side.
    cpus: Option<[usize; 2]>,
}

impl Placement {
    /// The command on its processor.
    fn put(self, side: usize, words: impl IntoIterator<Item = String>) -> Vec<String> {
        let pin = self
            .cpus
            .map(|cpus| ["taskset", "-c", &cpus[side].to_string()].map(str::to_owned));
        pin.into_iter().flatten().chain(words).collect()
    }
}

#[derive(Serialize)]
struct Row {
    program: &'static str,
    what: &'static str,
    placement: &'static str,
    unit: Unit,
    theirs: f64,
    bench: f64,
    ratio: f64,
    /// What either came to in each turn.
    turns: [Vec<f64>; 2],
}

fn placements() -> Vec<Placement> {
    let ours = sched_getaffinity(Pid::this()).unwrap_or_default();
    let cpus: Vec<usize> = (0..CpuSet::count())
        .filter(|&c| ours.is_set(c).unwrap_or(false))
        .take(2)
        .collect();
    let mut all = vec![Placement {
        name: "unpinned",
        cpus: None,
    }];
    match cpus[..] {
        [a, b] => all.push(Placement {
            name: "pinned",
            cpus: Some([a, b]),
        }),
        _ => println!("pinned: not run (needs two processors)"),
    }
    all
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What a program of perftest prints below its heading: the typical latency, or the average bandwidth in Gbit/s.
fn perftest_figure(text: &str, unit: Unit) -> Option<f64> {
    const TYPICAL: usize = 4;
    const AVERAGE: usize = 3;
    let line = text
        .lines()
        .skip_while(|l| !l.trim_start().starts_with("#bytes"))
        .nth(1)?;
    let (column, scale) = match unit {
        Unit::Microseconds => (TYPICAL, 1.0),
        Unit::Gigabytes => (AVERAGE, 8.0),
    };
    let figure: f64 = line.split_whitespace().nth(column)?.parse().ok()?;
    Some(figure / scale)
}

/// What `ferroce bench --json` says; its latencies are whole round trips.
fn bench_figure(text: &str, line: &str, unit: Unit) -> Option<f64> {
    let lines = text
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
    let row = lines.into_iter().find(|v| v["op"] == line)?;
    match unit {
        Unit::Microseconds => row["latency_us"]["p50"].as_f64().map(|rtt| rtt / 2.0),
        Unit::Gigabytes => row["gbytes_per_s"].as_f64(),
    }
}

fn theirs(setup: &Setup, measure: &Measure, placement: Placement, dir: &Path) -> Result<f64> {
    let words = |side, more: Option<String>| {
        let own = [measure.program, "-F", "-p", "{port}"].map(str::to_owned);
        let own = own
            .into_iter()
            .chain(measure.arguments.iter().map(|&a| a.to_owned()))
            .chain(more);
        placement.put(side, own).join(" ")
    };
    let case = Case::pair(
        measure.program,
        PERFTEST,
        &words(0, None),
        &words(1, Some("{addr}".to_owned())),
    );
    let text = setup.attempt(&case, dir)?;
    perftest_figure(&text, measure.unit).ok_or_else(|| format!("{} printed no figure\n{text}", measure.program))
}

/// Two addresses beside the matrix's own, if that is of this host alone; both sides of `bench` need one.
fn bench_addresses(addr: IpAddr) -> Result<[String; 2]> {
    match addr {
        IpAddr::V4(a) if a.is_loopback() => {
            let [x, y, z, _] = a.octets();
            Ok([251, 252].map(|d| Ipv4Addr::new(x, y, z, d).to_string()))
        }
        _ => Err("--speed needs an IPv4 loopback address".into()),
    }
}

fn ours(setup: &Setup, measure: &Measure, placement: Placement, dir: &Path) -> Result<f64> {
    let [passive, active] = bench_addresses(setup.addr())?;
    let command = |side, name: &str, more: &[&str]| -> Result<Group> {
        let own = [&setup.ferroce().display().to_string(), "bench", "--json"].map(|w| (*w).to_owned());
        let words = placement.put(side, own.into_iter().chain(more.iter().map(|&w| w.to_owned())));
        let output = dir.join(name);
        let file = File::create(&output).map_err(|e| format!("{}: {e}", output.display()))?;
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(Stdio::inherit());
        setup.confine(&mut command, dir);
        Group::spawn(command, output).map_err(|e| format!("starting {}: {e}", words.join(" ")))
    };
    let deadline = Instant::now() + LIMIT;
    let server = command(0, "bench-passive", &["--server", "--addr", &passive])?;
    while !server.text().contains("listening") {
        if interrupted() || Instant::now() >= deadline {
            return Err(format!("ferroce bench does not listen\n{}", server.text()));
        }
        thread::sleep(Duration::from_millis(20));
    }
    let mut arguments = vec![
        measure.operation,
        "--connect",
        &passive,
        "--addr",
        &active,
        "--seconds",
        SECONDS,
    ];
    arguments.extend(measure.bench);
    let mut client = command(1, "bench-active", &arguments)?;
    let status = client.wait(deadline).map_err(|e| e.to_string())?;
    let text = client.text();
    match status {
        Some(s) if s.success() => bench_figure(&text, measure.line, measure.unit)
            .ok_or_else(|| format!("ferroce bench printed no figure\n{text}")),
        Some(s) => Err(format!("ferroce bench ended with {s}\n{text}")),
        None => Err(format!("ferroce bench is not done after {} s", LIMIT.as_secs())),
    }
}

/// Measures each program so many times in turns with `ferroce bench`, without giving it a processor of its own (or also so), prints
/// a table of medians, and writes it to `json` as well.
///
/// # Errors
/// When perftest is not installed, or a measurement fails.
pub(crate) fn run(setup: &Setup, turns: u32, pinned: bool, json: Option<&Path>) -> Result<()> {
    if let Some(lacking) = MEASURES.iter().map(|m| m.program).find(|p| find(p).is_none()) {
        return Err(format!("{lacking} is not installed (Debian package perftest)"));
    }
    let dir = setup.directory("speed")?;
    let mut rows = Vec::new();
    println!(
        "{:<14} {:<10} {:>10} {:>10} {:>6}",
        "program", "placement", "program", "bench", "ratio"
    );
    for measure in &MEASURES {
        for placement in placements().into_iter().filter(|p| pinned || p.cpus.is_none()) {
            let mut figures = [Vec::new(), Vec::new()];
            for _ in 0..turns {
                figures[0].push(theirs(setup, measure, placement, &dir)?);
                figures[1].push(ours(setup, measure, placement, &dir)?);
            }
            let [theirs, bench] = figures.clone().map(median);
            let row = Row {
                program: measure.program,
                what: measure.what,
                placement: placement.name,
                unit: measure.unit,
                theirs,
                bench,
                ratio: theirs / bench,
                turns: figures,
            };
            println!(
                "{:<14} {:<10} {:>10.2} {:>10.2} {:>6.2}  {}; {}",
                row.program,
                row.placement,
                row.theirs,
                row.bench,
                row.ratio,
                row.unit.text(),
                row.what
            );
            rows.push(row);
        }
    }
    match json {
        Some(file) => {
            let text = serde_json::to_string_pretty(&rows).map_err(|e| e.to_string())?;
            fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_what_the_programs_print() {
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
                       64      20000          4.64           6971.31      5.67               28.86\n";
        assert_eq!(perftest_figure(latency, Unit::Microseconds), Some(5.67));
        let bandwidth = "------\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n \
                         1048576    9000             0.00               40.00               0.004769\n";
        assert_eq!(perftest_figure(bandwidth, Unit::Gigabytes), Some(5.0));
        assert_eq!(perftest_figure("Failed", Unit::Gigabytes), None);
        let bench = "{\"op\":\"write_lat\",\"latency_us\":{\"p50\":28.0}}\n{\"op\":\"send_lat\",\"latency_us\":{\"p50\":16.0}}\n";
        assert_eq!(bench_figure(bench, "send_lat", Unit::Microseconds), Some(8.0));
        assert_eq!(bench_figure(bench, "write", Unit::Gigabytes), None);
    }

    #[test]
    fn a_pinned_command_is_started_on_its_processor() {
        let pinned = Placement {
            name: "pinned",
            cpus: Some([0, 3]),
        };
        assert_eq!(pinned.put(1, ["prog".to_owned()]), ["taskset", "-c", "3", "prog"]);
        assert_eq!(placements()[0].put(1, ["prog".to_owned()]), ["prog"]);
    }
}
