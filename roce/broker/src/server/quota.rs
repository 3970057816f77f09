//! Limits of one user, and the errors beyond them.

use std::{collections::HashMap, time::Duration};

use roce_verbs::Instant;

use crate::proto::{GENERATIONS, Isolation, MAX_GROUPS, SLOTS};

/// Limits of one user (by the user id of its processes). Requests beyond them are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quotas {
    /// Processes with a place.
    pub places: usize,
    /// Addresses that were opened for it.
    pub addresses: usize,
    /// Ports of RDMA_CM's port spaces, of all of its processes.
    pub ports: usize,
    /// Connections that are recorded, of all of its processes. Others work as well; when their process dies their peers are
    /// not disconnected.
    pub connections: usize,
}

impl Quotas {
    /// Limits of a broker for one user: those of all.
    pub const PRIVATE: Self = Self {
        places: SLOTS - 1,
        addresses: MAX_GROUPS,
        ports: 131_072,
        connections: 131_072,
    };
    /// Limits of a broker for several users: one of them leaves half of the places to the others.
    pub const SHARED: Self = Self {
        places: 64,
        addresses: 16,
        ports: 8192,
        connections: 16_384,
    };

    /// Returns how many whole slots one user may have, those in quarantine included; further processes get one generation of a slot. None where
    /// users are kept apart: a socket that a former member keeps lets the packets of its place through for ever, and a whole
    /// slot's numbers are soon another's.
    pub(super) const fn whole(&self, isolation: Isolation) -> usize {
        match isolation {
            Isolation::OneUser => SLOTS,
            Isolation::TrustDomain => SLOTS / 16,
            Isolation::Isolated => 0,
        }
    }

    /// Returns how many places may rest of processes that ended without a goodbye: more are not had until some have rested.
    pub(super) fn resting(&self) -> usize {
        let all = SLOTS * GENERATIONS;
        match self.places >= SLOTS - 1 {
            true => all,
            false => (all / 4).min(4 * self.places),
        }
    }
}

/// Largest number of connections of one user without a place.
pub(super) const MAX_NAMELESS: usize = 256;

/// Interval between log lines of one kind.
const PAUSE: Duration = Duration::from_secs(10);

/// Limits the rate of log lines of each kind.
#[derive(Default)]
pub(super) struct Throttle {
    last: HashMap<&'static str, (Instant, u64)>,
}

impl Throttle {
    /// Returns the number of lines suppressed since the last one, if a line of this kind may be written now.
    pub(super) fn pass(&mut self, now: Instant, kind: &'static str) -> Option<u64> {
        match self.last.get_mut(kind) {
            Some((at, left_out)) if *at + PAUSE > now => {
                *left_out += 1;
                None
            }
            _ => self.last.insert(kind, (now, 0)).map(|(_, n)| n).or(Some(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_a_while() {
        let mut t = Throttle::default();
        let now = Instant::ZERO;
        assert_eq!(t.pass(now, "a"), Some(0));
        assert_eq!(
            (t.pass(now, "a"), t.pass(now, "a"), t.pass(now, "b")),
            (None, None, Some(0))
        );
        assert_eq!(t.pass(now + PAUSE, "a"), Some(2));
        assert_eq!(t.pass(now + PAUSE + PAUSE, "a"), Some(0));
    }

    #[test]
    fn one_user_of_several_can_not_let_all_places_rest() {
        assert!(Quotas::SHARED.resting() <= SLOTS * GENERATIONS / 4);
        assert_eq!(Quotas::PRIVATE.resting(), SLOTS * GENERATIONS);
    }
}
