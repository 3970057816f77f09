//! The soak test: `ferroce serve` and `ferroce map` under a flood from many addresses for minutes. Nothing may grow with
//! it, the device must work, and new clients must get in.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use ferroce_hostile::{
    aim::Aim,
    attack::{Background, flood},
    forge::{Forger, Identifications, Kind},
    load::Load,
    origin::Origin,
};
use ferroce_tests::{
    device::{map, map_args, serve},
    fresh_address,
    nbd::Client,
    process::Running,
    usage::{Flat, Usage},
};
use serde_json::{Value, json};

/// First address that the flood comes from.
const CROWD: Ipv4Addr = Ipv4Addr::new(127, 255, 0, 1);
/// Bytes of the device.
const DISK: u64 = 256 << 20;
/// Connections of the load.
const LOAD: u64 = 2;
/// How often processes are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// A new client is there by then.
const NEW_CLIENT: Duration = Duration::from_secs(2);

// What counts as flat, from the end of the first minute to the last one:

/// Threads and descriptors are those of a session that is just being opened or closed.
const FLAT: Flat = Flat {
    memory: 16 << 20,
    threads: 8,
    descriptors: 32,
};
/// Log lines a minute: each limit says something now and then, however often it is hit.
const LINES: u64 = 90;

#[derive(Args)]
#[command(
    after_help = "The program under test is $FERROCE_BIN, or a debug build.\n\nThe verdict compares the largest values of the last minute with those of the first minute of the flood, for each \
process: its memory (RssAnon) may be 16 MiB more, threads 8, descriptors 32; at most 90 log lines may come in any minute. \
The device must not fail, reading back what was written; in every minute a new client must map a device and read from it, \
within 2 seconds."
)]
pub(crate) struct SoakArgs {
    /// How long the flood lasts
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    minutes: f64,
    /// Packets a second to each end
    #[arg(long, value_name = "N", default_value_t = 2500.0)]
    rate: f64,
    /// How many addresses the packets come from
    #[arg(long, value_name = "N", default_value_t = 1000)]
    addresses: u32,
    /// Kinds of packets
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Kind::FLOOD)]
    kinds: Vec<Kind>,
    /// Seconds before and after the flood in which the device's speed without it is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0)]
    calm: f64,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A process under test and what it was seen to take.
struct Watched {
    name: &'static str,
    process: Running,
    worst: Usage,
    lines: usize,
}

impl Watched {
    fn new(name: &'static str, process: Running) -> Self {
        Self {
            name,
            process,
            worst: Usage::default(),
            lines: 0,
        }
    }

    fn look(&mut self) -> Result<(), String> {
        if self.process.has_ended() {
            return Err(format!("{} has ended:\n{}", self.name, tail(&self.process.stderr())));
        }
        let now = Usage::of(self.process.id()).map_err(|e| format!("{}: {e}", self.name))?;
        self.worst = self.worst.max(now);
        Ok(())
    }

    /// The largest values since the last call, and how many lines were logged.
    fn take(&mut self) -> (Usage, u64) {
        let lines = self.process.stderr().lines().count();
        let more = lines - self.lines;
        self.lines = lines;
        (std::mem::take(&mut self.worst), more as u64)
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// A minute of the flood.
struct Minute {
    packets: u64,
    rate: f64,
    ends: [(Usage, u64); 2],
    new_client: Result<Duration, String>,
}

/// Served and mapped device under test.
struct Bench {
    dir: tempfile::TempDir,
    server: Ipv4Addr,
    client: Ipv4Addr,
    ends: [Watched; 2],
    load: Load,
    clients: u32,
}

impl Bench {
    fn start() -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        let (server, client) = (fresh_address(), fresh_address());
        let mut exports = Vec::new();
        for (name, mode) in [("disk", ""), ("other", ",ro")] {
            let path = dir.path().join(name);
            File::create(&path)?.set_len(DISK)?;
            exports.push(format!("{name}={}{mode}", path.display()));
        }
        let (serve, _) = serve(server, &exports, &[]);
        let socket = dir.path().join("nbd");
        let (map, _) = map(client, &server.to_string(), &socket, &[]);
        let load = Load::start(&socket, LOAD)?;
        Ok(Self {
            dir,
            server,
            client,
            ends: [Watched::new("serve", serve), Watched::new("map", map)],
            load,
            clients: 0,
        })
    }

    fn targets(&self) -> [IpAddr; 2] {
        [self.server.into(), self.client.into()]
    }

    fn look(&mut self) -> Result<(), String> {
        self.ends.iter_mut().try_for_each(Watched::look)?;
        self.load.error().map_or(Ok(()), Err)
    }

    /// Looks on until then; false if the user wants to stop.
    fn wait(&mut self, until: Instant, stop: &AtomicBool) -> Result<bool, String> {
        while Instant::now() < until {
            if stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            self.look()?;
            thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
        }
        Ok(true)
    }

    /// Bytes a second without a flood.
    fn calm(&mut self, seconds: f64, stop: &AtomicBool) -> Result<f64, String> {
        let (started, before) = (Instant::now(), self.load.moved());
        self.wait(started + Duration::from_secs_f64(seconds), stop)?;
        Ok((self.load.moved() - before) as f64 / started.elapsed().as_secs_f64())
    }

    /// A client that was not there before maps the other device and reads from it: how long that took.
    fn new_client(&mut self) -> Result<Duration, String> {
        self.clients += 1;
        let socket = self.dir.path().join(format!("new-{}", self.clients));
        let session = format!("new-{}", self.clients);
        let more = ["--session", &session, "--device", "other", "--ro"];
        let args = map_args(fresh_address(), &self.server.to_string(), &socket, &more);
        let started = Instant::now();
        let mut map = Running::start(&args);
        let event = map.next_event();
        if event["event"] != "mapped" {
            return Err(event["message"].as_str().unwrap_or("no device").to_owned());
        }
        let read = Client::connect(&socket).map_err(|e| e.to_string())?.read(0, 4096);
        let took = started.elapsed();
        read.map_err(|e| format!("{e:?}"))?;
        let done = map.stop();
        match done.code {
            Some(0) => Ok(took),
            _ => Err(tail(&done.stderr)),
        }
    }

    fn minute(&mut self, length: Duration, flood: &Background, stop: &AtomicBool) -> Result<Option<Minute>, String> {
        let (started, moved, packets) = (Instant::now(), self.load.moved(), flood.packets());
        if !self.wait(started + length / 2, stop)? {
            return Ok(None);
        }
        let new_client = self.new_client();
        if !self.wait(started + length, stop)? {
            return Ok(None);
        }
        let seconds = started.elapsed().as_secs_f64();
        let [a, b] = &mut self.ends;
        Ok(Some(Minute {
            packets: ((flood.packets() - packets) as f64 / seconds) as u64,
            rate: (self.load.moved() - moved) as f64 / seconds,
            ends: [a.take(), b.take()],
            new_client,
        }))
    }

    /// Ends the processes orderly; their summaries.
    fn finish(self) -> Result<Vec<Value>, String> {
        self.load.finish()?;
        let [serve, map] = self.ends;
        let end = |w: Watched| {
            let name = w.name;
            let done = w.process.stop();
            match (done.code, done.json().pop()) {
                (Some(0), Some(summary)) => Ok(summary),
                _ => Err(format!("{name} did not end well:\n{}", tail(&done.stderr))),
            }
        };
        Ok(vec![end(map)?, end(serve)?])
    }
}

const HEAD: &str = "minute  packets/s   MB/s  new client |  serve: MiB   VM GiB  threads   fds  lines |  \
                    map: MiB   VM GiB  threads   fds  lines";

fn row(number: usize, m: &Minute) -> String {
    let end = |(u, lines): &(Usage, u64)| {
        let (mib, gib) = (
            u.anonymous as f64 / f64::from(1 << 20),
            u.address_space as f64 / f64::from(1 << 30),
        );
        format!("{mib:10.1} {gib:8.2} {:8} {:5} {lines:6}", u.threads, u.descriptors)
    };
    let client = match &m.new_client {
        Ok(took) => format!("{:.2} s", took.as_secs_f64()),
        Err(_) => "FAILED".to_owned(),
    };
    let [a, b] = &m.ends;
    format!(
        "{number:6} {:10} {:6.0}  {client:>10} |  {} |  {}",
        m.packets,
        m.rate / 1e6,
        end(a),
        end(b)
    )
}

/// Returns the faults of these minutes.
fn judge(minutes: &[Minute]) -> Vec<String> {
    let mut bad = Vec::new();
    for (n, m) in minutes.iter().enumerate() {
        match &m.new_client {
            Err(e) => bad.push(format!("minute {}: a new client did not get in: {e}", n + 1)),
            Ok(took) if *took > NEW_CLIENT => bad.push(format!("minute {}: a new client took {took:.1?}", n + 1)),
            Ok(_) => {}
        }
        for (end, name) in m.ends.iter().zip(["serve", "map"]) {
            if end.1 > LINES {
                bad.push(format!("minute {}: {name} logged {} lines", n + 1, end.1));
            }
        }
    }
    if let [first, .., last] = minutes {
        for (n, name) in ["serve", "map"].into_iter().enumerate() {
            bad.extend(FLAT.grown(name, first.ends[n].0, last.ends[n].0));
        }
    }
    bad
}

fn figures(args: &SoakArgs, minutes: &[Minute], calm: [f64; 2], bad: &[String], summaries: &[Value]) -> Value {
    let usage = |(u, lines): &(Usage, u64)| {
        json!({
            "anonymous": u.anonymous, "resident": u.resident, "address_space": u.address_space,
            "threads": u.threads, "descriptors": u.descriptors, "lines": lines,
        })
    };
    let minute = |m: &Minute| {
        json!({
            "packets_per_second": m.packets,
            "bytes_per_second": m.rate,
            "new_client_seconds": m.new_client.as_ref().ok().map(Duration::as_secs_f64),
            "serve": usage(&m.ends[0]),
            "map": usage(&m.ends[1]),
        })
    };
    json!({
        "rate": args.rate,
        "addresses": args.addresses,
        "calm_bytes_per_second": calm,
        "minutes": minutes.iter().map(minute).collect::<Vec<_>>(),
        "summaries": summaries,
        "bad": bad,
    })
}

fn start_flood(args: &SoakArgs, targets: [IpAddr; 2]) -> io::Result<Background> {
    let origins = Origin::crowd(Aim::LOOPBACK, CROWD, args.addresses)?;
    let (kinds, rate) = (args.kinds.clone(), args.rate);
    let mut forger = Forger::new(1, Identifications::Random);
    forger.timeout = None;
    Ok(Background::start(move |control| {
        flood(&targets, &origins, &kinds, &mut forger, rate, None, control)
    }))
}

/// The flood, minute by minute; what was seen even if it ends early, and why it did.
fn flooded(bench: &mut Bench, args: &SoakArgs, stop: &AtomicBool) -> (Vec<Minute>, Result<(), String>) {
    let mut minutes = Vec::new();
    let mut run = || {
        let flood = start_flood(args, bench.targets()).map_err(|e| e.to_string())?;
        for end in &mut bench.ends {
            end.take();
        }
        let end = Instant::now() + Duration::from_secs_f64(args.minutes * 60.0);
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            let length = Duration::from_secs(60).min(end - Instant::now());
            let Some(minute) = bench.minute(length, &flood, stop)? else {
                break;
            };
            println!("{}", row(minutes.len() + 1, &minute));
            let _ = io::stdout().flush();
            minutes.push(minute);
        }
        flood.stop().map(drop).map_err(|e| e.to_string())
    };
    let outcome = run();
    (minutes, outcome)
}

/// Runs it; whether the verdict is good.
pub(crate) fn run(args: &SoakArgs, stop: &Arc<AtomicBool>) -> Result<bool, String> {
    let mut bench = Bench::start().map_err(|e| e.to_string())?;
    let Kinds(kinds) = Kinds::of(&args.kinds);
    println!(
        "flooding {} (serve) and {} (map) with {} packets a second each from {} addresses: {kinds}",
        bench.server, bench.client, args.rate, args.addresses
    );
    // The first seconds are the page cache's.
    bench.calm(args.calm.min(3.0), stop)?;
    let before = bench.calm(args.calm, stop)?;
    println!("without a flood: {:.0} MB/s\n{HEAD}", before / 1e6);
    let (minutes, outcome) = flooded(&mut bench, args, stop);
    let mut bad = judge(&minutes);
    let mut calm = [before, 0.0];
    let mut summaries = Vec::new();
    match outcome {
        Err(e) => bad.push(e),
        Ok(()) if stop.load(Ordering::Relaxed) => return Err("interrupted".to_owned()),
        Ok(()) => match bench.calm(args.calm, stop).and_then(|after| {
            calm[1] = after;
            bench.finish()
        }) {
            Ok(all) => summaries = all,
            Err(e) => bad.push(e),
        },
    }
    let under = minutes.iter().map(|m| m.rate).sum::<f64>() / minutes.len().max(1) as f64;
    let ratio = 2.0 * under / (calm[0] + calm[1]);
    println!(
        "without a flood afterwards: {:.0} MB/s; under it on average {:.0} MB/s, a ratio of {ratio:.2}",
        calm[1] / 1e6,
        under / 1e6
    );
    if let Some(file) = &args.json {
        write(file, &figures(args, &minutes, calm, &bad, &summaries))?;
    }
    for line in &bad {
        println!("BAD: {line}");
    }
    println!("verdict: {}", if bad.is_empty() { "flat" } else { "NOT flat" });
    Ok(bad.is_empty())
}

fn write(file: &Path, figures: &Value) -> Result<(), String> {
    fs::write(file, format!("{figures:#}\n")).map_err(|e| format!("{}: {e}", file.display()))
}

/// Names for people.
struct Kinds(String);

impl Kinds {
    fn of(kinds: &[Kind]) -> Self {
        use clap::ValueEnum as _;
        let names = kinds.iter().filter_map(Kind::to_possible_value);
        Self(names.map(|v| v.get_name().to_owned()).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minute(memory: u64, threads: u64, lines: u64, client: Result<f64, String>) -> Minute {
        let usage = Usage {
            anonymous: memory << 20,
            threads,
            descriptors: 40,
            ..Usage::default()
        };
        Minute {
            packets: 1000,
            rate: 1e9,
            ends: [(usage, lines), (usage, 0)],
            new_client: client.map(Duration::from_secs_f64),
        }
    }

    #[test]
    fn what_is_flat_is_told_from_what_grows() {
        let flat = [
            minute(80, 20, 30, Ok(0.2)),
            minute(84, 22, 30, Ok(1.9)),
            minute(81, 20, 30, Ok(0.2)),
        ];
        assert_eq!(judge(&flat), Vec::<String>::new());
        for (what, last) in [
            ("memory", minute(100, 20, 30, Ok(0.2))),
            ("threads", minute(80, 40, 30, Ok(0.2))),
            ("lines", minute(80, 20, 1000, Ok(0.2))),
            ("took", minute(80, 20, 30, Ok(2.5))),
            ("did not get in", minute(80, 20, 30, Err("refused".into()))),
        ] {
            let bad = judge(&[minute(80, 20, 30, Ok(0.2)), last]);
            assert!(
                !bad.is_empty() && bad.iter().all(|b| b.contains(what)),
                "{what}: {bad:?}"
            );
        }
    }
}
