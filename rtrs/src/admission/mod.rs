//! Admission control of a server, as a state machine without I/O: no threads, clocks or sockets, the time is an argument, and
//! the same calls give the same answers.
//!
//! A connection request may come from anybody, with any source address. So it gets no more than a queue pair: the path
//! is *half-open*. Only when connection 0 stands has the client shown that it receives what is sent to its address; then
//! the path counts against the limits of sessions, paths and connections, and the caller may allocate. Half-open paths
//! have limits of their own, and when these are reached the oldest one gives way to the newcomer, so that whoever answers
//! gets in, however many don't.
//!
//! The caller ([`crate::server`], or a simulator) tells what happens and does what is answered:
//! [`Admission::request`] for each connection request, [`Admission::established`] when connection 0 of a path stands,
//! [`Admission::name`] and [`Admission::up`] at the end of the handshake, [`Admission::closing`] and
//! [`Admission::ended`] for the end of a path, and [`Admission::expired`] when [`Admission::next_deadline`] is reached.

mod access;
mod penalty;
mod refusal;

use core::{
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};
use std::collections::{BTreeMap, BTreeSet};

use roce_verbs::Instant;

pub use access::{AccessError, AccessList, AccessRule};
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
    /// Paths whose client has not proved its address.
    pub half_open: usize,
    /// Half-open paths of one client.
    pub half_open_per_client: usize,
    /// Requests for further connections of half-open paths that wait.
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
        /// A half-open path that gives way; it is forgotten here already.
        gives_way: Option<PathKey>,
    },
    /// It is a further connection of a path whose client has proved its address: make a queue pair and accept.
    Connection(PathKey),
    /// It is a further connection of a half-open path: keep it unanswered, and show it again once the path is
    /// established. What of it stays behind when the path ends is to be refused.
    Held(PathKey),
    /// It is connection 0 of a later attempt to connect this path: the client has given it up, which we had not noticed. To be closed;
    /// and this request is to be [refused](Refusal::Unexpected), since requests may still be worked on. The client's next attempt
    /// finds the way free.
    GivenUp(PathKey),
}

/// A path whose client has proved its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Its session.
    pub session: Uuid,
    /// It is the session's first: the session is to be made.
    pub new_session: bool,
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
    /// Client of its first path.
    client: Client,
    paths: BTreeSet<PathKey>,
    name: Option<String>,
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
    paths: BTreeMap<PathKey, Entry>,
    by_identity: BTreeMap<Identity, PathKey>,
    sessions: BTreeMap<Uuid, Session>,
    clients: BTreeMap<Client, Tally>,
    /// By age.
    half_open: BTreeSet<PathKey>,
    deadlines: BTreeSet<(Instant, PathKey)>,
    /// Connections that the established paths have or may still make.
    connections: usize,
    held: usize,
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
    /// A server that nobody has come to yet.
    pub fn new(limits: Limits, access: AccessList) -> Self {
        Self {
            limits,
            access,
            next_key: 1,
            paths: BTreeMap::new(),
            by_identity: BTreeMap::new(),
            sessions: BTreeMap::new(),
            clients: BTreeMap::new(),
            half_open: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            connections: 0,
            held: 0,
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
        self.paths.len() - self.half_open.len()
    }

    /// Paths whose client has not proved its address.
    pub fn half_open(&self) -> usize {
        self.half_open.len()
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
        self.held
    }

    /// A connection request came.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn request(&mut self, now: Instant, request: &ConnectRequest) -> Result<Admitted, Refusal> {
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
        let gives_way = self.make_room(Client::of(request.peer));
        let path = self.insert(now, request);
        Ok(Admitted::HalfOpen { path, gives_way })
    }

    /// A further connection of a path.
    fn further(&mut self, path: PathKey, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        let entry = self.paths.get_mut(&path).ok_or(Refusal::NoPath)?;
        let cid = request.cid;
        // Counted modulo 2^16. A repetition of the request has the same number.
        let later = request.recon_cnt.wrapping_sub(entry.request.recon_cnt) as i16 > 0;
        if cid == 0 && later && entry.stage != Stage::Closing {
            return Ok(Admitted::GivenUp(path));
        }
        let known = entry.made.contains(&cid) || entry.held.contains(&cid);
        if known || request.connections != entry.request.connections {
            return Err(Refusal::Unexpected);
        }
        match entry.stage {
            Stage::HalfOpen if entry.held.len() >= self.limits.held_per_path || self.held >= self.limits.held => {
                Err(Refusal::Held)
            }
            Stage::HalfOpen => {
                entry.held.insert(cid);
                self.held += 1;
                Ok(Admitted::Held(path))
            }
            Stage::Opening => {
                entry.made.insert(cid);
                Ok(Admitted::Connection(path))
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

    /// Ends a half-open path if there is no room for another: one of the same client if that has its share, otherwise the
    /// oldest.
    fn make_room(&mut self, client: Client) -> Option<PathKey> {
        let oldest = match self.clients.get(&client) {
            Some(tally) if tally.half_open.len() >= self.limits.half_open_per_client => tally.half_open.first(),
            _ if self.half_open.len() >= self.limits.half_open => self.half_open.first(),
            _ => None,
        };
        let oldest = *oldest?;
        self.remove(oldest);
        Some(oldest)
    }

    fn insert(&mut self, now: Instant, request: &ConnectRequest) -> PathKey {
        let path = PathKey(self.next_key);
        self.next_key += 1;
        let client = Client::of(request.peer);
        let deadline = now + self.limits.handshake;
        let entry = Entry {
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
        self.half_open.insert(path);
        self.deadlines.insert((deadline, path));
        path
    }

    /// Connection 0 of a path stands: the client has what was sent to its address. `None` if the path is not half-open.
    ///
    /// # Errors
    /// Why there is no room for it; the path is forgotten then.
    pub fn established(&mut self, path: PathKey) -> Option<Result<Opened, Refusal>> {
        let request = self.paths.get(&path).filter(|e| e.stage == Stage::HalfOpen)?.request;
        if let Err(refusal) = self.check(&request) {
            self.remove(path);
            return Some(Err(refusal));
        }
        self.leave_half_open(path);
        let entry = self.paths.get_mut(&path)?;
        entry.stage = Stage::Opening;
        self.connections += usize::from(request.connections);
        let new_session = !self.sessions.contains_key(&request.session);
        if new_session {
            self.clients.entry(entry.client).or_default().sessions += 1;
        }
        let client = entry.client;
        let session = self.sessions.entry(request.session).or_insert_with(|| Session {
            client,
            paths: BTreeSet::new(),
            name: None,
        });
        session.paths.insert(path);
        Some(Ok(Opened {
            session: request.session,
            new_session,
        }))
    }

    /// The client says what its session is called; only the first name counts.
    ///
    /// # Errors
    /// When a session of this name may not come from there.
    pub fn name(&mut self, path: PathKey, name: &str) -> Result<(), Refusal> {
        let entry = self.paths.get(&path).ok_or(Refusal::NoPath)?;
        let (uuid, peer) = (entry.request.session, entry.request.peer);
        let session = self.sessions.get_mut(&uuid).ok_or(Refusal::NoSession)?;
        let lasting = session.name.as_deref().unwrap_or(name);
        if !self.access.may_be(lasting, peer) {
            return Err(Refusal::Name);
        }
        session.name.get_or_insert_with(|| name.into());
        Ok(())
    }

    /// Whether another session than the path's is called so, and has a path that is not about to end. Of an admission that
    /// several servers share; a server by itself knows that.
    pub fn has_name(&self, path: PathKey, name: &str) -> bool {
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

    /// Whether a path is known: half-open, established, or ending.
    pub fn has_path(&self, path: PathKey) -> bool {
        self.paths.contains_key(&path)
    }

    /// The handshake of a path is complete.
    pub fn up(&mut self, path: PathKey) {
        if let Some(entry) = self.paths.get_mut(&path).filter(|e| e.stage == Stage::Opening) {
            entry.stage = Stage::Up;
            if let Some(deadline) = entry.deadline.take() {
                self.deadlines.remove(&(deadline, path));
            }
        }
    }

    /// A path is about to end: it takes no more connections. A half-open one is forgotten at once.
    pub fn closing(&mut self, path: PathKey) {
        let Some(entry) = self.paths.get_mut(&path) else { return };
        if entry.stage == Stage::HalfOpen {
            return self.remove(path);
        }
        entry.stage = Stage::Closing;
        if let Some(deadline) = entry.deadline.take() {
            self.deadlines.remove(&(deadline, path));
        }
    }

    /// Nothing of a path is left. True if its session is gone with it.
    pub fn ended(&mut self, path: PathKey) -> bool {
        let session = self.paths.get(&path).map(|e| e.request.session);
        let before = session.is_some_and(|s| self.sessions.contains_key(&s));
        self.remove(path);
        before && session.is_some_and(|s| !self.sessions.contains_key(&s))
    }

    /// A client that had proved its address has used a key that it had no right to.
    pub fn access_error(&mut self, now: Instant, peer: IpAddr) {
        self.penalties.add(now, Client::of(peer));
    }

    /// When [`Admission::expired`] wants to be called.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Takes a path whose handshake has not ended in time. It is closing now; a half-open one is forgotten.
    pub fn expired(&mut self, now: Instant) -> Option<PathKey> {
        let (_, path) = *self.deadlines.first().filter(|(deadline, _)| *deadline <= now)?;
        self.closing(path);
        Some(path)
    }

    /// Whether the handshake of this path has not ended in time. If so, it is as if [`expired`](Self::expired) had named it.
    pub fn expire(&mut self, now: Instant, path: PathKey) -> bool {
        let deadline = self.paths.get(&path).and_then(|e| e.deadline);
        let late = deadline.is_some_and(|deadline| deadline <= now);
        if late {
            self.closing(path);
        }
        late
    }

    /// Takes a path out of the half-open ones; its held requests are the caller's.
    fn leave_half_open(&mut self, path: PathKey) {
        self.half_open.remove(&path);
        let Some(entry) = self.paths.get_mut(&path) else { return };
        self.held -= entry.held.len();
        entry.held.clear();
        if let Some(tally) = self.clients.get_mut(&entry.client) {
            tally.half_open.remove(&path);
        }
        self.drop_tally(path);
    }

    /// Forgets a client that has nothing.
    fn drop_tally(&mut self, path: PathKey) {
        let Some(client) = self.paths.get(&path).map(|e| e.client) else {
            return;
        };
        self.drop_client(client);
    }

    fn drop_client(&mut self, client: Client) {
        let idle = |t: &Tally| t.sessions == 0 && t.half_open.is_empty();
        if self.clients.get(&client).is_some_and(idle) {
            self.clients.remove(&client);
        }
    }

    fn remove(&mut self, path: PathKey) {
        match self.paths.get(&path).map(|e| e.stage) {
            None => return,
            Some(Stage::HalfOpen) => self.leave_half_open(path),
            Some(_) => self.leave_session(path),
        }
        let Some(entry) = self.paths.remove(&path) else { return };
        self.by_identity.remove(&entry.request.identity());
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(&(deadline, path));
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
        if let Some(tally) = self.clients.get_mut(&client) {
            tally.sessions -= 1;
        }
        self.drop_client(client);
    }
}
