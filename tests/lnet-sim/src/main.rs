//! `ferroce-lnet-sim`: runs seeds and prints what failed. `cargo xtask sim --lnet` builds and calls it.

use std::process::ExitCode;

use clap::Parser;
use roce_sim::{Coverage, cli::RunArgs};

/// Runs LNet nodes and programs on simulated networks with every fault.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = cli.run.run_seeds(|config| ferroce_lnet_sim::run(&config));
    let total = &outcome.total;
    println!(
        "{} packets, {} lost; {} operations begun, {} done; {:.1} s of virtual time",
        total.packets,
        total.lost,
        total.begun,
        total.done,
        total.simulated_ns as f64 / 1e9
    );
    println!("runs with: {}", Coverage::text(&total.coverage));
    outcome.finish(true)
}
