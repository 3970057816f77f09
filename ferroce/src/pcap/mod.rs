//! `ferroce pcap`.

mod annotate;
mod check;
mod filter;
mod source;
mod split;
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
    Annotate(annotate::AnnotateArgs),
    Filter(filter::FilterArgs),
    Split(split::SplitArgs),
}

/// Runs the command.
pub(crate) fn run(args: &PcapArgs) -> Result<(), Failure> {
    match &args.command {
        PcapCommand::Check(args) => check::run(args),
        PcapCommand::Annotate(args) => annotate::run(args),
        PcapCommand::Filter(args) => filter::run(args),
        PcapCommand::Split(args) => split::run(args),
    }
}
