//! A slow link between two network namespaces: losses, and who gets how much of it.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{
    PageArgs,
    figure::{Aim, Columns, Figure},
    transport::json_lines,
};
use crate::{
    Result, process,
    tools::{self, Tool},
};

const IPERF: Tool = Tool::new("iperf3", "iperf3");
/// 2 Gb/s, in MB/s, and what waits for it at most, bytes.
const RATE: &str = "250";
const QUEUE: &str = "2000000";
/// Round trips, and how long a packet takes, milliseconds.
const DELAYS: [(&str, &str); 3] = [("0.2 ms", "0.1"), ("2 ms", "1"), ("20 ms", "10")];
/// Losses, and what of the loss-free goodput is to be left.
const LOSSES: [(&str, &str, f64); 4] = [
    ("0.1 %", "0.001", 0.9),
    ("1 %", "0.01", 0.8),
    ("3 %", "0.03", 0.6),
    ("10 %", "0.1", 0.2),
];

pub(super) struct Programs {
    pub(super) ferroce: PathBuf,
    pub(super) wire: PathBuf,
}

impl Programs {
    fn listen(&self, addr: &str) -> String {
        format!("{} bench --listen {addr} -q", self.ferroce.display())
    }

    fn write(&self, to: &str, from: &str, seconds: f64) -> String {
        self.bench("write", to, from, seconds)
    }

    fn bench(&self, operation: &str, to: &str, from: &str, seconds: f64) -> String {
        let ferroce = self.ferroce.display();
        format!("{ferroce} bench {operation} --connect {to} --local {from} --seconds {seconds} --json -q")
    }

    /// Runs a command at either end; returns the JSON that they print.
    fn run(&self, delay: &str, loss: &str, first: &str, second: &str) -> Result<Vec<Value>> {
        let mut command = process::command(&self.wire);
        command.args(["--rate", RATE, "--queue", QUEUE, "--mtu", "4200"]);
        command.args(["--delay", delay, "--loss", loss, first, second]);
        let output = process::capture("ferroce-wire", &mut command)?;
        Ok(json_lines(&String::from_utf8_lossy(&output.stdout)))
    }
}

fn goodputs(lines: &[Value]) -> Vec<f64> {
    let mb = |l: &Value| Some(l.get("gbytes_per_s")?.as_f64()? * 1e3);
    lines.iter().filter_map(mb).collect()
}

/// What iperf3 has received, MB/s.
fn iperf_goodput(file: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let report: Value = serde_json::from_str(&text).map_err(|e| format!("iperf3: {e}"))?;
    let bits = report
        .pointer("/end/sum_received/bits_per_second")
        .and_then(Value::as_f64);
    bits.map(|b| b / 8e6)
        .ok_or_else(|| format!("iperf3 says no goodput: {text}"))
}

fn one(got: Vec<f64>) -> Result<f64> {
    got.first()
        .copied()
        .ok_or_else(|| "ferroce bench said nothing on the wire".to_owned())
}

/// 1 MiB WRITEs with losses, and on one of the links READs, beside the same without.
pub(super) fn loss(programs: &Programs, args: &PageArgs) -> Result<Vec<Figure>> {
    let mut columns = Columns::default();
    let delays = if args.quick { &DELAYS[1..2] } else { &DELAYS[..] };
    let writes = delays.iter().map(|delay| ("WRITE", "write", *delay));
    let links: Vec<_> = writes.chain([("READ", "read", DELAYS[1])]).collect();
    let listen = programs.listen("10.81.0.1");
    for _ in 0..args.rounds() {
        for (name, operation, (round_trip, delay)) in &links {
            let bench = programs.bench(operation, "10.81.0.1", "10.81.0.2", args.seconds());
            let connect = format!("sleep 1; {bench}");
            let clean = programs.run(delay, "0", &listen, &connect)?;
            columns.add(&format!("{name}, {round_trip}, no loss"), one(goodputs(&clean))?);
            for (percent, loss, _) in LOSSES {
                let lossy = programs.run(delay, loss, &listen, &connect)?;
                columns.add(&format!("{name}, {round_trip}, {percent}"), one(goodputs(&lossy))?);
            }
        }
    }
    let figure = |link: &str, (percent, _, least): (&str, &str, f64)| {
        let (ours, clean) = (format!("{link}, {percent}"), format!("{link}, no loss"));
        columns.figure(&ours, "MB/s", &ours, &clean, Aim::AtLeast(least))
    };
    let of = |(name, _, (round_trip, _)): &(&str, &str, (&str, &str))| {
        let link = format!("{name}, {round_trip}");
        LOSSES.map(|loss| figure(&link, loss))
    };
    Ok(links.iter().flat_map(of).collect())
}

/// Two of ours at once, and one beside TCP.
pub(super) fn sharing(programs: &Programs, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[IPERF])?;
    let mut columns = Columns::default();
    let delays = if args.quick { &DELAYS[1..2] } else { &DELAYS[..] };
    // Shares take a while to settle.
    let seconds = args.seconds() * 3.0;
    let report = scratch.join("iperf.json");
    let two_listen = format!(
        "ip addr add 10.81.0.3/24 dev wire0; {} & {}",
        programs.listen("10.81.0.3"),
        programs.listen("10.81.0.1")
    );
    let two_connect = format!(
        "sleep 1; ip addr add 10.81.0.4/24 dev wire0; {} & {}; wait",
        programs.write("10.81.0.3", "10.81.0.4", seconds),
        programs.write("10.81.0.1", "10.81.0.2", seconds)
    );
    let tcp_listen = format!("iperf3 -s -B 10.81.0.1 >/dev/null & {}", programs.listen("10.81.0.1"));
    let tcp_connect = format!(
        "sleep 1; iperf3 -c 10.81.0.1 -t {} -J > {} & {}; wait",
        seconds.ceil(),
        report.display(),
        programs.write("10.81.0.1", "10.81.0.2", seconds)
    );
    for _ in 0..args.rounds() {
        for (round_trip, delay) in delays {
            let got = goodputs(&programs.run(delay, "0", &two_listen, &two_connect)?);
            let [first, second] = got[..] else {
                return Err(format!("two flows have said {got:?}"));
            };
            columns.add(&format!("{round_trip}, less"), first.min(second));
            columns.add(&format!("{round_trip}, more"), first.max(second));
            let ours = one(goodputs(&programs.run(delay, "0", &tcp_listen, &tcp_connect)?))?;
            columns.add(&format!("{round_trip}, ours"), ours);
            columns.add(&format!("{round_trip}, both"), ours + iperf_goodput(&report)?);
        }
    }
    let mut figures = Vec::new();
    for (round_trip, _) in delays {
        let column = |what: &str| format!("{round_trip}, {what}");
        figures.push(Figure {
            name: format!("{round_trip}, the slower of two of ours"),
            ..columns.figure("", "MB/s", &column("less"), &column("more"), Aim::AtLeast(0.8))
        });
        figures.push(Figure {
            name: format!("{round_trip}, one of ours beside TCP"),
            ..columns.figure("", "MB/s", &column("ours"), &column("both"), Aim::Within(0.3, 0.7))
        });
    }
    Ok(figures)
}
