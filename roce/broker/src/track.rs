//! Connections of members, as members report them, and connect requests in flight. They tell which member a peer's message
//! is for that does not carry our communication ID, and what to end when a process dies.
//!
//! Packets create no connections, since anybody may send them.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

pub(crate) use roce_cm::requests::host;
use roce_cm::{
    mad::{Message, Subject},
    requests::{HostLimit, RequestKey, RequestLimits, Requests},
};
use roce_verbs::Instant;

use crate::proto::{Connection, Place};

/// Time for which a request is remembered.
const REQUEST_TIME: Duration = Duration::from_secs(30);

/// Members' connections and requests.
#[derive(Debug)]
pub(crate) struct Tracker {
    /// By our communication ID, which names the place.
    established: HashMap<u32, Connection>,
    by_remote: HashMap<RequestKey, u32>,
    counts: HashMap<Place, usize>,
    /// Requests that were forwarded, and to which place.
    requests: Requests<Place>,
}

impl Default for Tracker {
    fn default() -> Self {
        Self {
            established: HashMap::new(),
            by_remote: HashMap::new(),
            counts: HashMap::new(),
            requests: Requests::new(RequestLimits::new(REQUEST_TIME)),
        }
    }
}

impl Tracker {
    /// Checks the per-host limit of a peer's message before anything else is done with it. Only new requests count.
    ///
    /// # Errors
    /// When the peer's host has too many recent requests.
    pub(crate) fn admit(&mut self, now: Instant, remote: IpAddr, message: &Message) -> Result<(), HostLimit> {
        match message {
            Message::Req(_) if self.owner(now, remote, message).is_none() => self.requests.admit(now, remote),
            _ => Ok(()),
        }
    }

    /// Notes that a peer's message is forwarded to the member at `place`.
    pub(crate) fn forwarded(&mut self, now: Instant, place: Place, remote: IpAddr, message: &Message) {
        match message {
            Message::Req(m) => {
                let key = (remote, m.local_comm_id);
                if self.requests.get(now, key).is_none() && !self.by_remote.contains_key(&key) {
                    // Beyond the limit it was not admitted.
                    let _ = self.requests.insert(now, key, place);
                }
            }
            Message::Rej(m) => drop(self.requests.remove((remote, m.local_comm_id))),
            _ => {}
        }
    }

    /// Records a connection that a member has established. Returns false if its communication ID is not the member's.
    pub(crate) fn establish(&mut self, place: Place, conn: Connection) -> bool {
        if !place.covers(Place::of_comm_id(conn.local_id)) {
            return false;
        }
        self.over(place, conn.local_id);
        let key = (conn.remote, conn.remote_id);
        self.requests.remove(key);
        // Two members can't have the same key: the first keeps it.
        self.by_remote.entry(key).or_insert(conn.local_id);
        self.established.insert(conn.local_id, conn);
        *self.counts.entry(place).or_default() += 1;
        true
    }

    /// Forgets a connection that a member has closed.
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

    /// Returns the place that a message is for which names its connection by the peer's communication ID only.
    pub(crate) fn owner(&self, now: Instant, remote: IpAddr, message: &Message) -> Option<Place> {
        let id = match message {
            Message::Req(m) => m.local_comm_id,
            Message::Rej(m) if m.remote_comm_id == 0 || m.subject == Subject::Other => m.local_comm_id,
            _ => return None,
        };
        let key = (remote, id);
        let established = self.by_remote.get(&key).map(|id| Place::of_comm_id(*id));
        established.or_else(|| self.requests.get(now, key).copied())
    }

    /// Returns the number of a member's connections.
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
        self.requests.retain(|of| *of != place);
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
        assert!(t.take(HERE).is_empty() && t.requests.is_empty());
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
    fn a_hosts_requests_are_refused_beyond_its_limit_and_others_are_not() {
        let mut t = Tracker::default();
        let conn = connection(HERE, 1, 1);
        assert!(t.establish(HERE, conn));
        let mut admitted = 0;
        for id in 10..10_000 {
            if t.admit(ZERO, ip(2), &req(id)).is_ok() {
                admitted += 1;
                t.forwarded(ZERO, HERE, ip(2), &req(id));
            }
        }
        assert_eq!((admitted, t.requests.len()), (1024, 1024));
        assert!(t.admit(ZERO, ip(2), &req(10)).is_ok(), "it repeats an earlier one");
        assert!(t.admit(ZERO, ip(2), &req(1)).is_ok(), "it is of a connection");
        assert!(t.admit(ZERO, ip(2), &taken_back(20_000)).is_ok(), "it is no request");
        assert!(t.admit(ZERO, ip(3), &req(10_000)).is_ok());
        for n in 0..100_000 {
            t.forwarded(ZERO, HERE, ip(3), &req(n));
            t.forwarded(ZERO, HERE, ip(3), &taken_back(n));
        }
        assert_eq!(t.requests.len(), 1024, "what was taken back is forgotten");
    }
}
