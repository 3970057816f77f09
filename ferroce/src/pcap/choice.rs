//! Options that choose frames.

use std::net::IpAddr;

use clap::Args;
use roce::Qpn;
use roce_bth::Opcode;
use roce_pcap::{Rule, Selection};

use super::stated;
use crate::output::Failure;

/// Frames that are wanted.
#[derive(Args)]
pub(super) struct Choice {
    /// Frames of the conversation with this queue pair
    #[arg(long, value_name = "[ADDR:]QPN", value_parser = stated::queue_pair)]
    qp: Vec<(Option<IpAddr>, Qpn)>,
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
    /// Frames with a finding of severity "error" or "warning"
    #[arg(long)]
    bad: bool,
}

impl Choice {
    /// Returns the conditions.
    pub(super) fn selection(&self) -> Result<Selection, Failure> {
        if self.from > self.to {
            let text = format!("--from {} is behind --to {}", self.from, self.to);
            return Err(Failure::usage(text));
        }
        Ok(Selection {
            queue_pairs: self.qp.clone(),
            addresses: self.addr.clone(),
            conversations: self.conversation.clone(),
            rules: self.rule.clone(),
            opcodes: self.opcode.iter().flat_map(|opcodes| opcodes.0.clone()).collect(),
            frames: self.from..=self.to,
            bad: self.bad,
        })
    }
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
