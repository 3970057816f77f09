//! Admission control of a server, as a state machine without I/O: no threads, clocks or sockets, the time is an argument, and
//! the same calls give the same answers.
//!
//! A connection request may come from anybody, with any source address. So it gets no more than a queue pair: the path
//! is *half-open*. Only when connection 0 stands has the client shown that it receives what is sent to its address; then
//! the path counts against the limits of sessions, paths and connections, and the caller may allocate. Half-open paths
//! have limits of their own, and when these are reached the oldest one is evicted for the newcomer, so that clients that answer
//! are admitted, however many don't.
//!
//! The caller ([`crate::server`], or a simulator) reports events and does what is answered:
//! [`Admission::request`] for each connection request, [`Admission::established`] when connection 0 of a path is established,
//! [`Admission::name`] and [`Admission::up`] at the end of the handshake, [`Admission::closing`] and
//! [`Admission::ended`] for the end of a path, and [`Admission::expired`] when [`Admission::next_deadline`] is reached.
//!
//! The servers of several loops share one, each under its index. [`Admission::place`] gives each session to one of them. Limits hold for
//! all loops together, but for half-open paths and their waiting requests, whose limits are each loop's.

mod access;
mod homes;
mod penalty;
mod refusal;
pub mod shared;

use core::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};
use std::collections::{BTreeMap, BTreeSet};

use roce_verbs::Instant;

pub use access::{AccessError, AccessList, AccessRule};
use homes::Homes;
use penalty::Penalties;
pub use refusal::Refusal;

use crate::proto::{MAX_PATHS, Uuid};

/// The limits of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Sessions.
    pub sessions: usize,
    /// Sessions of one client (see [`Client`]).
    pub sessions_per_client: usize,
    /// Paths of all sessions.
    pub paths: usize,
    /// Connections of a path, the service connection included.
    pub connections_per_path: u16,
    /// Connections of all paths.
    pub connections: usize,
    /// Paths whose client has not proved its address, of each loop.
    pub half_open: usize,
    /// Half-open paths of one client, at each loop.
    pub half_open_per_client: usize,
    /// Requests for further connections of half-open paths that wait, at each loop.
    pub held: usize,
    /// Waiting requests of one path.
    pub held_per_path: usize,
    /// From the first request of a path to the end of its handshake.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 64,
            sessions_per_client: 16,
            paths: 128,
            connections_per_path: 257,
            connections: 8192,
            half_open: 256,
            half_open_per_client: 32,
            // All that the half-open paths can have: what is held of one never keeps another's from being held.
            held: 1024,
            held_per_path: 4,
            handshake: Duration::from_secs(30),
        }
    }
}

/// Unit in which requests are counted: an IPv4 address, or the /64 of an IPv6 address, of which a host may use all.
/// Link-local IPv6 addresses each count for themselves: every host of the network has one in the same /64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Client(IpAddr);

impl Client {
    /// The client that an address belongs to.
    pub fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V6(v6) if !v6.is_unicast_link_local() => {
                let network = v6.to_bits() & !u128::from(u64::MAX);
                Self(IpAddr::V6(Ipv6Addr::from_bits(network)))
            }
            ip => Self(ip),
        }
    }
}

/// Names a path; no number is used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PathKey(u64);

impl PathKey {
    /// The path of this [number](Self::value), if there is one.
    pub const fn of(value: u64) -> Self {
        Self(value)
    }

    /// The number.
    pub const fn value(self) -> u64 {
        self.0
    }
}

/// A connection request that is well-formed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectRequest {
    /// The client's address, as far as one may believe it.
    pub peer: IpAddr,
    /// Our address.
    pub local: IpAddr,
    /// The session.
    pub session: Uuid,
    /// The path.
    pub path: Uuid,
    /// Number of the connection; 0 is the service connection.
    pub cid: u16,
    /// Connections of the path.
    pub connections: u16,
    /// The session may be new.
    pub first_conn: bool,
    /// Counts the client's attempts to connect the path.
    pub recon_cnt: u16,
}

/// Answer to a connection request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admitted {
    /// It is connection 0 of a new path, whose client may be anybody: make a queue pair and accept, no more.
    HalfOpen {
        /// The new path.
        path: PathKey,
        /// A half-open path of the same loop that is evicted; it is forgotten here already.
        evicted: Option<PathKey>,
    },
    /// It is a further connection of a path whose client has proved its address: make a queue pair and accept.
    Connection(PathKey, SessionKey),
    /// It is a further connection of a half-open path: keep it unanswered, and show it again once the path is
    /// established. What of it stays behind when the path ends is to be refused.
    Held(PathKey),
    /// It is connection 0 of a later attempt to connect this path: the client has given it up, which we had not noticed. Close the path,
    /// and [refuse](Refusal::Unexpected) this request, since requests may still be in flight. The client's next attempt is admitted.
    /// A half-open path has no session.
    GivenUp(PathKey, Option<SessionKey>),
}

/// Names a session; no number is used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionKey(pub u64);

/// A path whose client has proved its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Its session.
    pub session: Uuid,
    /// The session's number.
    pub key: SessionKey,
}

/// Key by which connections belong to one path. The addresses are part of it, so that nobody elsewhere meets a path whose UUIDs it
/// has learned.
type Identity = (Uuid, Uuid, IpAddr, IpAddr);

impl ConnectRequest {
    fn identity(&self) -> Identity {
        (
            self.session,
            self.path,
            self.local.to_canonical(),
            self.peer.to_canonical(),
        )
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Nobody has answered from the client's address yet.
    HalfOpen,
    /// The address is proved; further connections, then the name, have to come.
    Opening,
    Up,
    Closing,
}

struct Entry {
    /// The loop that has it.
    at: usize,
    /// Request of its connection 0.
    request: ConnectRequest,
    client: Client,
    stage: Stage,
    deadline: Option<Instant>,
    /// Connections made.
    made: BTreeSet<u16>,
    /// Connections that wait for the path to be established.
    held: BTreeSet<u16>,
}

struct Session {
    key: SessionKey,
    /// Client of its first path.
    client: Client,
    paths: BTreeSet<PathKey>,
    name: Option<String>,
}

#[derive(Default)]
struct Loop {
    /// By age.
    half_open: BTreeSet<PathKey>,
    /// Connections of those that wait for their path to be established.
    held: usize,
    deadlines: BTreeSet<(Instant, PathKey)>,
}

#[derive(Default)]
struct Tally {
    sessions: usize,
    half_open: BTreeSet<PathKey>,
}

/// The state machine. Ordered maps: keys come from peers, and runs must repeat.
pub struct Admission {
    limits: Limits,
    access: AccessList,
    next_key: u64,
    next_session: u64,
    paths: BTreeMap<PathKey, Entry>,
    by_identity: BTreeMap<Identity, PathKey>,
    sessions: BTreeMap<Uuid, Session>,
    clients: BTreeMap<Client, Tally>,
    loops: Vec<Loop>,
    homes: Homes,
    /// Connections that the established paths have or may still make.
    connections: usize,
    penalties: Penalties,
}

impl core::fmt::Debug for Admission {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Admission")
            .field("sessions", &self.sessions())
            .field("paths", &self.paths())
            .field("half_open", &self.half_open())
            .field("connections", &self.connections())
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}

impl Admission {
    /// Admission of a server on one loop, number 0.
    pub fn new(limits: Limits, access: AccessList) -> Self {
        Self::on_loops(limits, access, 1)
    }

    /// Admission of a server on so many loops.
    pub fn on_loops(limits: Limits, access: AccessList, loops: usize) -> Self {
        Self {
            limits,
            access,
            next_key: 1,
            next_session: 1,
            paths: BTreeMap::new(),
            by_identity: BTreeMap::new(),
            sessions: BTreeMap::new(),
            clients: BTreeMap::new(),
            loops: (0..loops.max(1)).map(|_| Loop::default()).collect(),
            homes: Homes::new(loops),
            connections: 0,
            penalties: Penalties::default(),
        }
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sessions with a path whose client has proved its address.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Sessions of a client.
    pub fn sessions_of(&self, client: Client) -> usize {
        self.clients.get(&client).map_or(0, |t| t.sessions)
    }

    /// Paths whose client has proved its address.
    pub fn paths(&self) -> usize {
        self.paths.len() - self.half_open()
    }

    /// Paths whose client has not proved its address.
    pub fn half_open(&self) -> usize {
        self.loops.iter().map(|of| of.half_open.len()).sum()
    }

    /// Sessions of each loop, half-open and expected ones included.
    pub fn loads(&self) -> Vec<usize> {
        self.homes.loads().to_vec()
    }

    /// Half-open paths of a client.
    pub fn half_open_of(&self, client: Client) -> usize {
        self.clients.get(&client).map_or(0, |t| t.half_open.len())
    }

    /// Connections that the established paths have or may still make.
    pub fn connections(&self) -> usize {
        self.connections
    }

    /// Requests that wait for their path to be established.
    pub fn held(&self) -> usize {
        self.loops.iter().map(|of| of.held).sum()
    }

    /// Returns the loop of a session; for an unknown one the loop with the fewest, where it is expected from here on if it may be new.
    pub fn place(&mut self, now: Instant, session: Uuid, may_be_new: bool) -> usize {
        self.homes.place(now, session, may_be_new)
    }

    /// A connection request came to this loop.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn request(&mut self, now: Instant, at: usize, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        let admitted = self.decide(now, at, request);
        if admitted.is_err() {
            self.homes.leave(request.session);
        }
        admitted
    }

    fn decide(&mut self, now: Instant, at: usize, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        if !self.access.may_connect(request.peer) {
            return Err(Refusal::Address);
        }
        if request.connections > self.limits.connections_per_path {
            return Err(Refusal::ConnectionsOfPath);
        }
        // Without I/O connection there is nothing that the path could be for.
        if request.connections < 2 {
            return Err(Refusal::NoIoConnection);
        }
        if request.cid >= request.connections {
            return Err(Refusal::Unexpected);
        }
        if self.homes.is_elsewhere(at, request.session) {
            return Err(Refusal::Unexpected);
        }
        if let Some(path) = self.by_identity.get(&request.identity()) {
            return self.further(*path, request);
        }
        if request.cid != 0 {
            return Err(Refusal::NoPath);
        }
        if self.penalties.waits(now, Client::of(request.peer)) {
            return Err(Refusal::SlowedDown);
        }
        self.check(request)?;
        let evicted = self.make_room(at, Client::of(request.peer));
        let path = self.insert(now, at, request);
        Ok(Admitted::HalfOpen { path, evicted })
    }

    /// A further connection of a path.
    fn further(&mut self, path: PathKey, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        let session = self.session_of(path);
        let entry = self.paths.get_mut(&path).ok_or(Refusal::NoPath)?;
        let cid = request.cid;
        // Counted modulo 2^16. A repetition of the request has the same number.
        let later = request.recon_cnt.wrapping_sub(entry.request.recon_cnt) as i16 > 0;
        if cid == 0 && later && entry.stage != Stage::Closing {
            return Ok(Admitted::GivenUp(path, session));
        }
        let known = entry.made.contains(&cid) || entry.held.contains(&cid);
        if known || request.connections != entry.request.connections {
            return Err(Refusal::Unexpected);
        }
        match entry.stage {
            Stage::HalfOpen => {
                let of_loop = &mut self.loops[entry.at].held;
                if entry.held.len() >= self.limits.held_per_path || *of_loop >= self.limits.held {
                    return Err(Refusal::Held);
                }
                entry.held.insert(cid);
                *of_loop += 1;
                Ok(Admitted::Held(path))
            }
            Stage::Opening => {
                entry.made.insert(cid);
                Ok(Admitted::Connection(path, session.ok_or(Refusal::NoSession)?))
            }
            Stage::Up | Stage::Closing => Err(Refusal::Unexpected),
        }
    }

    /// Whether there is room for another established path. Asked at the request, to refuse early, and again when the path
    /// is established: others may have been faster.
    fn check(&self, request: &ConnectRequest) -> Result<(), Refusal> {
        match self.sessions.get(&request.session) {
            Some(session) => self.check_joining(session, request)?,
            None if !request.first_conn => return Err(Refusal::NoSession),
            None if self.sessions.len() >= self.limits.sessions => return Err(Refusal::Sessions),
            None if self.sessions_of(Client::of(request.peer)) >= self.limits.sessions_per_client => {
                return Err(Refusal::SessionsOfClient);
            }
            None => {}
        }
        if self.paths() >= self.limits.paths {
            return Err(Refusal::Paths);
        }
        if self.connections + usize::from(request.connections) > self.limits.connections {
            return Err(Refusal::Connections);
        }
        Ok(())
    }

    /// Another path of a session that exists.
    fn check_joining(&self, session: &Session, request: &ConnectRequest) -> Result<(), Refusal> {
        let name = session.name.as_deref();
        if name.is_some_and(|name| !self.access.may_be(name, request.peer)) {
            return Err(Refusal::Name);
        }
        if session.paths.len() >= MAX_PATHS {
            return Err(Refusal::PathsOfSession);
        }
        let (_, uuid, local, peer) = request.identity();
        for path in session.paths.iter().filter_map(|p| self.paths.get(p)) {
            let (_, its_uuid, its_local, its_peer) = path.request.identity();
            if uuid == its_uuid {
                return Err(Refusal::Unexpected);
            }
            if (local, peer) == (its_local, its_peer) {
                return Err(Refusal::SamePath);
            }
        }
        Ok(())
    }

    /// Session of a path whose client has proved its address.
    fn session_of(&self, path: PathKey) -> Option<SessionKey> {
        let entry = self.paths.get(&path).filter(|e| e.stage != Stage::HalfOpen)?;
        self.sessions.get(&entry.request.session).map(|session| session.key)
    }

    /// Evicts a half-open path of a loop if there is no room for another: the oldest of the same client if that has as many as it may,
    /// otherwise the oldest.
    fn make_room(&mut self, at: usize, client: Client) -> Option<PathKey> {
        let here = |path: &&PathKey| self.paths.get(path).is_some_and(|e| e.at == at);
        let of_client = self
            .clients
            .get(&client)
            .map(|tally| tally.half_open.iter().filter(here));
        let all = &self.loops[at].half_open;
        let oldest = match of_client {
            Some(of) if of.clone().count() >= self.limits.half_open_per_client => of.min(),
            _ if all.len() >= self.limits.half_open => all.first(),
            _ => None,
        };
        let oldest = *oldest?;
        self.ended(oldest);
        Some(oldest)
    }

    fn insert(&mut self, now: Instant, at: usize, request: &ConnectRequest) -> PathKey {
        let path = PathKey(self.next_key);
        self.next_key += 1;
        let client = Client::of(request.peer);
        let deadline = now + self.limits.handshake;
        let entry = Entry {
            at,
            request: *request,
            client,
            stage: Stage::HalfOpen,
            deadline: Some(deadline),
            made: BTreeSet::from([0]),
            held: BTreeSet::new(),
        };
        self.paths.insert(path, entry);
        self.by_identity.insert(request.identity(), path);
        self.clients.entry(client).or_default().half_open.insert(path);
        self.loops[at].half_open.insert(path);
        self.loops[at].deadlines.insert((deadline, path));
        self.homes.add_path(at, request.session);
        path
    }

    /// Connection 0 of a path stands: the client has what was sent to its address. `None` if the path is not half-open.
    ///
    /// # Errors
    /// Why there is no room for it; the path is forgotten then.
    pub fn established(&mut self, path: PathKey) -> Option<Result<Opened, Refusal>> {
        let request = self.paths.get(&path).filter(|e| e.stage == Stage::HalfOpen)?.request;
        if let Err(refusal) = self.check(&request) {
            self.ended(path);
            return Some(Err(refusal));
        }
        self.leave_half_open(path);
        let entry = self.paths.get_mut(&path)?;
        entry.stage = Stage::Opening;
        self.connections += usize::from(request.connections);
        if !self.sessions.contains_key(&request.session) {
            self.clients.entry(entry.client).or_default().sessions += 1;
        }
        let client = entry.client;
        let next = &mut self.next_session;
        let session = self.sessions.entry(request.session).or_insert_with(|| {
            *next += 1;
            Session {
                key: SessionKey(*next - 1),
                client,
                paths: BTreeSet::new(),
                name: None,
            }
        });
        session.paths.insert(path);
        Some(Ok(Opened {
            session: request.session,
            key: session.key,
        }))
    }

    /// The client says what its session is called; only the first name counts.
    ///
    /// # Errors
    /// When a session of this name may not come from there, or another session has the name.
    pub fn name(&mut self, path: PathKey, name: &str) -> Result<(), Refusal> {
        let entry = self.paths.get(&path).ok_or(Refusal::NoPath)?;
        let (uuid, peer) = (entry.request.session, entry.request.peer);
        let session = self.sessions.get(&uuid).ok_or(Refusal::NoSession)?;
        let lasting = session.name.as_deref().unwrap_or(name);
        if !self.access.may_be(lasting, peer) {
            return Err(Refusal::Name);
        }
        if self.has_name(path, name) {
            return Err(Refusal::NameTaken);
        }
        if let Some(session) = self.sessions.get_mut(&uuid) {
            session.name.get_or_insert_with(|| name.into());
        }
        Ok(())
    }

    /// Whether another session than the path's has this name, and a path that is not about to end. One that is only being cleaned up
    /// does not count: its client may be back already.
    fn has_name(&self, path: PathKey, name: &str) -> bool {
        let own = self.paths.get(&path).map(|e| e.request.session);
        let others = self.sessions.iter().filter(|(uuid, _)| Some(**uuid) != own);
        let lives = |s: &Session| {
            let mut paths = s.paths.iter().filter_map(|p| self.paths.get(p));
            paths.any(|e| e.stage != Stage::Closing)
        };
        others
            .filter(|(_, s)| s.name.as_deref() == Some(name))
            .any(|(_, s)| lives(s))
    }

    /// The handshake of a path is complete.
    pub fn up(&mut self, path: PathKey) {
        if let Some(entry) = self.paths.get_mut(&path).filter(|e| e.stage == Stage::Opening) {
            entry.stage = Stage::Up;
            self.stop_deadline(path);
        }
    }

    fn stop_deadline(&mut self, path: PathKey) {
        let Some(entry) = self.paths.get_mut(&path) else { return };
        if let Some(deadline) = entry.deadline.take() {
            self.loops[entry.at].deadlines.remove(&(deadline, path));
        }
    }

    /// A path is about to end: it takes no more connections. A half-open one is forgotten at once.
    pub fn closing(&mut self, path: PathKey) {
        let Some(entry) = self.paths.get_mut(&path) else { return };
        if entry.stage == Stage::HalfOpen {
            return self.ended(path);
        }
        entry.stage = Stage::Closing;
        self.stop_deadline(path);
    }

    /// Forgets a path of which nothing is left, and its session if that has no other.
    pub fn ended(&mut self, path: PathKey) {
        match self.paths.get(&path).map(|e| e.stage) {
            None => return,
            Some(Stage::HalfOpen) => self.leave_half_open(path),
            Some(_) => self.leave_session(path),
        }
        self.stop_deadline(path);
        let Some(entry) = self.paths.remove(&path) else { return };
        self.by_identity.remove(&entry.request.identity());
        self.homes.remove_path(entry.request.session);
    }

    /// A client that had proved its address has used a key that it had no right to.
    pub fn access_error(&mut self, now: Instant, peer: IpAddr) {
        self.penalties.add(now, Client::of(peer));
    }

    /// When [`Admission::expired`] is due for a loop.
    pub fn next_deadline(&self, at: usize) -> Option<Instant> {
        self.loops[at].deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Takes a path of a loop whose handshake has not ended in time, and its session. It is closing from here on; a half-open one, which
    /// has no session, is forgotten.
    pub fn expired(&mut self, now: Instant, at: usize) -> Option<(PathKey, Option<SessionKey>)> {
        let (_, path) = *self.loops[at]
            .deadlines
            .first()
            .filter(|(deadline, _)| *deadline <= now)?;
        let session = self.session_of(path);
        self.closing(path);
        Some((path, session))
    }

    /// Takes a path out of the half-open ones; its held requests are the caller's.
    fn leave_half_open(&mut self, path: PathKey) {
        let Some(entry) = self.paths.get_mut(&path) else { return };
        let of_loop = &mut self.loops[entry.at];
        of_loop.half_open.remove(&path);
        of_loop.held -= entry.held.len();
        entry.held.clear();
        let client = entry.client;
        self.tally(client, |tally| {
            tally.half_open.remove(&path);
        });
    }

    /// Takes something off a client, which is forgotten when it has nothing.
    fn tally(&mut self, client: Client, take: impl FnOnce(&mut Tally)) {
        let Some(tally) = self.clients.get_mut(&client) else {
            return;
        };
        take(tally);
        if tally.sessions == 0 && tally.half_open.is_empty() {
            self.clients.remove(&client);
        }
    }

    /// Takes an established path out of its session, which ends with its last one.
    fn leave_session(&mut self, path: PathKey) {
        let Some(request) = self.paths.get(&path).map(|e| e.request) else {
            return;
        };
        self.connections -= usize::from(request.connections);
        let Some(session) = self.sessions.get_mut(&request.session) else {
            return;
        };
        session.paths.remove(&path);
        if !session.paths.is_empty() {
            return;
        }
        let client = session.client;
        self.sessions.remove(&request.session);
        self.tally(client, |tally| tally.sessions -= 1);
    }
}
