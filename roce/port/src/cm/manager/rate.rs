//! Rate limits of MADs, by peer address.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use roce_verbs::Instant;

use crate::cm::types::RateLimit;

/// Token bucket, kept as the time at which it is full again (ITU-T I.371, virtual scheduling).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct TokenBucket {
    full_at: Instant,
}

impl TokenBucket {
    /// Takes one token. Returns false if there is none.
    pub(super) fn take(&mut self, now: Instant, limit: RateLimit) -> bool {
        let each = 1_000_000_000 / u64::from(limit.per_second.max(1));
        let depth = each.saturating_mul(limit.burst.into());
        let now = now.as_nanos();
        let full_at = self.full_at.as_nanos().max(now).saturating_add(each);
        if full_at - now > depth {
            return false;
        }
        self.full_at = Instant::from_nanos(full_at);
        true
    }
}

/// Buckets of the peers ([`peer_group`]) whose bucket is not full.
#[derive(Default)]
pub(super) struct Buckets {
    of: BTreeMap<IpAddr, TokenBucket>,
    /// Index of the buckets, the fullest first.
    by_fill: BTreeSet<(Instant, IpAddr)>,
}

impl Buckets {
    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    /// Takes one token of a peer. Returns false if it has none.
    ///
    /// Beyond `max` buckets, the fullest is removed: least is lost with it, and a flood from ever new addresses only evicts buckets of
    /// its own.
    pub(super) fn take(&mut self, now: Instant, peer: IpAddr, limit: RateLimit, max: usize) -> bool {
        let mut bucket = self.of.get(&peer).copied().unwrap_or_default();
        let before = bucket;
        if !bucket.take(now, limit) {
            return false;
        }
        self.by_fill.remove(&(before.full_at, peer));
        self.by_fill.insert((bucket.full_at, peer));
        self.of.insert(peer, bucket);
        while let Some(&(full_at, peer)) = self.by_fill.first() {
            if full_at > now && self.of.len() <= max {
                break;
            }
            self.by_fill.pop_first();
            self.of.remove(&peer);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use core::{net::Ipv4Addr, time::Duration};

    use super::*;

    const LIMIT: RateLimit = RateLimit {
        per_second: 100,
        burst: 10,
    };

    fn v4(n: u32) -> IpAddr {
        Ipv4Addr::from(n).into()
    }

    fn taken(b: &mut Buckets, now: Instant, peer: IpAddr, tries: usize) -> usize {
        (0..tries).filter(|_| b.take(now, peer, LIMIT, 8)).count()
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut b = Buckets::default();
        let start = Instant::from_nanos(5_000_000_000);
        assert_eq!(taken(&mut b, start, v4(1), 50), 10);
        assert_eq!(taken(&mut b, start, v4(2), 50), 10, "another address has its own");
        let later = start + Duration::from_millis(50);
        assert_eq!(taken(&mut b, later, v4(1), 50), 5);
        let much_later = start + Duration::from_secs(60);
        assert_eq!(
            taken(&mut b, much_later, v4(1), 50),
            10,
            "no more than a burst is saved up"
        );
        assert_eq!(b.of.len(), 1, "a full bucket need not be kept");
    }

    #[test]
    fn ever_new_addresses_neither_grow_the_table_nor_free_the_heavy() {
        let mut b = Buckets::default();
        let now = Instant::from_nanos(1);
        assert_eq!(taken(&mut b, now, v4(1), 50), 10);
        for n in 2..10_000 {
            assert!(b.take(now, v4(n), LIMIT, 8));
            assert!(b.of.len() <= 8 && b.by_fill.len() == b.of.len());
        }
        assert_eq!(taken(&mut b, now, v4(1), 50), 0, "its bucket is still empty");
    }
}
