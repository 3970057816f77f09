//! Permits of a session: the right to one of the server's chunks. They limit the requests in flight to the queue depth.

use std::collections::VecDeque;

use roce_verbs::Instant;

/// When a permit whose request went by a path that died may be used again: the server may still work on the chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rest<P> {
    path: P,
    until: Instant,
    permit: u16,
}

/// All permits of a session. `P` names a path.
#[derive(Debug)]
pub struct Permits<P> {
    depth: u16,
    /// The last returned is given out first, so that few chunks stay in use (and in caches).
    free: Vec<u16>,
    resting: VecDeque<Rest<P>>,
}

impl<P: Copy + PartialEq> Permits<P> {
    /// `depth` permits, numbered from 0.
    pub fn new(depth: u16) -> Self {
        Self {
            depth,
            free: (0..depth).rev().collect(),
            resting: VecDeque::new(),
        }
    }

    /// How many there are.
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Takes one; `None` when all are in use.
    pub fn take(&mut self, now: Instant) -> Option<u16> {
        self.wake(now);
        self.free.pop()
    }

    /// Gives one back whose request was answered, or never sent.
    pub fn give(&mut self, permit: u16) {
        debug_assert!(permit < self.depth && !self.free.contains(&permit));
        self.free.push(permit);
    }

    /// Gives one back whose request was sent by a path that is going down, and not answered: it rests until the path is gone, or
    /// until this time, when the server has long done with it.
    pub fn give_later(&mut self, permit: u16, path: P, until: Instant) {
        self.resting.push_back(Rest { path, until, permit });
    }

    /// The server is done with what came by this path.
    pub fn path_gone(&mut self, path: P) {
        let free = &mut self.free;
        self.resting.retain(|rest| {
            let wakes = rest.path == path;
            if wakes {
                free.push(rest.permit);
            }
            !wakes
        });
    }

    fn wake(&mut self, now: Instant) {
        while let Some(rest) = self.resting.front().filter(|rest| rest.until <= now) {
            self.free.push(rest.permit);
            self.resting.pop_front();
        }
    }

    /// When the next one that rests is free; `None` when none rests.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.resting.front().map(|rest| rest.until)
    }

    /// The server has another queue depth than before. Of permits beyond it none may be in use.
    pub fn set_depth(&mut self, depth: u16) {
        if depth >= self.depth {
            self.free.extend((self.depth..depth).rev());
        } else {
            self.free.retain(|permit| *permit < depth);
            self.resting.retain(|rest| rest.permit < depth);
        }
        self.depth = depth;
    }

    /// How many are in use, or rest.
    pub fn in_use(&self) -> usize {
        usize::from(self.depth) - self.free.len()
    }

    /// How many are in use.
    pub fn held(&self) -> usize {
        self.in_use().saturating_sub(self.resting.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn as_many_as_the_queue_is_deep_and_the_last_returned_first() {
        let mut permits = Permits::<u8>::new(3);
        let taken: Vec<_> = std::iter::from_fn(|| permits.take(at(0))).collect();
        assert_eq!(taken, [0, 1, 2]);
        permits.give(1);
        permits.give(0);
        assert_eq!((permits.take(at(0)), permits.in_use()), (Some(0), 2));
    }

    #[test]
    fn what_a_dying_path_had_rests_until_it_is_gone_or_long_enough() {
        let mut permits = Permits::new(3);
        while permits.take(at(0)).is_some() {}
        permits.give_later(0, 'a', at(2000));
        permits.give_later(1, 'b', at(2500));
        permits.give_later(2, 'b', at(2500));
        assert_eq!((permits.take(at(1999)), permits.next_timeout()), (None, Some(at(2000))));
        permits.path_gone('b');
        assert_eq!((permits.take(at(1999)), permits.take(at(1999))), (Some(2), Some(1)));
        assert_eq!(permits.take(at(1999)), None);
        assert_eq!((permits.take(at(2000)), permits.next_timeout()), (Some(0), None));
    }

    #[test]
    fn a_shallower_queue_loses_the_permits_beyond_it() {
        let mut permits = Permits::<u8>::new(4);
        let held = permits.take(at(0)).unwrap();
        permits.set_depth(2);
        assert_eq!((held, permits.take(at(0)), permits.take(at(0))), (0, Some(1), None));
        permits.set_depth(3);
        assert_eq!(permits.take(at(0)), Some(2));
        assert_eq!(permits.in_use(), 3);
    }
}
