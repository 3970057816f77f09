//! Requests of peers that are not settled yet: how many there may be, and who gives way to whom.
//!
//! A request costs its sender one packet with any source address, so refusing newcomers when all places are taken would
//! let strangers keep everybody out. Instead the oldest request whose address has not proved itself gives way: a real
//! client needs one round trip, and survives if the table turns over slower than that. (Within one address connections
//! that are younger than our first pause stay: so many of a busy host are delayed rather than broken.)
//!
//! A listener's backlog is another matter. It bounds the requests that are reported and wait for the consumer, which
//! frees a place by answering the request or by taking it from its queue, even if its peer has given up: the consumer's
//! queue of events can't grow. One address can fill the backlog, as in the kernel. A quarter more is reserved for other
//! addresses, so that none keeps them out. Further requests are dropped, and their peers repeat them.

use std::collections::{BTreeMap, BTreeSet};

use super::rate::PeerGroup;
use crate::types::{CmConfig, ConnId, DropReason, ListenId};

#[derive(Default)]
struct Group {
    count: usize,
    unproven: BTreeSet<ConnId>,
}

/// Half-open connections. IDs count up, so the lowest is the oldest.
#[derive(Default)]
pub(super) struct HalfOpen {
    /// Requests in the listeners' backlogs.
    pub(super) backlogs: Backlogs,
    count: usize,
    unproven: BTreeSet<ConnId>,
    groups: BTreeMap<PeerGroup, Group>,
}

/// Eviction that makes room for a new request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Displaced {
    /// Nobody.
    None,
    /// The oldest of the same address.
    OfPeer(ConnId),
    /// The oldest of all.
    OfAll(ConnId),
}

impl HalfOpen {
    pub(super) fn enter(&mut self, id: ConnId, peer: PeerGroup, proven: bool) {
        self.count += 1;
        let group = self.groups.entry(peer).or_default();
        group.count += 1;
        if !proven {
            group.unproven.insert(id);
            self.unproven.insert(id);
        }
    }

    pub(super) fn leave(&mut self, id: ConnId, peer: PeerGroup) {
        self.prove(id, peer);
        let Some(group) = self.groups.get_mut(&peer) else {
            return;
        };
        self.count -= 1;
        group.count -= 1;
        if group.count == 0 {
            self.groups.remove(&peer);
        }
    }

    /// How many, and the most of one address.
    pub(super) fn counts(&self) -> (usize, usize) {
        let most = self.groups.values().map(|g| g.count).max();
        (self.count, most.unwrap_or(0))
    }

    /// It does not give way any more.
    pub(super) fn prove(&mut self, id: ConnId, peer: PeerGroup) {
        self.unproven.remove(&id);
        if let Some(group) = self.groups.get_mut(&peer) {
            group.unproven.remove(&id);
        }
    }

    /// Whether there is room for one more request of `peer` at a listener, and who gives way to it.
    pub(super) fn room_for(
        &self,
        peer: PeerGroup,
        listener: ListenId,
        backlog: u32,
        config: &CmConfig,
    ) -> Result<Displaced, DropReason> {
        self.backlogs.check(listener, peer, backlog)?;
        self.displaced_by(peer, config.max_half_open, config.max_half_open_per_peer)
    }

    /// Chooses the connection that a request of `peer` evicts.
    ///
    /// # Errors
    /// When nobody does: all others have proved themselves.
    fn displaced_by(&self, peer: PeerGroup, max: usize, max_per_peer: usize) -> Result<Displaced, DropReason> {
        let group = self.groups.get(&peer);
        if group.map_or(0, |g| g.count) >= max_per_peer {
            let oldest = group.and_then(|g| g.unproven.first());
            return oldest.map(|id| Displaced::OfPeer(*id)).ok_or(DropReason::HalfOpenPeer);
        }
        if self.count >= max {
            let oldest = self.unproven.first();
            return oldest.map(|id| Displaced::OfAll(*id)).ok_or(DropReason::HalfOpen);
        }
        Ok(Displaced::None)
    }
}

/// Requests reported to each listener's consumer that wait for it, in all and of each address.
#[derive(Default)]
pub(super) struct Backlogs {
    at: BTreeMap<ListenId, usize>,
    of: BTreeMap<(ListenId, PeerGroup), usize>,
}

impl Backlogs {
    /// Checks that a request of `peer` fits into the listener's backlog.
    fn check(&self, listener: ListenId, peer: PeerGroup, backlog: u32) -> Result<(), DropReason> {
        let backlog = backlog as usize;
        let reserve = (backlog / 4).max(1);
        if self.at.get(&listener).is_some_and(|n| *n >= backlog + reserve) {
            return Err(DropReason::Backlog);
        }
        match self.of.get(&(listener, peer)) {
            Some(n) if *n >= backlog => Err(DropReason::BacklogPeer),
            _ => Ok(()),
        }
    }

    pub(super) fn take(&mut self, listener: ListenId, peer: PeerGroup) {
        *self.at.entry(listener).or_default() += 1;
        *self.of.entry((listener, peer)).or_default() += 1;
    }

    pub(super) fn free(&mut self, listener: ListenId, peer: PeerGroup) {
        less(&mut self.at, &listener);
        less(&mut self.of, &(listener, peer));
    }
}

/// Counts one less; nothing is kept of zeroes.
fn less<K: Ord>(map: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(n) = map.get_mut(key) {
        *n -= 1;
        if *n == 0 {
            map.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u8) -> PeerGroup {
        PeerGroup::of([10, 0, 0, n].into())
    }

    #[test]
    fn the_oldest_unproven_gives_way_first_within_its_address() {
        let mut h = HalfOpen::default();
        for n in 0..4 {
            h.enter(ConnId(n), peer(n as u8 % 2), false);
        }
        assert_eq!(h.displaced_by(peer(1), 9, 9), Ok(Displaced::None));
        assert_eq!(h.displaced_by(peer(1), 9, 2), Ok(Displaced::OfPeer(ConnId(1))));
        assert_eq!(h.displaced_by(peer(7), 4, 2), Ok(Displaced::OfAll(ConnId(0))));
        h.prove(ConnId(0), peer(0));
        h.prove(ConnId(1), peer(1));
        assert_eq!(h.displaced_by(peer(7), 4, 2), Ok(Displaced::OfAll(ConnId(2))));
        assert_eq!(h.displaced_by(peer(1), 4, 2), Ok(Displaced::OfPeer(ConnId(3))));
        h.prove(ConnId(3), peer(1));
        assert_eq!(h.displaced_by(peer(1), 4, 2), Err(DropReason::HalfOpenPeer));
        h.prove(ConnId(2), peer(0));
        assert_eq!(h.displaced_by(peer(7), 4, 2), Err(DropReason::HalfOpen));
        for n in 0..4 {
            h.leave(ConnId(n), peer(n as u8 % 2));
        }
        assert!(h.count == 0 && h.groups.is_empty() && h.unproven.is_empty());
    }

    #[test]
    fn one_address_can_fill_the_backlog_and_leaves_the_reserve_to_others() {
        let l = ListenId(1);
        for (backlog, in_all) in [(1, 2), (2, 3), (4, 5), (8, 10), (64, 80), (1024, 1280)] {
            let mut b = Backlogs::default();
            while b.check(l, peer(1), backlog).is_ok() {
                b.take(l, peer(1));
            }
            assert_eq!(b.at[&l], backlog as usize);
            assert_eq!(b.check(l, peer(1), backlog), Err(DropReason::BacklogPeer));
            while b.check(l, peer(2), backlog).is_ok() {
                b.take(l, peer(2));
            }
            assert_eq!(b.at[&l], in_all, "with a backlog of {backlog}");
            assert_eq!(b.check(l, peer(3), backlog), Err(DropReason::Backlog));
            for _ in 0..backlog {
                b.free(l, peer(1));
            }
            assert!(!b.of.contains_key(&(l, peer(1))));
            assert_eq!(b.check(l, peer(3), backlog), Ok(()));
        }
    }
}
