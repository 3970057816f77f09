//! The other shares that have connections of a path, as home knows them.

use std::collections::{BTreeMap, BTreeSet};

use crate::server::share::Share;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It knows of the path.
    Told,
    /// It was told that requests will come.
    Asked,
    /// It takes requests.
    Ready,
}

/// See the module. None of a server that is all in one loop.
#[derive(Debug, Default)]
pub(crate) struct Others {
    shares: BTreeMap<usize, Stage>,
    /// Connections that they were told to accept.
    made: BTreeSet<u16>,
}

impl Others {
    /// Creates the state of a path with so many connections whose home is `share`.
    pub(crate) fn new(share: Share, connections: u16) -> Self {
        let shares = share.others_of_path(connections);
        Self {
            shares: shares.map(|other| (other, Stage::Told)).collect(),
            made: BTreeSet::new(),
        }
    }

    /// Shares that have not reported that nothing is left there.
    pub(crate) fn shares(&self) -> impl Iterator<Item = usize> {
        self.shares.keys().copied()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.shares.is_empty()
    }

    /// A share is told to accept a connection. False: it has no part in the path.
    pub(crate) fn make(&mut self, share: usize, cid: u16) -> bool {
        let part = self.shares.contains_key(&share);
        if part {
            self.made.insert(cid);
        }
        part
    }

    /// Whether a share was told to accept the connection.
    pub(crate) fn has(&self, cid: u16) -> bool {
        self.made.contains(&cid)
    }

    /// Takes the shares that were not told yet that requests will come.
    pub(crate) fn unprepared(&mut self) -> Vec<usize> {
        let told = self.shares.iter_mut().filter(|(_, stage)| **stage == Stage::Told);
        told.map(|(share, stage)| {
            *stage = Stage::Asked;
            *share
        })
        .collect()
    }

    /// A share takes requests.
    pub(crate) fn ready(&mut self, share: usize) {
        if let Some(stage) = self.shares.get_mut(&share) {
            *stage = Stage::Ready;
        }
    }

    /// Whether all take requests.
    pub(crate) fn are_ready(&self) -> bool {
        self.shares.values().all(|stage| *stage == Stage::Ready)
    }

    /// Nothing of the path is left at a share.
    pub(crate) fn gone(&mut self, share: usize) {
        self.shares.remove(&share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_without_a_connection_have_no_part() {
        let others = |home, count, connections| {
            let share = Share::new(home, count).unwrap();
            Others::new(share, connections).shares().collect::<Vec<_>>()
        };
        assert_eq!(others(0, 1, 9), []);
        assert_eq!(others(1, 3, 2), [], "connection 1 is home's as well");
        assert_eq!(others(1, 3, 3), [2]);
        for connections in [4, 5, 400, u16::MAX] {
            assert_eq!(others(1, 3, connections), [0, 2]);
        }
    }

    #[test]
    fn each_is_told_once_and_all_have_to_be_ready() {
        let mut others = Others::new(Share::new(0, 3).unwrap(), 4);
        assert!(others.make(1, 2) && others.has(2) && !others.has(3));
        assert!(!others.make(5, 3));
        assert_eq!((others.unprepared(), others.unprepared()), (vec![1, 2], vec![]));
        others.ready(2);
        assert!(!others.are_ready());
        others.ready(1);
        assert!(others.are_ready());
        others.gone(1);
        assert!(!others.is_empty());
        others.gone(2);
        assert!(others.is_empty() && others.are_ready());
    }
}
