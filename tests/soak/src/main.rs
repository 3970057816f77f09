//! `ferroce-soak`: served and mapped devices under hours of random trouble.

mod client;
mod daemon;
mod limits;
mod load;
mod logs;
mod model;
mod report;
mod run;
mod seen;
mod steer;
mod trouble;
mod world;

use std::{
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use ferroce_tests::signals::stop_flag;
use report::HEAD;
use run::Run;
use world::World;

/// Serves devices to sessions with two paths and with one, over networks that are cut, lose, repeat, reorder and delay packets, while
/// the server is killed and started again, stopped, and image files grow and shrink. Nothing may be lost, and nothing may grow.
///
/// Four times `ferroce map` and `ferroce serve` are in two network namespaces, between which a wire in user space carries two networks.
/// NBD clients write and read all devices; each block is to hold what was written last. With `--on-loss queue` no request may fail, and
/// none may take longer than two of the longest outages and what it takes to find a path dead and connect it. Without it requests may
/// fail while no path is up.
///
/// Beside them a `ferroce daemon` is administered under load: its file changes, `ferroce ctl` looks at it and steers it, NBD clients and
/// front ends of virtual machines come and leave.
///
/// Every now and then all trouble ends: then everything is to come back, a second writer is refused, and the memory, threads and
/// descriptors of each process are compared with what they were at first.
#[derive(Parser)]
#[command(
    name = "ferroce-soak",
    version,
    max_term_width = 100,
    after_help = "Needs root (network namespaces, TAP devices). The program under test is $FERROCE_BIN, or a debug build.\n\n\
                  A line a minute is printed, and at the end a summary. When something is wrong, logs and a time line of all trouble \
                  are kept in a folder that is named. The same seed brings the same trouble, though not at the same moment of the load.\n\n\
                  Exit status: 0 all well, 1 something was wrong, 2 wrong usage, 130 interrupted."
)]
struct Cli {
    /// How long, at least 2 minutes
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    minutes: f64,
    /// Decides about all trouble [default: at random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let stop = stop_flag();
    if !(2.0..1e6).contains(&cli.minutes) {
        eprintln!("error: --minutes: at least 2");
        return ExitCode::from(2);
    }
    let seed = cli.seed.unwrap_or_else(|| rand::random::<u32>().into());
    println!("seed {seed}, {} minutes", cli.minutes);
    let world = match World::start(seed) {
        Ok(world) => world,
        Err(e) => {
            eprintln!("error: {e}");
            return ExitCode::FAILURE;
        }
    };
    println!("{HEAD}");
    let mut run = Run::new(world, seed, Duration::from_secs_f64(cli.minutes * 60.0), &stop);
    let mut bad = Vec::new();
    // Waiting for a process panics when it ends instead.
    match panic::catch_unwind(AssertUnwindSafe(|| run.all())) {
        Ok(Ok(())) => bad.extend(run.grown()),
        Ok(Err(e)) if e == run::INTERRUPTED => {
            eprintln!("{e}");
            return ExitCode::from(130);
        }
        Ok(Err(e)) => bad.push(e),
        Err(_) => bad.push("a process under test did not do what it was asked".to_owned()),
    }
    run.summarise();
    if bad.is_empty() {
        let ended = panic::catch_unwind(AssertUnwindSafe(|| run.finish()));
        bad.extend(ended.unwrap_or_else(|_| Err("a process did not end".into())).err());
    }
    if bad.is_empty() {
        println!("verdict: nothing lost, flat");
        return ExitCode::SUCCESS;
    }
    for line in &bad {
        println!("BAD: {line}");
        run.world.logs.say(&format!("BAD: {line}"));
    }
    println!("verdict: BAD (seed {seed}); logs are in {}", run.give_up().display());
    ExitCode::FAILURE
}
