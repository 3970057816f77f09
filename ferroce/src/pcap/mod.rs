//! `ferroce pcap`.

mod check;
mod stated;

use clap::{Args, Subcommand};

use crate::output::Failure;

#[derive(Args)]
pub(crate) struct PcapArgs {
    #[command(subcommand)]
    command: PcapCommand,
}

#[derive(Subcommand)]
enum PcapCommand {
    Check(check::CheckArgs),
}

/// Runs the command.
pub(crate) fn run(args: &PcapArgs) -> Result<(), Failure> {
    match &args.command {
        PcapCommand::Check(args) => check::run(args),
    }
}
