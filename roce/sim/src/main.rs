//! `roce-sim`: runs seeds and prints what failed. `cargo xtask sim` builds and calls it.

use std::process::ExitCode;

use clap::Parser;
use roce_sim::{LEAST_GOODPUT, MANY_PAIRS, Runs, SimConfig, Stats, cli::RunArgs, run};

/// Runs simulated networks with every fault.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    only: Only,
}

/// Runs of each seed, instead of those that it draws.
#[derive(clap::Args)]
#[group(multiple = false)]
struct Only {
    /// No faults but narrow links and queues that overflow
    #[arg(long)]
    bottleneck: bool,
    /// An adversary in every run: it knows addresses and the protocol, sees nothing, and sends what it likes. Without this
    /// option a quarter of the runs have it
    #[arg(long)]
    adversary: bool,
    /// No adversary in any run
    #[arg(long)]
    peaceful: bool,
    /// Only runs with an observer, who sees all packets and sends its own in the name of one connection
    #[arg(long)]
    observer: bool,
    /// Only pairs of runs over a network without faults, with and without an adversary, which compare goodput
    #[arg(long)]
    goodput: bool,
    /// Only pairs of runs with and without forged packets to connected queue pairs, at and around the PSNs in use
    #[arg(long)]
    strangers: bool,
    /// Only runs with forged copies of packets beyond a gap, which come before the genuine ones from the right source ports
    #[arg(long)]
    copies: bool,
}

impl Only {
    fn runs(&self) -> Runs {
        let all = [
            (self.bottleneck, Runs::Narrow),
            (self.adversary, Runs::Attacked),
            (self.peaceful, Runs::Peaceful),
            (self.observer, Runs::Observed),
            (self.goodput, Runs::Goodput),
            (self.strangers, Runs::Strangers),
            (self.copies, Runs::Copies),
        ];
        all.iter()
            .find(|(wanted, _)| *wanted)
            .map_or(Runs::Drawn, |(_, runs)| *runs)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runs = cli.only.runs();
    let outcome = cli
        .run
        .run_seeds(|run_config| run(&SimConfig { runs, run: run_config }));
    let total = &outcome.total;
    print_totals(total);
    let fast_enough = total.pairs < MANY_PAIRS || total.goodput() >= LEAST_GOODPUT;
    if !fast_enough {
        println!("goodput under attack is too low");
    }
    outcome.finish(fast_enough)
}

fn print_totals(total: &Stats) {
    let counts: Vec<String> = total.named().map(|(name, n)| format!("{name} {n}")).collect();
    let errors: Vec<String> = total.errors.iter().map(|(status, n)| format!("{status} {n}")).collect();
    println!("{}", counts.join(", ").replace('_', " "));
    println!("completions with an error: {}", errors.join(", "));
    println!("longest recovery: {:.1} s", total.longest_quiet_ns as f64 / 1e9);
    println!(
        "goodput under attack: {:.3} of that without ({} pairs)",
        total.goodput(),
        total.pairs
    );
}
