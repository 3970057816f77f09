//! A slow link between two network namespaces: losses, a disk behind it, and shares of its rate.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{
    PageArgs,
    figure::{Columns, Figure, Series, Target},
    transport::json_lines,
};
use crate::{
    Result,
    bench::{MIB, NEEDED, fill, load::parse_fio},
    process,
    tools::{self, Tool},
};

pub(super) const IPERF: Tool = Tool::new("iperf3", "iperf3");
/// Rate of the link, MB/s (2 Gb/s), and bytes of its queue.
const RATE: &str = "250";
const QUEUE: &str = "2000000";
/// Round trips, and how long a packet takes, milliseconds.
const DELAYS: [(&str, &str); 3] = [("0.2 ms", "0.1"), ("2 ms", "1"), ("20 ms", "10")];
/// Losses, and the share of the loss-free goodput that is the target.
const LOSSES: [(&str, &str, f64); 4] = [
    ("0.1 %", "0.001", 0.9),
    ("1 %", "0.01", 0.8),
    ("3 %", "0.03", 0.6),
    ("10 %", "0.1", 0.2),
];

/// Link whose retransmitted packets are counted.
const REPAIRED: (&str, &str) = ("WRITE", "2 ms");

pub(super) struct Programs {
    pub(super) ferroce: PathBuf,
    pub(super) wire: PathBuf,
}

impl Programs {
    fn listen(&self, addr: &str) -> String {
        format!("{} bench --server --addr {addr} -q", self.ferroce.display())
    }

    fn write(&self, to: &str, from: &str, seconds: f64) -> String {
        self.bench("write", to, from, seconds)
    }

    fn bench(&self, operation: &str, to: &str, from: &str, seconds: f64) -> String {
        let ferroce = self.ferroce.display();
        format!("{ferroce} bench {operation} --connect {to} --addr {from} --seconds {seconds} --json -q")
    }

    /// Runs a command at either end and returns the JSON objects that both and the wire print.
    fn run(&self, delay: &str, loss: &str, first: &str, second: &str) -> Result<Vec<Value>> {
        self.run_at(RATE, delay, loss, first, second)
    }

    fn run_at(&self, rate: &str, delay: &str, loss: &str, first: &str, second: &str) -> Result<Vec<Value>> {
        let mut command = process::command(&self.wire);
        command.args(["--rate", rate, "--queue", QUEUE, "--mtu", "4200"]);
        command.args(["--delay", delay, "--loss", loss, first, second]);
        let output = process::capture("ferroce-wire", &mut command)?;
        Ok(json_lines(&String::from_utf8_lossy(&output.stdout)))
    }
}

fn goodputs(lines: &[Value]) -> Vec<f64> {
    let mb = |l: &Value| Some(l.get("gbytes_per_s")?.as_f64()? * 1e3);
    lines.iter().filter_map(mb).collect()
}

/// Goodput that iperf3 received, MB/s.
pub(super) fn iperf_goodput(file: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let report: Value = serde_json::from_str(&text).map_err(|e| format!("iperf3: {e}"))?;
    let bits = report
        .pointer("/end/sum_received/bits_per_second")
        .and_then(Value::as_f64);
    bits.map(|b| b / 8e6)
        .ok_or_else(|| format!("iperf3 reported no goodput: {text}"))
}

fn one(got: Vec<f64>) -> Result<f64> {
    got.first()
        .copied()
        .ok_or_else(|| "ferroce bench reported no result on the wire".to_owned())
}

/// Packets that ferroce retransmitted, and packets of it that the wire lost.
fn repairs(lines: &[Value]) -> Result<(f64, f64)> {
    let resent = lines.iter().find_map(|l| l.get("retransmits")?.as_f64());
    let wire = lines.iter().find(|l| l["from"] == 2);
    let lost = wire.and_then(|l| l["lost"].as_f64());
    resent
        .zip(lost)
        .ok_or_else(|| "ferroce bench or the wire reported no losses".to_owned())
}

/// 1 MiB WRITEs with losses, and READs on one of the links, compared with the link without loss.
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
                if (*name, *round_trip) == REPAIRED {
                    let (resent, lost) = repairs(&lossy)?;
                    columns.add(&format!("retransmitted packets at {percent}"), resent);
                    columns.add(&format!("lost at {percent}"), lost);
                }
            }
        }
    }
    let figure = |link: &str, (percent, _, least): (&str, &str, f64)| {
        let (ours, clean) = (format!("{link}, {percent}"), format!("{link}, no loss"));
        columns.figure(&ours, "MB/s", &ours, &clean, Target::AtLeast(least))
    };
    let of = |(name, _, (round_trip, _)): &(&str, &str, (&str, &str))| {
        let link = format!("{name}, {round_trip}");
        LOSSES.map(|loss| figure(&link, loss))
    };
    let repaired = |(percent, ..): (&str, &str, f64)| {
        let (resent, lost) = (
            format!("retransmitted packets at {percent}"),
            format!("lost at {percent}"),
        );
        let name = format!("{}, {}: {resent}", REPAIRED.0, REPAIRED.1);
        Figure {
            name,
            ..columns.figure("", "packets", &resent, &lost, Target::AtMost(1.5))
        }
    };
    Ok(links.iter().flat_map(of).chain(LOSSES.map(repaired)).collect())
}

/// Goodput with losses at 2 ms: perftest connected by RDMA_CM (selective repeat) and without (go-back-N), and TCP.
pub(super) fn recovery(programs: &Programs, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[tools::PERFTEST, IPERF])?;
    let (seconds, delay) = (args.seconds().ceil().max(2.0), DELAYS[1].1);
    let report = scratch.join("recovery");
    let file = report.display();
    let perftest = |addr: &str, more: &str| {
        let ferroce = programs.ferroce.display();
        format!(
            "FERROCE_BROKER=off {ferroce} run --addr {addr} -- ib_write_bw -F -s 1048576 -t 16 --report_gbits -D {seconds} {more}"
        )
    };
    let rdma = |name, more: &str| {
        let connect = format!("{} 10.81.0.1 > {file}", perftest("10.81.0.2", more));
        (name, perftest("10.81.0.1", more), connect)
    };
    let iperf = format!("iperf3 -c 10.81.0.1 -t {seconds} -J > {file}");
    let contestants = [
        rdma("ferroce", "-R"),
        rdma("ferroce, go-back-N", ""),
        ("TCP", "iperf3 -s -1 -B 10.81.0.1".to_owned(), iperf),
    ];
    let losses: Vec<_> = [("no loss", "0")]
        .into_iter()
        .chain(LOSSES.map(|(name, loss, _)| (name, loss)))
        .collect();
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (percent, loss) in &losses {
            for (name, listen, connect) in &contestants {
                // A program that failed has transferred nothing.
                let (listen, connect) = (format!("{listen} >&2"), format!("sleep 1; {connect} || : > {file}"));
                programs.run(delay, loss, &listen, &connect)?;
                let text = std::fs::read_to_string(&report).map_err(|e| format!("{file}: {e}"))?;
                let goodput = match (text.is_empty(), *name) {
                    (true, _) => Some(0.0),
                    (false, "TCP") => Some(iperf_goodput(&report)?),
                    (false, _) => perftest_goodput(&text),
                };
                let goodput = goodput.ok_or_else(|| format!("ib_write_bw printed no bandwidth: {text}"))?;
                columns.add(&format!("{name}, {percent}"), goodput);
            }
        }
    }
    let figure = |percent: &str, reference: &str| {
        let compared = columns.figure(
            "",
            "MB/s",
            &format!("ferroce, {percent}"),
            &format!("{reference}, {percent}"),
            Target::None,
        );
        Figure {
            name: format!("goodput, {percent}"),
            reference: Series {
                name: reference.to_owned(),
                ..compared.reference
            },
            ..compared
        }
    };
    let of = |reference| losses.iter().map(move |(percent, _)| (*percent, reference));
    Ok([contestants[1].0, contestants[2].0]
        .into_iter()
        .flat_map(of)
        .map(|(percent, reference)| figure(percent, reference))
        .collect())
}

/// Average bandwidth in the last line of numbers that perftest printed with `--report_gbits`, MB/s.
fn perftest_goodput(text: &str) -> Option<f64> {
    let mut rows = text.lines().filter_map(|line| {
        let words = line.split_whitespace().map(str::parse);
        words.collect::<std::result::Result<Vec<f64>, _>>().ok()
    });
    rows.rfind(|row| row.len() >= 4).map(|row| row[3] * 1e3 / 8.0)
}

/// Link of the mapped device: rate in MB/s (5 Gb/s), and delay of a packet in milliseconds.
const DISK_RATE: &str = "625";
const DISK_DELAY: &str = "0.2";
const DISK_LOSSES: [(&str, &str); 2] = [("no loss", "0"), ("1 %", "0.01")];

/// 128 KiB reads of a disk at the other end, by RNBD and by nbdkit over TCP.
pub(super) fn disk(programs: &Programs, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&NEEDED)?;
    let (image, report, socket) = (
        scratch.join("disk.img"),
        scratch.join("fio.json"),
        scratch.join("disk.sock"),
    );
    fill(&image, 64 * MIB)?;
    let (image, socket) = (image.display(), socket.display());
    let ferroce = format!("FERROCE_BROKER=off {}", programs.ferroce.display());
    let nbdkit = format!("nbdkit -f -i 10.81.0.1 -p 10809 file {image}");
    let local = format!("nbd+unix:///?socket={socket}");
    let behind = |hop: &str, uri: &str| {
        let fio = format!(
            "fio --name=load --ioengine=nbd --time_based --rw=read --bs=128k --iodepth=16 --runtime={} --output-format=json \
             --output={} '--uri={uri}'",
            args.seconds(),
            report.display()
        );
        match hop {
            "" => format!("sleep 1; {fio}"),
            hop => format!(
                "rm -f {socket}; sleep 1; {hop} & hop=$!; for i in $(seq 100); do [ -S {socket} ] && break; sleep 0.1; done; {fio}; \
                 done=$?; kill -INT $hop; wait $hop; exit $done"
            ),
        }
    };
    let map = format!("{ferroce} map -q --session bench --path 10.81.0.2,10.81.0.1 --device disk --nbd {socket}");
    let nbd = format!("nbdkit -f -U {socket} nbd hostname=10.81.0.1 port=10809");
    let serve = format!("{ferroce} serve -q --addr 10.81.0.1 --export disk={image}");
    let chains = [
        ("RNBD", serve, behind(&map, &local)),
        ("nbdkit", nbdkit.clone(), behind("", "nbd://10.81.0.1:10809")),
        ("nbdkit in two hops", nbdkit, behind(&nbd, &local)),
    ];
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (percent, loss) in DISK_LOSSES {
            for (name, listen, connect) in &chains {
                programs.run_at(DISK_RATE, DISK_DELAY, loss, listen, connect)?;
                let text = std::fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
                let got = parse_fio(&text)?;
                columns.add(&format!("{name}, {percent}"), got.bytes / got.seconds / 1e6);
            }
        }
    }
    let figure = |percent: &str, other: &str, target| {
        let (ours, reference) = (format!("RNBD, {percent}"), format!("{other}, {percent}"));
        columns.figure(
            &format!("128 KiB reads, {ours}, 0.4 ms"),
            "MB/s",
            &ours,
            &reference,
            target,
        )
    };
    Ok(vec![
        figure("no loss", "nbdkit", Target::None),
        figure("1 %", "nbdkit", Target::AtLeast(1.0)),
        Figure {
            name: "the same, nbdkit in two hops".into(),
            ..figure("1 %", "nbdkit in two hops", Target::None)
        },
    ])
}

/// Two ferroce flows at once, and one next to TCP.
pub(super) fn sharing(programs: &Programs, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[IPERF])?;
    let mut columns = Columns::default();
    let delays = if args.quick { &DELAYS[1..2] } else { &DELAYS[..] };
    // Shares take a while to settle.
    let seconds = match args.quick {
        true => args.seconds() * 3.0,
        false => args.seconds().max(2.0) * 3.0,
    };
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
                return Err(format!("expected the results of two flows, found {got:?}"));
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
            name: format!("{round_trip}, the slower of two ferroce flows"),
            ..columns.figure("", "MB/s", &column("less"), &column("more"), Target::AtLeast(0.8))
        });
        figures.push(Figure {
            name: format!("{round_trip}, one ferroce flow and TCP"),
            ..columns.figure("", "MB/s", &column("ours"), &column("both"), Target::Within(0.3, 0.7))
        });
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::perftest_goodput;

    #[test]
    fn perftest_prints_its_average_in_the_fourth_column() {
        let text = " local address: LID 0000\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n \
                    1048576    421              0.00               1.76               0.000210\n------\n";
        assert_eq!(perftest_goodput(text), Some(220.0));
        assert_eq!(perftest_goodput("Couldn't connect\n"), None);
    }
}
