//! Deadlines of queue pairs, earliest first. Entries are never taken out of the middle: a queue pair remembers the
//! earliest entry that stands for it, and what no longer matches is dropped when it comes up.

use std::{cmp::Reverse, collections::BinaryHeap};

use roce_bth::Qpn;
use roce_verbs::Instant;

/// The heap. Keys are QPNs. A late entry of a queue pair that is gone may hit the next one with its number: that is looked at
/// once too often.
#[derive(Debug, Default)]
pub(crate) struct TimerHeap {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
}

impl TimerHeap {
    /// Brings the heap up to date with a queue pair's deadline. `armed` is the queue pair's own note of its earliest
    /// entry. A deadline that moved later costs nothing until the old entry comes up.
    pub(crate) fn update(&mut self, qpn: Qpn, armed: &mut Option<Instant>, deadline: Option<Instant>) {
        let Some(deadline) = deadline else {
            return;
        };
        if armed.is_none_or(|at| deadline < at) {
            *armed = Some(deadline);
            self.heap.push(Reverse((deadline, qpn.value())));
        }
    }

    /// The earliest entry.
    pub(crate) fn peek(&self) -> Option<(Instant, Qpn)> {
        self.heap.peek().map(|Reverse((at, qpn))| (*at, Qpn::new(*qpn)))
    }

    /// Takes the earliest entry out.
    pub(crate) fn pop(&mut self) -> Option<(Instant, Qpn)> {
        self.heap.pop().map(|Reverse((at, qpn))| (at, Qpn::new(qpn)))
    }
}
