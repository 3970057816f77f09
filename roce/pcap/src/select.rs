//! Selection of frames.

use std::{net::IpAddr, ops::RangeInclusive};

use roce_bth::{Opcode, Qpn};

use crate::{judge::Endpoint, report::FrameReport, rule::Rule, severity::Severity, survey::Reviewed};

/// Conditions on frames. A frame matches if it meets all kinds of conditions that are there, and of each kind one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Selection {
    /// Queue pairs, of one address or any: all packets of their conversations, with the messages that make and end the connection.
    pub queue_pairs: Vec<(Option<IpAddr>, Qpn)>,
    /// Senders or receivers.
    pub addresses: Vec<IpAddr>,
    /// Conversations, as in the survey's report.
    pub conversations: Vec<usize>,
    /// Rules that are broken.
    pub rules: Vec<Rule>,
    /// Opcodes.
    pub opcodes: Vec<Opcode>,
    /// Numbers of frames.
    pub frames: RangeInclusive<u64>,
    /// Only frames with findings of severity "error" or "warning".
    pub bad: bool,
}

impl Default for Selection {
    fn default() -> Self {
        Self {
            queue_pairs: vec![],
            addresses: vec![],
            conversations: vec![],
            rules: vec![],
            opcodes: vec![],
            frames: 0..=u64::MAX,
            bad: false,
        }
    }
}

impl Selection {
    /// Returns whether a frame matches.
    pub fn matches(&self, frame: &Reviewed) -> bool {
        self.frames.contains(&frame.index)
            && any(&self.queue_pairs, |queue_pair| is_of(*queue_pair, frame))
            && any(&self.addresses, |address| has_address(*address, frame))
            && any(&self.conversations, |index| frame.conversation == Some(*index))
            && any(&self.rules, |rule| frame.findings.iter().any(|f| f.rule == *rule))
            && any(&self.opcodes, |opcode| frame.opcodes.contains(opcode))
            && (!self.bad || frame.findings.iter().any(|f| f.severity >= Severity::Warning))
    }
}

/// Returns whether one of the conditions holds, or there is none.
fn any<T>(conditions: &[T], holds: impl FnMut(&T) -> bool) -> bool {
    conditions.is_empty() || conditions.iter().any(holds)
}

fn has_address(address: IpAddr, frame: &Reviewed) -> bool {
    let report = frame.report.as_ref();
    report.is_some_and(|report| report.src.ip() == address || report.dst.ip() == address)
}

fn is_of((address, qpn): (Option<IpAddr>, Qpn), frame: &Reviewed) -> bool {
    let is = |addr: IpAddr, number: Option<u32>| address.is_none_or(|a| a == addr) && number == Some(qpn.value());
    let is_end = |end: &Endpoint| is(end.addr, end.qpn);
    let to_it = |report: &FrameReport| is(report.dst.ip(), report.dest_qp);
    frame.ends.iter().flatten().any(is_end) || frame.report.as_ref().is_some_and(to_it)
}
