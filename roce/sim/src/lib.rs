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
#![forbid(unsafe_code)]

mod chaos;
mod life;
mod model;
mod net;
mod ops;
mod rng;
mod scenario;
mod services;
mod stats;
mod trace;
mod verdict;
mod world;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

pub use stats::Stats;

use crate::{trace::Trace, world::World};

/// What to run.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Decides everything.
    pub seed: u64,
    /// About how many work requests each direction of a connection carries.
    pub scale: u32,
    /// The network has no faults but narrow links and queues that overflow, and nothing else goes wrong.
    pub bottleneck: bool,
    /// Where a capture of a failing run goes; `None`: the system's directory for temporary files.
    pub pcap_dir: Option<PathBuf>,
    /// Where to write a capture of the run, whether it fails or not.
    pub capture: Option<PathBuf>,
    /// Print every packet, completion and event of connections.
    pub log: bool,
}

impl SimConfig {
    /// A seed's run in usual size.
    pub const fn new(seed: u64) -> Self {
        Self {
            seed,
            scale: 150,
            bottleneck: false,
            pcap_dir: None,
            capture: None,
            log: false,
        }
    }
}

/// A run that broke a rule.
#[derive(Clone, Debug, thiserror::Error)]
#[error("seed {seed}: {text}\n  again: cargo xtask sim --seed {seed} --seeds 1{}", .pcap.as_ref().map(|p| format!("\n  capture: {}", p.display())).unwrap_or_default())]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The rule and what was seen, with the virtual time.
    pub text: String,
    /// What the ports sent, if it could be written.
    pub pcap: Option<PathBuf>,
}

/// Runs one seed. A failing run is repeated to write its capture.
///
/// # Errors
/// When a rule is broken or the code under test panics.
pub fn run(config: &SimConfig) -> Result<Stats, Failure> {
    let text = match attempt(config, config.capture.clone(), config.log) {
        Ok(stats) => return Ok(stats),
        Err(text) => text,
    };
    let dir = config.pcap_dir.clone().unwrap_or_else(std::env::temp_dir);
    let path = dir.join(format!("roce-sim-{}.pcap", config.seed));
    let pcap = attempt(config, Some(path.clone()), false).is_err() && path.is_file();
    Err(Failure {
        seed: config.seed,
        text,
        pcap: pcap.then_some(path),
    })
}

fn attempt(config: &SimConfig, pcap: Option<PathBuf>, log: bool) -> Result<Stats, String> {
    let trace = Trace::new(pcap.as_deref(), log).map_err(|e| format!("no capture file: {e}"))?;
    let mut world = World::new(config, trace);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        world.begin_services(config).and_then(|()| world.run())
    }));
    world.trace.finish();
    let at = world.now as f64 / 1e9;
    match outcome {
        Ok(Ok(())) => Ok(world.into_stats()),
        Ok(Err(text)) => Err(format!("at {at:.6} s: {text}")),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(format!("at {at:.6} s: panic: {}", text.unwrap_or_default()))
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
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let next = AtomicUsize::new(0);
    let shared = Mutex::new((Stats::default(), Vec::new(), done));
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
                        Ok(stats) => total.add(&stats),
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
