//! `roce-sim`: runs seeds and prints what failed. `cargo xtask sim` builds and calls it.

use std::process::ExitCode;

use clap::Parser;
use roce_sim::{Adversary, LEAST_GOODPUT, MANY_PAIRS, SimConfig, Stats, cli::RunArgs, run};

/// Runs simulated networks with every fault.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
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
    /// Only runs with an observer, who sees all packets and sends its own in the name of one connection
    #[arg(long, conflicts_with_all = ["adversary", "goodput"])]
    observer: bool,
    /// Only pairs of runs over a network without faults, with and without an adversary, which compare goodput
    #[arg(long)]
    goodput: bool,
    /// Only pairs of runs with and without forged packets to connected queue pairs, at and around the PSNs in use
    #[arg(long, conflicts_with_all = ["adversary", "observer", "goodput"])]
    strangers: bool,
    /// Only runs with forged copies of packets beyond a gap, which come before the genuine ones from the right source ports
    #[arg(long, conflicts_with_all = ["adversary", "observer", "goodput", "strangers"])]
    copies: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let adversary = match (cli.adversary, cli.peaceful || cli.bottleneck) {
        (true, _) => Adversary::Always,
        (_, true) => Adversary::Never,
        _ => Adversary::Drawn,
    };
    let outcome = cli.run.run_seeds(|run_config| {
        run(&SimConfig {
            adversary,
            observer: cli.observer,
            goodput: cli.goodput,
            copies: cli.copies,
            strangers: cli.strangers,
            bottleneck: cli.bottleneck,
            ..SimConfig::new(run_config)
        })
    });
    let total = &outcome.total;
    print_totals(total);
    print_attacks(total);
    let fast_enough = total.pairs < MANY_PAIRS || total.goodput() >= LEAST_GOODPUT;
    if !fast_enough {
        println!("goodput under attack is too low");
    }
    outcome.finish(fast_enough)
}

fn print_totals(total: &Stats) {
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
    println!("completions with an error: {}", errors.join(", "));
}

fn print_attacks(total: &Stats) {
    println!(
        "{} forged packets, {} of them to queue pairs at live PSNs, {} at the exact one of a learned port ({} guesses redrawn that \
         hit the port, {} the PSN), {} of observers, {} copies beyond gaps; {} packets to addresses that they were forged in the \
         name of; {} requests that found a backlog full; goodput under attack: {:.3} of that without ({} pairs of runs)",
        total.forged,
        total.at_live,
        total.exact,
        total.port_hits,
        total.psn_hits,
        total.meddled,
        total.copies,
        total.reflected,
        total.backlog_drops,
        total.goodput(),
        total.pairs
    );
}
