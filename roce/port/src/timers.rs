//! Deadlines of queue pairs, earliest first. Entries are never removed from the middle: a queue pair remembers its earliest entry, and
//! entries that no longer match are dropped when they expire.

use std::{cmp::Reverse, collections::BinaryHeap};

use roce_bth::Qpn;
use roce_verbs::Instant;

/// Timer heap. Keys are QPNs. A late entry of a destroyed queue pair may hit the next one with its number, which is then checked once
/// too often.
#[derive(Debug, Default)]
pub(crate) struct TimerHeap {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
}

impl TimerHeap {
    /// Adds a queue pair's deadline if it is earlier than `armed`, the queue pair's earliest entry. A later deadline costs nothing until
    /// the old entry expires.
    pub(crate) fn update(&mut self, qpn: Qpn, armed: &mut Option<Instant>, deadline: Option<Instant>) {
        let Some(deadline) = deadline else {
            return;
        };
        if armed.is_none_or(|at| deadline < at) {
            *armed = Some(deadline);
            self.heap.push(Reverse((deadline, qpn.value())));
        }
    }

    /// Returns the earliest entry.
    pub(crate) fn peek(&self) -> Option<(Instant, Qpn)> {
        self.heap.peek().map(|Reverse((at, qpn))| (*at, Qpn::new(*qpn)))
    }

    /// Removes the earliest entry.
    pub(crate) fn pop(&mut self) {
        self.heap.pop();
    }
}
