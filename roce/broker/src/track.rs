//! Connections of members, as members report them, and connect requests in flight. They tell which member a peer's message
//! is for that does not carry our communication ID, and what to end when a process dies.
//!
//! Packets create no connections, since anybody may send them.

use std::{collections::HashMap, net::IpAddr, time::Duration};

pub(crate) use roce_port::cm::requests::host;
use roce_port::cm::{
    mad::{Message, Subject},
    requests::{HostLimit, RequestKey, RequestLimits, Requests},
};
use roce_verbs::Instant;

use crate::proto::{Connection, Place};

/// Time for which a request is remembered.
const REQUEST_TIME: Duration = Duration::from_secs(30);

/// Peers' names of members' connections and requests.
#[derive(Debug)]
pub(crate) struct Tracker {
    /// Our communication IDs, which name the place, of established connections.
    by_remote: HashMap<RequestKey, u32>,
    /// Requests that were forwarded, and to which place.
    requests: Requests<Place>,
}

impl Default for Tracker {
    fn default() -> Self {
        Self {
            by_remote: HashMap::new(),
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

    /// Records a connection that a member has established.
    pub(crate) fn establish(&mut self, conn: &Connection) {
        let key = (conn.remote, conn.remote_id);
        self.requests.remove(key);
        // Two members can't have the same key: the first keeps it.
        self.by_remote.entry(key).or_insert(conn.local_id);
    }

    /// Forgets a connection that is closed.
    pub(crate) fn over(&mut self, conn: &Connection) {
        let key = (conn.remote, conn.remote_id);
        if self.by_remote.get(&key) == Some(&conn.local_id) {
            self.by_remote.remove(&key);
        }
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

    /// Forgets the requests that were forwarded to a member.
    pub(crate) fn forget(&mut self, place: Place) {
        self.requests.retain(|of| *of != place);
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::Qpn;
    use roce_port::cm::mad::{Dreq, Rej, Rep, Req, Rtu};

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
        t.forget(HERE);
        assert!(t.requests.is_empty());
    }

    #[test]
    fn a_connection_is_what_its_member_reports_and_no_packet_makes_or_ends_one() {
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
        assert!(t.by_remote.is_empty());
        t.establish(&conn);
        t.establish(&conn);
        assert_eq!((t.by_remote.len(), t.requests.len()), (1, 0));
        t.forwarded(ZERO, HERE, ip(2), &dreq);
        assert_eq!(t.owner(ZERO + 2 * REQUEST_TIME, ip(2), &req(9)), Some(HERE));
        t.over(&conn);
        assert!(t.by_remote.is_empty());
    }

    #[test]
    fn the_first_member_keeps_the_name_of_a_peers_connection() {
        let mut t = Tracker::default();
        t.establish(&connection(HERE, 1, 9));
        t.establish(&connection(OTHER, 1, 9));
        assert_eq!(t.owner(ZERO, ip(2), &req(9)), Some(HERE));
        t.over(&connection(OTHER, 1, 9));
        assert_eq!(t.owner(ZERO, ip(2), &req(9)), Some(HERE));
    }

    #[test]
    fn a_hosts_requests_are_refused_beyond_its_limit_and_others_are_not() {
        let mut t = Tracker::default();
        let conn = connection(HERE, 1, 1);
        t.establish(&conn);
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
