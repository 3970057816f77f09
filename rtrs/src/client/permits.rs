//! Permits of a session: the right to one of the server's chunks. They limit the requests in flight to the queue depth.

use std::collections::VecDeque;

use roce_verbs::Instant;
use smallvec::SmallVec;

/// Quarantine of a permit whose request was sent by a lost path, and not answered there: until the server has closed that path, or until
/// a deadline. Until then packets of the old request may still arrive at the server's chunk, or be processed there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Quarantine<P> {
    /// The paths; `None` for a removed one, whose end is not reported.
    paths: SmallVec<[Option<P>; 2]>,
    /// When the last of their queue pairs stopped.
    pub since: Instant,
    /// When the server has certainly completed it.
    pub until: Instant,
}

impl<P: PartialEq> Quarantine<P> {
    /// Creates the quarantine of one path.
    pub fn new(path: P, since: Instant, until: Instant) -> Self {
        Self {
            paths: [Some(path)].into_iter().collect(),
            since,
            until,
        }
    }

    /// Combines two: it lasts until both are over.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        for path in other.paths {
            if path.is_none() || !self.paths.contains(&path) {
                self.paths.push(path);
            }
        }
        self.since = self.since.max(other.since);
        self.until = self.until.max(other.until);
        self
    }

    /// The server has closed a path.
    pub fn path_gone(&mut self, path: P) {
        let path = Some(path);
        self.paths.retain(|of| *of != path);
    }

    /// A path was removed.
    pub fn path_forgotten(&mut self, path: &P) {
        for of in &mut self.paths {
            of.take_if(|of| of == path);
        }
    }

    /// Whether all paths are gone.
    pub fn is_over(&self) -> bool {
        self.paths.is_empty()
    }
}

/// All permits of a session. `P` names a path.
#[derive(Debug)]
pub struct Permits<P> {
    depth: u16,
    /// LIFO: few chunks stay in use, and in caches.
    free: Vec<u16>,
    /// Ordered by deadline.
    quarantined: VecDeque<(Quarantine<P>, u16)>,
}

impl<P: Copy + PartialEq> Permits<P> {
    /// `depth` permits, numbered from 0.
    pub fn new(depth: u16) -> Self {
        Self {
            depth,
            free: (0..depth).rev().collect(),
            quarantined: VecDeque::new(),
        }
    }

    /// Takes a permit; `None` when all are in use.
    pub fn take(&mut self, now: Instant) -> Option<u16> {
        self.wake(now);
        self.free.pop()
    }

    /// Returns a permit whose request was answered, or never sent.
    pub fn give(&mut self, permit: u16) {
        debug_assert!(permit < self.depth && !self.free.contains(&permit));
        self.free.push(permit);
    }

    /// Returns a permit that is quarantined first.
    pub fn give_later(&mut self, permit: u16, quarantine: Quarantine<P>) {
        let at = self
            .quarantined
            .partition_point(|(other, _)| other.until <= quarantine.until);
        self.quarantined.insert(at, (quarantine, permit));
    }

    /// The server has completed all that arrived by this path.
    pub fn path_gone(&mut self, path: P) {
        let free = &mut self.free;
        self.quarantined.retain_mut(|(quarantine, permit)| {
            quarantine.path_gone(path);
            if quarantine.is_over() {
                free.push(*permit);
            }
            !quarantine.is_over()
        });
    }

    /// A path was removed: its permits stay in quarantine until the deadline.
    pub fn path_forgotten(&mut self, path: P) {
        for (quarantine, _) in &mut self.quarantined {
            quarantine.path_forgotten(&path);
        }
    }

    fn wake(&mut self, now: Instant) {
        while let Some((_, permit)) = self
            .quarantined
            .front()
            .filter(|(quarantine, _)| quarantine.until <= now)
        {
            self.free.push(*permit);
            self.quarantined.pop_front();
        }
    }

    /// When the next quarantine ends; `None` without one.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.quarantined.front().map(|(quarantine, _)| quarantine.until)
    }

    /// The server's queue depth has changed. No permit beyond it may be in use.
    pub fn set_depth(&mut self, depth: u16) {
        if depth >= self.depth {
            self.free.extend((self.depth..depth).rev());
        } else {
            self.free.retain(|permit| *permit < depth);
            self.quarantined.retain(|(_, permit)| *permit < depth);
        }
        self.depth = depth;
    }

    /// Permits in use, or in quarantine.
    pub fn in_use(&self) -> usize {
        usize::from(self.depth) - self.free.len()
    }

    /// Permits in use.
    pub fn held(&self) -> usize {
        self.in_use().saturating_sub(self.quarantined.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    fn quarantine<P: PartialEq>(path: P, ms: u64) -> Quarantine<P> {
        Quarantine::new(path, at(0), at(ms))
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
        permits.give_later(1, quarantine('b', 2500));
        permits.give_later(2, quarantine('b', 2500));
        permits.give_later(0, quarantine('a', 2000));
        assert_eq!((permits.take(at(1999)), permits.next_timeout()), (None, Some(at(2000))));
        permits.path_gone('b');
        assert_eq!((permits.take(at(1999)), permits.take(at(1999))), (Some(2), Some(1)));
        assert_eq!(permits.take(at(1999)), None);
        assert_eq!((permits.take(at(2000)), permits.next_timeout()), (Some(0), None));
    }

    #[test]
    fn what_went_by_two_paths_rests_until_nothing_of_either_can_come() {
        let mut permits = Permits::new(2);
        while permits.take(at(0)).is_some() {}
        permits.give_later(0, quarantine('a', 2000).and(quarantine('b', 1500)));
        permits.give_later(1, quarantine('a', 1000).and(quarantine('a', 1500)));
        permits.path_gone('b');
        assert_eq!(permits.take(at(999)), None);
        permits.path_gone('a');
        assert_eq!((permits.take(at(999)), permits.take(at(999))), (Some(0), Some(1)));
    }

    #[test]
    fn what_went_by_a_path_that_is_no_more_rests_until_its_time_is_over() {
        let mut permits = Permits::new(2);
        while permits.take(at(0)).is_some() {}
        permits.give_later(0, quarantine('a', 2000).and(quarantine('b', 1500)));
        permits.path_forgotten('a');
        // Another in its place.
        permits.path_gone('a');
        permits.path_gone('b');
        assert_eq!((permits.take(at(1999)), permits.take(at(2000))), (None, Some(0)));
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
