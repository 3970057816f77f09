//! `ferroce-lab`: small programs that are the other half of programs on an RDMA host.

mod agent;
mod guestd;
mod link;
mod ops;
mod pingpong;
mod rping;

use std::{net::IpAddr, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use roce::{Device, DeviceConfig};

/// Whatever ends a test.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Speaks to ibv_rc_pingpong, rping and verbs-agent on another host over our own transport.
#[derive(Parser, Debug)]
#[command(version)]
struct Cli {
    /// Our address.
    #[arg(long)]
    addr: IpAddr,
    /// Write every packet into this capture.
    #[arg(long)]
    pcap: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// The other half of ibv_rc_pingpong.
    Pingpong(pingpong::Args),
    /// The other half of rping.
    Rping(rping::Args),
    /// Every RC operation, in both directions, against a verbs-agent.
    Ops(ops::Args),
    /// In a guest: runs the scripts that the lab sends.
    #[command(hide = true)]
    Guestd(guestd::Args),
}

fn run(cli: Cli) -> Result<(), Error> {
    if let Command::Guestd(args) = &cli.command {
        return guestd::run(args);
    }
    let device = Device::open(DeviceConfig {
        pcap: cli.pcap,
        ..DeviceConfig::new(cli.addr)
    })?;
    let result = match cli.command {
        Command::Pingpong(args) => pingpong::run(&device, cli.addr, &args),
        Command::Rping(args) => rping::run(&device, cli.addr, &args),
        Command::Ops(args) => ops::run(&device, cli.addr, &args),
        Command::Guestd(args) => guestd::run(&args),
    };
    println!("counters: {:?}", device.stats());
    result
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ferroce-lab: failed: {e}");
            ExitCode::FAILURE
        }
    }
}
