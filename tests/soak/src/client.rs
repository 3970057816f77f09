//! A mapped device: a `ferroce map` after another, and the load on it.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use ferroce_tests::process::Running;
use ferroce_wire::{
    namespace::Namespace,
    wire::{End, Wire},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    limits::{CONNECT_TIMEOUT, LIMIT},
    load::Load,
    logs::Logs,
    seen::{Counts, Seen},
    trouble::Ending,
};

/// What NBD clients met while there was no mapping may be noticed this much later.
const LATE: Duration = Duration::from_secs(3);
/// Between two attempts to map the device.
const AGAIN: Duration = Duration::from_secs(1);

/// A session under test: its devices, the first of which has its name, its networks, and the options of `ferroce map`.
pub(crate) struct Plan {
    name: &'static str,
    pub(crate) devices: &'static [&'static str],
    networks: &'static [u8],
    queues: bool,
    options: &'static [&'static str],
}

pub(crate) const PLANS: [Plan; 4] = [
    Plan {
        name: "two",
        devices: &["two", "twin"],
        networks: &[0, 1],
        queues: true,
        options: &["--on-loss", "queue"],
    },
    Plan {
        name: "robin",
        devices: &["robin"],
        networks: &[1, 0],
        queues: true,
        options: &[
            "--on-loss",
            "queue",
            "--policy",
            "round-robin",
            "--heartbeat",
            "0.5",
            "--connections",
            "2",
        ],
    },
    Plan {
        name: "one",
        devices: &["one"],
        networks: &[0],
        queues: true,
        options: &["--on-loss", "queue", "--reconnect-delay", "0.5", "--heartbeat", "2"],
    },
    Plan {
        name: "error",
        devices: &["error"],
        networks: &[0, 1],
        queues: false,
        options: &["--policy", "min-latency", "--heartbeat", "5", "--connections", "2"],
    },
];

/// Where a client is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Its devices are mapped, since then.
    Mapped(Instant),
    /// It was asked to end, or killed.
    Ending(Instant),
    /// It has ended.
    Down,
    /// It is to be mapped, since then. The server may keep the session of one that was killed, and networks may be cut, so it may
    /// need several attempts.
    Starting(Instant),
    /// An attempt failed; the next one comes at the second time.
    Failed(Instant, Instant),
}

/// What a client tells of itself.
pub(crate) type Answers = Vec<Value>;

/// A session, and the devices that are mapped over it.
pub(crate) struct Device {
    pub(crate) name: &'static str,
    devices: &'static [&'static str],
    /// Whether requests wait while no path is up.
    pub(crate) queues: bool,
    /// Whether there is more than one path.
    pub(crate) has_spare: bool,
    program: PathBuf,
    args: Vec<String>,
    namespace: Namespace,
    process: Running,
    phase: Phase,
    /// Whether it is to be started again when it has ended.
    wanted: bool,
    /// How many processes there were.
    pub(crate) generation: u32,
    pub(crate) seen: Seen,
    before: Counts,
    /// On each of its devices.
    pub(crate) loads: Vec<Load>,
}

impl Device {
    /// Maps the n-th one, and starts the load.
    pub(crate) fn start(plan: &Plan, n: u8, wire: &Wire, program: &Path, dir: &Path, seed: u64) -> io::Result<Self> {
        let namespace = wire.namespace(End::B).clone();
        let socket = dir.join(format!("{}.sock", plan.name));
        let args = arguments(plan, n, &namespace, &socket)?;
        let mut process = spawn(&namespace, program, &args);
        let mut mapped = Value::Null;
        for _ in plan.devices {
            mapped = process.event("mapped");
        }
        let seed = seed.wrapping_mul(31).wrapping_add(u64::from(n) << 16);
        let load = |(n, device): (usize, &&'static str)| {
            let image = dir.join(format!("{device}.img"));
            Load::start(&socket, device, image, seed.wrapping_add((n as u64) << 12), LIMIT)
        };
        Ok(Self {
            name: plan.name,
            queues: plan.queues,
            has_spare: plan.networks.len() > 1,
            program: program.to_owned(),
            args,
            namespace,
            process,
            phase: Phase::Mapped(Instant::now()),
            wanted: true,
            generation: 1,
            seen: Seen::new(&paths(&mapped), plan.devices),
            devices: plan.devices,
            before: Counts::default(),
            loads: plan.devices.iter().enumerate().map(load).collect(),
        })
    }

    /// Whether it is mapped and all its paths are up.
    pub(crate) fn is_well(&self) -> bool {
        self.is_mapped() && self.seen.is_well()
    }

    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.phase, Phase::Mapped(_))
    }

    /// The process's id.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Of all its processes.
    pub(crate) fn counts(&self) -> Counts {
        self.before + self.seen.counts
    }

    pub(crate) fn stderr(&self) -> String {
        self.process.stderr()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Sends a command; its number.
    pub(crate) fn ask(&mut self, request: Value) -> u64 {
        self.process.begin(request)
    }

    /// The process ends, and NBD clients see that. It is [started](Self::revive) later.
    pub(crate) fn end(&mut self, how: Ending) {
        self.broken(true);
        match how {
            Ending::Killed => self.signal(Signal::SIGKILL),
            Ending::Interrupted => self.signal(Signal::SIGINT),
            Ending::Unmapped => {
                for device in self.devices {
                    self.process
                        .begin(json!({ "do": "unmap", "device": device, "force": true }));
                }
            }
        }
        self.phase = Phase::Ending(Instant::now());
        self.wanted = false;
    }

    /// There may be nobody behind the socket.
    fn broken(&self, broken: bool) {
        self.loads.iter().for_each(|load| load.told.broken(broken));
    }

    /// It is to be mapped again, when it has ended.
    pub(crate) fn revive(&mut self) {
        self.wanted = true;
    }

    /// Reads what it tells; answers to commands. An error if it has ended, or tells what it must not.
    pub(crate) fn listen(&mut self, logs: &mut Logs) -> Result<Answers, String> {
        let now = Instant::now();
        let mut answers = Vec::new();
        while let Some(line) = self.process.new_line() {
            logs.say(&format!("{}: {line}", self.name));
            let event: Value = serde_json::from_str(&line).map_err(|e| format!("{}: {line}: {e}", self.name))?;
            match (event["event"].as_str().unwrap_or_default(), self.phase) {
                ("answer", Phase::Mapped(_)) => answers.push(event),
                (_, Phase::Mapped(_)) => {
                    self.seen
                        .event(now, &event)
                        .map_err(|e| format!("{}: {e}", self.name))?;
                }
                ("mapped", Phase::Starting(_)) => {
                    self.before = self.counts();
                    self.seen.begin_again(now, &paths(&event));
                    self.phase = Phase::Mapped(now);
                }
                // What it says at its end is no matter, nor why it was not let in.
                _ => {}
            }
        }
        self.advance(now, logs)?;
        Ok(answers)
    }

    fn advance(&mut self, now: Instant, logs: &mut Logs) -> Result<(), String> {
        let in_time = |since: Instant, what: &str| match now.duration_since(since) > LIMIT * 2 {
            true => Err(format!(
                "{}: ferroce map has not {what} within {:?}",
                self.name,
                LIMIT * 2
            )),
            false => Ok(()),
        };
        match self.phase {
            Phase::Mapped(since) => {
                if now.duration_since(since) > LATE {
                    self.broken(false);
                }
                if self.process.has_ended() {
                    return Err(format!("{}: ferroce map has ended", self.name));
                }
            }
            Phase::Ending(since) => {
                in_time(since, "ended")?;
                if self.process.has_ended() {
                    self.phase = Phase::Down;
                    let name = format!("map-{}-{}.log", self.name, self.generation);
                    logs.keep(&name, &self.process.stderr());
                }
            }
            Phase::Down if self.wanted => self.phase = Phase::Failed(now, now),
            Phase::Down => {}
            Phase::Starting(since) => {
                in_time(since, "mapped its device")?;
                if self.process.has_ended() {
                    self.phase = Phase::Failed(since, now + AGAIN);
                }
            }
            Phase::Failed(since, next) if next <= now => {
                self.process = spawn(&self.namespace, &self.program, &self.args);
                self.generation += 1;
                self.phase = Phase::Starting(since);
            }
            Phase::Failed(..) => {}
        }
        Ok(())
    }

    /// Ends it at once.
    pub(crate) fn kill(&mut self) {
        if !self.process.has_ended() {
            self.process.signal(Signal::SIGKILL);
        }
    }

    /// The process, when all is over.
    pub(crate) fn into_process(self) -> Running {
        let Self { process, .. } = self;
        process
    }
}

fn spawn(namespace: &Namespace, program: &Path, args: &[String]) -> Running {
    let mut command = namespace.command(program);
    command.args(args);
    Running::steered_by(command, format!("ferroce {args:?}"))
}

fn paths(mapped: &Value) -> Vec<String> {
    let paths = mapped["paths"].as_array().into_iter().flatten();
    paths.filter_map(Value::as_str).map(str::to_owned).collect()
}

fn arguments(plan: &Plan, n: u8, namespace: &Namespace, socket: &Path) -> io::Result<Vec<String>> {
    let mut args = vec!["map".to_owned(), "--json".to_owned()];
    for network in plan.networks {
        let server = Wire::address(*network, End::A);
        let [a, b, c, _] = server.octets();
        // Port 4791 of an address is one process's.
        let ours = format!("{a}.{b}.{c}.{}", 100 + n);
        namespace.ip(&format!("addr add {ours}/24 dev wire{network}"))?;
        args.extend(["--path".to_owned(), format!("{ours},{server}")]);
    }
    let (timeout, socket) = (CONNECT_TIMEOUT.to_string(), socket.display().to_string());
    let more = [
        ["--session", plan.name],
        ["--nbd", &socket],
        ["--connect-timeout", &timeout],
    ];
    let devices = plan.devices.iter().flat_map(|device| ["--device", device]);
    let more = more
        .into_iter()
        .flatten()
        .chain(devices)
        .chain(plan.options.iter().copied());
    args.extend(more.map(str::to_owned));
    Ok(args)
}
