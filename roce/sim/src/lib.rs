//! Simulator of the transport: the ports that run in production, under a virtual clock, joined by a network that
//! loses, doubles, reorders and damages packets, cuts hosts off and lets them die, all drawn from one seed.
//!
//! A run has a chaos phase, then a quiet phase in which everything posted must complete. Throughout, a simple model
//! knows what each work request must do: every message arrives once and in order, memory is what the operations make
//! of it, every signalled work request completes once, in order and with a status that it may have, and no completion
//! reports what did not happen. Half of the runs have traffic of the other services as well: messages of
//! unreliable connections and datagrams arrive whole or not at all, in order where the network keeps it, and only where
//! they may; extended connections and shared receive queues lose nothing and use no receive twice. At the end nothing is in flight any more and no timer spins.
//!
//! [`run`] does one seed, [`run_many`] many on several threads. The same seed gives the same run ([`Stats::trace_hash`]).
//!
//! It knows the crates from `roce-bth` to `roce-port`, no sockets, no clock and none of the protocols above
//! verbs. For those it is a library: [`Link`], [`Trace`] and [`Rng`] for a network of others (`tests/storage-sim`), and
//! [`simulate_program`] for programs on its own hosts.
#![forbid(unsafe_code)]

mod adversary;
mod chaos;
pub mod cli;
mod faulty;
pub mod forge;
mod life;
mod model;
mod net;
mod ops;
mod program;
mod rng;
mod runner;
mod scenario;
mod services;
mod stats;
mod trace;
mod verdict;
mod world;

use std::path::PathBuf;

pub use crate::{
    net::{Faults, Frame, Link, NetStats},
    program::{PRIVATE_LEN, Program, simulate_program},
    rng::Rng,
    runner::{Check, Failure, RunConfig, Simulation, Total, run_many, simulate},
    scenario::{HostPlan, MS, SEC, Scenario, US},
    stats::Stats,
    trace::{Notes, Trace},
    world::{LISTEN_PORT, World},
};

/// Whether runs have an adversary (`adversary/mod.rs`). What a seed draws for everything else does not depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adversary {
    /// None.
    Never,
    /// As the seed decides: a quarter of the runs, and further runs beside some.
    Drawn,
    /// Every run, and beside some a pair of runs that compares goodput.
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
    /// Programs of others, no faults, and a flood of requests to the first host.
    Flood,
    /// Connections over a network without faults: what gets through, with an off-path attacker or without.
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

    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Blind => "blind",
            Self::Observed => "observed",
            Self::Flood => "flood",
            Self::Goodput { .. } => "goodput",
            Self::Copies => "copies",
            Self::Strangers { .. } => "strangers",
        }
    }
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Seed, size, capture and log.
    pub run: RunConfig,
    /// Whether somebody attacks.
    pub adversary: Adversary,
    /// Only runs with an observer (`adversary/observer.rs`).
    pub observer: bool,
    /// Only pairs of runs that compare goodput.
    pub goodput: bool,
    /// Only runs with forged copies of packets beyond a gap.
    pub copies: bool,
    /// Only pairs of runs with and without forged packets to connected queue pairs.
    pub strangers: bool,
    /// The network has no faults but narrow links and queues that overflow, and nothing else goes wrong.
    pub bottleneck: bool,
}

impl SimConfig {
    /// Returns the options of a run without an adversary.
    pub const fn new(run: RunConfig) -> Self {
        Self {
            run,
            adversary: Adversary::Never,
            observer: false,
            goodput: false,
            copies: false,
            strangers: false,
            bottleneck: false,
        }
    }

    /// Returns the same options for another seed.
    pub fn with_seed(&self, seed: u64) -> Self {
        let mut config = self.clone();
        config.run.seed = seed;
        config
    }

    /// Returns the options of `cargo xtask sim` that repeat a run.
    fn options(&self) -> &'static str {
        match (self.adversary, self.bottleneck) {
            _ if self.observer => " --observer",
            _ if self.goodput => " -- --goodput",
            _ if self.strangers => " -- --strangers",
            _ if self.copies => " -- --copies",
            (Adversary::Always, _) => " --adversary",
            (_, true) => " -- --bottleneck",
            _ => "",
        }
    }
}

/// Runs one seed. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &SimConfig) -> Result<Stats, Failure> {
    let plan = Plan::draw(config);
    let capture = &config.run.capture;
    let mut stats = match plan.main {
        Some(class) => run_class(config, class, capture.clone())?,
        None => Stats::default(),
    };
    for (class, wanted) in [(Class::Observed, plan.observed), (Class::Copies, plan.copies)] {
        if wanted {
            stats.add(&run_class(config, class, None)?);
        }
    }
    if plan.goodput {
        stats.add(&run_goodput(config)?);
    }
    if plan.strangers {
        stats.add(&run_strangers(config)?);
    }
    stats.runs = 1;
    Ok(stats)
}

/// Runs a seed with and without an adversary, and compares how fast the work was.
fn run_goodput(config: &SimConfig) -> Result<Stats, Failure> {
    let capture = config.run.capture.clone().filter(|_| config.goodput);
    let pair = [(false, None), (true, capture)];
    let [alone, attacked] = pair.map(|(attacked, to)| run_class(config, Class::Goodput { attacked }, to));
    let (alone, attacked) = (alone?, attacked?);
    // The programs' choices depend on what happens when, so it is not quite the same work.
    let (before, under) = (alone.work_ns, attacked.work_ns);
    let same = before as f64 * attacked.work_bytes as f64 / alone.work_bytes.max(1) as f64;
    if under as f64 > same / LEAST_OF_A_PAIR + SHORT_NS {
        let text = format!("under attack the work took {under} ns instead of {same:.0} ns");
        return Err(failure(config, text));
    }
    let mut stats = alone.clone();
    stats.add(&attacked);
    stats.pairs = 1;
    (stats.alone_ns, stats.attacked_ns) = (before, under);
    (stats.alone_bytes, stats.attacked_bytes) = (alone.work_bytes, attacked.work_bytes);
    Ok(stats)
}

/// Runs a seed with and without forged packets to connected queue pairs. They change nothing, to the nanosecond.
fn run_strangers(config: &SimConfig) -> Result<Stats, Failure> {
    let capture = config.run.capture.clone().filter(|_| config.strangers);
    let pair = [(false, None), (true, capture)];
    let [alone, attacked] = pair.map(|(attacked, to)| run_class(config, Class::Strangers { attacked }, to));
    let (alone, attacked) = (alone?, attacked?);
    if alone.trace_hash != attacked.trace_hash {
        let text = format!("packets of strangers changed a run: {attacked:?} instead of {alone:?}");
        return Err(failure(config, text));
    }
    Ok(attacked)
}

/// Least share of its goodput that work keeps under attack, over [`MANY_PAIRS`] of runs or more.
pub const LEAST_GOODPUT: f64 = 0.7;
/// Number of pairs from which on their sum is significant. Depending on when the last connection ends, 14 of 1000 pairs are below
/// [`LEAST_GOODPUT`], and less than one of 10,000 sums of five.
pub const MANY_PAIRS: u64 = 5;
/// Least share in a single pair. Most are over within 20 ms, and end with whichever connection happens to be last.
const LEAST_OF_A_PAIR: f64 = 0.5;
/// Time that any pair may take longer, nanoseconds.
const SHORT_NS: f64 = 10e6;
/// Stream that decides which runs have an adversary.
const PLAN: u64 = 24;

/// Runs of a seed.
#[derive(Default)]
struct Plan {
    main: Option<Class>,
    observed: bool,
    goodput: bool,
    strangers: bool,
    copies: bool,
}

impl Plan {
    fn draw(config: &SimConfig) -> Self {
        let mut rng = Rng::new(config.run.seed, PLAN);
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
            SimConfig { goodput: true, .. } => only(None, true),
            SimConfig { copies: true, .. } => only(Some(Class::Copies), false),
            SimConfig { strangers: true, .. } => Self {
                strangers: true,
                ..Self::default()
            },
            _ => Self {
                main: Some(if chance(0.25, 1.0) { Class::Blind } else { Class::Plain }),
                goodput: chance(0.04, 0.3),
                observed: chance(0.05, 0.0),
                strangers: chance(0.1, 0.5),
                copies: chance(0.05, 0.1),
            },
        }
    }
}

fn failure(config: &SimConfig, text: String) -> Failure {
    Failure {
        seed: config.run.seed,
        options: config.options(),
        text,
        pcap: None,
    }
}

fn run_class(config: &SimConfig, class: Class, capture: Option<PathBuf>) -> Result<Stats, Failure> {
    let run = RunConfig {
        capture,
        ..config.run.clone()
    };
    simulate(&run, class.name(), config.options(), |trace| {
        World::new(config, class, trace)
    })
}
