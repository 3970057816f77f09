//! `ferroce-interop speed`: programs of perftest, and one with RDS sockets, between two guests, each over rdma_rxe (and the kernel's RDS)
//! or, under `ferroce run`, over our transport.

use std::{fs, path::PathBuf, thread};

use clap::ValueEnum as _;
use serde_json::{Value, json};

use crate::{
    Error,
    guest::{Guest, Kernel, Shape},
    lab::{self, Net, Places},
    scenarios::JUMBO,
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The kernel in both guests
    #[arg(long, value_enum, default_value_t = Kernel::V6_1)]
    kernel: Kernel,
    /// Each measurement is made so many times, all in turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Only measurements whose name contains this; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Write all results to a file
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
}

/// What a side runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stack {
    Rxe,
    Ours,
}

impl Stack {
    const fn name(self) -> &'static str {
        match self {
            Self::Rxe => "rxe",
            Self::Ours => "ours",
        }
    }

    /// What a guest does to have it. rdma_rxe keeps the UDP port for as long as it is loaded, and `ferroce run`'s broker for a while.
    const fn prepare(self) -> &'static str {
        match self {
            Self::Rxe => {
                "for i in $(seq 50); do modprobe -q rdma_rxe && break; pkill -x ferroce; sleep 0.2; done\n[ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev eth0"
            }
            Self::Ours => {
                "modprobe -qr rds_rdma\n[ ! -e /sys/class/infiniband/rxe0 ] || rdma link delete rxe0\nmodprobe -r rdma_rxe"
            }
        }
    }
}

/// Program that measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Program {
    Perftest(&'static str),
    /// `rds-peer` of the lab.
    Rds,
}

impl Program {
    const fn name(self) -> &'static str {
        match self {
            Self::Perftest(name) => name,
            Self::Rds => "rds-peer",
        }
    }

    /// What the server's guest runs until its program has a socket.
    fn listens(self) -> String {
        let has_socket = match self {
            Self::Perftest(_) => format!("grep -q ':{PORT:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"),
            Self::Rds => format!("rm {RDS_WAITS} 2>/dev/null"),
        };
        format!("for i in $(seq 100); do {has_socket} && exit 0; sleep 0.1; done; exit 1")
    }

    /// The rate in the output of the client, GB/s.
    fn rate(self, text: &str) -> Option<f64> {
        match self {
            Self::Perftest(_) => average(text),
            Self::Rds => rds_rate(text),
        }
    }
}

/// Program, what it sends, and on what.
#[derive(Clone, Copy, Debug)]
struct Load {
    program: Program,
    what: &'static str,
    bytes: u32,
    /// Percent of packets, in either direction.
    loss: &'static str,
}

impl Load {
    fn name(&self, [client, server]: [Stack; 2]) -> String {
        let loss = match self.loss {
            "0" => String::new(),
            percent => format!(", {percent} % lost"),
        };
        let size = match self.bytes {
            small @ ..1024 => format!("{small} B"),
            large => format!("{} KiB", large >> 10),
        };
        format!("{} {size}{loss}, {} to {}", self.what, client.name(), server.name())
    }
}

const fn perftest(program: &'static str, what: &'static str, loss: &'static str) -> Load {
    Load {
        program: Program::Perftest(program),
        what,
        bytes: 64 << 10,
        loss,
    }
}

const fn rds(bytes: u32) -> Load {
    Load {
        program: Program::Rds,
        what: "RDS",
        bytes,
        loss: "0",
    }
}

const LOADS: [Load; 8] = [
    perftest("ib_write_bw", "WRITE", "0"),
    perftest("ib_read_bw", "READ", "0"),
    perftest("ib_send_bw", "SEND", "0"),
    perftest("ib_write_bw", "WRITE", "1"),
    perftest("ib_read_bw", "READ", "1"),
    rds(64),
    rds(8 << 10),
    rds(1 << 20),
];
/// Client and server; pairs that follow one another have as much as possible in common.
const PAIRS: [[Stack; 2]; 4] = [
    [Stack::Rxe, Stack::Rxe],
    [Stack::Rxe, Stack::Ours],
    [Stack::Ours, Stack::Ours],
    [Stack::Ours, Stack::Rxe],
];
const PORT: u16 = 18_515;
/// File that says that RDS's receiver has its socket.
const RDS_WAITS: &str = "/tmp/rds-waits";
/// What perftest says when it could not measure how fast its clock runs: then it computes 0 MB/s …
const NO_CLOCK: &str = "Correlation coefficient";
/// … and is run again, up to so many times.
const ATTEMPTS: u32 = 4;

struct Row {
    name: String,
    /// GB/s of each round. None: the program failed.
    values: Vec<Option<f64>>,
    /// What both sides said in rounds that brought nothing over.
    failures: Vec<String>,
}

impl Row {
    fn add(&mut self, outcome: Result<f64, String>) {
        self.values.push(outcome.as_ref().ok().copied());
        self.failures.extend(outcome.err());
    }
}

struct Pair<'a> {
    client: Guest,
    server: Guest,
    stacks: [Option<Stack>; 2],
    loss: &'static str,
    places: &'a Places,
    seconds: u32,
}

impl Pair<'_> {
    fn set_up(&mut self, stacks: [Stack; 2], loss: &'static str) -> Result<(), Error> {
        for ((guest, had), wanted) in [&self.client, &self.server]
            .into_iter()
            .zip(&mut self.stacks)
            .zip(stacks)
        {
            if *had != Some(wanted) {
                guest.run(wanted.prepare(), 60)?;
                *had = Some(wanted);
            }
        }
        if self.loss != loss {
            let netem = format!("loss {loss}%");
            self.client.netem((loss != "0").then_some(&netem))?;
            self.loss = loss;
        }
        Ok(())
    }

    /// The command of one side.
    fn command(&self, load: &Load, stack: Stack, guest: u8, peer: &str) -> String {
        let Load { program, bytes, .. } = load;
        let seconds = self.seconds;
        let under_run = format!(
            "mkdir -p /tmp/broker; export FERROCE_BROKER_DIR=/tmp/broker\n{} run --addr 10.77.0.{guest} --",
            self.places.ferroce.display()
        );
        match program {
            Program::Perftest(name) => {
                let common = format!("{name} -F -p {PORT} -s {bytes} -m 4096 -t 64 -D {seconds}");
                match stack {
                    Stack::Rxe => format!(
                        "gid=$(cd /sys/class/infiniband/rxe0/ports/1/gids; grep -li 'ffff:0a4d' 0 1 2 3 4 5 6 7)\n\
                         {common} -d rxe0 -x $gid {peer}"
                    ),
                    Stack::Ours => format!("{under_run} {common} {peer}"),
                }
            }
            Program::Rds => {
                let program = self.places.lab.join("rds-peer").display().to_string();
                let before = match stack {
                    Stack::Rxe => format!("modprobe rds && modprobe rds_rdma && {program}"),
                    Stack::Ours => format!("{under_run} {program}"),
                };
                match peer {
                    "" => format!("{before} count 10.77.0.{guest} {PORT} | (read -r waiting; : > {RDS_WAITS}; cat)"),
                    peer => format!("{before} rate 10.77.0.{guest} {peer} {PORT} {bytes} {seconds}"),
                }
            }
        }
    }

    /// What the client says, GB/s, or if nothing came over, what both sides said.
    fn measure(&self, load: &Load, stacks: [Stack; 2]) -> Result<Result<f64, String>, Error> {
        for _ in 1..ATTEMPTS {
            match self.attempt(load, stacks)? {
                Err(said) if said.contains(NO_CLOCK) => {}
                outcome => return Ok(outcome),
            }
        }
        self.attempt(load, stacks)
    }

    fn attempt(&self, load: &Load, [client, server]: [Stack; 2]) -> Result<Result<f64, String>, Error> {
        let limit = self.seconds + 40;
        let passive = format!(
            "timeout {limit} bash -c '{}'",
            self.command(load, server, 1, "").replace('\'', "'\\''")
        );
        let active = format!(
            "timeout {limit} bash -c '{}'",
            self.command(load, client, 2, "10.77.0.1").replace('\'', "'\\''")
        );
        let listens = load.program.listens();
        let (said, served) = thread::scope(|scope| {
            let serves = scope.spawn(|| self.server.try_run(&passive, limit + 20));
            let said = self
                .server
                .run(&listens, 60)
                .and_then(|_| self.client.try_run(&active, limit + 20));
            if said.as_ref().map_or(true, |(code, _)| *code != 0) {
                let _ = self.server.run(&format!("pkill {}; true", load.program.name()), 20);
            }
            (said, serves.join())
        });
        let served = served.map_err(|_| "the server's thread panicked")??;
        let (code, text) = said.map_err(|e| format!("{e}\n--- server: {}\n{}", served.0, served.1))?;
        let figure = load.program.rate(&text).filter(|figure| code == 0 && *figure > 0.0);
        Ok(figure.ok_or_else(|| format!("client: {code}\n{text}\n--- server: {}\n{}", served.0, served.1)))
    }
}

/// The average bandwidth in the last line of perftest's table, from MiB/s to GB/s.
fn average(text: &str) -> Option<f64> {
    const AVERAGE: usize = 3;
    let mut lines = text.lines().skip_while(|l| !l.trim_start().starts_with("#bytes"));
    let mib: f64 = lines.nth(1)?.split_whitespace().nth(AVERAGE)?.parse().ok()?;
    Some(mib * f64::from(1 << 20) / 1e9)
}

/// The bytes a second in the last line of `rds-peer rate`, from MB/s to GB/s.
fn rds_rate(text: &str) -> Option<f64> {
    let rate = text.trim_end().strip_suffix(" MB/s")?.rsplit(' ').next()?;
    Some(rate.parse::<f64>().ok()? / 1e3)
}

fn to_json(args: &Args, rows: &[Row]) -> Value {
    let kernel = args.kernel.to_possible_value();
    json!({
        "kernel": kernel.as_ref().map(|k| k.get_name()),
        "rows": rows.iter().map(|r| json!({ "name": r.name, "gbytes_per_s": r.values, "failures": r.failures })).collect::<Vec<_>>(),
    })
}

/// Measures all of it.
pub(crate) fn run(args: &Args, places: &Places) -> Result<(), Error> {
    let _ready = lab::prepare(places, &[args.kernel])?;
    if let Some(why) = places.missing(args.kernel) {
        return Err(why.into());
    }
    let net = Net::up(2)?;
    let shape = Shape {
        kernel: args.kernel,
        ..JUMBO
    };
    net.set_mtu(shape.mtu)?;
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|o| name.contains(o));
    // Emulated, the instruction that makes CRCs fast elsewhere makes them slower than tables do.
    let processor = ["-cpu".to_owned(), "max,-pclmulqdq".to_owned()];
    let boot = |id| Guest::boot_with(id, shape, places, &processor);
    let mut pair = Pair {
        server: boot(1)?,
        client: boot(2)?,
        stacks: [None, None],
        loss: "0",
        places,
        seconds: args.seconds,
    };
    let mut rows: Vec<Row> = Vec::new();
    for _ in 0..args.rounds {
        for stacks in PAIRS {
            for load in LOADS.iter().filter(|l| wanted(&l.name(stacks))) {
                lab::check_stop()?;
                pair.set_up(stacks, load.loss)?;
                let outcome = pair.measure(load, stacks)?;
                let name = load.name(stacks);
                match &outcome {
                    Ok(value) => println!("{name:<40} {value:.4} GB/s"),
                    Err(said) => println!("{name:<40} failed\n{said}"),
                }
                let at = rows.iter().position(|r| r.name == name).unwrap_or_else(|| {
                    rows.push(Row {
                        name,
                        values: Vec::new(),
                        failures: Vec::new(),
                    });
                    rows.len() - 1
                });
                rows[at].add(outcome);
            }
        }
    }
    if let Some(file) = &args.results {
        let text = serde_json::to_string_pretty(&to_json(args, &rows))?;
        fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perftest_says_its_average() {
        let text = " Data ex. method : Ethernet\n #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                    65536      2500           0.00               128.00   \t\t   0.003052\n----\n";
        assert_eq!(average(text), Some(0.134_217_728));
        assert_eq!(average("Couldn't connect"), None);
    }

    #[test]
    fn rds_says_its_rate() {
        let text = "512 messages of 8192 bytes, 250/s, 2.048 MB/s\n";
        assert_eq!(rds_rate(text), Some(0.002_048));
        assert_eq!(rds_rate("rds-peer: bind: Address not available\n"), None);
    }

    #[test]
    fn measurements_have_names_of_their_own() {
        let names: std::collections::BTreeSet<String> =
            LOADS.iter().flat_map(|l| PAIRS.map(|stacks| l.name(stacks))).collect();
        assert_eq!(names.len(), LOADS.len() * PAIRS.len());
        assert!(names.contains("READ 64 KiB, 1 % lost, ours to rxe"), "{names:?}");
    }
}
