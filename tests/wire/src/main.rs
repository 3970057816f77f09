//! `ferroce-wire`: two commands at the ends of a wire.

use std::{
    io::{self, Write as _},
    process::{ExitCode, ExitStatus},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use clap::Parser;
use ferroce_wire::{
    direction::{Burst, Conditions, Line},
    group::Group,
    wire::{End, Wire, WireConfig},
};
use serde_json::{Map, Value, json};

/// Runs two commands in network namespaces of their own with a wire between them, which loses, repeats, reorders and delays packets.
///
/// The first command has the address 10.81.0.1 on the interface wire0, the second 10.81.0.2; on further networks it is 10.81.1.1 and
/// wire1, and so on. When the second command ends, the first one is killed. Needs root. Conditions are the same both ways. What
/// became of the packets is printed at the end, as a line of JSON for each way of each network.
#[derive(Parser)]
#[command(
    name = "ferroce-wire",
    version,
    max_term_width = 100,
    after_help = "Example:\n  ferroce-wire --loss 0.001 --delay 5 'ferroce bench --server --addr 10.81.0.1' \
                  'sleep 1; ferroce bench write --connect 10.81.0.1'\n\n\
                  Exit status: that of the second command, or 1."
)]
struct Cli {
    /// Run by sh at the first end
    first: String,
    /// Run by sh at the second end
    second: String,
    /// Networks between the ends
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    networks: u8,
    /// MTU of the interfaces
    #[arg(long, value_name = "BYTES", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=9000))]
    mtu: u32,
    /// Decides about the fate of packets
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Probability that a packet is lost
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    loss: f64,
    /// Probability that a burst of losses begins at a packet, and its average length
    #[arg(long, value_name = "P,LENGTH", value_parser = burst)]
    burst: Option<Burst>,
    /// Probability that a packet comes twice
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    duplicate: f64,
    /// Probability that a packet is held back, so that others overtake it
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    reorder: f64,
    /// How long it is held back, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1.0)]
    reorder_by: f64,
    /// How long each packet takes, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    delay: f64,
    /// Up to so much more, at random; packets stay in order
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    jitter: f64,
    /// Probability that a bit of a packet is flipped
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    corrupt: f64,
    /// Probability that a packet gets ECN's mark
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    ecn: f64,
    /// Megabytes a second
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// Bytes that wait when packets come faster than --rate; further ones are dropped
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20)]
    queue: u64,
    /// Packets that find more bytes waiting get ECN's mark
    #[arg(long, value_name = "BYTES")]
    mark_above: Option<u64>,
}

fn burst(text: &str) -> Result<Burst, String> {
    let (begins, length) = text.split_once(',').ok_or("a probability and a length")?;
    let parse = |s: &str| s.parse::<f64>().map_err(|e| format!("{s}: {e}"));
    Ok(Burst {
        begins: parse(begins)?,
        length: parse(length)?,
    })
}

fn milliseconds(ms: f64) -> io::Result<Duration> {
    Duration::try_from_secs_f64(ms / 1e3).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
}

impl Cli {
    fn conditions(&self) -> io::Result<Conditions> {
        let line = self.rate.map(|rate| Line {
            rate: (rate * 1e6) as u64,
            queue: self.queue,
            mark_above: self.mark_above,
        });
        Ok(Conditions {
            cut: false,
            loss: self.loss,
            burst: self.burst,
            duplicate: self.duplicate,
            reorder: self.reorder,
            reorder_by: milliseconds(self.reorder_by)?,
            delay: milliseconds(self.delay)?,
            jitter: milliseconds(self.jitter)?,
            corrupt: self.corrupt,
            mark: self.ecn,
            line,
        })
    }
}

fn start(wire: &Wire, end: End, command: &str) -> io::Result<Group> {
    Group::spawn(wire.namespace(end).command("sh").args(["-c", command]))
}

/// Waits for its end; `None` if the user wants to stop.
fn wait(mut command: Group, stop: &AtomicBool) -> io::Result<Option<ExitStatus>> {
    while !stop.load(Relaxed) {
        if let Some(status) = command.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(None)
}

fn run(cli: &Cli, stop: &AtomicBool) -> io::Result<ExitCode> {
    let wire = Wire::start(&WireConfig {
        networks: cli.networks,
        mtu: cli.mtu,
        seed: cli.seed,
    })?;
    let conditions = cli.conditions()?;
    let ways = || (0..cli.networks).flat_map(|network| End::BOTH.map(|from| (network, from)));
    for (network, from) in ways() {
        wire.set(network, from, conditions);
    }
    let first = start(&wire, End::A, &cli.first)?;
    let ended = wait(start(&wire, End::B, &cli.second)?, stop)?;
    drop(first);
    for (network, from) in ways() {
        let (counters, under_way) = wire.counters(network, from);
        let mut line = Map::new();
        line.insert("network".into(), network.into());
        line.insert("from".into(), if from == End::A { 1 } else { 2 }.into());
        line.extend(counters.named().map(|(name, n)| (name.to_owned(), Value::from(n))));
        line.insert("under_way".into(), json!(under_way));
        match writeln!(io::stdout(), "{}", Value::Object(line)) {
            // Whoever reads it has seen enough.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => break,
            result => result?,
        }
    }
    let code = ended.map_or(Some(130), |status| status.code());
    Ok(code
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        if let Err(e) = signal_hook::flag::register(signal, stop.clone()) {
            eprintln!("warning: ctrl-C will not clean up: {e}");
        }
    }
    run(&cli, &stop).unwrap_or_else(|e| {
        eprintln!("error: {e}");
        ExitCode::FAILURE
    })
}
