//! Bounded memory of connect requests. A REQ proves nothing about its sender, and its peer repeats or withdraws it. A forwarder
//! remembers where each went, without one host evicting the others'.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    time::Duration,
};

use roce_verbs::Instant;

use crate::cm::half_open::{Displaced, HalfOpen, peer_group};

/// Age below which an entry is not evicted for another request of its own host: time enough for a REP and its RTU. A flood in a
/// host's name is refused then, and does not evict the host's own recent requests.
const MIN_AGE: Duration = Duration::from_millis(250);

/// Key of a request and its repetitions: the sender's address and communication ID.
pub type RequestKey = (IpAddr, u32);

/// Bounds of a [`Requests`].
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Entries in all. Beyond that the oldest is evicted.
    pub total: usize,
    /// Entries of one host ([`host`]). Beyond that the host's oldest is evicted, or the new request is refused if all are
    /// younger than 250 ms.
    pub per_host: usize,
    /// Time after which an entry expires.
    pub lifetime: Duration,
}

impl RequestLimits {
    /// The bounds that the connection manager has for half-open connections: 4096 in all, a quarter of them of one host.
    pub const fn new(lifetime: Duration) -> Self {
        Self {
            total: 4096,
            per_host: 1024,
            lifetime,
        }
    }
}

/// Refusal of a request: its host has as many entries as it may have, all of them recent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostLimit;

#[derive(Debug)]
struct Entry<T> {
    key: RequestKey,
    at: Instant,
    value: T,
}

/// Requests and a value for each, bounded by number, by host and by time.
#[derive(Debug)]
pub struct Requests<T> {
    limits: RequestLimits,
    /// By serial number: the oldest first.
    entries: BTreeMap<u64, Entry<T>>,
    serials: HashMap<RequestKey, u64>,
    /// Serial numbers of each host's entries.
    hosts: HalfOpen,
    next_serial: u64,
}

/// Returns the host that an address belongs to: an IPv4 or link-local address itself, the /64 of any other IPv6 address,
/// of which one host may use all.
pub fn host(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => v6.into(),
        ip => peer_group(ip),
    }
}

impl<T> Requests<T> {
    /// Creates an empty memory.
    pub fn new(limits: RequestLimits) -> Self {
        Self {
            limits,
            entries: BTreeMap::new(),
            serials: HashMap::new(),
            hosts: HalfOpen::default(),
            next_serial: 0,
        }
    }

    /// Returns the number of entries, expired ones included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns a request's value unless it has expired.
    pub fn get(&self, now: Instant, key: RequestKey) -> Option<&T> {
        let entry = self.entries.get(self.serials.get(&key)?)?;
        (!self.has_expired(now, entry)).then_some(&entry.value)
    }

    fn has_expired(&self, now: Instant, entry: &Entry<T>) -> bool {
        entry.at + self.limits.lifetime <= now
    }

    /// Makes room for one more request of an address. Call it before any work is done for the request.
    ///
    /// # Errors
    /// If the address's host is at its limit and all of its entries are recent.
    pub fn admit(&mut self, now: Instant, remote: IpAddr) -> Result<(), HostLimit> {
        while let Some((_, oldest)) = self.entries.first_key_value().filter(|(_, e)| self.has_expired(now, e)) {
            self.remove(oldest.key);
        }
        let RequestLimits { total, per_host, .. } = self.limits;
        let displaced = self.hosts.displaced_by(host(remote), total, per_host);
        let (Displaced::OfPeer(serial) | Displaced::OfAll(serial)) = displaced.map_err(|_| HostLimit)? else {
            return Ok(());
        };
        let entry = self.entries.get(&serial).ok_or(HostLimit)?;
        if matches!(displaced, Ok(Displaced::OfPeer(_))) && entry.at + MIN_AGE > now {
            return Err(HostLimit);
        }
        self.remove(entry.key);
        Ok(())
    }

    /// Remembers a request, in place of an earlier one with the same key.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    pub fn insert(&mut self, now: Instant, key: RequestKey, value: T) -> Result<(), HostLimit> {
        self.remove(key);
        self.admit(now, key.0)?;
        let serial = self.next_serial;
        self.next_serial += 1;
        self.entries.insert(serial, Entry { key, at: now, value });
        self.serials.insert(key, serial);
        self.hosts.enter(serial, host(key.0), false);
        Ok(())
    }

    /// Forgets a request and returns its value.
    pub fn remove(&mut self, key: RequestKey) -> Option<T> {
        let serial = self.serials.remove(&key)?;
        self.hosts.leave(serial, host(key.0));
        Some(self.entries.remove(&serial)?.value)
    }

    /// Forgets the requests whose value fails a test.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let gone = self.entries.values().filter(|entry| !keep(&entry.value));
        let gone: Vec<RequestKey> = gone.map(|entry| entry.key).collect();
        for key in gone {
            self.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    const LIMITS: RequestLimits = RequestLimits {
        total: 100,
        per_host: 8,
        lifetime: Duration::from_secs(30),
    };

    fn v4(n: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(0x7f00_0000 | n).into()
    }

    fn v6(network: u64, low: u64) -> IpAddr {
        Ipv6Addr::from_bits(u128::from(network) << 64 | u128::from(low)).into()
    }

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn one_host_does_not_evict_another() {
        let mut requests = Requests::new(LIMITS);
        requests.insert(at(0), (v4(1), 7), 'a').unwrap();
        for n in 0..10_000 {
            let _ = requests.insert(at(u64::from(n)), (v4(2), n), 'b');
        }
        assert_eq!(requests.get(at(10_000), (v4(1), 7)), Some(&'a'));
        assert_eq!(requests.len(), 1 + LIMITS.per_host);
    }

    #[test]
    fn an_ipv6_network_is_one_host_unless_it_is_link_local() {
        let mut requests = Requests::new(LIMITS);
        let mut insert = |network: u64| {
            let before = requests.len();
            for low in 0..20 {
                let _ = requests.insert(at(0), (v6(network, low), 1), ());
            }
            requests.len() - before
        };
        assert_eq!(insert(0x2001_0db8_0000_0001), LIMITS.per_host);
        assert_eq!(insert(0xfe80_0000_0000_0000), 20);
    }

    #[test]
    fn a_host_at_its_limit_is_refused_until_its_oldest_entry_has_aged() {
        let mut requests = Requests::new(LIMITS);
        for n in 0..8 {
            requests.insert(at(0), (v4(1), n), n).unwrap();
        }
        assert_eq!(requests.admit(at(249), v4(1)), Err(HostLimit));
        assert_eq!(requests.insert(at(249), (v4(1), 8), 8), Err(HostLimit));
        assert_eq!(requests.insert(at(250), (v4(1), 8), 8), Ok(()));
        assert_eq!(requests.get(at(250), (v4(1), 0)), None, "the oldest made room");
        assert_eq!(requests.get(at(250), (v4(1), 1)), Some(&1));
        assert_eq!(requests.admit(at(250), v4(2)), Ok(()));
    }

    #[test]
    fn the_oldest_of_all_is_evicted_beyond_the_total() {
        let mut requests = Requests::new(LIMITS);
        for n in 0..500 {
            requests.insert(at(0), (v4(n), 1), n).unwrap();
        }
        assert_eq!(requests.len(), LIMITS.total);
        assert_eq!(requests.get(at(0), (v4(399), 1)), None);
        assert_eq!(requests.get(at(0), (v4(400), 1)), Some(&400));
    }

    #[test]
    fn entries_expire_and_nothing_of_them_is_left() {
        let mut requests = Requests::new(LIMITS);
        for n in 0..50 {
            requests.insert(at(0), (v4(n), 1), n).unwrap();
        }
        assert_eq!(requests.get(at(30_000), (v4(3), 1)), None);
        requests.insert(at(30_000), (v4(1), 2), 0).unwrap();
        assert_eq!(
            (requests.len(), requests.serials.len(), requests.hosts.counts()),
            (1, 1, (1, 1))
        );
        requests.retain(|n| *n != 0);
        assert!(requests.is_empty() && requests.serials.is_empty());
        assert_eq!(requests.hosts.counts(), (0, 0));
    }

    #[test]
    fn a_repeated_key_replaces_its_entry() {
        let mut requests = Requests::new(LIMITS);
        for value in 0..100 {
            requests.insert(at(0), (v4(1), 1), value).unwrap();
        }
        assert_eq!((requests.len(), requests.get(at(0), (v4(1), 1))), (1, Some(&99)));
        assert_eq!(requests.remove((v4(1), 1)), Some(99));
        assert_eq!(requests.remove((v4(1), 1)), None);
    }
}
