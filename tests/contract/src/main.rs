//! The suite over the RDMA devices of this host, or ours in their place under `ferroce run`.

use std::{net::IpAddr, process::ExitCode};

use clap::Parser;
use ferroce_contract::{Pair, hardware::Hardware, run_all};

#[derive(Parser)]
#[command(
    name = "provider-contract",
    about = "Runs what every Provider has to do over libibverbs and librdmacm: two hosts at addresses of this one",
    after_help = "Exit status: 0 all cases passed, 1 some failed, 2 wrong usage"
)]
struct Cli {
    /// Only cases whose name contains this; several times: any of them
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Run everything so many times
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: u32,
    /// Addresses of the two hosts, of RDMA devices of this machine; the first twice if there is but one
    #[arg(required = true, num_args = 1..=2, value_name = "ADDRESS")]
    addrs: Vec<IpAddr>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let addrs = [cli.addrs[0], *cli.addrs.last().unwrap_or(&cli.addrs[0])];
    let make = || Ok(Box::new(Hardware::new(addrs)?) as Box<dyn Pair>);
    let failed: usize = (0..cli.rounds).map(|_| run_all(&cli.only, make)).sum();
    match failed {
        0 => ExitCode::SUCCESS,
        n => {
            println!("{n} failed");
            ExitCode::FAILURE
        }
    }
}
