//! Loops of sessions: each session is on one of a server's loops, whole.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use roce_verbs::Instant;

use crate::proto::Uuid;

/// Sessions that were placed on a loop while their first request was on its way there.
const MAX_EXPECTED: usize = 1024;
/// Time within which such a session is expected.
const EXPECTED: Duration = Duration::from_secs(30);

struct Home {
    at: usize,
    /// Paths, half-open ones included. A session without any is expected.
    paths: usize,
    /// When it was placed, unless it came without that.
    placed: Option<Instant>,
}

/// See the module.
pub(super) struct Homes {
    homes: BTreeMap<Uuid, Home>,
    /// Sessions that were placed, by age.
    placed: VecDeque<(Instant, Uuid)>,
    /// Sessions of each loop.
    loads: Vec<usize>,
}

impl Homes {
    /// Homes on so many loops, at least one.
    pub(super) fn new(loops: usize) -> Self {
        Self {
            homes: BTreeMap::new(),
            placed: VecDeque::new(),
            loads: vec![0; loops.max(1)],
        }
    }

    /// Sessions of each loop, expected ones included.
    pub(super) fn loads(&self) -> &[usize] {
        &self.loads
    }

    /// Returns the loop of a session; for an unknown one the loop with the fewest, where it is expected from here on if it may be new.
    pub(super) fn place(&mut self, now: Instant, session: Uuid, may_be_new: bool) -> usize {
        if let Some(home) = self.homes.get(&session) {
            return home.at;
        }
        if may_be_new {
            self.forget_expected(now);
        }
        let fewest = self.loads.iter().enumerate().min_by_key(|(_, load)| **load);
        let at = fewest.map_or(0, |(index, _)| index);
        if may_be_new {
            self.placed.push_back((now, session));
            self.settle(at, session, Some(now));
        }
        at
    }

    /// Makes room for one more session that is expected.
    fn forget_expected(&mut self, now: Instant) {
        while let Some((since, session)) = self.placed.front().copied() {
            if self.placed.len() < MAX_EXPECTED && now.saturating_since(since) < EXPECTED {
                return;
            }
            self.placed.pop_front();
            // It may have been placed again since.
            if self.homes.get(&session).is_some_and(|home| home.placed == Some(since)) {
                self.leave(session);
            }
        }
    }

    /// Whether a session has paths on another loop. So many may have been placed that it was forgotten where this one was expected.
    pub(super) fn is_elsewhere(&self, at: usize, session: Uuid) -> bool {
        let home = self.homes.get(&session);
        home.is_some_and(|home| home.at != at && home.paths > 0)
    }

    fn settle(&mut self, at: usize, session: Uuid, placed: Option<Instant>) -> &mut Home {
        let load = &mut self.loads[at];
        self.homes.entry(session).or_insert_with(|| {
            *load += 1;
            Home { at, paths: 0, placed }
        })
    }

    /// A session has one more path on a loop.
    pub(super) fn add_path(&mut self, at: usize, session: Uuid) {
        if self.homes.get(&session).is_some_and(|home| home.at != at) {
            self.leave(session);
        }
        self.settle(at, session, None).paths += 1;
    }

    /// A session has one path less.
    pub(super) fn remove_path(&mut self, session: Uuid) {
        if let Some(home) = self.homes.get_mut(&session) {
            home.paths = home.paths.saturating_sub(1);
        }
        self.leave(session);
    }

    /// Forgets a session that has no path.
    pub(super) fn leave(&mut self, session: Uuid) {
        if let Some(home) = self.homes.get(&session).filter(|home| home.paths == 0) {
            self.loads[home.at] -= 1;
            self.homes.remove(&session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(n: u32) -> Uuid {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        Uuid(bytes)
    }

    fn at(secs: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(secs)
    }

    #[test]
    fn sessions_go_to_the_loop_with_the_fewest_and_stay_there() {
        let mut homes = Homes::new(3);
        let place = |homes: &mut Homes, n| homes.place(at(1), uuid(n), true);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|n| place(&mut homes, n)), [0, 1, 2, 0, 1, 2]);
        assert_eq!(place(&mut homes, 4), 1, "it comes again");
        homes.add_path(1, uuid(1));
        homes.add_path(1, uuid(1));
        homes.remove_path(uuid(1));
        assert_eq!((place(&mut homes, 1), homes.loads()), (1, &[2; 3][..]));
        assert!(homes.is_elsewhere(0, uuid(1)) && !homes.is_elsewhere(1, uuid(1)));
        homes.remove_path(uuid(1));
        assert_eq!(homes.loads(), [2, 1, 2]);
        assert_eq!(place(&mut homes, 100), 1);
    }

    #[test]
    fn an_expected_session_may_come_to_another_loop() {
        let mut homes = Homes::new(2);
        assert_eq!(homes.place(at(1), uuid(1), true), 0);
        assert!(!homes.is_elsewhere(1, uuid(1)));
        homes.add_path(1, uuid(1));
        assert_eq!(homes.loads(), [0, 1]);
    }

    #[test]
    fn expected_sessions_that_do_not_come_are_forgotten() {
        let mut homes = Homes::new(2);
        for n in 0..4 * MAX_EXPECTED as u32 {
            homes.place(at(1), uuid(n), true);
        }
        assert_eq!(homes.loads().iter().sum::<usize>(), MAX_EXPECTED);
        assert_eq!((homes.homes.len(), homes.placed.len()), (MAX_EXPECTED, MAX_EXPECTED));
        // A further connection of an unknown path reserves nothing.
        homes.place(at(1), uuid(u32::MAX), false);
        assert_eq!(homes.homes.len(), MAX_EXPECTED);
        homes.place(at(32), uuid(7), true);
        assert_eq!((homes.homes.len(), homes.loads().iter().sum::<usize>()), (1, 1));
    }

    #[test]
    fn a_session_that_is_placed_again_is_expected_as_long() {
        let mut homes = Homes::new(2);
        homes.place(at(1), uuid(1), true);
        homes.leave(uuid(1));
        homes.place(at(20), uuid(1), true);
        homes.place(at(32), uuid(2), true);
        assert_eq!(homes.loads(), [1, 1]);
        homes.place(at(50), uuid(3), true);
        assert_eq!(homes.loads(), [1, 1], "30 s after it was placed again");
    }
}
