//! Context of a message that is judged.

use std::net::IpAddr;

use roce_pcap::{Finding, Rule};

use super::claims::{Claims, Missing};

/// Message of a conversation, and where findings go.
pub(super) struct Cx<'a> {
    pub(super) conversation: usize,
    /// Index of the endpoint that sent the message.
    pub(super) sender: usize,
    pub(super) frame: u64,
    pub(super) time_ns: u64,
    /// Addresses of sender and receiver.
    pub(super) peers: (IpAddr, IpAddr),
    pub(super) claims: &'a mut Claims,
    pub(super) findings: &'a mut Vec<Finding>,
}

impl Cx<'_> {
    /// Index of the endpoint that received the message.
    pub(super) const fn receiver(&self) -> usize {
        1 - self.sender
    }

    fn finding(&self, rule: Rule, text: String) -> Finding {
        Finding::new(self.frame, rule, self.peers, text).of(self.conversation)
    }

    /// Reports that the message breaks a rule.
    pub(super) fn find(&mut self, rule: Rule, text: impl Into<String>) {
        let finding = self.finding(rule, text.into());
        self.findings.push(finding);
    }

    /// Reports that the message breaks a rule, unless it turns out that the capture misses a message of the other side.
    pub(super) fn claim(&mut self, rule: Rule, missing: Missing, text: impl Into<String>) {
        let finding = self.finding(rule, text.into());
        self.claims.add(self.receiver(), missing, self.time_ns, finding);
    }
}
