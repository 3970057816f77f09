//! Findings: broken rules, with frame, queue pair and the party at fault.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    net::IpAddr,
};

use serde::{Serialize, Serializer};

use crate::{
    rule::Rule,
    severity::{Fault, Severity},
};

/// Findings that a [`Findings`] keeps; further ones are only counted.
pub const MAX_FINDINGS: usize = 10_000;

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.id())
    }
}

/// Broken rule, or something worth knowing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// Frame that shows it first, from 1. Of [`Rule::FileBroken`] the first frame that could not be read.
    pub frame: u64,
    /// Rule.
    pub rule: Rule,
    /// Severity.
    pub severity: Severity,
    /// Party at fault.
    pub fault: Fault,
    /// Address of the party at fault, if it is one of the two peers.
    pub at_fault: Option<IpAddr>,
    /// Conversation, an index into the report's; `None`: the frame by itself.
    pub conversation: Option<usize>,
    /// Description.
    pub text: String,
    /// Whether it is the first of its rule and peer.
    #[serde(skip)]
    pub is_first: bool,
    /// Whether it was found at the capture's end, not at a frame.
    #[serde(skip)]
    pub at_end: bool,
    /// How often this peer broke this rule.
    pub count: u64,
    /// Frame that shows it last.
    pub last_frame: u64,
}

impl Finding {
    /// Creates a finding of a packet from `src` to `dst`.
    pub fn new(frame: u64, rule: Rule, (src, dst): (IpAddr, IpAddr), text: impl Into<String>) -> Self {
        let fault = rule.fault();
        Self {
            at_fault: match fault {
                Fault::Sender => Some(src),
                Fault::Receiver => Some(dst),
                _ => None,
            },
            ..Self::of_file(frame, rule, text)
        }
    }

    /// Creates a finding that concerns no peer.
    pub(crate) fn of_file(frame: u64, rule: Rule, text: impl Into<String>) -> Self {
        Self {
            frame,
            rule,
            severity: rule.severity(),
            fault: rule.fault(),
            at_fault: None,
            conversation: None,
            text: text.into(),
            is_first: false,
            at_end: false,
            count: 1,
            last_frame: frame,
        }
    }

    /// Sets the conversation.
    #[must_use]
    pub fn of(mut self, conversation: usize) -> Self {
        self.conversation = Some(conversation);
        self
    }
}

/// Severity, rule, description, and who is at fault: `error psn-reused: …; at fault: 10.0.0.2`.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.severity.word(), self.rule.id(), self.text)?;
        match (self.at_fault, self.fault) {
            (Some(addr), _) => write!(f, "; at fault: {addr}"),
            (None, Fault::Network) => write!(f, "; at fault: the network, or a device on the way"),
            (None, Fault::Capture) => write!(f, "; a matter of the capture"),
            (None, _) => Ok(()),
        }
    }
}

/// Findings, each rule once for each peer, with a count.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Findings {
    list: Vec<Finding>,
    index: HashMap<(Rule, Option<IpAddr>), usize>,
    left_out: u64,
}

impl Findings {
    /// Adds a finding. Returns whether it is the first of its rule and peer.
    pub(crate) fn add(&mut self, finding: &Finding) -> bool {
        match self.index.entry((finding.rule, finding.at_fault)) {
            Entry::Occupied(at) => {
                let known = &mut self.list[*at.get()];
                known.count += 1;
                known.last_frame = finding.frame;
                false
            }
            Entry::Vacant(_) if self.list.len() >= MAX_FINDINGS => {
                self.left_out += 1;
                false
            }
            Entry::Vacant(place) => {
                place.insert(self.list.len());
                self.list.push(finding.clone());
                true
            }
        }
    }

    /// Changes the conversations that findings belong to.
    pub(crate) fn map_conversations(&mut self, to: impl Fn(usize) -> usize) {
        for finding in &mut self.list {
            finding.conversation = finding.conversation.map(&to);
        }
    }

    pub(crate) fn into_parts(self) -> (Vec<Finding>, u64) {
        (self.list, self.left_out)
    }
}
