//! Findings that hold only if the capture misses nothing of what the other side sent. One that nothing proves is dropped.

use roce_pcap::Finding;

/// Claims of a conversation at most; further ones are dropped.
const MAX_CLAIMS: usize = 64;
/// Time by which a capture may have packets of two directions in the wrong order, nanoseconds.
const SWAPPED_NS: u64 = 1_000_000;

/// Message whose absence a claim is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Missing {
    /// RDS message with this sequence number or a higher one.
    Sequence(u64),
    /// RDS map.
    Map,
    /// LNet request with this cookie.
    Cookie(u64),
    /// LNet description of memory with this key.
    Key(u32),
    /// LNet message that returns credits, or takes one.
    Credit,
}

/// Finding that holds if the side with index `by` did not send what is missing.
#[derive(Debug)]
struct Claim {
    by: usize,
    missing: Missing,
    time_ns: u64,
    finding: Finding,
}

/// Claims of a conversation.
#[derive(Default, Debug)]
pub(super) struct Claims {
    list: Vec<Claim>,
}

impl Claims {
    pub(super) fn add(&mut self, by: usize, missing: Missing, time_ns: u64, finding: Finding) {
        if self.list.len() < MAX_CLAIMS {
            self.list.push(Claim {
                by,
                missing,
                time_ns,
                finding,
            });
        }
    }

    /// Returns whether there is none.
    pub(super) const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Drops the claims about a side of which packets are missing in the capture.
    pub(super) fn drop_of(&mut self, by: usize) {
        self.list.retain(|claim| claim.by != by);
    }

    /// Confirms the claims about a side whose peer has shown that it got all of the capture and nothing more; those of frames before
    /// this one.
    pub(super) fn confirm(&mut self, by: usize, frame: u64, findings: &mut Vec<Finding>) {
        self.settle(findings, |claim| match claim.by == by && claim.finding.frame < frame {
            true => Some(true),
            false => None,
        });
    }

    /// Confirms the claims about a side whose next message is here, but for those that it refutes: it was captured too late.
    pub(super) fn next_message(
        &mut self,
        by: usize,
        first_ns: u64,
        is: impl Fn(Missing) -> bool,
        findings: &mut Vec<Finding>,
    ) {
        self.settle(findings, |claim| {
            let late = first_ns.saturating_sub(claim.time_ns) < SWAPPED_NS && is(claim.missing);
            (claim.by == by).then_some(!late)
        });
    }

    /// Removes the claims of which `verdict` is known, and adds those that hold to the findings.
    fn settle(&mut self, findings: &mut Vec<Finding>, verdict: impl Fn(&Claim) -> Option<bool>) {
        let mut left = Vec::new();
        for claim in self.list.drain(..) {
            match verdict(&claim) {
                None => left.push(claim),
                Some(true) => findings.push(claim.finding),
                Some(false) => {}
            }
        }
        self.list = left;
    }
}
