//! Conversation-wide facts that the checks of one packet read and write.

use std::net::IpAddr;

use super::observed::Observed;
use crate::{finding::Finding, rule::Rule};

/// Path MTU of a conversation, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PathMtu {
    /// Nobody has shown it yet.
    Unknown,
    /// From a connection request, or from the user.
    Stated(u32),
    /// Length of the first packet that must be as long.
    Seen(u32),
}

impl PathMtu {
    pub(super) const fn bytes(self) -> Option<u32> {
        match self {
            Self::Unknown => None,
            Self::Stated(n) | Self::Seen(n) => Some(n),
        }
    }

    /// Returns how many packets a READ's response of `len` bytes has.
    pub(super) fn packets(self, len: u32) -> Option<i64> {
        self.bytes().map(|mtu| i64::from(len.div_ceil(mtu).max(1)))
    }
}

/// Facts of one conversation and the findings of one packet.
pub(super) struct Context<'a> {
    pub(super) conversation: usize,
    pub(super) mtu: &'a mut PathMtu,
    /// READs and atomics that the direction's requester may have outstanding.
    pub(super) depth: Option<u8>,
    /// Requests that a direction remembers.
    pub(super) room: usize,
    /// When the connection ended.
    pub(super) disconnected: Option<u64>,
    /// Packets of either direction that the capture misses, as far as is known.
    pub(super) missed: u64,
    pub(super) findings: &'a mut Vec<Finding>,
}

impl Context<'_> {
    /// Reports that `o` breaks a rule.
    pub(super) fn find(&mut self, rule: Rule, o: &Observed<'_>, text: impl Into<String>) {
        self.find_at(rule, o.meta.frame, (o.meta.src.ip(), o.meta.dst), text);
    }

    /// Reports that a packet seen earlier broke a rule.
    pub(super) fn find_at(&mut self, rule: Rule, frame: u64, peers: (IpAddr, IpAddr), text: impl Into<String>) {
        let finding = Finding::new(frame, rule, peers, text);
        self.findings.push(finding.of(self.conversation));
    }
}
