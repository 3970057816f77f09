//! Permits of a session: the right to one of the server's chunks. They limit the requests in flight to the queue depth.

use std::collections::VecDeque;

use roce_verbs::Instant;

/// When a permit whose request was sent by a path that went down, and not answered there, may have another request: when that path
/// is gone, or at this time at the latest. Until then something of the old one may still come to the server's chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rest<P> {
    /// The path; `None` if there are several, of which nobody waits for the end.
    pub path: Option<P>,
    /// When its queue pairs stopped.
    pub since: Instant,
    /// When the server has long done with it.
    pub until: Instant,
    /// The request has ended without an answer by any path: the server may be at work on it for as long as its disk takes.
    pub unanswered: bool,
}

impl<P: PartialEq> Rest<P> {
    /// Until both are over.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            path: self.path.filter(|path| other.path.as_ref() == Some(path)),
            since: self.since.max(other.since),
            until: self.until.max(other.until),
            unanswered: self.unanswered || other.unanswered,
        }
    }
}

/// All permits of a session. `P` names a path.
#[derive(Debug)]
pub struct Permits<P> {
    depth: u16,
    /// The last returned is given out first, so that few chunks stay in use (and in caches).
    free: Vec<u16>,
    /// In the order in which they wake.
    resting: VecDeque<(Rest<P>, u16)>,
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

    /// Gives one back that has to rest.
    pub fn give_later(&mut self, permit: u16, rest: Rest<P>) {
        let at = self.resting.partition_point(|(other, _)| other.until <= rest.until);
        self.resting.insert(at, (rest, permit));
    }

    /// Nothing comes to the server by this path any more, and it is done with what was answered by others; with `all` also with what
    /// was not answered.
    pub fn path_gone(&mut self, path: P, all: bool) {
        let free = &mut self.free;
        self.resting.retain(|(rest, permit)| {
            let wakes = rest.path == Some(path) && (all || !rest.unanswered);
            if wakes {
                free.push(*permit);
            }
            !wakes
        });
    }

    /// There is no such path any more: what rests for it rests until its time is over.
    pub fn path_forgotten(&mut self, path: P) {
        for (rest, _) in &mut self.resting {
            rest.path.take_if(|of| *of == path);
        }
    }

    fn wake(&mut self, now: Instant) {
        while let Some((_, permit)) = self.resting.front().filter(|(rest, _)| rest.until <= now) {
            self.free.push(*permit);
            self.resting.pop_front();
        }
    }

    /// When the next one that rests is free; `None` when none rests.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.resting.front().map(|(rest, _)| rest.until)
    }

    /// The server has another queue depth than before. Of permits beyond it none may be in use.
    pub fn set_depth(&mut self, depth: u16) {
        if depth >= self.depth {
            self.free.extend((self.depth..depth).rev());
        } else {
            self.free.retain(|permit| *permit < depth);
            self.resting.retain(|(_, permit)| *permit < depth);
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

    fn rest<P>(path: P, ms: u64) -> Rest<P> {
        Rest {
            path: Some(path),
            since: at(0),
            until: at(ms),
            unanswered: false,
        }
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
        permits.give_later(1, rest('b', 2500));
        permits.give_later(2, rest('b', 2500));
        permits.give_later(0, rest('a', 2000));
        assert_eq!((permits.take(at(1999)), permits.next_timeout()), (None, Some(at(2000))));
        permits.path_gone('b', false);
        assert_eq!((permits.take(at(1999)), permits.take(at(1999))), (Some(2), Some(1)));
        assert_eq!(permits.take(at(1999)), None);
        assert_eq!((permits.take(at(2000)), permits.next_timeout()), (Some(0), None));
    }

    #[test]
    fn what_was_not_answered_rests_until_the_server_is_done_with_that_too() {
        let mut permits = Permits::new(1);
        assert_eq!(permits.take(at(0)), Some(0));
        let unanswered = Rest {
            unanswered: true,
            ..rest('a', 2000)
        };
        permits.give_later(0, unanswered);
        permits.path_gone('a', false);
        assert_eq!(permits.take(at(0)), None);
        permits.path_gone('a', true);
        assert_eq!(permits.take(at(0)), Some(0));
    }

    #[test]
    fn what_went_by_two_paths_rests_until_nothing_of_either_can_come() {
        let mut permits = Permits::new(2);
        while permits.take(at(0)).is_some() {}
        permits.give_later(0, rest('a', 2000).and(rest('b', 1500)));
        permits.give_later(1, rest('a', 1000).and(rest('a', 1500)));
        permits.path_gone('b', false);
        assert_eq!(permits.take(at(999)), None);
        permits.path_gone('a', false);
        assert_eq!((permits.take(at(999)), permits.take(at(1999))), (Some(1), None));
        assert_eq!(permits.take(at(2000)), Some(0));
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
