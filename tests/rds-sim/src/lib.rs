//! Simulator of RDS: nodes whose programs send each other messages, in turns as their loops run, under the virtual clock and on the
//! faulty links of `roce-sim`.
//!
//! Hosts die and come back, links are cut, processes stand still, readers are slow or stop, sockets are closed and messages canceled.
//! Messages of a socket to another come in order, once, and whole; none is missing but those that died with a host or a socket, or were
//! canceled. In some runs a stranger asks for connections in the name of hosts. Who was told that a socket is full, or a destination congested, is told when that is over. In the end everything is
//! acknowledged, and all queue pairs and memory have come back.
#![forbid(unsafe_code)]

mod board;
mod draw;
mod kernel;
mod ledger;
mod program;
mod race;
mod stranger;
mod world;

use roce_sim::{Coverage, Failure, RunConfig, RunsWith, Total, simulate};

pub use crate::race::RACES;
use crate::{race::Race, world::World};

/// Counts of runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RdsStats {
    /// Runs.
    pub runs: u64,
    /// Packets sent.
    pub packets: u64,
    /// Packets that the network lost.
    pub lost: u64,
    /// Messages that programs sent.
    pub sent: u64,
    /// Messages that programs received.
    pub received: u64,
    /// Virtual time, nanoseconds.
    pub simulated_ns: u64,
    /// Fingerprint of the run: times and headers of all packets received. Of several runs: combined.
    pub trace_hash: u64,
    /// Number of runs with each event, and of the events.
    pub coverage: RunsWith,
}

impl Total for RdsStats {
    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.packets += other.packets;
        self.lost += other.lost;
        self.sent += other.sent;
        self.received += other.received;
        self.simulated_ns += other.simulated_ns;
        self.trace_hash ^= other.trace_hash;
        Coverage::sum(&mut self.coverage, &other.coverage);
    }
}

/// Runs one seed. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &RunConfig) -> Result<RdsStats, Failure> {
    let (seed, scale) = (config.seed, config.scale);
    simulate(config, "rds", " --rds", |trace| World::new(seed, scale, trace))
}

/// Runs a race of two nodes that connect to each other; the seed, below [`RACES`], is its number. A failing run is repeated to write its
/// capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run_race(config: &RunConfig) -> Result<RdsStats, Failure> {
    simulate(config, "rds-race", " --rds -- --races", |trace| {
        Race::new(config.seed % RACES, trace)
    })
}

/// Runs our node and an overloaded kernel that connect to each other; even seeds give the kernel the smaller address. A failing run is
/// repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run_overloaded(config: &RunConfig) -> Result<RdsStats, Failure> {
    simulate(config, "rds-overloaded", " --rds -- --overloaded", |trace| {
        Race::overloaded(config.seed, trace)
    })
}
