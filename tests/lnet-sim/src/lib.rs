//! Simulator of LNet: nodes whose programs PUT to, GET from and ping each other, in turns as their loops run, under the virtual clock and
//! on the faulty links of `roce-sim`.
//!
//! Hosts die and come back, links are cut, processes stand still. In some runs a stranger asks for connections in the name of hosts: it ends
//! none that stands, and leaves nothing. Every operation ends, once. One that has ended well is done: its bytes
//! are where they belong, and the peer was told of it once. Credits are never more than a connection has, and no message ever meets a queue
//! pair without a receive (RNR). In the end all queue pairs and memory have come back.
#![forbid(unsafe_code)]

mod draw;
mod full;
mod intruder;
mod ledger;
mod plan;
mod program;
mod stranger;
mod tester;
mod world;

use lnet::{Planted, proto::Nid};
use roce_sim::{Coverage, Failure, Rng, RunConfig, RunsWith, Total, lab, simulate};

pub use crate::full::{Full, Traffic};
use crate::{draw::Draw, world::World};

/// Share of runs in which hosts have more to send than credits, and nothing goes wrong.
const FULL: f64 = 0.2;
/// Random numbers that plans are drawn with.
const DRAW: u64 = 70;

/// NID of a host of a lab.
pub fn nid(index: usize) -> Nid {
    Nid::o2ib(lab::address(index))
}

/// Counts of runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LnetStats {
    /// Runs.
    pub runs: u64,
    /// Packets sent.
    pub packets: u64,
    /// Packets that the network lost.
    pub lost: u64,
    /// Operations that programs began.
    pub begun: u64,
    /// Operations that ended well.
    pub done: u64,
    /// Virtual time, nanoseconds.
    pub simulated_ns: u64,
    /// Fingerprint of the run: times and headers of all packets received. Of several runs: combined.
    pub trace_hash: u64,
    /// Number of runs with each event, and of the events.
    pub coverage: RunsWith,
}

impl Total for LnetStats {
    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.packets += other.packets;
        self.lost += other.lost;
        self.begun += other.begun;
        self.done += other.done;
        self.simulated_ns += other.simulated_ns;
        self.trace_hash ^= other.trace_hash;
        Coverage::sum(&mut self.coverage, &other.coverage);
    }
}

/// Runs one seed. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &RunConfig) -> Result<LnetStats, Failure> {
    run_planted(config, Planted::Nothing)
}

/// Runs one seed with nodes that have a bug.
///
/// # Errors
/// As [`run`].
pub fn run_planted(config: &RunConfig, planted: Planted) -> Result<LnetStats, Failure> {
    simulate(config, "lnet", " --lnet", |trace| {
        let rng = &mut Rng::new(config.seed, DRAW);
        let mut draw = match rng.chance(FULL) {
            true => Draw::full(&Full::draw(rng), config.scale, rng),
            false => Draw::new(config.scale, rng),
        };
        draw.plant(planted);
        World::new(config.seed, draw, trace)
    })
}

/// Runs one seed of a run in which hosts have more to send than credits.
///
/// # Errors
/// As [`run`]. The command in it does not repeat the run: only its caller knows `full`.
pub fn run_full(config: &RunConfig, full: &Full) -> Result<LnetStats, Failure> {
    simulate(config, "lnet-full", " --lnet", |trace| {
        let draw = Draw::full(full, config.scale, &mut Rng::new(config.seed, DRAW));
        World::new(config.seed, draw, trace)
    })
}
