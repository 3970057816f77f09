//! Progress without polls: latencies seen by the peer of a process that computes or sleeps. `tests/apps/c/progress.c` measures them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use super::{
    PageArgs,
    figure::{Columns, Figure, Target},
    transport::json_lines,
};
use crate::{
    Result,
    cargo::{self, Profile},
    process,
    tools::{self, Tool},
};

const NEEDED: [Tool; 3] = [
    Tool::new("cc", "gcc"),
    Tool::new("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    Tool::new("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
];
const ADDR: &str = "127.0.0.1";

/// The compiled program and what runs it.
struct Program {
    ferroce: PathBuf,
    path: PathBuf,
}

impl Program {
    fn build(scratch: &Path) -> Result<Self> {
        tools::ensure(&NEEDED)?;
        let path = scratch.join("progress");
        let mut cc = process::command("cc");
        cc.args(["-O1", "-o"]).arg(&path).arg("tests/apps/c/progress.c");
        process::capture("cc", cc.args(["-libverbs", "-lrdmacm"]))?;
        Ok(Self {
            ferroce: cargo::build_programs(Profile::Release)?.program("ferroce")?.to_owned(),
            path,
        })
    }

    /// Runs a mode once and adds its latencies.
    fn round(&self, mode: &str, seconds: f64, allowance: f64, columns: &mut Columns) -> Result<()> {
        let mut command = Command::new(&self.ferroce);
        command.args(["run", "--addr", ADDR, "--"]).arg(&self.path);
        command.args([mode, ADDR, &seconds.to_string()]);
        let output = process::capture("progress", &mut command)?;
        add(
            &json_lines(&String::from_utf8_lossy(&output.stdout)),
            allowance,
            columns,
        );
        Ok(())
    }
}

/// Adds the program's latencies, and each plus `allowance` microseconds.
fn add(lines: &[Value], allowance: f64, columns: &mut Columns) {
    for line in lines {
        let name = line["name"].as_str().unwrap_or_default();
        for p in ["p50", "p99"] {
            let value = line[p].as_f64().unwrap_or(f64::NAN);
            columns.add(&format!("{name}, {p}"), value);
            columns.add(&allowed(name, p, allowance), value + allowance);
        }
    }
}

/// The name of a latency with an allowance.
fn allowed(name: &str, percentile: &str, allowance: f64) -> String {
    format!("{name}, {percentile}, + {allowance} us")
}

fn measure(args: &PageArgs, scratch: &Path, mode: &str, allowance: f64) -> Result<Columns> {
    let program = Program::build(scratch)?;
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        program.round(mode, args.seconds(), allowance, &mut columns)?;
    }
    Ok(columns)
}

/// Median compared with a median, and 99th percentile compared with one plus an allowance.
fn figures(columns: &Columns, ours: &str, reference: &str, allowance: f64) -> [Figure; 2] {
    let figure = |p, reference: &str, target| {
        let name = format!("{ours}, {p}");
        columns.figure(&name, "us", &name, reference, target)
    };
    [
        figure("p50", &format!("{reference}, p50"), Target::None),
        figure("p99", &allowed(reference, "p99", allowance), Target::AtMost(1.0)),
    ]
}

/// Acknowledgements of SENDs that a polling process received before it computes.
pub(super) fn acknowledgements(args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    const ALLOWANCE: f64 = 50.0;
    let columns = measure(args, scratch, "ack", ALLOWANCE)?;
    let of = |time| figures(&columns, &format!("SEND, {time}"), &format!("echo, {time}"), ALLOWANCE);
    Ok(["300 us", "3 ms", "20 ms"].into_iter().flat_map(of).collect())
}

/// WRITEs and READs to a process that computes, and READs to one that sleeps.
pub(super) fn one_sided(args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    const ALLOWANCE: f64 = 200.0;
    let columns = measure(args, scratch, "one-sided", ALLOWANCE)?;
    let pairs = [
        ("WRITE", "echo"),
        ("READ", "echo"),
        ("READ, asleep, timer", "READ, asleep"),
    ];
    let of = |(ours, reference)| figures(&columns, ours, reference, ALLOWANCE);
    Ok(pairs.into_iter().flat_map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_next_to_the_echo() {
        let text = "{\"name\": \"echo, 3 ms\", \"rounds\": 20, \"p50\": 10.0, \"p99\": 30.0}\n\
                    {\"name\": \"SEND, 3 ms\", \"rounds\": 20, \"p50\": 15.0, \"p99\": 100.0}\nprogress is made\n";
        let mut columns = Columns::default();
        add(&json_lines(text), 50.0, &mut columns);
        let [median, high] = figures(&columns, "SEND, 3 ms", "echo, 3 ms", 50.0);
        assert_eq!((median.ratio().median, median.meets_target()), (1.5, true));
        assert_eq!((high.ratio().median, high.meets_target()), (1.25, false));
    }
}
