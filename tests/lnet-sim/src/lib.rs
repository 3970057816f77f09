//! Simulator of LNet: nodes whose programs PUT to, GET from and ping each other, in turns as their loops run, under the virtual clock and
//! on the faulty links of `roce-sim`.
//!
//! Hosts die and come back, links are cut, processes stand still. In some runs a stranger asks for connections in the name of hosts: it ends
//! none that stands, and leaves nothing. Every operation ends, once. One that has ended well is done: its bytes
//! are where they belong, and the peer was told of it once. Credits are never more than a connection has, and no message ever meets a queue
//! pair without a receive (RNR). In the end all queue pairs and memory have come back.
#![forbid(unsafe_code)]

mod draw;
pub mod lab;
mod ledger;
mod program;
mod stranger;
mod tester;
mod world;

use roce_sim::{Coverage, Failure, RunConfig, RunsWith, Total, simulate};

use crate::world::World;

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
    let (seed, scale) = (config.seed, config.scale);
    simulate(config, "lnet", " --lnet", |trace| World::new(seed, scale, trace))
}
