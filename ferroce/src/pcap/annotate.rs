//! `ferroce pcap annotate`.

use std::path::PathBuf;

use clap::Args;
use roce_pcap::judge::Stated;

use super::{
    source::{Source, note},
    stated,
};
use crate::output::Failure;

/// Copy a capture with the judge's findings as comments on the frames
///
/// Writes a pcapng file with all frames, for Wireshark. Findings of `pcap check` become comments on the frame that breaks the rule,
/// also those that later frames or the end of the capture show: `ferroce error psn-reused: …; at fault: 10.0.0.2`. Comments that
/// are there are kept. Only the file's owner may read it.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap annotate trace.pcap annotated.pcapng
  tshark -r annotated.pcapng -Y frame.comment -T fields -e frame.number -e frame.comment
  ferroce pcap annotate trace.pcap - | wireshark -k -i -

Exit status:
  0  all frames were copied
  1  the capture breaks off (the frames before are copied), or the copy can't be written
  2  the capture can't be read, or wrong usage")]
pub(super) struct AnnotateArgs {
    /// The capture; `-` is standard input, which is kept in a temporary file until the end
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The copy; `-` is standard output
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Names two queue pairs whose connection the capture doesn't show, as in `pcap check`
    #[arg(long, value_name = "QP", value_parser = stated::parse)]
    qp: Vec<Stated>,
}

/// Runs the command.
pub(super) fn run(args: &AnnotateArgs) -> Result<(), Failure> {
    let mut source = Source::open(&args.input)?;
    let survey = source.survey(&args.qp)?;
    let mut out = source.copy_to(&args.output)?;
    let copied = roce_pcap::annotate(&survey, &mut source.capture()?, &mut out);
    let (frames, commented) = copied.and_then(|n| out.flush().map(|()| n)).map_err(Failure::of)?;
    note(&format!("{frames} frames, comments on {commented} of them"));
    source.finish(&survey)
}
