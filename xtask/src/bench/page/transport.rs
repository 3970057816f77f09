//! The transport on loopback: `ferroce bench` compared with the ceiling and a raw UDP ping-pong.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use super::{
    PageArgs,
    figure::{Columns, Figure, Series, Target},
    inner,
};
use crate::{
    Result,
    cargo::{self, Profile},
    process, tools,
};

/// Reports of `ferroce bench`, one for each operation.
pub(super) fn bench(ferroce: &Path, args: &[&str], seconds: f64) -> Result<Vec<Value>> {
    let mut command = Command::new(ferroce);
    command.arg("bench").args(args).args(["--json", "-q", "--seconds"]);
    let output = process::capture("ferroce bench", command.arg(seconds.to_string()))?;
    Ok(json_lines(&String::from_utf8_lossy(&output.stdout)))
}

/// Lines of an output that are JSON.
pub(super) fn json_lines(text: &str) -> Vec<Value> {
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// A number in the report of an operation.
pub(super) fn number(lines: &[Value], op: &str, pointer: &str) -> Result<f64> {
    let line = lines.iter().find(|l| l["op"] == op);
    let value = line.and_then(|l| l.pointer(pointer)).and_then(Value::as_f64);
    value.ok_or_else(|| format!("ferroce bench reported no {pointer} of {op}"))
}

/// Contestants of a table: name, operation, arguments.
pub(super) type Row = (&'static str, &'static str, &'static [&'static str]);

/// Measures each contestant once per round.
pub(super) fn rounds(ferroce: &Path, args: &PageArgs, rows: &[Row], pointer: &str, scale: f64) -> Result<Columns> {
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (name, op, more) in rows {
            let all: Vec<&str> = [*op].into_iter().chain(more.iter().copied()).collect();
            let lines = bench(ferroce, &all, args.seconds())?;
            columns.add(name, number(&lines, op, pointer)? / scale);
        }
    }
    Ok(columns)
}

/// 1 MiB operations compared with the ceiling.
pub(super) fn bulk(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    let rows: [Row; 9] = [
        ("ceiling", "ceiling", &[]),
        ("WRITE", "write", &[]),
        ("READ", "read", &[]),
        ("SEND", "send", &[]),
        ("ceiling, MTU 1024", "ceiling", &["--mtu", "1024"]),
        ("WRITE, MTU 1024", "write", &["--mtu", "1024"]),
        ("READ, MTU 1024", "read", &["--mtu", "1024"]),
        ("ceiling without GRO", "ceiling", &["--no-gro"]),
        ("WRITE without GRO", "write", &["--no-gro"]),
    ];
    let columns = rounds(ferroce, args, &rows, "/gbytes_per_s", 1.0)?;
    let figure = |ours, reference, least| columns.figure(ours, "GB/s", ours, reference, Target::AtLeast(least));
    Ok(vec![
        figure("WRITE", "ceiling", 0.9),
        figure("READ", "ceiling", 0.9),
        figure("SEND", "ceiling", 0.9),
        figure("WRITE, MTU 1024", "ceiling, MTU 1024", 0.85),
        figure("READ, MTU 1024", "ceiling, MTU 1024", 0.85),
        figure("WRITE without GRO", "ceiling without GRO", 0.85),
    ])
}

/// Ping-pong of 64 bytes.
pub(super) fn latency(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        let lines = bench(ferroce, &["latency"], args.seconds())?;
        for (op, name) in [("udp_lat", "raw UDP"), ("write_lat", "WRITE"), ("send_lat", "SEND")] {
            for p in ["p50", "p99"] {
                columns.add(&format!("{name} {p}"), number(&lines, op, &format!("/latency_us/{p}"))?);
            }
        }
        let lines = bench(ferroce, &["latency", "--events"], args.seconds())?;
        for (op, name) in [
            ("udp_event_lat", "UDP and epoll p50"),
            ("write_event_lat", "WRITE p50, asleep"),
            ("send_event_lat", "SEND p50, asleep"),
        ] {
            columns.add(name, number(&lines, op, "/latency_us/p50")?);
        }
    }
    let figure = |ours: &str, reference, most| columns.figure(ours, "us", ours, reference, Target::AtMost(most));
    Ok(vec![
        figure("WRITE p50", "raw UDP p50", 1.8),
        figure("SEND p50", "raw UDP p50", 1.8),
        figure("WRITE p99", "raw UDP p99", 3.0),
        figure("SEND p99", "raw UDP p99", 3.0),
        figure("WRITE p50, asleep", "UDP and epoll p50", 1.6),
        figure("SEND p50, asleep", "UDP and epoll p50", 1.6),
    ])
}

/// Programs of perftest under `ferroce run` compared with `ferroce bench`, which has no C ABI in between.
pub(super) fn programs(args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[tools::PERFTEST])?;
    let built = cargo::build_programs(Profile::Release)?;
    let file = scratch.join("programs.json");
    let mut command = process::command(built.program("ferroce-apps")?);
    command.arg("--ferroce").arg(built.program("ferroce")?);
    command.args(["--speed", "--unpinned", "--turns", &args.rounds().to_string(), "--json"]);
    process::capture("ferroce-apps", command.arg(&file))?;
    let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let rows: Vec<Value> = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))?;
    rows.iter().map(program).collect()
}

/// Figure of a program, from a row that `ferroce-apps --speed` wrote.
fn program(row: &Value) -> Result<Figure> {
    let name = row["program"].as_str().unwrap_or_default();
    let turns = |side: usize| -> Option<Vec<f64>> {
        let values = row["turns"][side].as_array()?;
        values.iter().map(Value::as_f64).collect()
    };
    let (Some(ferroce), Some(bench)) = (turns(0), turns(1)) else {
        return Err(format!("ferroce-apps reported no turns of {name}"));
    };
    let (unit, target) = match row["unit"].as_str() {
        Some("us") => ("us", Target::AtMost(1.2)),
        _ => ("GB/s", Target::None),
    };
    Ok(Figure {
        name: name.to_owned(),
        unit: unit.to_owned(),
        ferroce,
        reference: Series {
            name: "ferroce bench".into(),
            values: bench,
        },
        target,
    })
}

/// Operations by size and depth.
pub(super) fn operations(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    let rows: [Row; 10] = [
        ("packets of 64 bytes, raw", "ceiling", &["-s", "64"]),
        ("64 B WRITE, depth 64", "write", &["-s", "64", "-d", "64"]),
        ("64 B WRITE, depth 512", "write", &["-s", "64", "-d", "512"]),
        ("64 B SEND, depth 512", "send", &["-s", "64", "-d", "512"]),
        ("64 B READ, depth 64", "read", &["-s", "64", "-d", "64"]),
        ("packets of 4 KiB, raw", "ceiling", &["-s", "4K"]),
        ("4 KiB WRITE, depth 64", "write", &["-s", "4K", "-d", "64"]),
        ("4 KiB READ, depth 64", "read", &["-s", "4K", "-d", "64"]),
        ("64 KiB WRITE, depth 16", "write", &["-s", "64K", "-d", "16"]),
        ("64 KiB, raw", "ceiling", &["-s", "64K"]),
    ];
    let columns = rounds(ferroce, args, &rows, "/msgs_per_s", 1e6)?;
    let figure = |ours, reference, target| columns.figure(ours, "M/s", ours, reference, target);
    Ok(vec![
        figure("64 B WRITE, depth 64", "packets of 64 bytes, raw", Target::None),
        figure("64 B WRITE, depth 512", "packets of 64 bytes, raw", Target::None),
        figure("64 B SEND, depth 512", "64 B WRITE, depth 512", Target::AtLeast(0.8)),
        figure("64 B READ, depth 64", "64 B WRITE, depth 64", Target::None),
        figure("4 KiB WRITE, depth 64", "packets of 4 KiB, raw", Target::None),
        figure("4 KiB READ, depth 64", "packets of 4 KiB, raw", Target::None),
        figure("64 KiB WRITE, depth 16", "64 KiB, raw", Target::None),
    ])
}

/// The cost of an operation with more queue pairs, at the same number of operations outstanding, in all and on each.
pub(super) fn scale(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    let rows: [Row; 6] = [
        ("1 queue pair", "write", &["-s", "64", "-d", "512", "--qps", "1"]),
        ("8 queue pairs", "write", &["-s", "64", "-d", "64", "--qps", "8"]),
        ("64 queue pairs", "write", &["-s", "64", "-d", "8", "--qps", "64"]),
        (
            "64 of 10,000 queue pairs",
            "write",
            &["-s", "64", "-d", "8", "--qps", "64", "--idle-qps", "9936"],
        ),
        (
            "1 queue pair, 64 outstanding",
            "write",
            &["-s", "64", "-d", "64", "--qps", "1"],
        ),
        (
            "64 queue pairs, 64 outstanding each",
            "write",
            &["-s", "64", "-d", "64", "--qps", "64"],
        ),
    ];
    let columns = rounds(ferroce, args, &rows, "/msgs_per_s", 1e6)?;
    let figure = |ours, reference, target| columns.figure(ours, "M/s", ours, reference, target);
    Ok(vec![
        figure("8 queue pairs", "1 queue pair", Target::None),
        figure("64 queue pairs", "1 queue pair", Target::None),
        figure(
            "64 queue pairs, 64 outstanding each",
            "1 queue pair, 64 outstanding",
            Target::AtLeast(0.8),
        ),
        // The same cost within 1.2.
        figure("64 of 10,000 queue pairs", "64 queue pairs", Target::AtLeast(0.83)),
        inner::idle()?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_operation() {
        let lines = json_lines("listening\n{\"op\":\"write\",\"latency_us\":{\"p50\":5.5}}\n");
        assert_eq!(number(&lines, "write", "/latency_us/p50"), Ok(5.5));
        assert!(number(&lines, "read", "/latency_us/p50").is_err());
    }
}
