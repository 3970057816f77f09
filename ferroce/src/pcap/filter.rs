//! `ferroce pcap filter`.

use std::path::PathBuf;

use clap::Args;

use super::{
    choice::Choice,
    source::{Source, note},
};
use crate::output::Failure;

/// Copy the frames of a capture that match
///
/// Options of different kinds must all hold; of one option that is given several times, one value. Without options all frames match.
/// Conversations are those of `pcap check`: all packets between two queue pairs, and the messages of the connection manager
/// that make and end the connection. Writes a pcapng file; only its owner may read it.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap filter trace.pcap bad.pcapng --bad
  ferroce pcap filter trace.pcap one.pcapng --qp 10.0.0.1:0x12
  ferroce pcap filter trace.pcap naks.pcapng --rule nak-fatal --addr 10.0.0.2
  ferroce pcap filter trace.pcap reads.pcapng --opcode 'RC RDMA Read Request' --from 100 --to 200

Exit status:
  0  all frames that match were copied
  1  the capture breaks off (the frames before are copied), or the copy can't be written
  2  the capture can't be read, or wrong usage
  3  no frame matches: the copy is empty")]
pub(super) struct FilterArgs {
    /// The capture; `-` is standard input, which is kept in a temporary file until the end
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The copy; `-` is standard output
    #[arg(value_name = "OUT")]
    output: PathBuf,
    #[command(flatten)]
    choice: Choice,
}

/// Runs the command.
pub(super) fn run(args: &FilterArgs) -> Result<(), Failure> {
    let selection = args.choice.selection()?;
    let mut source = Source::open(&args.input)?;
    let survey = source.survey(&[])?;
    let mut out = source.copy_to(&args.output)?;
    let mut copied = 0u64;
    let written = survey.review(&mut source.capture()?, |frame, reviewed| {
        if !selection.matches(reviewed) {
            return Ok(());
        }
        copied += 1;
        out.copy(frame, [])
    });
    written.and_then(|()| out.flush()).map_err(Failure::of)?;
    note(&format!("{copied} of {} frames", survey.report().frames));
    source.finish(&survey)?;
    match copied {
        0 => Err(Failure::with_status(3, "no frame matches")),
        _ => Ok(()),
    }
}
