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
//! verbs. For those it is a library: [`Link`], [`Trace`] and [`Rng`] for a network of others (`tests/storage-sim`),
//! [`lab`] for tests that say what each of its hosts does, and [`simulate_program`] for programs on its own hosts.
#![forbid(unsafe_code)]

mod adversary;
mod chaos;
pub mod cli;
mod config;
mod coverage;
mod faulty;
pub mod forge;
mod host;
pub mod lab;
pub mod lan;
mod lan_world;
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
mod turn;
mod verdict;
mod world;

use std::path::PathBuf;

use crate::config::Class;

pub use crate::{
    config::{Runs, SimConfig},
    coverage::{Coverage, RunsWith},
    forge::PRIVATE_LEN,
    host::LISTEN_PORT,
    lan_world::LanWorld,
    net::{Faults, Frame, Link, NetStats},
    program::simulate_program,
    rng::Rng,
    runner::{Check, Failure, RunConfig, Simulation, Total, run_many, simulate},
    scenario::{HostPlan, MS, SEC, Scenario, US},
    stats::Stats,
    trace::{Notes, Trace},
    world::{Program, World},
};

/// Runs one seed. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &SimConfig) -> Result<Stats, Failure> {
    let plan = Plan::draw(config);
    let mut stats = Stats::default();
    // The capture is that of the first run, or of the second of a pair that is alone.
    let mut capture = config.run.capture.clone();
    for class in plan.single {
        stats.add(&run_class(config, class, capture.take())?);
    }
    if plan.goodput {
        stats.add(&run_goodput(config, capture.take())?);
    }
    if plan.strangers {
        stats.add(&run_strangers(config, capture.take())?);
    }
    stats.runs = 1;
    Ok(stats)
}

/// Runs a seed with and without an adversary, and compares how fast the work was.
fn run_goodput(config: &SimConfig, capture: Option<PathBuf>) -> Result<Stats, Failure> {
    let pair = [(false, None), (true, capture)];
    let [alone, attacked] = pair.map(|(attacked, to)| run_class(config, Class::Goodput { attacked }, to));
    let (alone, attacked) = (alone?, attacked?);
    // The programs' choices depend on what happens when, so it is not quite the same work.
    let (before, under) = (alone.work_ns, attacked.work_ns);
    let same = before as f64 * attacked.work_bytes as f64 / alone.work_bytes.max(1) as f64;
    if under as f64 > same / LEAST_OF_A_PAIR + SHORT_NS {
        let text = format!("under attack the work took {under} ns instead of {same:.0} ns");
        return Err(config.failure(text));
    }
    let mut stats = alone.clone();
    stats.add(&attacked);
    stats.pairs = 1;
    (stats.alone_ns, stats.attacked_ns) = (before, under);
    (stats.alone_bytes, stats.attacked_bytes) = (alone.work_bytes, attacked.work_bytes);
    Ok(stats)
}

/// Runs a seed with and without forged packets to connected queue pairs. They change nothing, to the nanosecond.
fn run_strangers(config: &SimConfig, capture: Option<PathBuf>) -> Result<Stats, Failure> {
    let pair = [(false, None), (true, capture)];
    let [alone, attacked] = pair.map(|(attacked, to)| run_class(config, Class::Strangers { attacked }, to));
    let (alone, attacked) = (alone?, attacked?);
    if alone.trace_hash != attacked.trace_hash {
        let text = format!("packets of strangers changed a run: {attacked:?} instead of {alone:?}");
        return Err(config.failure(text));
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
    single: Vec<Class>,
    goodput: bool,
    strangers: bool,
}

impl Plan {
    fn draw(config: &SimConfig) -> Self {
        let mut rng = Rng::new(config.run.seed, PLAN);
        let mut chance = |drawn: f64, attacked: f64| match config.runs {
            Runs::Drawn => rng.chance(drawn),
            Runs::Attacked => rng.chance(attacked),
            _ => false,
        };
        let main = match config.runs {
            Runs::Goodput | Runs::Strangers => None,
            Runs::Observed => Some(Class::Observed),
            Runs::Copies => Some(Class::Copies),
            _ if chance(0.25, 1.0) => Some(Class::Blind),
            _ => Some(Class::Plain),
        };
        let goodput = config.runs == Runs::Goodput || chance(0.04, 0.3);
        let observed = chance(0.05, 0.0).then_some(Class::Observed);
        let strangers = config.runs == Runs::Strangers || chance(0.1, 0.5);
        let copies = chance(0.05, 0.1).then_some(Class::Copies);
        Self {
            single: [main, observed, copies].into_iter().flatten().collect(),
            goodput,
            strangers,
        }
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
