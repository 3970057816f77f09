//! Deadlines of queue pairs or connections, earliest first. Entries are never removed from the middle: the owner of a deadline remembers
//! its earliest entry, and entries that no longer match are dropped when they expire.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::time::Instant;

/// Timer heap, with the names of the deadlines' owners. A late entry of an owner that is gone may hit the next one with its name, which
/// is then checked once too often.
#[derive(Debug)]
pub struct TimerHeap<K> {
    heap: BinaryHeap<Reverse<(Instant, K)>>,
}

impl<K: Ord> Default for TimerHeap<K> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
        }
    }
}

impl<K: Copy + Ord> TimerHeap<K> {
    /// Adds a deadline if it is earlier than `armed`, its owner's earliest entry. A later deadline costs nothing until the old entry
    /// expires.
    pub fn update(&mut self, key: K, armed: &mut Option<Instant>, deadline: Option<Instant>) {
        let Some(deadline) = deadline else {
            return;
        };
        if armed.is_none_or(|at| deadline < at) {
            *armed = Some(deadline);
            self.heap.push(Reverse((deadline, key)));
        }
    }

    /// Returns the earliest entry.
    pub fn peek(&self) -> Option<(Instant, K)> {
        self.heap.peek().map(|Reverse(entry)| *entry)
    }

    /// Removes the earliest entry.
    pub fn pop(&mut self) {
        self.heap.pop();
    }

    /// Removes the earliest entry if it is due, and returns it.
    pub fn pop_due(&mut self, now: Instant) -> Option<(Instant, K)> {
        let due = self.peek().filter(|(at, _)| *at <= now)?;
        self.pop();
        Some(due)
    }
}
