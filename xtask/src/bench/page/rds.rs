//! RDS of unmodified programs, next to UDP and TCP sockets: `tests/apps/c/flow.c` sends messages one way.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use super::{
    PageArgs,
    figure::{Columns, Figure, Target},
    transport::json_lines,
};
use crate::{
    Result,
    process::{self, Guard},
    tools::{self, Tool},
};

const NEEDED: [Tool; 1] = [Tool::new("cc", "gcc")];
/// Addresses of receiver and sender. Each has a node and a broker of its own, as on two hosts. These end some time after the programs, so
/// that no other part has the addresses.
const ADDRS: [&str; 2] = ["127.0.0.13", "127.0.0.14"];
const PORT: &str = "15204";
/// Bytes of a message, their name, and the others that can send it: a datagram of UDP has 64 KiB at most.
const SIZES: [(&str, &str, &[&str]); 3] = [
    ("64", "64 B", &["udp", "tcp"]),
    ("8192", "8 KiB", &["udp", "tcp"]),
    ("1048576", "1 MiB", &["tcp"]),
];
/// Largest buffers of sockets: RDS sends no message that is longer than its send buffer.
const LIMITS: [&str; 2] = ["/proc/sys/net/core/wmem_max", "/proc/sys/net/core/rmem_max"];
const BUFFER: u64 = 4 << 20;
/// Time of a flow beyond that of its sender.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Limits of the system that are larger for the time of the measurement.
struct Raised(Vec<(&'static str, String)>);

impl Raised {
    fn raise() -> Result<Self> {
        let mut this = Self(Vec::new());
        for file in LIMITS {
            let fail = |e: std::io::Error| format!("{file} has to be {BUFFER} at least: {e}");
            let former = fs::read_to_string(file).map_err(fail)?;
            if former.trim().parse::<u64>().is_ok_and(|limit| limit >= BUFFER) {
                continue;
            }
            fs::write(file, BUFFER.to_string()).map_err(fail)?;
            this.0.push((file, former));
        }
        Ok(this)
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        for (file, former) in &self.0 {
            if let Err(e) = fs::write(file, former) {
                eprintln!("warning: {file} was {}: {e}", former.trim());
            }
        }
    }
}

/// Messages and bytes a second.
pub(super) fn rds(ferroce: &Path, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&NEEDED)?;
    let flow = scratch.join("flow");
    let mut cc = process::command("cc");
    process::capture("cc", cc.args(["-O2", "-o"]).arg(&flow).arg("tests/apps/c/flow.c"))?;
    let homes = ADDRS.map(|addr| scratch.join(addr));
    for home in &homes {
        fs::create_dir(home).map_err(|e| format!("{}: {e}", home.display()))?;
    }
    let _raised = Raised::raise()?;
    let side = |kind: &str, side: usize| {
        if kind != "rds" {
            return process::command(&flow);
        }
        let mut command = process::command(ferroce);
        command.args(["run", "--addr", ADDRS[side], "--"]).arg(&flow);
        command.env("XDG_RUNTIME_DIR", &homes[side]);
        command
    };
    let seconds = args.seconds().to_string();
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (bytes, size, others) in SIZES {
            for kind in ["rds"].iter().chain(others) {
                let mut receiver = side(kind, 0);
                receiver.args([*kind, "receive", ADDRS[0], PORT, bytes]);
                let mut sender = side(kind, 1);
                sender.args([*kind, "send", ADDRS[0], PORT, bytes, ADDRS[1], &seconds]);
                let [messages, moved] = measure(&mut receiver, &mut sender)?;
                columns.add(&column(kind, size, "messages"), messages / 1e3);
                columns.add(&column(kind, size, "bytes"), moved / 1e9);
            }
        }
    }
    let mut figures = Vec::new();
    for (_, size, others) in SIZES {
        for (what, unit) in [("messages", "k/s"), ("bytes", "GB/s")] {
            figures.extend(others.iter().map(|other| {
                let [ours, theirs] = ["rds", *other].map(|kind| column(kind, size, what));
                columns.figure(&format!("{size}, {what}"), unit, &ours, &theirs, Target::None)
            }));
        }
    }
    Ok(figures)
}

fn column(kind: &str, size: &str, what: &str) -> String {
    format!("{} of {size}, {what}", kind.to_uppercase())
}

/// Messages and bytes a second that a receiver has counted.
fn measure(receiver: &mut Command, sender: &mut Command) -> Result<[f64; 2]> {
    let mut receiver = Guard::spawn("receiver", receiver.stdout(Stdio::piped()))?;
    let lines = receiver.stdout_lines();
    let line = || lines.recv_timeout(TIMEOUT).map_err(|e| format!("the receiver: {e}"));
    line()?;
    process::capture("sender", sender)?;
    let report = line()?;
    let report = json_lines(&report).pop().ok_or("the receiver has no report")?;
    let number = |key: &str| report[key].as_f64().ok_or(format!("no {key} in {report}"));
    let seconds = number("seconds")?;
    Ok([number("messages")? / seconds, number("bytes")? / seconds])
}
