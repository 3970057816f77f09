//! Places of a listener: which peer holds them, until when, and which connection is evicted. No clock and no socket of its own.

use std::{
    fmt,
    net::IpAddr,
    time::{Duration, Instant},
};

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Connections at a time.
    pub(super) all: usize,
    /// Of these, those that only trusted peers get.
    pub(super) reserved: usize,
    /// Connections of one peer that is not trusted.
    pub(super) each: usize,
    /// Time for the first request. Until it has arrived a connection is half-open.
    pub(super) first_request: Duration,
}

/// What distinguishes peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Identity {
    /// A user of this host.
    User(u32),
    /// An IPv4 address, or the /64 of an IPv6 address.
    Host(IpAddr),
}

impl Identity {
    /// The host that an address belongs to.
    pub(super) fn host(addr: IpAddr) -> Self {
        Self::Host(match addr.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
            v4 => v4,
        })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Host(addr) => write!(f, "host {addr}"),
        }
    }
}

/// The peer of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    pub(super) identity: Identity,
    /// May take reserved places, and any number of them.
    pub(super) trusted: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    HalfOpen { until: Instant },
    Open,
}

#[derive(Debug)]
struct Place {
    id: u64,
    peer: Peer,
    state: State,
}

/// A connection that got a place.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Entered {
    pub(super) id: u64,
    /// The half-open connection that was evicted for it.
    pub(super) evicted: Option<u64>,
}

/// Why a connection got no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Full {
    /// As many as there may be are open.
    All(usize),
    /// As many as this peer may have are open.
    Peer(Identity, usize),
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All(limit) => write!(f, "{limit} connections are open already, as many as there may be"),
            Self::Peer(who, limit) => write!(f, "{who} has {limit} connections open already, as many as it may have"),
        }
    }
}

/// The places that are taken, oldest first.
#[derive(Debug)]
pub(super) struct Places {
    limits: Limits,
    taken: Vec<Place>,
    next_id: u64,
}

impl Places {
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            limits,
            taken: Vec::new(),
            next_id: 0,
        }
    }

    fn count(&self, of: impl Fn(&Place) -> bool) -> usize {
        self.taken.iter().filter(|place| of(place)).count()
    }

    /// Gives a connection a place. Where the limit of its peer, or of all, is reached, the oldest half-open connection is evicted: of
    /// this peer, or of the peer that has the most.
    pub(super) fn enter(&mut self, peer: Peer, now: Instant) -> Result<Entered, Full> {
        let Limits {
            all,
            reserved,
            each,
            first_request,
        } = self.limits;
        let evicted = if !peer.trusted && self.count(|p| p.peer == peer) >= each {
            let oldest = self.oldest_half_open(|p| *p == peer);
            Some(oldest.ok_or(Full::Peer(peer.identity, each))?)
        } else if !peer.trusted && self.count(|p| !p.peer.trusted) >= all - reserved {
            Some(self.oldest_half_open(|p| !p.trusted).ok_or(Full::All(all - reserved))?)
        } else if self.taken.len() >= all {
            Some(self.oldest_half_open(|_| true).ok_or(Full::All(all))?)
        } else {
            None
        };
        if let Some(id) = evicted {
            self.leave(id);
        }
        let id = self.next_id;
        self.next_id += 1;
        let until = now + first_request;
        let state = State::HalfOpen { until };
        self.taken.push(Place { id, peer, state });
        Ok(Entered { id, evicted })
    }

    /// Of the peer that has the most connections, among these peers.
    fn oldest_half_open(&self, of: impl Fn(&Peer) -> bool) -> Option<u64> {
        let half_open = |p: &&Place| of(&p.peer) && p.state != State::Open;
        let held = |p: &&Place| self.count(|other| other.peer == p.peer);
        // Of several maxima the last one is taken: the oldest.
        let found = self.taken.iter().rev().filter(half_open).max_by_key(held);
        found.map(|place| place.id)
    }

    /// Its first request has arrived. False: it has no place any more.
    pub(super) fn open(&mut self, id: u64) -> bool {
        let place = self.taken.iter_mut().find(|place| place.id == id);
        place.map(|place| place.state = State::Open).is_some()
    }

    pub(super) fn leave(&mut self, id: u64) {
        self.taken.retain(|place| place.id != id);
    }

    /// When the next half-open connection has had its time.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let deadlines = self.taken.iter().filter_map(|place| match place.state {
            State::HalfOpen { until } => Some(until),
            State::Open => None,
        });
        deadlines.min()
    }

    /// Takes their places from those that have had their time, whatever has arrived from them.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<u64> {
        let late = |place: &Place| matches!(place.state, State::HalfOpen { until } if until <= now);
        let expired = self.taken.extract_if(.., |place| late(place));
        expired.map(|place| place.id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        all: 8,
        reserved: 2,
        each: 3,
        first_request: Duration::from_secs(10),
    };

    fn user(user: u32) -> Peer {
        Peer {
            identity: Identity::User(user),
            trusted: user == 0,
        }
    }

    fn full(places: &mut Places, who: u32, now: Instant) -> Full {
        places.enter(user(who), now).unwrap_err()
    }

    fn entered(places: &mut Places, who: u32, now: Instant) -> u64 {
        let entered = places.enter(user(who), now).unwrap();
        assert_eq!(entered.evicted, None);
        assert!(places.open(entered.id));
        entered.id
    }

    #[test]
    fn one_user_can_not_take_the_places_of_others_nor_all_users_those_of_root() {
        let (mut places, now) = (Places::new(LIMITS), Instant::now());
        let first = entered(&mut places, 7, now);
        for _ in 0..2 {
            entered(&mut places, 7, now);
        }
        assert_eq!(full(&mut places, 7, now), Full::Peer(Identity::User(7), 3));
        for _ in 0..3 {
            entered(&mut places, 8, now);
        }
        assert_eq!(full(&mut places, 9, now), Full::All(6));
        for _ in 0..2 {
            entered(&mut places, 0, now);
        }
        assert_eq!(full(&mut places, 0, now), Full::All(8));
        places.leave(first);
        entered(&mut places, 0, now);
    }

    #[test]
    fn the_oldest_half_open_connection_of_the_user_who_has_the_most_leaves() {
        let (mut places, now) = (Places::new(LIMITS), Instant::now());
        let mut enter = |who: u32| places.enter(user(who), now).unwrap();
        // As often as user 7 likes.
        let ids: Vec<_> = (0..6).map(|_| enter(7)).collect();
        let evicted: Vec<_> = ids.iter().map(|entered| entered.evicted).collect();
        assert_eq!(evicted, [None, None, None, Some(0), Some(1), Some(2)]);
        assert_eq!(
            (enter(8).evicted, enter(8).evicted, enter(9).evicted),
            (None, None, None)
        );
        // User 7 has three.
        assert_eq!(enter(10).evicted, Some(ids[3].id));
        assert_eq!((enter(0).evicted, enter(0).evicted), (None, None));
        // Root may have all, while others have not said a word.
        let evicted = (0..8).filter(|_| enter(0).evicted.is_some()).count();
        assert_eq!(evicted, 8);
    }

    #[test]
    fn deadlines_are_kept_whatever_has_arrived() {
        let (mut places, now) = (Places::new(LIMITS), Instant::now());
        assert_eq!(places.deadline(), None);
        let late = places.enter(user(7), now).unwrap().id;
        let next = places.enter(user(7), now + Duration::from_secs(1)).unwrap().id;
        let open = entered(&mut places, 7, now);
        assert_eq!(places.deadline(), Some(now + Duration::from_secs(10)));
        assert_eq!(places.expire(now + Duration::from_secs(9)), [0; 0]);
        assert_eq!(places.expire(now + Duration::from_secs(10)), [late]);
        assert!(!places.open(late) && places.open(next) && places.open(open));
        assert_eq!(places.deadline(), None);
    }

    #[test]
    fn hosts_are_told_apart_as_networks_are_given_out() {
        let host = |text: &str| Identity::host(text.parse().unwrap());
        assert_eq!(host("2001:db8::1"), host("2001:db8::2:3"));
        assert_ne!(host("2001:db8::1"), host("2001:db8:0:1::1"));
        assert_ne!(host("192.0.2.1"), host("192.0.2.2"));
        assert_eq!(host("::ffff:192.0.2.1"), host("192.0.2.1"));
    }
}
