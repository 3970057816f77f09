//! `ferroce pcap anonymize`.

use std::path::PathBuf;

use clap::Args;
use roce_pcap::{Filling, Settings};

use super::source::{Source, note};
use crate::output::Failure;

/// Copy a capture without addresses, keys and data, so that it can be shown to others
///
/// IPv4, IPv6 and MAC addresses become others, also in messages of the connection manager; a common prefix stays one. Virtual addresses,
/// remote keys, immediate data and payload are replaced: the same by the same. Private data behind the RDMA_CM header,
/// comments, names of interfaces and everything that is not RoCEv2 are cleared. Frames, lengths, times, PSNs, ports and queue pair
/// numbers stay. ICRCs and checksums are made again; those that were wrong stay wrong. The judge must find the same in the copy:
/// it is asked while copying.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap anonymize trace.pcap share.pcapng
  ferroce pcap anonymize --zero --shift=-86400 trace.pcap share.pcapng

Exit status:
  0  all frames were copied, and are judged as before
  1  the capture breaks off (the frames before are copied), or the copy can't be written
  2  the capture can't be read, or wrong usage
  3  all frames were copied, and some are judged differently")]
pub(super) struct AnonymizeArgs {
    /// The capture; `-` is standard input
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The copy; `-` is standard output
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Secret from which all replacements follow: captures with the same one fit together [default: random]
    ///
    /// Whoever knows it can test guesses of addresses and data.
    #[arg(long, value_name = "SECRET")]
    seed: Option<String>,
    /// Fill payload with zeros: the judge no longer tells whether a repeated packet has the payload of the first
    #[arg(long)]
    zero: bool,
    /// Keep private data of connection messages: which service it was
    #[arg(long)]
    keep_private: bool,
    /// Move all times by so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0, allow_negative_numbers = true)]
    shift: i64,
}

/// Runs the command.
pub(super) fn run(args: &AnonymizeArgs) -> Result<(), Failure> {
    let settings = Settings {
        key: key(args.seed.as_deref())?,
        filling: if args.zero { Filling::Zeros } else { Filling::Pattern },
        keep_private: args.keep_private,
        shift_secs: args.shift,
    };
    let mut source = Source::open(&args.input)?;
    // What is no capture leaves no copy.
    source.capture()?;
    let mut out = source.copy_to(&args.output)?;
    let copied = roce_pcap::anonymize(&settings, &mut source.capture()?, &mut out);
    let done = copied
        .and_then(|done| out.flush().map(|()| done))
        .map_err(Failure::of)?;
    note(&format!("{} frames", done.frames));
    if let Some(e) = done.broken {
        return Err(source.broken(&e.to_string(), done.frames));
    }
    match done.first_different {
        None => Ok(()),
        Some(frame) => Err(Failure::with_status(
            3,
            format!(
                "{} frames are judged differently than in the original, the first is {frame}",
                done.judged_differently
            ),
        )),
    }
}

/// The key of a seed, or a random one.
fn key(seed: Option<&str>) -> Result<[u8; 32], Failure> {
    match seed {
        Some(seed) => Ok(Settings::key_of(seed)),
        None => {
            let mut key = [0; 32];
            getrandom::fill(&mut key).map_err(Failure::of)?;
            Ok(key)
        }
    }
}
