//! Parts that don't measure this kernel by the clock: instructions under callgrind, and rdma_rxe in virtual machines.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{
    PageArgs,
    figure::{Columns, Figure, Series, Target},
};
use crate::{
    Result,
    cargo::{self, Profile},
    process, tools,
};

/// Loads of two ends of a wire in memory, with their counts. Each also runs twice as long, and the difference counts: it leaves out
/// the setup.
const LOADS: [(&str, &str, u32, u32); 6] = [
    ("WRITE of 64 bytes", "write", 64, 20_000),
    ("SEND of 64 bytes", "send", 64, 20_000),
    ("READ of 64 bytes", "read", 64, 20_000),
    ("WRITE of 4 KiB", "write", 4096, 4000),
    ("READ of 4 KiB", "read", 4096, 4000),
    ("packet of a WRITE of 1 MiB", "write", 1 << 20, 40),
];
/// Bytes of a packet of the last.
const PACKET: u32 = 4096;

/// Instructions of both ends, in thousands, per operation, or per packet of a long one. The reference is two copies and two ICRCs of
/// each of its packets.
pub(super) fn instructions(args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[tools::VALGRIND])?;
    let program = example("instructions")?;
    let mut figures = Vec::new();
    for (name, load, bytes, count) in LOADS {
        let packets = bytes.div_ceil(PACKET).max(1);
        let count = if args.quick { count / 10 } else { count };
        let each = |load: &str| -> Result<f64> {
            let once = collected(&program, load, bytes, count, scratch)?;
            let twice = collected(&program, load, bytes, 2 * count, scratch)?;
            Ok((twice - once) / f64::from(count * packets) / 1e3)
        };
        figures.push(Figure {
            name: name.to_owned(),
            unit: "k instructions".into(),
            ferroce: vec![each(load)?],
            reference: Series {
                name: "copies and ICRCs".into(),
                values: vec![each("bare")?],
            },
            target: Target::None,
        });
    }
    Ok(figures)
}

/// Builds one of the port's examples.
fn example(name: &str) -> Result<PathBuf> {
    cargo::run(&["build", "-p", "roce-port", "--example", name, "--release"])?;
    Ok(cargo::target_dir()?.join("release/examples").join(name))
}

/// Memory of a connected idle queue pair, in KiB.
pub(super) fn idle() -> Result<Figure> {
    let output = process::capture("idle", &mut process::command(example("idle")?))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let bytes: f64 = text.trim().parse().map_err(|e| format!("{text}: {e}"))?;
    Ok(Figure {
        name: "memory of an idle queue pair and its connection".into(),
        unit: "KiB".into(),
        ferroce: vec![bytes / 1024.0],
        reference: Series {
            name: "limit".into(),
            values: vec![4.0],
        },
        target: Target::AtMost(1.0),
    })
}

/// Instructions that a run takes.
fn collected(program: &Path, load: &str, bytes: u32, count: u32, scratch: &Path) -> Result<f64> {
    let mut command = process::command("valgrind");
    let out = scratch.join("callgrind.out");
    command.args(["--tool=callgrind", &format!("--callgrind-out-file={}", out.display())]);
    command
        .arg(program)
        .args([load, &bytes.to_string(), &count.to_string()]);
    let output = process::capture("valgrind", &mut command)?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    total(&text).ok_or_else(|| format!("callgrind printed no number of instructions: {text}"))
}

/// The number in callgrind's line `Collected : 12345`.
fn total(text: &str) -> Option<f64> {
    let line = text.lines().rfind(|l| l.contains("Collected :"))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Loads of `ferroce-interop speed`, with the least ratio to rdma_rxe: of ferroce at both ends, and of ferroce with rdma_rxe as its
/// peer.
const RXE: [(&str, f64, f64); 5] = [
    ("WRITE 64 KiB", 3.0, 1.0),
    ("READ 64 KiB", 3.0, 1.0),
    ("SEND 64 KiB", 3.0, 1.0),
    ("WRITE 64 KiB, 1 % lost", 5.0, 5.0),
    ("READ 64 KiB, 1 % lost", 5.0, 5.0),
];
/// Likewise of messages over RDS, with their bytes.
const RDS: [(&str, f64); 3] = [("RDS 64 B", 64.0), ("RDS 8 KiB", 8192.0), ("RDS 1024 KiB", 1_048_576.0)];
/// Pairs of ferroce with itself and with the kernel.
const PAIRS: [&str; 3] = ["ours to ours", "ours to rxe", "rxe to ours"];

/// rdma_rxe and ours in the same virtual machines.
pub(super) fn rxe(args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[tools::PERFTEST])?;
    let built = cargo::build_programs(Profile::Release)?;
    let file: PathBuf = scratch.join("speed.json");
    let mut command = process::command(built.program("ferroce-interop")?);
    let seconds = args.seconds().ceil().max(2.0).to_string();
    command.args(["speed", "--rounds", &args.rounds().to_string(), "--seconds", &seconds]);
    process::capture("ferroce-interop", command.arg("--results").arg(&file))?;
    let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let results: Value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut columns = Columns::default();
    for row in results["rows"].as_array().into_iter().flatten() {
        let name = row["name"].as_str().unwrap_or_default();
        let values = row["gbytes_per_s"].as_array().into_iter().flatten();
        // A program that failed has brought nothing over.
        for value in values {
            let rate = value.as_f64().unwrap_or(0.0);
            columns.add(name, rate * 1e3);
            if let Some((_, bytes)) = RDS.iter().find(|(load, _)| name.starts_with(load)) {
                columns.add(&format!("messages of {name}"), rate * 1e9 / bytes / 1e3);
            }
        }
        let failures = row["failures"].as_array().into_iter().flatten();
        failures.for_each(|why| eprintln!("{name} failed:\n{}", why.as_str().unwrap_or_default()));
    }
    let figure = |load: &str, unit: &str, pair: &str, target| {
        let (ours, rxe) = (format!("{load}, {pair}"), format!("{load}, rxe to rxe"));
        let name = ours.replace("ours", "ferroce");
        columns.figure(&name, unit, &ours, &rxe, target)
    };
    let verbs = RXE.into_iter().flat_map(|(load, alone, mixed)| {
        PAIRS
            .into_iter()
            .zip([alone, mixed, mixed])
            .map(move |(pair, least)| (load, pair, least))
    });
    let verbs = verbs.map(|(load, pair, least)| figure(load, "MB/s", pair, Target::AtLeast(least)));
    let rds = RDS.iter().flat_map(|&(load, _)| {
        let messages = format!("messages of {load}");
        PAIRS.map(|pair| {
            [
                figure(&messages, "k/s", pair, Target::None),
                figure(load, "MB/s", pair, Target::None),
            ]
        })
    });
    Ok(verbs.chain(rds.flatten()).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn callgrind_prints_its_total_last() {
        let text = "==1== Callgrind\n==1== Events    : Ir\n==1== Collected : 123456\n==1== \n";
        assert_eq!(super::total(text), Some(123_456.0));
        assert_eq!(super::total("valgrind: no such program"), None);
    }
}
