//! Servers that are one: each a share of it, in a loop of its own.

use crate::server::request::SessionKey;

/// Share of a server. Each has the same configuration, its own provider, on the same devices, and its own listener.
///
/// A session's *home* is the share that its connections 0 come to. It decides who gets in, and knows the state of each path. The
/// other connections of a path are spread over all shares, and what comes by one of them stays there: from the request to the
/// answer nothing passes between shares.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Share {
    index: usize,
    count: usize,
}

impl Share {
    /// The most shares.
    pub const MAX: usize = 64;

    /// A server that is all in one loop.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Number `index` of `count`; `None` when there can't be such a one.
    pub const fn new(index: usize, count: usize) -> Option<Self> {
        if index < count && count <= Self::MAX {
            Some(Self { index, count })
        } else {
            None
        }
    }

    /// Its number, from 0.
    pub const fn index(self) -> usize {
        self.index
    }

    /// How many there are.
    pub const fn count(self) -> usize {
        self.count
    }

    /// Share that a connection request belongs to: connection `cid` of a session whose home is this share. Whoever hands connection
    /// requests to the shares has to ask this.
    pub const fn of_connection(self, cid: u16) -> usize {
        (self.index + (cid as usize).saturating_sub(1)) % self.count
    }

    /// The other shares that have connections of a path with so many, the service connection included, if this is its home. Each is
    /// there once.
    pub fn others_of_path(self, connections: u16) -> impl Iterator<Item = usize> {
        let last = connections.min(u16::try_from(self.count).unwrap_or(u16::MAX));
        (1..=last)
            .filter(move |cid| *cid < connections)
            .map(move |cid| self.of_connection(cid))
            .filter(move |other| *other != self.index)
    }

    /// The home of a session of which connection `cid` has come here.
    pub(crate) const fn home_of(self, cid: u16) -> usize {
        let away = (cid as usize).saturating_sub(1) % self.count;
        (self.index + self.count - away) % self.count
    }

    /// The home of a session.
    pub const fn of_session(self, session: SessionKey) -> usize {
        (session.0.saturating_sub(1) % self.count as u64) as usize
    }

    /// All others.
    pub(crate) fn others(self) -> impl Iterator<Item = usize> {
        (0..self.count).filter(move |index| *index != self.index)
    }

    /// The first number for sessions of this home; each further one is [`count`](Self::count) higher, so that no two shares give
    /// the same.
    pub(crate) const fn first_session(self) -> SessionKey {
        SessionKey(1 + self.index as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connections_share_knows_the_home() {
        for count in [1, 2, 3, 7, Share::MAX] {
            for home in 0..count {
                let share = Share::new(home, count).unwrap();
                assert_eq!(share.of_connection(0), home);
                for cid in [0, 1, 2, 3, 4, 63, 64, 65, 300, u16::MAX] {
                    let there = Share::new(share.of_connection(cid), count).unwrap();
                    assert_eq!(there.home_of(cid), home, "{cid} of {home}/{count}");
                }
            }
        }
    }

    #[test]
    fn a_sessions_number_tells_its_home() {
        for count in [1, 2, 3, Share::MAX] {
            for home in 0..count {
                let share = Share::new(home, count).unwrap();
                let SessionKey(first) = share.first_session();
                let later = SessionKey(first + 7 * count as u64);
                assert_eq!([SessionKey(first), later].map(|key| share.of_session(key)), [home; 2]);
            }
        }
    }

    #[test]
    fn connections_are_spread_evenly_from_home_on() {
        let share = Share::new(1, 3).unwrap();
        let shares: Vec<usize> = (0..8).map(|cid| share.of_connection(cid)).collect();
        assert_eq!(shares, [1, 1, 2, 0, 1, 2, 0, 1]);
    }

    #[test]
    fn there_are_no_other_shares() {
        for (index, count) in [(0, 0), (1, 1), (64, 65), (2, 65)] {
            assert_eq!(Share::new(index, count), None);
        }
        assert_eq!(Share::new(0, 1), Some(Share::WHOLE));
    }
}
