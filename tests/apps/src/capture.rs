//! Reads the captures of programs (`FERROCE_PCAP`) and checks the order of their packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
};

use ferroce_dissect::check_file;
use roce_bth::{Class, Opcode, Packet, Service};
use roce_pcap::{Capture, Finding, Rule, Severity, decode};

use crate::Result;

/// A packet of a reliable connection.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Seen {
    /// Microseconds since 1970.
    pub(crate) at: f64,
    pub(crate) opcode: Opcode,
    pub(crate) psn: u32,
    /// Destination queue pair number.
    pub(crate) to: u32,
}

impl Seen {
    /// Identifies the packet; a retransmission has the same key.
    pub(crate) fn key(&self) -> (u32, u32, u8) {
        (self.to, self.psn, self.opcode as u8)
    }

    pub(crate) fn is_send(&self) -> bool {
        self.opcode.info().class == Class::Send
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} to {:#x}", self.opcode, self.psn, self.to)
    }
}

/// Lists the captures in a directory.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    entries.filter(|p| p.extension().is_some_and(|e| e == "pcap")).collect()
}

/// Reads the packets of reliable connections.
pub(crate) fn read(file: &Path) -> Result<Vec<Seen>> {
    let fail = |e: &dyn fmt::Display| format!("{}: {e}", file.display());
    let mut capture = Capture::open(file).map_err(|e| fail(&e))?;
    let mut all = Vec::new();
    while let Some(frame) = capture.next_frame() {
        let frame = frame.map_err(|e| fail(&e))?;
        let Ok(datagram) = decode(frame.link, frame.data) else {
            continue;
        };
        let Ok(packet) = Packet::parse(datagram.payload) else {
            continue;
        };
        let bth = &packet.header.bth;
        if bth.opcode.info().service == Service::Rc {
            all.push(Seen {
                at: frame.time_ns as f64 / 1e3,
                opcode: bth.opcode,
                psn: bth.psn.value(),
                to: bth.dest_qp.value(),
            });
        }
    }
    Ok(all)
}

/// Finds the first SEND of a ping-pong that precedes the acknowledgement of the SEND that it answers.
fn answer_without_acknowledgement(packets: &[Seen]) -> Option<Seen> {
    let (mut asked, mut acknowledged) = (BTreeMap::new(), BTreeMap::new());
    let mut known = BTreeSet::new();
    for p in packets {
        if p.opcode.info().class == Class::Acknowledge {
            acknowledged.insert(p.to, p.psn);
        } else if p.is_send() && known.insert(p.key()) {
            // A ping-pong has two queue pairs: the answered SEND went to the other one.
            let question = asked.iter().find(|(to, _)| **to != p.to).map(|(_, psn)| psn);
            if question.is_some() && question != acknowledged.get(&p.to) {
                return Some(*p);
            }
            asked.insert(p.to, p.psn);
        }
    }
    None
}

/// Checks all captures in a directory.
pub(crate) fn check_order(dir: &Path) -> Result<()> {
    let files = files(dir);
    if files.is_empty() {
        return Err("the programs left no captures".into());
    }
    files
        .iter()
        .try_for_each(|file| match answer_without_acknowledgement(&read(file)?) {
            None => Ok(()),
            Some(p) => Err(format!(
                "{}: {p} is sent before the acknowledgement of the SEND that it answers",
                file.display()
            )),
        })
}

/// Judges all captures in a directory, and removes those that break no rule but `known`.
pub(crate) fn check_rules(dir: &Path, known: &[Rule]) -> Result<()> {
    for file in files(dir) {
        let report = check_file(&file).map_err(|e| e.to_string())?;
        let broken = |finding: &&Finding| finding.severity == Severity::Error && !known.contains(&finding.rule);
        let broken: Vec<_> = report.findings.iter().filter(broken).collect();
        if let Some(first) = broken.first() {
            let count = broken.len();
            return Err(format!(
                "{}: frame {} breaks {}: {} (of {count} such)",
                file.display(),
                first.frame,
                first.rule.id(),
                first.text
            ));
        }
        fs::remove_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_follows_its_acknowledgement() {
        let packet = |opcode, psn, to| Seen {
            at: 0.0,
            opcode,
            psn,
            to,
        };
        let send = |psn, to| packet(Opcode::RcSendOnly, psn, to);
        let ack = |psn, to| packet(Opcode::RcAcknowledge, psn, to);
        let good = [
            send(7, 1),
            ack(7, 2),
            send(3, 2),
            ack(3, 1),
            send(8, 1),
            send(8, 1),
            ack(8, 2),
            send(4, 2),
        ];
        assert_eq!(answer_without_acknowledgement(&good), None);
        let bad = [send(7, 1), send(3, 2), ack(7, 2)];
        assert_eq!(answer_without_acknowledgement(&bad), Some(bad[1]));
        let second = [send(7, 1), ack(7, 2), send(3, 2), ack(3, 1), send(8, 1), send(4, 2)];
        assert_eq!(answer_without_acknowledgement(&second), Some(second[5]));
    }
}
