//! `ferroce pcap split`.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use clap::Args;

use super::source::Source;
use crate::output::Failure;

/// Write a file for each conversation of a capture
///
/// The folder is made, or must be empty. A file's name has the conversation's number, service and queue pairs; in it are all packets
/// between the two, and the messages of the connection manager that make and end the connection. Frames of no conversation are in
/// `other.pcapng`. Prints each file and the number of its frames. Only their owner may read the files.
#[derive(Args)]
#[command(after_help = "\
Example:
  ferroce pcap split trace.pcap conversations
  ferroce pcap check conversations/*.pcapng

Exit status:
  0  all frames were written
  1  the capture breaks off (the frames before are written), or files can't be written
  2  the capture can't be read, or wrong usage")]
pub(super) struct SplitArgs {
    /// The capture; `-` is standard input, which is kept in a temporary file until the end
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Folder of the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs the command.
pub(super) fn run(args: &SplitArgs) -> Result<(), Failure> {
    let mut source = Source::open(&args.input)?;
    let survey = source.survey(&[])?;
    let parts = roce_pcap::split(&survey, &mut source.capture()?, &args.dir);
    let parts = parts.map_err(|e| Failure::failed(format!("{}: {e}", args.dir.display())))?;
    let mut out = io::stdout().lock();
    for part in parts {
        writeln!(out, "{:>9} frames  {}", part.frames, part.path.display())?;
    }
    source.finish(&survey)
}
