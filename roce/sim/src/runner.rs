//! Runs of simulations: one seed with its capture, or many seeds on several threads.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::trace::Trace;

/// Result of a step: the rule that was broken, and what was seen.
pub type Check = Result<(), String>;

/// Options of a run of any kind.
#[derive(Clone, Debug, clap::Args)]
pub struct RunConfig {
    /// First seed; with --seeds 1 it repeats one run exactly
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// About how many work requests each direction of a connection carries
    #[arg(long, default_value_t = 150)]
    pub scale: u32,
    /// Folder for captures of failed runs; default: the system's for temporary files
    #[arg(long)]
    pub pcap_dir: Option<PathBuf>,
    /// Write a capture of the (last) run, whether it fails or not
    #[arg(long, value_name = "FILE")]
    pub capture: Option<PathBuf>,
    /// Print every packet, completion and event of connections
    #[arg(long)]
    pub log: bool,
}

impl RunConfig {
    /// Returns the options of a seed's run in usual size.
    pub const fn new(seed: u64) -> Self {
        Self {
            seed,
            scale: 150,
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

/// Simulated world that runs to its end once.
pub trait Simulation {
    /// Counts of a good run.
    type Counts;

    /// Runs to the end and checks everything.
    ///
    /// # Errors
    /// When a rule is broken.
    fn run(&mut self) -> Check;

    /// Returns the virtual time, nanoseconds.
    fn now(&self) -> u64;

    /// Returns the counts of a run that has ended well.
    fn into_counts(self) -> Self::Counts;
}

/// Runs the simulation that `make` creates. A failing run is repeated to write its capture, in a file named after `kind`.
///
/// # Errors
/// When a rule is broken or the code under test panics. `options` are those of the command that repeats the run.
pub fn simulate<S: Simulation>(
    config: &RunConfig,
    kind: &str,
    options: &'static str,
    make: impl Fn(Trace) -> S,
) -> Result<S::Counts, Failure> {
    let text = match attempt(&make, config.capture.as_deref(), config.log) {
        Ok(counts) => return Ok(counts),
        Err(text) => format!("{kind}: {text}"),
    };
    let dir = config.pcap_dir.clone().unwrap_or_else(std::env::temp_dir);
    let path = dir.join(format!("roce-sim-{kind}-{}.pcap", config.seed));
    let written = attempt(&make, Some(&path), false).is_err() && path.is_file();
    Err(Failure {
        seed: config.seed,
        options,
        text,
        pcap: written.then_some(path),
    })
}

fn attempt<S: Simulation>(make: &impl Fn(Trace) -> S, pcap: Option<&Path>, log: bool) -> Result<S::Counts, String> {
    let trace = Trace::new(pcap, log).map_err(|e| format!("no capture file: {e}"))?;
    let mut simulation = make(trace);
    let outcome = catch_unwind(AssertUnwindSafe(|| simulation.run()));
    let at = simulation.now() as f64 / 1e9;
    match outcome {
        Ok(Ok(())) => Ok(simulation.into_counts()),
        Ok(Err(text)) => Err(format!("at {at:.6} s: {text}")),
        Err(panic) => Err(format!("at {at:.6} s: panic: {}", panic_text(&*panic))),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_default()
}

/// Counts of runs that can be summed up.
pub trait Total: Default + Send {
    /// Adds the counts of another run, or of several.
    fn add(&mut self, other: &Self);
}

/// Runs many seeds on `jobs` threads. `done` is called after each, on the thread that ran it, one call at a time.
/// Returns the sum of the good runs and the failures in the order of their seeds.
pub fn run_many<T: Total>(
    seeds: impl IntoIterator<Item = u64>,
    jobs: usize,
    run: impl Fn(u64) -> Result<T, Failure> + Sync,
    done: impl FnMut(&Result<T, Failure>) + Send,
) -> (T, Vec<Failure>) {
    let seeds: Vec<u64> = seeds.into_iter().collect();
    let next = AtomicUsize::new(0);
    let shared = Mutex::new((T::default(), Vec::new(), done));
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, seeds.len().max(1)) {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run(seed);
                    let mut shared = shared.lock().unwrap_or_else(|e| e.into_inner());
                    let (total, failures, done) = &mut *shared;
                    done(&result);
                    match result {
                        Ok(counts) => total.add(&counts),
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
