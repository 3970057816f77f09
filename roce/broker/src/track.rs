//! Connections as management datagrams show them: whose a peer's message is that does not name our communication ID, and
//! what is to be ended when a process dies.
//!
//! Only messages from peers are seen. They tell enough: a REQ, and then the RTU that answers our REP, or a REP.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

use roce_cm::mad::{Message, Subject};
use roce_verbs::Instant;

use crate::proto::{Connection, Place};

/// Connections of one member that are remembered. A new one then takes the place of the oldest that is only a request.
const MAX_PER_PLACE: usize = 16_384;
/// How long a request is remembered that nothing came of: it may have been rejected, which is not seen here.
const REQUEST_TIME: Duration = Duration::from_secs(60);

/// The peer's name for a connection.
type RemoteKey = (IpAddr, u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    place: Place,
    conn: Connection,
    /// Tells it from others with the same key.
    serial: u64,
}

/// A request, in the order of their coming. It may have become a connection since, or be forgotten.
#[derive(Debug)]
struct Asked {
    at: Instant,
    key: RemoteKey,
    serial: u64,
}

impl Asked {
    /// Whether an entry is still this request, and no more.
    fn is(&self, known: &Known) -> bool {
        known.serial == self.serial && known.conn.local_id.is_none()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    by_remote: HashMap<RemoteKey, Known>,
    counts: HashMap<Place, usize>,
    asked: HashMap<Place, VecDeque<Asked>>,
    serial: u64,
}

impl Tracker {
    /// Takes note of a message from a peer that is for the member at `place`.
    pub(crate) fn observe(&mut self, now: Instant, place: Place, local: IpAddr, remote: IpAddr, message: &Message) {
        match message {
            Message::Req(m) => {
                let conn = Connection {
                    local,
                    remote,
                    local_id: None,
                    remote_id: m.local_comm_id,
                    remote_qpn: m.local_qpn.value(),
                };
                // A repeated REQ must not make a connection a request again.
                if !self.by_remote.contains_key(&(remote, m.local_comm_id)) {
                    self.insert(now, place, conn);
                }
            }
            Message::Rep(m) => {
                let conn = Connection {
                    local,
                    remote,
                    local_id: Some(m.remote_comm_id),
                    remote_id: m.local_comm_id,
                    remote_qpn: m.local_qpn.value(),
                };
                self.insert(now, place, conn);
            }
            Message::Rtu(m) => {
                let key = (remote, m.local_comm_id);
                if let Some(entry) = self.by_remote.get_mut(&key).filter(|e| e.place == place) {
                    entry.conn.local_id = Some(m.remote_comm_id);
                }
            }
            // A REJ of our REQ may come late, when a REP has been seen as well; it is of no use then.
            Message::Rej(m) => self.forget((remote, m.local_comm_id)),
            Message::Dreq(m) => self.forget((remote, m.local_comm_id)),
            Message::Drep(m) => self.forget((remote, m.local_comm_id)),
            Message::Mra(_) | Message::SidrReq(_) | Message::SidrRep(_) => {}
        }
    }

    /// What a member had with a former broker. What is not the member's by its communication ID, or known as another's, is
    /// left out.
    pub(crate) fn restore(&mut self, now: Instant, place: Place, conn: Connection) {
        let others = |e: &Known| e.place != place;
        let known = self.by_remote.get(&(conn.remote, conn.remote_id));
        if conn.local_id.is_none_or(|id| Place::of_comm_id(id) == place) && !known.is_some_and(others) {
            self.insert(now, place, conn);
        }
    }

    /// Whose a message is that names its connection by the peer's communication ID only.
    pub(crate) fn owner(&self, remote: IpAddr, message: &Message) -> Option<Place> {
        let id = match message {
            Message::Req(m) => m.local_comm_id,
            Message::Rej(m) if m.remote_comm_id == 0 || m.subject == Subject::Other => m.local_comm_id,
            _ => return None,
        };
        self.by_remote.get(&(remote, id)).map(|e| e.place)
    }

    /// How many connections of a member are known.
    pub(crate) fn count(&self, place: Place) -> usize {
        self.counts.get(&place).copied().unwrap_or(0)
    }

    /// All connections of a member.
    pub(crate) fn of(&self, place: Place) -> Vec<Connection> {
        let all = self.by_remote.values();
        all.filter(|e| e.place == place).map(|e| e.conn).collect()
    }

    /// Forgets a member, and returns its connections.
    pub(crate) fn take(&mut self, place: Place) -> Vec<Connection> {
        let all = self.of(place);
        for conn in &all {
            self.forget((conn.remote, conn.remote_id));
        }
        self.asked.remove(&place);
        all
    }

    fn insert(&mut self, now: Instant, place: Place, conn: Connection) {
        let key = (conn.remote, conn.remote_id);
        self.forget(key);
        while let Some(first) = self.asked.get(&place).and_then(VecDeque::front)
            && (first.at + REQUEST_TIME <= now || self.count(place) >= MAX_PER_PLACE || !self.is_request(first))
        {
            self.forget_oldest(place);
        }
        let count = self.counts.entry(place).or_default();
        if *count >= MAX_PER_PLACE {
            return;
        }
        *count += 1;
        self.serial += 1;
        let serial = self.serial;
        self.by_remote.insert(key, Known { place, conn, serial });
        if conn.local_id.is_some() {
            return;
        }
        let by_remote = &self.by_remote;
        let asked = self.asked.entry(place).or_default();
        if asked.len() >= 2 * MAX_PER_PLACE {
            asked.retain(|a| by_remote.get(&a.key).is_some_and(|e| a.is(e)));
        }
        asked.push_back(Asked { at: now, key, serial });
    }

    /// Whether nothing has come of it yet.
    fn is_request(&self, asked: &Asked) -> bool {
        self.by_remote.get(&asked.key).is_some_and(|known| asked.is(known))
    }

    /// Forgets the oldest request of a member, unless it has become a connection.
    fn forget_oldest(&mut self, place: Place) {
        let Some(first) = self.asked.get_mut(&place).and_then(VecDeque::pop_front) else {
            return;
        };
        if self.is_request(&first) {
            self.forget(first.key);
        }
    }

    fn forget(&mut self, key: RemoteKey) {
        let Some(old) = self.by_remote.remove(&key) else {
            return;
        };
        if let Entry::Occupied(mut count) = self.counts.entry(old.place) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::Qpn;
    use roce_cm::mad::{Dreq, Rej, Rep, Req, Rtu};

    use super::*;

    const HERE: Place = Place { slot: 3, generation: 1 };

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

    #[test]
    fn a_passive_connection_is_known_from_its_request_and_rtu() {
        let mut t = Tracker::default();
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &req(9));
        assert_eq!(
            t.owner(ip(2), &req(9)),
            Some(HERE),
            "the repeated request goes to the same"
        );
        assert_eq!(t.owner(ip(3), &req(9)), None, "another peer's is another");
        let rtu = Rtu {
            local_comm_id: 9,
            remote_comm_id: 1000,
            ..Rtu::default()
        };
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &Message::Rtu(rtu));
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &req(9));
        let all = t.take(HERE);
        assert_eq!(all.len(), 1);
        assert_eq!(
            (all[0].local_id, all[0].remote_id, all[0].remote_qpn),
            (Some(1000), 9, 77)
        );
        assert_eq!(t.count(HERE), 0);
    }

    #[test]
    fn an_active_connection_is_known_from_its_reply_and_ends_with_a_dreq() {
        let mut t = Tracker::default();
        let rep = Rep {
            local_comm_id: 5,
            remote_comm_id: 1001,
            ..Rep::default()
        };
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &Message::Rep(rep));
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &Message::Rep(rep));
        assert_eq!(t.count(HERE), 1);
        let timeout = Message::Rej(Rej {
            local_comm_id: 5,
            ..Rej::default()
        });
        assert_eq!(t.owner(ip(2), &timeout), Some(HERE));
        let dreq = Dreq {
            local_comm_id: 5,
            remote_comm_id: 1001,
            ..Dreq::default()
        };
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &Message::Dreq(dreq));
        assert_eq!(t.count(HERE), 0);
        assert!(t.by_remote.is_empty() && t.counts.is_empty());
    }

    #[test]
    fn no_more_than_a_bound_is_remembered() {
        let mut t = Tracker::default();
        for id in 1..MAX_PER_PLACE as u32 + 100 {
            t.observe(Instant::ZERO, HERE, ip(1), ip(2), &req(id));
        }
        assert_eq!(t.count(HERE), MAX_PER_PLACE);
        assert_eq!(t.owner(ip(2), &req(99)), None, "the oldest made room");
        assert_eq!(t.owner(ip(2), &req(100)), Some(HERE));
    }

    fn rtu(id: u32) -> Message {
        Message::Rtu(Rtu {
            local_comm_id: id,
            remote_comm_id: 1000 + id,
            ..Rtu::default()
        })
    }

    #[test]
    fn requests_that_nothing_came_of_are_forgotten_and_connections_are_not() {
        let mut t = Tracker::default();
        let mut now = Instant::ZERO;
        t.observe(now, HERE, ip(1), ip(2), &req(1));
        t.observe(now, HERE, ip(1), ip(2), &rtu(1));
        t.observe(now, HERE, ip(1), ip(2), &req(2));
        now = now + REQUEST_TIME / 2;
        t.observe(now, HERE, ip(1), ip(2), &req(3));
        now = now + REQUEST_TIME / 2;
        t.observe(now, HERE, ip(1), ip(2), &req(4));
        let mut ids: Vec<u32> = t.of(HERE).iter().map(|c| c.remote_id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [1, 3, 4]);
        // Not even when there are too many requests.
        for id in 10..2 * MAX_PER_PLACE as u32 {
            t.observe(now, HERE, ip(1), ip(3), &req(id));
        }
        assert_eq!(t.owner(ip(2), &req(1)), Some(HERE));
        assert_eq!(t.count(HERE), MAX_PER_PLACE);
        assert!(t.asked[&HERE].len() <= MAX_PER_PLACE);
    }

    #[test]
    fn connections_that_come_and_go_leave_nothing() {
        let mut t = Tracker::default();
        for id in 1..1000 {
            t.observe(Instant::ZERO, HERE, ip(1), ip(2), &req(id));
            t.observe(Instant::ZERO, HERE, ip(1), ip(2), &rtu(id));
            t.forget((ip(2), id));
        }
        assert!(t.asked[&HERE].len() <= 1);
    }

    #[test]
    fn a_member_is_only_given_back_what_is_its_own() {
        const OTHER: Place = Place { slot: 4, generation: 0 };
        let mut t = Tracker::default();
        t.observe(Instant::ZERO, HERE, ip(1), ip(2), &req(9));
        let conn = |remote_id, local_id| Connection {
            local: ip(1),
            remote: ip(2),
            local_id,
            remote_id,
            remote_qpn: 7,
        };
        let (first, _) = OTHER.numbers().comm_ids();
        t.restore(Instant::ZERO, OTHER, conn(9, Some(first)));
        assert_eq!((t.count(HERE), t.count(OTHER)), (1, 0), "known as another's");
        t.restore(Instant::ZERO, OTHER, conn(8, Some(HERE.numbers().comm_ids().0)));
        assert_eq!(t.count(OTHER), 0, "another's number");
        t.restore(Instant::ZERO, OTHER, conn(8, Some(first)));
        t.restore(Instant::ZERO, OTHER, conn(7, None));
        assert_eq!(t.count(OTHER), 2);
    }
}
