//! `ferroce pcap`.

mod annotate;
mod anonymize;
mod capture;
mod check;
mod choice;
mod extcap;
mod filter;
mod flows;
mod live;
mod play;
mod plot;
mod replay;
mod show;
mod source;
mod split;
mod stated;
mod stream;
mod table;

use clap::{Args, Subcommand};

use crate::output::Failure;

#[derive(Args)]
pub(crate) struct PcapArgs {
    #[command(subcommand)]
    command: PcapCommand,
}

#[derive(Subcommand)]
enum PcapCommand {
    Capture(capture::CaptureArgs),
    Check(check::CheckArgs),
    Flows(flows::FlowsArgs),
    Plot(plot::PlotArgs),
    Show(show::ShowArgs),
    Annotate(annotate::AnnotateArgs),
    Filter(filter::FilterArgs),
    Split(split::SplitArgs),
    Play(play::PlayArgs),
    Replay(replay::ReplayArgs),
    Anonymize(anonymize::AnonymizeArgs),
    Extcap(extcap::ExtcapArgs),
}

/// Runs the command.
pub(crate) fn run(args: &PcapArgs) -> Result<(), Failure> {
    match &args.command {
        PcapCommand::Capture(args) => capture::run(args),
        PcapCommand::Check(args) => check::run(args),
        PcapCommand::Show(args) => show::run(args),
        PcapCommand::Annotate(args) => annotate::run(args),
        PcapCommand::Filter(args) => filter::run(args),
        PcapCommand::Split(args) => split::run(args),
        PcapCommand::Flows(args) => flows::run(args),
        PcapCommand::Play(args) => play::run(args),
        PcapCommand::Replay(args) => replay::run(args),
        PcapCommand::Plot(args) => plot::run(args),
        PcapCommand::Anonymize(args) => anonymize::run(args),
        PcapCommand::Extcap(args) => extcap::run(args),
    }
}
