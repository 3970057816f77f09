//! Bounded memory of connect requests. A REQ proves nothing about its sender, and its peer repeats it or takes it back, so
//! a forwarder must remember where each went without letting one host push out the others.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use roce_verbs::Instant;

/// Age below which an entry is not evicted for another request of its own host: time enough for a REP and its RTU. A flood
/// in a host's name is refused then, and does not push out what the host itself has just asked.
const MIN_AGE: Duration = Duration::from_millis(250);

/// A request as its repetitions name it: the sender's address and communication ID.
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

#[derive(Clone, Copy, Debug)]
struct Entry<T> {
    serial: u64,
    at: Instant,
    value: T,
}

/// Requests and a value for each, bounded by number, by host and by time.
#[derive(Debug)]
pub struct Requests<T> {
    limits: RequestLimits,
    entries: HashMap<RequestKey, Entry<T>>,
    /// Keys by serial number: the oldest entry first.
    order: BTreeMap<u64, RequestKey>,
    /// Serial numbers of each host's entries.
    hosts: HashMap<IpAddr, BTreeSet<u64>>,
    next_serial: u64,
}

/// Returns the host that an address belongs to: an IPv4 or link-local address itself, the /64 of any other IPv6 address,
/// of which one host may use all.
pub fn host(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) if !v6.is_unicast_link_local() => {
            Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into()
        }
        other => other,
    }
}

impl<T> Requests<T> {
    /// Creates an empty memory.
    pub fn new(limits: RequestLimits) -> Self {
        Self {
            limits,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            hosts: HashMap::new(),
            next_serial: 0,
        }
    }

    /// Returns the number of entries, expired ones included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns a request's value unless it has expired.
    pub fn get(&self, now: Instant, key: RequestKey) -> Option<&T> {
        let entry = self.entries.get(&key)?;
        (entry.at + self.limits.lifetime > now).then_some(&entry.value)
    }

    /// Makes room for one more request of an address. Call it before any work is done for the request.
    ///
    /// # Errors
    /// When the address's host is at its limit and all of its entries are recent.
    pub fn admit(&mut self, now: Instant, remote: IpAddr) -> Result<(), HostLimit> {
        while let Some((_, key)) = self.order.first_key_value() {
            if self.get(now, *key).is_some() {
                break;
            }
            self.remove(*key);
        }
        let own = self.hosts.get(&host(remote));
        if own.is_some_and(|serials| serials.len() >= self.limits.per_host) {
            let oldest = own
                .and_then(BTreeSet::first)
                .and_then(|serial| self.order.get(serial))
                .copied();
            let evicted = oldest.filter(|key| self.entries.get(key).is_some_and(|e| e.at + MIN_AGE <= now));
            self.remove(evicted.ok_or(HostLimit)?);
        }
        while self.entries.len() >= self.limits.total
            && let Some((_, key)) = self.order.first_key_value()
        {
            self.remove(*key);
        }
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
        self.entries.insert(key, Entry { serial, at: now, value });
        self.order.insert(serial, key);
        self.hosts.entry(host(key.0)).or_default().insert(serial);
        Ok(())
    }

    /// Forgets a request and returns its value.
    pub fn remove(&mut self, key: RequestKey) -> Option<T> {
        let entry = self.entries.remove(&key)?;
        self.order.remove(&entry.serial);
        let host = host(key.0);
        if let Some(serials) = self.hosts.get_mut(&host) {
            serials.remove(&entry.serial);
            if serials.is_empty() {
                self.hosts.remove(&host);
            }
        }
        Some(entry.value)
    }

    /// Forgets the requests whose value fails a test.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let gone = self.entries.iter().filter(|(_, entry)| !keep(&entry.value));
        let gone: Vec<RequestKey> = gone.map(|(key, _)| *key).collect();
        for key in gone {
            self.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!((requests.len(), requests.order.len(), requests.hosts.len()), (1, 1, 1));
        requests.retain(|n| *n != 0);
        assert!(requests.is_empty() && requests.order.is_empty() && requests.hosts.is_empty());
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
