//! Events that wait to be read.

use std::collections::VecDeque;

/// Events that are kept. What a peer can repeat must not fill the memory.
const MAX: usize = 1024;

/// Events in their order. Beyond [`MAX`] the oldest are lost.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    events: VecDeque<T>,
    lost: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            events: VecDeque::new(),
            lost: 0,
        }
    }
}

impl<T> Queue<T> {
    pub(crate) fn push(&mut self, event: T) {
        if self.events.len() >= MAX {
            self.events.pop_front();
            self.lost += 1;
        }
        self.events.push_back(event);
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        self.events.pop_front()
    }

    /// Events that were lost.
    pub(crate) const fn lost(&self) -> u64 {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_limit_the_oldest_are_lost() {
        let mut queue = Queue::default();
        (0..MAX + 2).for_each(|n| queue.push(n));
        assert_eq!((queue.pop(), queue.pop(), queue.lost()), (Some(2), Some(3), 2));
    }
}
