//! Limits of peers' pending requests, and evictions.
//!
//! A request costs its sender one packet with any source address. If full tables refused new requests, strangers could keep everybody
//! out. Instead the oldest request with an unverified address is evicted: a real client needs one round trip, and survives if the table
//! turns over slower than that. (Requests of one address that are younger than our first pause stay: a burst of a busy host is
//! delayed rather than broken.)
//!
//! A listener's backlog limits the requests that are reported and wait for the consumer, whose queue of events can't grow. A place is
//! free again when the consumer answers the request or takes it from its queue, even if its peer has given up. One address can fill
//! the backlog, as in the kernel. A quarter more is reserved for other addresses, so that none keeps them out. Further requests are
//! dropped, and their peers repeat them.

use core::net::{IpAddr, Ipv6Addr};
use std::collections::{BTreeMap, BTreeSet};

use crate::cm::{drops::DropReason, types::ListenId};

/// Returns the addresses that share limits with `ip`: an IPv4 address alone, an IPv6 address's /64.
///
/// Other than in [`host`](crate::cm::requests::host) this holds for link-local addresses too: an on-link sender can use
/// any of them, and so would have no limits.
pub(super) fn peer_group(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

#[derive(Default, Debug)]
struct Group {
    count: usize,
    unproven: BTreeSet<u64>,
}

/// Half-open connections, or requests that are forwarded. Numbers count up, so the lowest is the oldest.
#[derive(Default, Debug)]
pub(super) struct HalfOpen {
    count: usize,
    unproven: BTreeSet<u64>,
    groups: BTreeMap<IpAddr, Group>,
}

/// Eviction that makes room for a new request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Displaced {
    /// None.
    None,
    /// Oldest of the same address.
    OfPeer(u64),
    /// Oldest of all.
    OfAll(u64),
}

impl HalfOpen {
    pub(super) fn enter(&mut self, id: u64, peer: IpAddr, proven: bool) {
        self.count += 1;
        let group = self.groups.entry(peer).or_default();
        group.count += 1;
        if !proven {
            group.unproven.insert(id);
            self.unproven.insert(id);
        }
    }

    pub(super) fn leave(&mut self, id: u64, peer: IpAddr) {
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

    /// Returns the number of connections, and the largest of one address.
    pub(super) fn counts(&self) -> (usize, usize) {
        let most = self.groups.values().map(|g| g.count).max();
        (self.count, most.unwrap_or(0))
    }

    /// Exempts a connection from eviction.
    pub(super) fn prove(&mut self, id: u64, peer: IpAddr) {
        self.unproven.remove(&id);
        if let Some(group) = self.groups.get_mut(&peer) {
            group.unproven.remove(&id);
        }
    }

    /// Chooses the connection that a request of `peer` evicts.
    ///
    /// # Errors
    /// If there is none: all others have verified addresses.
    pub(super) fn displaced_by(&self, peer: IpAddr, max: usize, max_per_peer: usize) -> Result<Displaced, DropReason> {
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

/// Number of requests reported to each listener's consumer that wait for it: of each address, and (`None`) of all.
#[derive(Default)]
pub(super) struct Backlogs(BTreeMap<(ListenId, Option<IpAddr>), usize>);

impl Backlogs {
    /// Checks that a request of `peer` fits into the listener's backlog.
    pub(super) fn check(&self, listener: ListenId, peer: IpAddr, backlog: u32) -> Result<(), DropReason> {
        let waiting = |of| self.0.get(&(listener, of)).copied().unwrap_or(0);
        let backlog = backlog as usize;
        let reserve = (backlog / 4).max(1);
        if waiting(None) >= backlog + reserve {
            return Err(DropReason::Backlog);
        }
        if waiting(Some(peer)) >= backlog {
            return Err(DropReason::BacklogPeer);
        }
        Ok(())
    }

    pub(super) fn take(&mut self, listener: ListenId, peer: IpAddr) {
        for of in [None, Some(peer)] {
            *self.0.entry((listener, of)).or_default() += 1;
        }
    }

    pub(super) fn free(&mut self, listener: ListenId, peer: IpAddr) {
        for key in [None, Some(peer)].map(|of| (listener, of)) {
            if let Some(n) = self.0.get_mut(&key) {
                *n -= 1;
                if *n == 0 {
                    self.0.remove(&key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u8) -> IpAddr {
        [10, 0, 0, n].into()
    }

    #[test]
    fn an_ipv6_network_is_one_group() {
        let group = |s: &str| peer_group(s.parse().unwrap());
        assert_eq!(group("fd00::1:2"), group("fd00::ffff:0:0:9"));
        assert_ne!(group("fd00:0:0:1::1"), group("fd00:0:0:2::1"));
        assert_eq!(group("::ffff:10.0.0.1"), group("10.0.0.1"));
        assert_ne!(group("10.0.0.1"), group("10.0.0.2"));
    }

    #[test]
    fn the_oldest_unproven_gives_way_first_within_its_address() {
        let mut h = HalfOpen::default();
        for n in 0..4 {
            h.enter(n, peer(n as u8 % 2), false);
        }
        assert_eq!(h.displaced_by(peer(1), 9, 9), Ok(Displaced::None));
        assert_eq!(h.displaced_by(peer(1), 9, 2), Ok(Displaced::OfPeer(1)));
        assert_eq!(h.displaced_by(peer(7), 4, 2), Ok(Displaced::OfAll(0)));
        h.prove(0, peer(0));
        h.prove(1, peer(1));
        assert_eq!(h.displaced_by(peer(7), 4, 2), Ok(Displaced::OfAll(2)));
        assert_eq!(h.displaced_by(peer(1), 4, 2), Ok(Displaced::OfPeer(3)));
        h.prove(3, peer(1));
        assert_eq!(h.displaced_by(peer(1), 4, 2), Err(DropReason::HalfOpenPeer));
        h.prove(2, peer(0));
        assert_eq!(h.displaced_by(peer(7), 4, 2), Err(DropReason::HalfOpen));
        for n in 0..4 {
            h.leave(n, peer(n as u8 % 2));
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
            assert_eq!(b.0[&(l, None)], backlog as usize);
            assert_eq!(b.check(l, peer(1), backlog), Err(DropReason::BacklogPeer));
            while b.check(l, peer(2), backlog).is_ok() {
                b.take(l, peer(2));
            }
            assert_eq!(b.0[&(l, None)], in_all, "with a backlog of {backlog}");
            assert_eq!(b.check(l, peer(3), backlog), Err(DropReason::Backlog));
            for _ in 0..backlog {
                b.free(l, peer(1));
            }
            assert!(!b.0.contains_key(&(l, Some(peer(1)))));
            assert_eq!(b.check(l, peer(3), backlog), Ok(()));
        }
    }
}
