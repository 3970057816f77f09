//! `roce-sim`: runs seeds and prints what failed. `cargo xtask sim` builds and calls it.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use clap::Parser;
use roce_sim::{Adversary, LEAST_GOODPUT, MANY_PAIRS, SimConfig, run_many, run_many_storage};

/// Runs simulated networks with every fault.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// How many seeds to run
    #[arg(long, default_value_t = 200)]
    seeds: u64,
    /// First seed; with --seeds 1 it repeats one run exactly
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs at a time; default: the processors
    #[arg(long)]
    jobs: Option<usize>,
    /// About how many work requests each direction of a connection carries
    #[arg(long, default_value_t = 150)]
    scale: u32,
    /// No faults but narrow links and queues that overflow
    #[arg(long)]
    bottleneck: bool,
    /// An adversary in every run: it knows addresses and the protocol, sees nothing, and sends what it likes. Without this
    /// option a quarter of the runs have it
    #[arg(long)]
    adversary: bool,
    /// No adversary in any run
    #[arg(long, conflicts_with = "adversary")]
    peaceful: bool,
    /// Only runs with somebody who sees all packets and sends its own in the name of one connection
    #[arg(long, conflicts_with_all = ["adversary", "goodput"])]
    observer: bool,
    /// Only runs with clients of a server that verifies before it allocates, under a flood of requests
    #[arg(long, conflicts_with_all = ["adversary", "observer", "goodput"])]
    admission: bool,
    /// Only pairs of runs over a network without faults, with and without an adversary, which compare goodput
    #[arg(long)]
    goodput: bool,
    /// Only pairs of runs with and without forged packets to connected queue pairs, at and around the PSNs in use
    #[arg(long, conflicts_with_all = ["adversary", "observer", "goodput", "admission"])]
    strangers: bool,
    /// Only runs with forged copies of packets beyond a gap, which come before the genuine ones from the right source ports
    #[arg(long, conflicts_with_all = ["adversary", "observer", "goodput", "admission", "strangers"])]
    copies: bool,
    /// Runs of servers and clients with RTRS, RNBD and disks
    #[arg(long, conflicts_with_all = ["adversary", "observer", "goodput", "admission", "bottleneck"])]
    storage: bool,
    /// Folder for captures of failed runs; default: the system's for temporary files
    #[arg(long)]
    pcap_dir: Option<PathBuf>,
    /// Write a capture of the (last) run, whether it fails or not
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Print every packet, completion and event of connections
    #[arg(long)]
    log: bool,
    /// Stop after so many failures
    #[arg(long, default_value_t = 10)]
    max_failures: usize,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let begin = Instant::now();
    let jobs = cli
        .jobs
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let base = SimConfig {
        scale: cli.scale,
        bottleneck: cli.bottleneck,
        goodput: cli.goodput,
        observer: cli.observer,
        strangers: cli.strangers,
        copies: cli.copies,
        admission: cli.admission,
        adversary: match (cli.adversary, cli.peaceful || cli.bottleneck) {
            (true, _) => Adversary::Always,
            (_, true) => Adversary::Never,
            _ => Adversary::Drawn,
        },
        pcap_dir: cli.pcap_dir,
        capture: cli.capture,
        log: cli.log,
        ..SimConfig::new(cli.seed)
    };
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    if cli.storage {
        return storage(
            &base,
            cli.seed..cli.seed.saturating_add(cli.seeds),
            jobs,
            cli.max_failures,
        );
    }
    let (mut passed, mut failed) = (0u64, 0usize);
    let seeds = cli.seed..cli.seed.saturating_add(cli.seeds);
    let (total, _) = run_many(seeds, jobs, &base, |_, result| {
        match result {
            Ok(_) => passed += 1,
            Err(failure) => {
                failed += 1;
                println!("{failure}");
            }
        }
        if (passed + failed as u64).is_multiple_of(500) {
            println!(
                "{} of {} seeds, {:.0} s",
                passed + failed as u64,
                cli.seeds,
                begin.elapsed().as_secs_f64()
            );
        }
        if failed >= cli.max_failures {
            println!("sim: {passed} passed, {failed} failed, stopped");
            std::process::exit(1);
        }
    });
    println!(
        "{} packets, {} retransmitted, {} lost, {} damaged ({} ICRC errors); {} operations, {} messages ({} of UC, UD, XRC and \
         shared queues), {} connections, {} repairs; {:.1} s of virtual time, at most {:.1} s to recover",
        total.packets,
        total.retransmissions,
        total.lost + total.overflowed,
        total.corrupted,
        total.icrc_errors,
        total.operations,
        total.messages,
        total.service_messages,
        total.connections,
        total.repairs,
        total.simulated_ns as f64 / 1e9,
        total.longest_quiet_ns as f64 / 1e9
    );
    let errors: Vec<String> = total.errors.iter().map(|(status, n)| format!("{status} {n}")).collect();
    let goodput = total.goodput();
    println!(
        "{} forged packets, {} of them to queue pairs at live PSNs, {} at the exact one of a learned port ({} guesses redrawn that hit the port, {} the PSN), {} of observers, {} copies beyond gaps; {} packets to addresses that they were forged in the name of; {} requests that found a backlog full; goodput under attack: {goodput:.3} \
         of that without ({} pairs of runs)",
        total.forged,
        total.at_live,
        total.exact,
        total.port_hits,
        total.psn_hits,
        total.meddled,
        total.copies,
        total.reflected,
        total.backlog_drops,
        total.pairs
    );
    println!(
        "{} clients let in under a flood of requests, the slowest after {:.1} ms",
        total.admitted,
        total.longest_admission_ns as f64 / 1e6
    );
    if total.pairs >= MANY_PAIRS && goodput < LEAST_GOODPUT {
        println!("goodput under attack is too low");
        failed += 1;
    }
    println!("completions with an error: {}", errors.join(", "));
    println!(
        "sim: {passed} passed, {failed} failed, {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn storage(base: &SimConfig, seeds: std::ops::Range<u64>, jobs: usize, max_failures: usize) -> ExitCode {
    let begin = Instant::now();
    let (mut passed, mut failed) = (0u64, 0usize);
    let (total, _) = run_many_storage(seeds, jobs, base, |_, result| {
        match result {
            Ok(_) => passed += 1,
            Err(failure) => {
                failed += 1;
                println!("{failure}");
            }
        }
        if failed >= max_failures {
            println!("sim: {passed} passed, {failed} failed, stopped");
            std::process::exit(1);
        }
    });
    println!(
        "{} packets, {} lost; {} operations, {} of them with success; {:.1} s of virtual time",
        total.packets,
        total.lost,
        total.operations,
        total.succeeded,
        total.simulated_ns as f64 / 1e9
    );
    let coverage = total.coverage.iter().map(|(what, [runs, _])| format!("{what} {runs}"));
    println!("runs with: {}", coverage.collect::<Vec<_>>().join(", "));
    println!(
        "sim: {passed} passed, {failed} failed, {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
