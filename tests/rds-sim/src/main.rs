//! `ferroce-rds-sim`: runs seeds and prints what failed. `cargo xtask sim --rds` builds and calls it.

use std::process::ExitCode;

use clap::Parser;
use roce_sim::{Coverage, cli::RunArgs};

/// Runs RDS nodes and programs with sockets on simulated networks with every fault.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Have two nodes connect to each other at about the same time: seeds are the numbers of the orders that there are, 0 to 28124
    #[arg(long)]
    races: bool,
    /// Have a node connect to a kernel that gets to datagrams of the connection manager only after 12 seconds
    #[arg(long, conflicts_with = "races")]
    overloaded: bool,
    #[command(flatten)]
    run: RunArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let run = match (cli.races, cli.overloaded) {
        (true, _) => ferroce_rds_sim::run_race,
        (_, true) => ferroce_rds_sim::run_overloaded,
        _ => ferroce_rds_sim::run,
    };
    let outcome = cli.run.run_seeds(|config| run(&config));
    let total = &outcome.total;
    println!(
        "{} packets, {} lost; {} messages sent, {} received; {:.1} s of virtual time",
        total.packets,
        total.lost,
        total.sent,
        total.received,
        total.simulated_ns as f64 / 1e9
    );
    println!("runs with: {}", Coverage::text(&total.coverage));
    outcome.finish(true)
}
