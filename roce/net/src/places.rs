//! Admission control of a listener: which peer holds a place, until when, and which connection is evicted. No clock and no socket of
//! its own.

use core::ops::Add;
use std::{fmt, net::IpAddr, time::Duration};

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time, half-open ones included.
    pub all: usize,
    /// Open connections at a time. The rest of `all` is a queue of half-open ones.
    pub open: usize,
    /// Of either, those that only trusted peers get.
    pub reserved: usize,
    /// Connections of one peer that is not trusted.
    pub each: usize,
}

/// Identity by which peers are told apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Identity {
    /// A user of this host.
    User(u32),
    /// An IPv4 address, or the /64 of an IPv6 address.
    Host(IpAddr),
}

impl Identity {
    /// The host that an address belongs to.
    pub fn host(addr: IpAddr) -> Self {
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
pub struct Peer {
    /// User or host.
    pub identity: Identity,
    /// May take reserved places, and any number of them.
    pub trusted: bool,
}

#[derive(Debug)]
struct Place<T> {
    id: u64,
    peer: Peer,
    /// Time since which its handshake, or first request, is awaited. `None`: it is open.
    half_open: Option<T>,
}

impl<T> Place<T> {
    const fn is_open(&self) -> bool {
        self.half_open.is_none()
    }
}

/// A connection that got a place.
#[derive(PartialEq, Eq, Debug)]
pub struct Entered {
    /// Names the connection from here on.
    pub id: u64,
    /// The half-open connection that was evicted for it.
    pub evicted: Option<u64>,
}

/// Why a connection got no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
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

/// Why a half-open connection can't become an open one. It has no place any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// It was evicted, or has expired.
    Evicted,
    /// Others were faster.
    Full(Full),
}

/// The places that are taken, oldest first. `T` is a point in time.
#[derive(Debug)]
pub struct Places<T> {
    limits: Limits,
    taken: Vec<Place<T>>,
    next_id: u64,
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Places<T> {
    /// None is taken.
    pub const fn new(limits: Limits) -> Self {
        Self {
            limits,
            taken: Vec::new(),
            next_id: 0,
        }
    }

    fn count(&self, of: impl Fn(&Place<T>) -> bool) -> usize {
        self.taken.iter().filter(|place| of(place)).count()
    }

    fn half_open_of(&self, peer: &Peer) -> usize {
        self.count(|place| place.peer == *peer && !place.is_open())
    }

    /// Whether no further connection of a peer can be open.
    fn check_open(&self, peer: &Peer) -> Result<(), Full> {
        let Limits {
            open, reserved, each, ..
        } = self.limits;
        let count = |of: &dyn Fn(&Peer) -> bool| self.count(|place| place.is_open() && of(&place.peer));
        if !peer.trusted && count(&|other| other == peer) >= each {
            Err(Full::Peer(peer.identity, each))
        } else if !peer.trusted && count(&|other| !other.trusted) >= open - reserved {
            Err(Full::All(open - reserved))
        } else if count(&|_| true) >= open {
            Err(Full::All(open))
        } else {
            Ok(())
        }
    }

    /// The half-open connection that is evicted for one of this peer. Where the limit of the peer, or of all, is reached, that is the
    /// oldest one of the peer, or of the one that has the most of them.
    fn victim(&self, peer: &Peer) -> Option<&Place<T>> {
        let Limits {
            all, reserved, each, ..
        } = self.limits;
        if !peer.trusted && self.count(|p| p.peer == *peer) >= each {
            self.oldest_half_open(|p| p == peer)
        } else if !peer.trusted && self.count(|p| !p.peer.trusted) >= all - reserved {
            self.oldest_half_open(|p| !p.trusted)
        } else if self.taken.len() >= all {
            self.oldest_half_open(|_| true)
        } else {
            None
        }
    }

    /// Of the peer that has the most half-open connections, among these peers.
    fn oldest_half_open(&self, of: impl Fn(&Peer) -> bool) -> Option<&Place<T>> {
        let half_open = |p: &&Place<T>| of(&p.peer) && !p.is_open();
        // Of several maxima the last one is taken: the oldest.
        let found = self.taken.iter().rev().filter(half_open);
        found.max_by_key(|p| self.half_open_of(&p.peer))
    }

    /// When a connection of this peer should [enter](Self::enter), if not now: a half-open one is spared for this time, unless it
    /// is of a peer that has more of them, or of one that is not trusted as this one is. Without that a flood leaves no half-open
    /// connection the time to finish.
    pub fn spared_until(&self, peer: Peer, spare: Duration, now: T) -> Option<T> {
        self.check_open(&peer).ok()?;
        let victim = self.victim(&peer)?;
        let yields = (peer.trusted && !victim.peer.trusted)
            || self.half_open_of(&victim.peer) > self.half_open_of(&peer) + usize::from(victim.peer != peer);
        victim
            .half_open
            .map(|since| since + spare)
            .filter(|until| *until > now && !yields)
    }

    /// Gives a connection a place, in which it is half-open. Where the limit of its peer, or of all, is reached, the oldest half-open
    /// connection is evicted: of this peer, or of the peer that has the most of them.
    ///
    /// # Errors
    /// When as many are open as may be.
    pub fn enter(&mut self, peer: Peer, now: T) -> Result<Entered, Full> {
        self.check_open(&peer)?;
        let evicted = self.victim(&peer).map(|place| place.id);
        if let Some(id) = evicted {
            self.leave(id);
        }
        let id = self.push(peer, Some(now));
        Ok(Entered { id, evicted })
    }

    /// Gives a place that is open from the start, without a handshake.
    ///
    /// # Errors
    /// When as many are open as may be.
    pub fn take(&mut self, peer: Peer) -> Result<u64, Full> {
        self.check_open(&peer)?;
        Ok(self.push(peer, None))
    }

    fn push(&mut self, peer: Peer, half_open: Option<T>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.taken.push(Place { id, peer, half_open });
        id
    }

    /// Its handshake is over, or its first request has arrived: it is neither evicted nor expires from here on.
    ///
    /// # Errors
    /// When it has no place (any more).
    pub fn open(&mut self, id: u64) -> Result<(), Refusal> {
        let at = self.taken.iter().position(|place| place.id == id);
        let at = at.ok_or(Refusal::Evicted)?;
        if self.taken[at].is_open() {
            return Ok(());
        }
        let peer = self.taken[at].peer;
        if let Err(full) = self.check_open(&peer) {
            self.taken.remove(at);
            return Err(Refusal::Full(full));
        }
        self.taken[at].half_open = None;
        Ok(())
    }

    /// The connection is closed.
    pub fn leave(&mut self, id: u64) {
        self.taken.retain(|place| place.id != id);
    }

    /// When the next half-open connection has had this time.
    pub fn deadline(&self, time: Duration) -> Option<T> {
        self.taken
            .iter()
            .filter_map(|place| Some(place.half_open? + time))
            .min()
    }

    /// Takes their places from half-open connections that have had this time, whatever has arrived from them.
    pub fn expire(&mut self, time: Duration, now: T) -> Vec<u64> {
        let late = |place: &Place<T>| place.half_open.is_some_and(|since| since + time <= now);
        let expired = self.taken.extract_if(.., |place| late(place));
        expired.map(|place| place.id).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMITS: Limits = Limits {
        all: 8,
        open: 8,
        reserved: 2,
        each: 3,
    };
    const TIME: Duration = Duration::from_secs(10);

    fn user(user: u32) -> Peer {
        Peer {
            identity: Identity::User(user),
            trusted: user == 0,
        }
    }

    fn full(places: &mut Places<Instant>, who: u32, now: Instant) -> Full {
        places.enter(user(who), now).unwrap_err()
    }

    fn entered(places: &mut Places<Instant>, who: u32, now: Instant) -> u64 {
        let entered = places.enter(user(who), now).unwrap();
        assert_eq!(entered.evicted, None);
        assert_eq!(places.open(entered.id), Ok(()));
        entered.id
    }

    #[test]
    fn places_without_a_handshake_have_the_same_limits() {
        let mut places: Places<Instant> = Places::new(LIMITS);
        let mut take = |who, times: usize| (0..times).try_for_each(|_| places.take(user(who)).map(drop));
        assert_eq!(
            (take(7, 3), take(7, 1)),
            (Ok(()), Err(Full::Peer(Identity::User(7), 3)))
        );
        assert_eq!((take(8, 3), take(9, 1)), (Ok(()), Err(Full::All(6))));
        assert_eq!((take(0, 2), take(0, 1)), (Ok(()), Err(Full::All(8))));
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
        assert_eq!(places.deadline(TIME), None);
        let late = places.enter(user(7), now).unwrap().id;
        let next = places.enter(user(7), now + Duration::from_secs(1)).unwrap().id;
        let open = entered(&mut places, 7, now);
        assert_eq!(places.deadline(TIME), Some(now + Duration::from_secs(10)));
        assert_eq!(places.expire(TIME, now + Duration::from_secs(9)), [0; 0]);
        assert_eq!(places.expire(TIME, now + Duration::from_secs(10)), [late]);
        assert_eq!(places.open(late), Err(Refusal::Evicted));
        assert_eq!((places.open(next), places.open(open)), (Ok(()), Ok(())));
        assert_eq!(places.deadline(TIME), None);
    }

    #[test]
    fn hosts_are_told_apart_as_networks_are_given_out() {
        let host = |text: &str| Identity::host(text.parse().unwrap());
        assert_eq!(host("2001:db8::1"), host("2001:db8::2:3"));
        assert_ne!(host("2001:db8::1"), host("2001:db8:0:1::1"));
        assert_ne!(host("192.0.2.1"), host("192.0.2.2"));
        assert_eq!(host("::ffff:192.0.2.1"), host("192.0.2.1"));
    }

    /// Four may be open, of which one is reserved, and three wait beside.
    const QUEUE: Limits = Limits {
        all: 7,
        open: 4,
        reserved: 1,
        each: 7,
    };
    const SPARE: Duration = Duration::from_millis(250);

    #[test]
    fn half_open_connections_take_no_place_of_open_ones() {
        let (mut places, now) = (Places::new(QUEUE), Instant::now());
        for _ in 0..100 {
            places.enter(user(7), now).unwrap();
        }
        for who in [8, 8, 9] {
            entered_among(&mut places, who, now);
        }
        assert_eq!(full(&mut places, 8, now), Full::All(3));
        entered_among(&mut places, 0, now);
        assert_eq!(full(&mut places, 0, now), Full::All(4));
    }

    fn entered_among(places: &mut Places<Instant>, who: u32, now: Instant) {
        let id = places.enter(user(who), now).unwrap().id;
        assert_eq!(places.open(id), Ok(()));
        // Once more is as good as once.
        assert_eq!(places.open(id), Ok(()));
    }

    #[test]
    fn who_finishes_when_all_are_open_has_no_place() {
        let (mut places, now) = (Places::new(QUEUE), Instant::now());
        let ids: Vec<u64> = (0..4).map(|_| places.enter(user(7), now).unwrap().id).collect();
        for id in &ids[..3] {
            assert_eq!(places.open(*id), Ok(()));
        }
        assert_eq!(places.open(ids[3]), Err(Refusal::Full(Full::All(3))));
        assert_eq!(places.open(ids[3]), Err(Refusal::Evicted));
    }

    #[test]
    fn a_flood_leaves_time_to_finish_and_other_peers_a_place() {
        let (mut places, now) = (Places::new(QUEUE), Instant::now());
        let first = places.enter(user(7), now).unwrap().id;
        for _ in 1..6 {
            assert_eq!(places.spared_until(user(7), SPARE, now), None);
            places.enter(user(7), now).unwrap();
        }
        // All places for those who aren't trusted are taken.
        let then = now + SPARE;
        assert_eq!(places.spared_until(user(7), SPARE, now), Some(then));
        assert_eq!(places.spared_until(user(7), SPARE, then), None);
        // Others needn't wait, until they have as many.
        assert_eq!(places.spared_until(user(8), SPARE, now), None);
        assert_eq!(places.enter(user(8), now).unwrap().evicted, Some(first));
        assert_eq!(places.spared_until(user(0), SPARE, now), None);
        for _ in 0..2 {
            assert_eq!(places.spared_until(user(8), SPARE, now), None);
            places.enter(user(8), now).unwrap();
        }
        assert_eq!(places.spared_until(user(8), SPARE, now), Some(then));
        assert_eq!(places.spared_until(user(9), SPARE, now), None);
    }
}
