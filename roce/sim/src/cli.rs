//! Options and output that the simulators' programs share.

use std::{process::ExitCode, time::Instant};

use crate::runner::{Failure, RunConfig, Total, run_many};

/// Seeds after which progress is printed.
const PROGRESS: u64 = 500;

/// Options of a simulator's program.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// How many seeds to run
    #[arg(long, default_value_t = 200)]
    seeds: u64,
    /// Runs at a time; default: the processors
    #[arg(long)]
    jobs: Option<usize>,
    /// Stop after so many failures
    #[arg(long, default_value_t = 10)]
    max_failures: u64,
    #[command(flatten)]
    run: RunConfig,
}

impl RunArgs {
    /// Runs all seeds; prints failures, and from time to time how far it is.
    pub fn run_seeds<T: Total>(&self, run: impl Fn(RunConfig) -> Result<T, Failure> + Sync) -> Outcome<T> {
        std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
        let jobs = self
            .jobs
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let begin = Instant::now();
        let seeds = self.run.seed..self.run.seed.saturating_add(self.seeds);
        let (mut passed, mut failed) = (0u64, 0u64);
        let (total, _) = run_many(
            seeds,
            jobs,
            |seed| {
                run(RunConfig {
                    seed,
                    ..self.run.clone()
                })
            },
            |result| {
                match result {
                    Ok(_) => passed += 1,
                    Err(failure) => {
                        failed += 1;
                        println!("{failure}");
                    }
                }
                if (passed + failed).is_multiple_of(PROGRESS) {
                    let seconds = begin.elapsed().as_secs_f64();
                    println!("{} of {} seeds, {seconds:.0} s", passed + failed, self.seeds);
                }
                if failed >= self.max_failures {
                    println!("sim: {passed} passed, {failed} failed, stopped");
                    std::process::exit(1);
                }
            },
        );
        Outcome {
            total,
            passed,
            failed,
            begin,
        }
    }
}

/// Result of all seeds.
#[derive(Debug)]
pub struct Outcome<T> {
    /// Sum of the good runs' counts.
    pub total: T,
    passed: u64,
    failed: u64,
    begin: Instant,
}

impl<T> Outcome<T> {
    /// Prints how many seeds passed. `sound`: whether the sum of all runs keeps its rules, too.
    pub fn finish(&self, sound: bool) -> ExitCode {
        let failed = self.failed + u64::from(!sound);
        let seconds = self.begin.elapsed().as_secs_f64();
        println!("sim: {} passed, {failed} failed, {seconds:.1} s", self.passed);
        match failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}
