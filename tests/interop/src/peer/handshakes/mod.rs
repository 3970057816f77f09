//! Handshakes with an RTRS server, proper and improper ones, and what comes of each.

mod cases;
mod client;

use std::net::{IpAddr, SocketAddr};

use roce::{Device, DeviceConfig};

use crate::Error;
use cases::{CASES, Case};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The server's address on our network.
    #[arg(long)]
    to: IpAddr,
    /// Another address of ours, for second paths.
    #[arg(long)]
    second_addr: IpAddr,
    /// The server's address for these.
    #[arg(long)]
    second_to: IpAddr,
    /// Port of the server.
    #[arg(long, default_value_t = 1234)]
    port: u16,
    /// The server is Linux: leave out what it does not survive.
    #[arg(long)]
    linux: bool,
    /// Only cases whose names contain this.
    #[arg(long)]
    only: Option<String>,
}

/// The way from one of our addresses to one of the server's.
pub(super) struct Way {
    pub(super) dev: Device,
    pub(super) to: SocketAddr,
}

/// Prints a line for each case: its name and what came of it.
pub(crate) fn run(device: &Device, args: &Args) -> Result<(), Error> {
    let second = Device::open(DeviceConfig::new(args.second_addr))?;
    let ways = [
        Way {
            dev: device.clone(),
            to: SocketAddr::new(args.to, args.port),
        },
        Way {
            dev: second,
            to: SocketAddr::new(args.second_to, args.port),
        },
    ];
    let chosen = |case: &&Case| {
        args.only.as_ref().is_none_or(|part| case.name.contains(part)) && !(args.linux && case.crashes_linux)
    };
    for case in CASES.iter().filter(chosen) {
        let outcome = (case.run)(&ways, case.name).map_err(|e| format!("{}: {e}", case.name))?;
        println!("case {}: {outcome}", case.name);
    }
    Ok(())
}
