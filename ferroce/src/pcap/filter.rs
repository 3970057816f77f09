//! `ferroce pcap filter`.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;
use roce::Qpn;
use roce_bth::Opcode;
use roce_pcap::{Rule, Selection};

use super::{
    source::{Source, note},
    stated,
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
    /// Frames of the conversation with this queue pair
    #[arg(long, value_name = "ADDR:QPN", value_parser = stated::endpoint)]
    qp: Vec<(IpAddr, Qpn)>,
    /// Frames from or to this address
    #[arg(long, value_name = "ADDR")]
    addr: Vec<IpAddr>,
    /// Frames of a conversation, by its `index` in `pcap check --json`
    #[arg(long, value_name = "N")]
    conversation: Vec<usize>,
    /// Frames with a finding of this rule
    #[arg(long, value_name = "ID", value_parser = rule)]
    rule: Vec<Rule>,
    /// Frames with a packet of this opcode, by its name in `pcap check --frames`, or a part of that
    #[arg(long, value_name = "NAME", value_parser = opcodes)]
    opcode: Vec<Opcodes>,
    /// Frames from this number on
    #[arg(long, value_name = "FRAME", default_value_t = 1)]
    from: u64,
    /// Frames up to this number
    #[arg(long, value_name = "FRAME", default_value_t = u64::MAX, hide_default_value = true)]
    to: u64,
    /// Frames with a finding of severity "error"
    #[arg(long)]
    bad: bool,
}

/// Opcodes that one name stands for.
#[derive(Clone)]
struct Opcodes(Vec<Opcode>);

fn rule(text: &str) -> Result<Rule, String> {
    let found = Rule::ALL.into_iter().find(|rule| rule.id() == text);
    found.ok_or_else(|| {
        let names = Rule::ALL.map(Rule::id);
        let near = names
            .into_iter()
            .max_by(|a, b| strsim::jaro_winkler(a, text).total_cmp(&strsim::jaro_winkler(b, text)));
        format!(
            "no such rule; did you mean {}? They are in specs/rules.toml",
            near.unwrap_or("psn-reused")
        )
    })
}

/// Reads a name of opcodes: upper and lower case, spaces, `-` and `_` are the same.
fn opcodes(text: &str) -> Result<Opcodes, String> {
    let plain = |name: &str| name.to_lowercase().replace([' ', '-', '_'], "");
    let wanted = plain(text);
    let all = || Opcode::ALL.iter().copied();
    let exact = all().find(|opcode| plain(opcode.info().name) == wanted);
    let found = match exact {
        Some(opcode) => vec![opcode],
        None => all()
            .filter(|opcode| plain(opcode.info().name).contains(&wanted))
            .collect(),
    };
    match found.is_empty() || wanted.is_empty() {
        true => Err("no opcode has that in its name; examples: Send, 'RC RDMA Write First', Acknowledge".to_owned()),
        false => Ok(Opcodes(found)),
    }
}

/// Runs the command.
pub(super) fn run(args: &FilterArgs) -> Result<(), Failure> {
    if args.from > args.to {
        let text = format!("--from {} is behind --to {}", args.from, args.to);
        return Err(Failure::usage(text));
    }
    let selection = Selection {
        queue_pairs: args.qp.clone(),
        addresses: args.addr.clone(),
        conversations: args.conversation.clone(),
        rules: args.rule.clone(),
        opcodes: args.opcode.iter().flat_map(|opcodes| opcodes.0.clone()).collect(),
        frames: args.from..=args.to,
        bad: args.bad,
    };
    let mut source = Source::open(&args.input)?;
    let survey = source.survey(&[])?;
    let mut out = source.copy_to(&args.output)?;
    let mut copied = 0u64;
    let written = survey.review(&mut source.capture()?, |frame, reviewed| {
        if !selection.matches(&survey, reviewed) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_found_by_names_and_parts_of_them() {
        let found = opcodes("rc rdma-write_first").map(|found| found.0);
        assert_eq!(found, Ok(vec![Opcode::RcWriteFirst]));
        let found = opcodes("acknowledge").unwrap().0;
        assert!(found.contains(&Opcode::RcAcknowledge) && found.len() > 1, "{found:?}");
        assert!(opcodes("teleport").is_err() && opcodes(" ").is_err());
    }

    #[test]
    fn a_rule_that_is_mistyped_is_suggested() {
        assert_eq!(rule("psn-reused"), Ok(Rule::PsnReused));
        let e = rule("psn-resued").unwrap_err();
        assert!(e.contains("did you mean psn-reused"), "{e}");
    }
}
