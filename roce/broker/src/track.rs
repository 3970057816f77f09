//! Connections of members, which these tell of themselves, and requests for one that are on their way: whose a peer's message
//! is that does not name our communication ID, and what is to be ended when a process dies.
//!
//! Packets make no connections, as anybody may send them. A request is remembered for a while, because its peer may repeat it
//! or take it back; so are only so many.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use roce_cm::mad::{Message, Subject};
use roce_verbs::Instant;

use crate::proto::{Connection, Place};

/// Requests that are remembered: in all (the oldest gives way), and of one host.
pub(crate) const MAX_REQUESTS: usize = 4096;
pub(crate) const MAX_REQUESTS_PER_HOST: usize = 64;
/// How long a request is remembered.
const REQUEST_TIME: Duration = Duration::from_secs(30);

/// The peer's name for a connection.
type RemoteKey = (IpAddr, u32);

/// What counts as one host: an IPv4 address, or a /64 of IPv6, which is what a host has at least.
pub(crate) fn host(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Asked {
    place: Place,
    at: Instant,
    /// Tells it from others with the same key.
    serial: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    /// By our communication ID, which names the place.
    established: HashMap<u32, Connection>,
    by_remote: HashMap<RemoteKey, u32>,
    counts: HashMap<Place, usize>,
    requests: HashMap<RemoteKey, Asked>,
    /// In the order of their coming. They may be forgotten since.
    order: VecDeque<(RemoteKey, u64)>,
    by_host: HashMap<IpAddr, usize>,
    serial: u64,
}

impl Tracker {
    /// A member at `place` is sent a peer's message.
    pub(crate) fn forwarded(&mut self, now: Instant, place: Place, remote: IpAddr, message: &Message) {
        match message {
            Message::Req(m) => self.remember(now, place, (remote, m.local_comm_id)),
            Message::Rej(m) => self.forget_request((remote, m.local_comm_id)),
            _ => {}
        }
    }

    fn remember(&mut self, now: Instant, place: Place, key: RemoteKey) {
        while let Some((first, serial)) = self.order.front().copied() {
            let known = self.requests.get(&first).filter(|r| r.serial == serial);
            if known.is_some_and(|r| r.at + REQUEST_TIME > now) && self.requests.len() < MAX_REQUESTS {
                break;
            }
            self.order.pop_front();
            if known.is_some() {
                self.forget_request(first);
            }
        }
        if self.requests.contains_key(&key) || self.by_remote.contains_key(&key) {
            return;
        }
        let count = self.by_host.entry(host(key.0)).or_default();
        if *count >= MAX_REQUESTS_PER_HOST {
            return;
        }
        *count += 1;
        self.serial += 1;
        let serial = self.serial;
        self.requests.insert(key, Asked { place, at: now, serial });
        // Those that are forgotten early leave their entry here.
        if self.order.len() >= 2 * MAX_REQUESTS {
            let requests = &self.requests;
            self.order
                .retain(|(k, s)| requests.get(k).is_some_and(|r| r.serial == *s));
        }
        self.order.push_back((key, serial));
    }

    fn forget_request(&mut self, key: RemoteKey) {
        if self.requests.remove(&key).is_some()
            && let Entry::Occupied(mut count) = self.by_host.entry(host(key.0))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// A member has established a connection. False: it is not its own, by its communication ID.
    pub(crate) fn establish(&mut self, place: Place, conn: Connection) -> bool {
        if !place.covers(Place::of_comm_id(conn.local_id)) {
            return false;
        }
        self.over(place, conn.local_id);
        let key = (conn.remote, conn.remote_id);
        self.forget_request(key);
        // Two members can't have the same; who is first has it.
        self.by_remote.entry(key).or_insert(conn.local_id);
        self.established.insert(conn.local_id, conn);
        *self.counts.entry(place).or_default() += 1;
        true
    }

    /// A connection of a member is over.
    pub(crate) fn over(&mut self, place: Place, local_id: u32) {
        if !place.covers(Place::of_comm_id(local_id)) {
            return;
        }
        let Some(conn) = self.established.remove(&local_id) else {
            return;
        };
        let key = (conn.remote, conn.remote_id);
        if self.by_remote.get(&key) == Some(&local_id) {
            self.by_remote.remove(&key);
        }
        if let Entry::Occupied(mut count) = self.counts.entry(place) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Whether a connection is known.
    pub(crate) fn knows(&self, local_id: u32) -> bool {
        self.established.contains_key(&local_id)
    }

    /// Whose a message is that names its connection by the peer's communication ID only: his place, or a generation of it.
    pub(crate) fn owner(&self, now: Instant, remote: IpAddr, message: &Message) -> Option<Place> {
        let id = match message {
            Message::Req(m) => m.local_comm_id,
            Message::Rej(m) if m.remote_comm_id == 0 || m.subject == Subject::Other => m.local_comm_id,
            _ => return None,
        };
        let key = (remote, id);
        let asked = || self.requests.get(&key).filter(|r| r.at + REQUEST_TIME > now);
        let established = self.by_remote.get(&key).map(|id| Place::of_comm_id(*id));
        established.or_else(|| asked().map(|r| r.place))
    }

    /// How many connections of a member are known.
    pub(crate) fn count(&self, place: Place) -> usize {
        self.counts.get(&place).copied().unwrap_or(0)
    }

    /// Forgets a member, and returns its connections.
    pub(crate) fn take(&mut self, place: Place) -> Vec<Connection> {
        let all = self.established.values();
        let all: Vec<Connection> = all
            .filter(|c| place.covers(Place::of_comm_id(c.local_id)))
            .copied()
            .collect();
        for conn in &all {
            self.over(place, conn.local_id);
        }
        let asked = self.requests.iter().filter(|(_, r)| r.place == place);
        let keys: Vec<RemoteKey> = asked.map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.forget_request(key));
        all
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::Qpn;
    use roce_cm::mad::{Dreq, Rej, Rep, Req, Rtu};

    use super::*;

    const HERE: Place = Place { slot: 3, generation: 1 };
    const OTHER: Place = Place { slot: 4, generation: 0 };
    const ZERO: Instant = Instant::ZERO;

    fn ip(last: u8) -> IpAddr {
        [127, 0, 0, last].into()
    }

    fn req(id: u32) -> Message {
        Message::Req(Req {
            local_comm_id: id,
            local_qpn: Qpn::new(77),
            ..Req::default()
        })
    }

    fn taken_back(id: u32) -> Message {
        Message::Rej(Rej {
            local_comm_id: id,
            ..Rej::default()
        })
    }

    fn connection(place: Place, n: u32, remote_id: u32) -> Connection {
        Connection {
            local: ip(1),
            remote: ip(2),
            local_id: place.numbers().comm_ids().0 + n,
            remote_id,
            remote_qpn: 90,
        }
    }

    #[test]
    fn a_repeated_request_goes_to_the_same_until_it_is_taken_back() {
        let mut t = Tracker::default();
        t.forwarded(ZERO, HERE, ip(2), &req(9));
        assert_eq!(t.owner(ZERO, ip(2), &req(9)), Some(HERE));
        assert_eq!(t.owner(ZERO, ip(3), &req(9)), None, "another peer's is another");
        assert_eq!(t.owner(ZERO, ip(2), &taken_back(9)), Some(HERE));
        t.forwarded(ZERO, HERE, ip(2), &taken_back(9));
        assert_eq!(t.owner(ZERO, ip(2), &req(9)), None);
        t.forwarded(ZERO, HERE, ip(2), &req(10));
        assert_eq!(t.owner(ZERO + REQUEST_TIME, ip(2), &req(10)), None, "it was long ago");
        assert!(t.by_host.len() == 1 && t.take(HERE).is_empty() && t.by_host.is_empty() && t.requests.is_empty());
    }

    #[test]
    fn a_connection_is_what_its_member_tells_and_no_packet_makes_or_ends_one() {
        let mut t = Tracker::default();
        let conn = connection(HERE, 7, 9);
        t.forwarded(ZERO, HERE, ip(2), &req(9));
        let (local_comm_id, remote_comm_id) = (9, conn.local_id);
        let rtu = Message::Rtu(Rtu {
            local_comm_id,
            remote_comm_id,
            ..Rtu::default()
        });
        let rep = Message::Rep(Rep {
            local_comm_id,
            remote_comm_id,
            ..Rep::default()
        });
        let dreq = Message::Dreq(Dreq {
            local_comm_id,
            remote_comm_id,
            ..Dreq::default()
        });
        [&rep, &rtu].iter().for_each(|m| t.forwarded(ZERO, HERE, ip(2), m));
        assert_eq!((t.count(HERE), t.established.len()), (0, 0));
        assert!(t.establish(HERE, conn) && t.establish(HERE, conn));
        assert_eq!((t.count(HERE), t.requests.len()), (1, 0));
        t.forwarded(ZERO, HERE, ip(2), &dreq);
        assert_eq!(t.owner(ZERO + 2 * REQUEST_TIME, ip(2), &req(9)), Some(HERE));
        t.over(OTHER, conn.local_id);
        assert!(t.knows(conn.local_id), "it is not the other's to end");
        assert_eq!(t.take(HERE), [conn]);
        assert!(t.counts.is_empty() && t.by_remote.is_empty() && t.established.is_empty());
    }

    #[test]
    fn a_member_is_only_given_what_is_its_own() {
        let mut t = Tracker::default();
        assert!(!t.establish(OTHER, connection(HERE, 1, 9)), "another's number");
        assert!(t.establish(HERE, connection(HERE, 1, 9)));
        assert!(t.establish(OTHER, connection(OTHER, 1, 9)), "as good as any");
        assert_eq!(t.owner(ZERO, ip(2), &req(9)), Some(HERE), "who was first has the name");
        t.over(OTHER, connection(OTHER, 1, 9).local_id);
        assert_eq!(t.owner(ZERO, ip(2), &req(9)), Some(HERE));
    }

    #[test]
    fn requests_are_bounded_by_host_and_in_all_and_connections_outlast_them() {
        let mut t = Tracker::default();
        assert!(t.establish(HERE, connection(HERE, 1, 1)));
        for id in 10..10_000 {
            t.forwarded(ZERO, HERE, ip(2), &req(id));
        }
        assert_eq!(t.requests.len(), MAX_REQUESTS_PER_HOST);
        let of = |n: u32, low: u64| IpAddr::from(Ipv6Addr::from_bits((u128::from(n) << 64) | u128::from(low)));
        for low in 0..1000 {
            t.forwarded(ZERO, HERE, of(1, low), &req(low as u32));
        }
        assert_eq!(t.requests.len(), 2 * MAX_REQUESTS_PER_HOST, "a /64 is one host");
        for n in 2..20_000 {
            t.forwarded(ZERO, HERE, of(n, 1), &req(n));
        }
        assert_eq!(t.requests.len(), MAX_REQUESTS);
        assert!(t.order.len() <= 2 * MAX_REQUESTS && t.by_host.len() <= MAX_REQUESTS);
        assert_eq!(
            t.owner(ZERO, of(19_999, 1), &req(19_999)),
            Some(HERE),
            "the oldest made room"
        );
        assert_eq!(t.owner(ZERO, ip(2), &req(1)), Some(HERE));
        // And in time they go.
        t.forwarded(ZERO + REQUEST_TIME, HERE, ip(2), &req(5));
        assert_eq!((t.requests.len(), t.by_host.len()), (1, 1));
        for id in 0..100_000 {
            t.forwarded(ZERO + REQUEST_TIME, HERE, ip(2), &req(id));
            t.forwarded(ZERO + REQUEST_TIME, HERE, ip(2), &taken_back(id));
        }
        assert!(t.order.len() <= 2 * MAX_REQUESTS);
    }
}
