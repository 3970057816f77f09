//! Frames before and after those that match.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
};

use super::reading::Packets;

/// Frames before that are kept of all conversations together; the oldest are dropped.
const MAX_KEPT: usize = 100_000;

/// Frames that are shown together: those of a conversation, or between two hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Group {
    Conversation(usize),
    Hosts(IpAddr, IpAddr),
    None,
}

fn group(packets: &Packets) -> Group {
    if let Some(index) = packets.reviewed.conversation {
        return Group::Conversation(index);
    }
    packets.report().map_or(Group::None, |report| {
        let (a, b) = (report.src.ip(), report.dst.ip());
        Group::Hosts(a.min(b), a.max(b))
    })
}

/// Chooses frames around those that match.
pub(super) struct Context {
    size: usize,
    /// Frames that were not shown, with their places in `before`.
    kept: VecDeque<(Group, Packets)>,
    /// How many of each group are kept.
    counts: HashMap<Group, usize>,
    /// How many frames to come of each group are shown.
    after: HashMap<Group, usize>,
}

impl Context {
    pub(super) fn new(size: usize) -> Self {
        Self {
            size: size.min(MAX_KEPT),
            kept: VecDeque::new(),
            counts: HashMap::new(),
            after: HashMap::new(),
        }
    }

    /// Takes the next frame. Returns the frames that are to be shown now.
    pub(super) fn take(&mut self, packets: Packets, matches: bool) -> Vec<Packets> {
        if self.size == 0 {
            return Vec::from_iter(matches.then_some(packets));
        }
        let group = group(&packets);
        if matches {
            self.after.insert(group, self.size);
            let mut shown = self.release(group);
            shown.push(packets);
            return shown;
        }
        match self.after.get_mut(&group) {
            Some(left) if *left > 0 => {
                *left -= 1;
                vec![packets]
            }
            _ => {
                self.keep(group, packets);
                vec![]
            }
        }
    }

    fn release(&mut self, group: Group) -> Vec<Packets> {
        let Some(count) = self.counts.remove(&group) else {
            return vec![];
        };
        let mut skip = count.saturating_sub(self.size);
        let (mut shown, mut rest) = (vec![], VecDeque::new());
        for (of, packets) in self.kept.drain(..) {
            if of != group {
                rest.push_back((of, packets));
            } else if skip > 0 {
                skip -= 1;
            } else {
                shown.push(packets);
            }
        }
        self.kept = rest;
        shown
    }

    fn keep(&mut self, group: Group, packets: Packets) {
        *self.counts.entry(group).or_default() += 1;
        self.kept.push_back((group, packets));
        // What no frame can want any more is at the front, or among frames of others.
        while let Some((of, _)) = self.kept.front() {
            let count = self.counts.get(of).copied().unwrap_or_default();
            if count <= self.size && self.kept.len() <= MAX_KEPT {
                break;
            }
            if let Some(count) = self.counts.get_mut(of) {
                *count -= 1;
            }
            self.kept.pop_front();
        }
    }
}
