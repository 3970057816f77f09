//! `ferroce-storage-sim`: runs seeds and prints what failed. `cargo xtask sim --storage` builds and calls it.

use std::process::ExitCode;

use clap::Parser;
use ferroce_storage_sim::{StorageConfig, run};
use roce_sim::{Coverage, cli::RunArgs};

/// Runs servers and clients with RTRS, RNBD and disks on simulated networks with every fault.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    run: RunArgs,
    /// Only runs with clients of a server that verifies before it allocates, under a flood of requests
    #[arg(long)]
    admission: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = cli.run.run_seeds(|run_config| {
        run(&StorageConfig {
            admission: cli.admission,
            ..StorageConfig::new(run_config)
        })
    });
    let total = &outcome.total;
    println!(
        "{} packets, {} lost, {} forged; {} operations, {} of them with success; {:.1} s of virtual time",
        total.packets,
        total.lost,
        total.forged,
        total.operations,
        total.succeeded,
        total.simulated_ns as f64 / 1e9
    );
    println!(
        "{} clients accepted under a flood of requests, the slowest after {:.1} ms",
        total.admitted,
        total.longest_admission_ns as f64 / 1e6
    );
    println!("runs with: {}", Coverage::text(&total.coverage));
    outcome.finish(true)
}
