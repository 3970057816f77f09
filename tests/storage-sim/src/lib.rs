//! Simulator of storage: a server with RTRS, RNBD and disks, and clients that work with its devices, in turns as their loops
//! run, under the virtual clock and on the faulty links of `roce-sim`.
//!
//! Clients write blocks that carry a number of their own, read, flush, discard and write zeroes; disks are slow, fail, and lose
//! what was not flushed; hosts die and come back, links are cut, sessions are ended. Every operation ends once. A read gives
//! what some allowed order of the writes gives. Flushed blocks are there after a power failure. Nothing is written without
//! a request. In the end all permits, chunks, buffers, keys and queue pairs have come back.
//!
//! Beside a quarter of the runs there is another one, of `rtrs::admission` under a flood of forged requests (`admission.rs`).
#![forbid(unsafe_code)]

mod admission;
mod client;
mod disk;
mod draw;
mod engine;
mod history;
mod ledger;
mod losses;
mod program;
mod raw;
mod server;
mod tally;
mod turn;
mod wide;
mod world;

use roce_sim::{Failure, Rng, RunConfig, simulate};

pub use crate::tally::StorageStats;
use crate::world::World;

/// Stream that decides which seeds also run the admission of clients.
const PLAN: u64 = 24;

/// Options of a run with storage.
#[derive(Clone, Debug)]
pub struct StorageConfig {
    /// Seed, size, capture and log.
    pub run: RunConfig,
    /// Only runs with clients of a server under a flood of requests.
    pub admission: bool,
    /// Servers hide power failures, which the rules must find.
    pub hidden_losses: bool,
}

impl StorageConfig {
    /// Returns the options of a usual run.
    pub const fn new(run: RunConfig) -> Self {
        Self {
            run,
            admission: false,
            hidden_losses: false,
        }
    }

    /// Returns the same options for another seed.
    pub fn with_seed(&self, seed: u64) -> Self {
        let mut config = self.clone();
        config.run.seed = seed;
        config
    }
}

/// Runs one seed of a server and clients with storage. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &StorageConfig) -> Result<StorageStats, Failure> {
    let (seed, scale) = (config.run.seed, config.run.scale);
    let mut stats = StorageStats::default();
    if !config.admission {
        stats = simulate(&config.run, "storage", " --storage", |trace| {
            World::new(seed, scale, config.hidden_losses, trace)
        })?;
    }
    if config.admission || Rng::new(seed, PLAN).chance(0.25) {
        // The capture of a good run is that of the server and its disks, if there is one.
        let capture = config.run.capture.clone().filter(|_| config.admission);
        let run = RunConfig {
            capture,
            ..config.run.clone()
        };
        stats.add_admission(&admission::run(&run)?);
    }
    stats.runs = 1;
    Ok(stats)
}
