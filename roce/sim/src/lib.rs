//! A simulator for the transport: the ports that run in production, under a virtual clock, joined by a network that
//! loses, doubles, reorders and damages packets, cuts hosts off and lets them die, all drawn from one seed.
//!
//! A run has a chaos phase, then a quiet phase in which everything posted must complete. Throughout, a simple model
//! knows what each work request must do: every message arrives once and in order, memory is what the operations make
//! of it, every signalled work request completes once, in order and with a status that it may have, and no completion
//! tells of something that did not happen. Half of the runs have traffic of the other services beside: messages of
//! unreliable connections and datagrams arrive whole or not at all, in order where the network keeps it, and only where
//! they may; extended connections and shared receive queues lose nothing and use no receive twice. At the end nothing is in flight any more and no timer spins.
//!
//! [`run`] does one seed, [`run_many`] many on several threads. The same seed gives the same run ([`Stats::trace_hash`]).
//!
//! [`run_many_storage`] runs servers and clients of RNBD, with RTRS and disks, on such a network.
#![forbid(unsafe_code)]

mod admission;
mod adversary;
mod chaos;
mod faulty;
mod life;
mod model;
mod net;
mod ops;
mod rng;
mod scenario;
mod services;
mod stats;
mod storage;
mod trace;
mod verdict;
mod world;

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

pub use stats::Stats;

use crate::{trace::Trace, world::World};

/// Whether runs have an adversary (`adversary/mod.rs`). What a seed draws for everything else does not depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adversary {
    /// None.
    Never,
    /// As the seed decides: a quarter of the runs, and further runs beside some.
    Drawn,
    /// Every run, and beside some a pair of runs that compares goodput, or a server under a flood.
    Always,
}

/// Kind of run, beside the choices that its seed draws.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// The network's faults and the hosts' misfortunes.
    Plain,
    /// With an off-path attacker.
    Blind,
    /// With an on-path attacker that sees all packets and attacks one connection.
    Observed,
    /// Clients of a server that verifies before it allocates, and a flood of requests.
    Admission,
    /// Connections over a network without faults: what gets through, with somebody like that or without.
    Goodput { attacked: bool },
    /// As `Plain`, with forged copies ahead of packets beyond a gap, from the right source ports.
    Copies,
    /// As `Plain`, with forged packets to connected queue pairs alone or without: both runs are the same.
    Strangers { attacked: bool },
}

impl Class {
    pub(crate) const fn is_goodput(self) -> bool {
        matches!(self, Self::Goodput { .. })
    }
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Decides everything.
    pub seed: u64,
    /// Whether somebody attacks.
    pub adversary: Adversary,
    /// Only runs with clients of a server under a flood of requests (`admission.rs`).
    pub admission: bool,
    /// Only runs with an observer (`adversary/observer.rs`).
    pub observer: bool,
    /// Only pairs of runs that compare goodput.
    pub goodput: bool,
    /// Only runs with forged copies of packets beyond a gap.
    pub copies: bool,
    /// Only pairs of runs with and without forged packets to connected queue pairs.
    pub strangers: bool,
    /// Servers with storage hide power failures, which the rules must find.
    pub hidden_losses: bool,
    /// About how many work requests each direction of a connection carries.
    pub scale: u32,
    /// The network has no faults but narrow links and queues that overflow, and nothing else goes wrong.
    pub bottleneck: bool,
    /// Directory for captures of failing runs; `None`: the system's for temporary files.
    pub pcap_dir: Option<PathBuf>,
    /// File for a capture of the run, whether it fails or not.
    pub capture: Option<PathBuf>,
    /// Print every packet, completion and event of connections.
    pub log: bool,
}

impl SimConfig {
    /// Returns the options of a seed's run in usual size.
    pub const fn new(seed: u64) -> Self {
        Self {
            seed,
            adversary: Adversary::Never,
            admission: false,
            observer: false,
            goodput: false,
            copies: false,
            strangers: false,
            hidden_losses: false,
            scale: 150,
            bottleneck: false,
            pcap_dir: None,
            capture: None,
            log: false,
        }
    }
}

/// Run that broke a rule.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}: {text}\n  again: cargo xtask sim --seed {seed} --seeds 1{options}{}", .pcap.as_ref().map(|p| format!("\n  capture: {}", p.display())).unwrap_or_default())]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The simulator's options that it was run with.
    pub options: &'static str,
    /// The rule and what was seen, with the virtual time.
    pub text: String,
    /// Capture of the packets sent, if it could be written.
    pub pcap: Option<PathBuf>,
}

/// Runs one seed. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &SimConfig) -> Result<Stats, Failure> {
    let plan = Plan::draw(config);
    let mut stats = match plan.main {
        Some(class) => run_class(config, class, config.capture.clone())?,
        None => Stats::default(),
    };
    for (class, wanted) in [
        (Class::Observed, plan.observed),
        (Class::Admission, plan.admission),
        (Class::Copies, plan.copies),
    ] {
        if wanted {
            stats.add(&run_class(config, class, None)?);
        }
    }
    if plan.goodput {
        let capture = config.capture.clone().filter(|_| config.goodput);
        let pair = [(false, None), (true, capture)];
        let [alone, attacked] = pair.map(|(attacked, to)| run_class(config, Class::Goodput { attacked }, to));
        let (alone, attacked) = (alone?, attacked?);
        // The programs' choices depend on what happens when, so it is not quite the same work.
        let (before, under) = (alone.work_ns, attacked.work_ns);
        let same = before as f64 * attacked.work_bytes as f64 / alone.work_bytes.max(1) as f64;
        if under as f64 > same / LEAST_OF_A_PAIR + SHORT_NS {
            let text = format!("under attack the work took {under} ns instead of {same:.0} ns");
            return Err(failure(config, text, None));
        }
        stats.add(&alone);
        stats.add(&attacked);
        stats.pairs = 1;
        (stats.alone_ns, stats.attacked_ns) = (before, under);
        (stats.alone_bytes, stats.attacked_bytes) = (alone.work_bytes, attacked.work_bytes);
    }
    if plan.strangers {
        stats.add(&run_strangers(config)?);
    }
    stats.runs = 1;
    Ok(stats)
}

/// Runs a seed with and without forged packets to connected queue pairs. They change nothing, to the nanosecond.
fn run_strangers(config: &SimConfig) -> Result<Stats, Failure> {
    let capture = config.capture.clone().filter(|_| config.strangers);
    let pair = [(false, None), (true, capture)];
    let [alone, attacked] = pair.map(|(attacked, to)| run_class(config, Class::Strangers { attacked }, to));
    let (alone, attacked) = (alone?, attacked?);
    if alone.trace_hash != attacked.trace_hash {
        let text = format!("packets of strangers changed a run: {attacked:?} instead of {alone:?}");
        return Err(failure(config, text, None));
    }
    Ok(attacked)
}

/// The share of its goodput that work keeps under attack, over [`MANY_PAIRS`] of runs or more.
pub const LEAST_GOODPUT: f64 = 0.7;
/// Number of pairs from which on their sum is significant. Depending on when the last connection ends, 14 of 1000 pairs are below
/// [`LEAST_GOODPUT`], and less than one of 10,000 sums of five.
pub const MANY_PAIRS: u64 = 5;
/// In a single pair. Most are over within 20 ms, and end with whichever connection happens to be last.
const LEAST_OF_A_PAIR: f64 = 0.5;
/// Time that any pair may take longer, nanoseconds.
const SHORT_NS: f64 = 10e6;
/// The stream that decides which runs have an adversary.
const PLAN: u64 = 24;

/// The runs of a seed.
#[derive(Default)]
struct Plan {
    main: Option<Class>,
    observed: bool,
    admission: bool,
    goodput: bool,
    strangers: bool,
    copies: bool,
}

impl Plan {
    fn draw(config: &SimConfig) -> Self {
        let mut rng = rng::Rng::new(config.seed, PLAN);
        let mut chance = |drawn: f64, always: f64| match config.adversary {
            Adversary::Never => false,
            Adversary::Drawn => rng.chance(drawn),
            Adversary::Always => rng.chance(always),
        };
        let only = |main: Option<Class>, goodput: bool| Self {
            main,
            goodput,
            ..Self::default()
        };
        match config {
            SimConfig { observer: true, .. } => only(Some(Class::Observed), false),
            SimConfig { admission: true, .. } => only(Some(Class::Admission), false),
            SimConfig { goodput: true, .. } => only(None, true),
            SimConfig { copies: true, .. } => only(Some(Class::Copies), false),
            SimConfig { strangers: true, .. } => Self {
                strangers: true,
                ..Self::default()
            },
            _ => Self {
                main: Some(if chance(0.25, 1.0) { Class::Blind } else { Class::Plain }),
                goodput: chance(0.04, 0.3),
                admission: chance(0.05, 0.1),
                observed: chance(0.05, 0.0),
                strangers: chance(0.1, 0.5),
                copies: chance(0.05, 0.1),
            },
        }
    }
}

fn failure(config: &SimConfig, text: String, pcap: Option<PathBuf>) -> Failure {
    Failure {
        seed: config.seed,
        options: match (config.adversary, config.bottleneck) {
            _ if config.observer => " --observer",
            _ if config.admission => " -- --admission",
            _ if config.goodput => " -- --goodput",
            _ if config.strangers => " -- --strangers",
            _ if config.copies => " -- --copies",
            (Adversary::Always, _) => " --adversary",
            (_, true) => " -- --bottleneck",
            _ => "",
        },
        text,
        pcap,
    }
}

fn run_class(config: &SimConfig, class: Class, capture: Option<PathBuf>) -> Result<Stats, Failure> {
    let text = match attempt(config, class, capture, config.log) {
        Ok(stats) => return Ok(stats),
        Err(text) => text,
    };
    let dir = config.pcap_dir.clone().unwrap_or_else(std::env::temp_dir);
    let path = dir.join(format!("roce-sim-{}.pcap", config.seed));
    let pcap = attempt(config, class, Some(path.clone()), false).is_err() && path.is_file();
    let text = if class == Class::Plain {
        text
    } else {
        format!("{class:?}: {text}")
    };
    Err(failure(config, text, pcap.then_some(path)))
}

/// Counts of runs with storage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StorageStats {
    /// Runs.
    pub runs: u64,
    /// Packets sent.
    pub packets: u64,
    /// Packets that the network lost.
    pub lost: u64,
    /// Block operations that ended.
    pub operations: u64,
    /// Block operations that succeeded.
    pub succeeded: u64,
    /// Virtual time, nanoseconds.
    pub simulated_ns: u64,
    /// Fingerprint of the run: times and headers of all packets received, and how operations ended. Of several runs: combined.
    pub trace_hash: u64,
    /// Number of runs with each event, and of the events.
    pub coverage: BTreeMap<&'static str, [u64; 2]>,
}

impl StorageStats {
    fn add(&mut self, run: &storage::Tally) {
        self.runs += 1;
        self.packets += run.packets;
        self.lost += run.lost;
        self.operations += run.operations;
        self.succeeded += run.succeeded;
        self.simulated_ns += run.simulated_ns;
        self.trace_hash ^= run.hash;
        for (what, n) in run.coverage.iter() {
            self.covered(what, [1, n]);
        }
    }

    fn covered(&mut self, what: &'static str, [runs, times]: [u64; 2]) {
        let entry = self.coverage.entry(what).or_default();
        *entry = [entry[0] + runs, entry[1] + times];
    }
}

/// Runs one seed of a server and clients with storage. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run_storage(config: &SimConfig) -> Result<StorageStats, Failure> {
    let text = match attempt_storage(config, config.capture.clone(), config.log) {
        Ok(tally) => {
            let mut stats = StorageStats::default();
            stats.add(&tally);
            return Ok(stats);
        }
        Err(text) => text,
    };
    let dir = config.pcap_dir.clone().unwrap_or_else(std::env::temp_dir);
    let path = dir.join(format!("roce-sim-storage-{}.pcap", config.seed));
    let pcap = attempt_storage(config, Some(path.clone()), false).is_err() && path.is_file();
    let failure = failure(config, text, pcap.then_some(path));
    Err(Failure {
        options: " --storage",
        ..failure
    })
}

fn attempt_storage(config: &SimConfig, pcap: Option<PathBuf>, log: bool) -> Result<storage::Tally, String> {
    let trace = Trace::new(pcap.as_deref(), log).map_err(|e| format!("no capture file: {e}"))?;
    let mut world = storage::World::new(config.seed, config.scale, config.hidden_losses, trace);
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run()));
    let at = world.now() as f64 / 1e9;
    match outcome {
        Ok(Ok(())) => Ok(world.tally()),
        Ok(Err(text)) => Err(format!("at {at:.6} s: {text}")),
        Err(panic) => Err(format!("at {at:.6} s: panic: {}", panic_text(&*panic))),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_default()
}

fn attempt(config: &SimConfig, class: Class, pcap: Option<PathBuf>, log: bool) -> Result<Stats, String> {
    let trace = Trace::new(pcap.as_deref(), log).map_err(|e| format!("no capture file: {e}"))?;
    let mut world = World::new(config, class, trace);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        world.set_guards()?;
        world.begin_services(config)?;
        world.run()
    }));
    world.trace.finish();
    let at = world.now as f64 / 1e9;
    match outcome {
        Ok(Ok(())) => Ok(world.into_stats()),
        Ok(Err(text)) => Err(format!("at {at:.6} s: {text}")),
        Err(panic) => Err(format!("at {at:.6} s: panic: {}", panic_text(&*panic))),
    }
}

/// Sums of runs.
trait Total: Default + Send {
    fn take(&mut self, run: &Self);
}

impl Total for Stats {
    fn take(&mut self, run: &Self) {
        self.add(run);
    }
}

impl Total for StorageStats {
    fn take(&mut self, run: &Self) {
        self.runs += run.runs;
        self.packets += run.packets;
        self.lost += run.lost;
        self.operations += run.operations;
        self.succeeded += run.succeeded;
        self.simulated_ns += run.simulated_ns;
        self.trace_hash ^= run.trace_hash;
        for (what, counts) in &run.coverage {
            self.covered(what, *counts);
        }
    }
}

/// Runs many seeds on `jobs` threads. `done` is called after each, on the thread that ran it, one call at a time.
/// Returns the sum of the good runs and the failures in the order of their seeds.
pub fn run_many(
    seeds: impl IntoIterator<Item = u64>,
    jobs: usize,
    base: &SimConfig,
    done: impl FnMut(u64, &Result<Stats, Failure>) + Send,
) -> (Stats, Vec<Failure>) {
    each(seeds, jobs, base, run, done)
}

/// Runs many seeds with storage, as [`run_many`] does.
pub fn run_many_storage(
    seeds: impl IntoIterator<Item = u64>,
    jobs: usize,
    base: &SimConfig,
    done: impl FnMut(u64, &Result<StorageStats, Failure>) + Send,
) -> (StorageStats, Vec<Failure>) {
    each(seeds, jobs, base, run_storage, done)
}

fn each<T: Total>(
    seeds: impl IntoIterator<Item = u64>,
    jobs: usize,
    base: &SimConfig,
    run: impl Fn(&SimConfig) -> Result<T, Failure> + Sync,
    done: impl FnMut(u64, &Result<T, Failure>) + Send,
) -> (T, Vec<Failure>) {
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let next = AtomicUsize::new(0);
    let shared = Mutex::new((T::default(), Vec::new(), done));
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, seeds.len().max(1)) {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let config = SimConfig { seed, ..base.clone() };
                    let result = run(&config);
                    let mut shared = shared.lock().unwrap_or_else(|e| e.into_inner());
                    let (total, failures, done) = &mut *shared;
                    done(seed, &result);
                    match result {
                        Ok(stats) => total.take(&stats),
                        Err(failure) => failures.push(failure),
                    }
                }
            });
        }
    });
    let (total, mut failures, _) = shared.into_inner().unwrap_or_else(|e| e.into_inner());
    failures.sort_by_key(|f| f.seed);
    (total, failures)
}
