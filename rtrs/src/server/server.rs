//! The server as a state machine: it is told what happens and what time it is, posts what it has to send with its
//! [`Provider`](roce_verbs::provider::Provider), and says what concerns its user.
//!
//! A turn of the loop that drives it: completions ([`Server::completion`]) and events ([`Server::event`]), answers of the user
//! ([`Server::answer`]), timers ([`Server::timeout`]), and at its end [`Server::end_batch`]. [`Server::poll_output`] is to be
//! asked after each of them until it has nothing more. So are letters, [`Server::letter`] and [`Server::poll_letter`], if the server is
//! one of several [`Share`]s.

use core::{fmt, net::SocketAddr};
use std::{collections::BTreeMap, sync::Arc};

use roce_mem::{MemError, Pages};
use roce_verbs::{
    Completion, Instant,
    provider::{CmKind, CmRef, DeviceIx, Event, KeyStrategy, QpId, RangeError, VerbsError},
};

use crate::{
    Error, PathError,
    admission::{Admission, PathKey, Refusal},
    cx::Cx,
    door::Doorkeeper,
    proto::{ChunkLayout, Uuid},
    server::{
        config::ServerConfig,
        counters::ServerCounters,
        domains::Domains,
        effects::{Effects, Place},
        half_open::{Asked, HalfOpen},
        letter::{Letter, Message, Part},
        listing::SessionListing,
        log::Lines,
        path::Path,
        path_id::Ask,
        post::ServerWork,
        request::{Output, RequestKey, SessionKey, SessionOpened, SessionSummary, Ticket},
        session::{Named, Session},
        share::Share,
        state::{PathAction, PathEvent, PathState},
    },
    stats::RdmaStats,
    table::step,
};

/// Connection requests that may wait to be looked at, beside those that are held.
const BACKLOG: u32 = 64;

/// Purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    /// Connection 0 of a path whose client has not proved its address.
    HalfOpen(PathKey),
    /// A request for a further connection of such a path.
    Held(PathKey),
    /// A connection of a path.
    Path(Place),
    /// A connection request that home has been asked about.
    Asked(Ask),
}

/// Lines that anybody may cause.
pub(super) struct Log {
    pub(super) refused: Lines,
    pub(super) gave_way: Lines,
    pub(super) timed_out: Lines,
}

impl Log {
    fn new() -> Self {
        Self {
            refused: Lines::new(|more| tracing::warn!(more, "connections refused")),
            gave_way: Lines::new(|more| {
                tracing::warn!(more, "clients that had not answered gave way to others");
            }),
            timed_out: Lines::new(|more| tracing::warn!(more, "clients have not answered")),
        }
    }

    fn tick(&mut self, now: Instant) {
        self.refused.tick(now);
        self.gave_way.tick(now);
        self.timed_out.tick(now);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let all = [&self.refused, &self.gave_way, &self.timed_out];
        all.into_iter().filter_map(Lines::next_timeout).min()
    }
}

/// See the module. It has to be [stopped](Server::stop) and driven until it [is idle](Server::is_idle), or what it has of the
/// provider stays there.
pub struct Server {
    pub(super) share: Share,
    pub(super) config: ServerConfig,
    pub(super) layout: ChunkLayout,
    /// One for each address.
    listeners: Vec<CmRef>,
    /// It has not been stopped.
    listens: bool,
    pub(super) admission: Box<dyn Doorkeeper>,
    pub(super) half_open: BTreeMap<PathKey, HalfOpen>,
    pub(super) domains: Domains<Uuid>,
    /// Domains of sessions whose home is another share.
    pub(super) borrowed: Domains<SessionKey>,
    pub(super) sessions: BTreeMap<SessionKey, Session>,
    pub(super) by_uuid: BTreeMap<Uuid, SessionKey>,
    /// Sessions of paths whose client has proved its address.
    pub(super) paths: BTreeMap<PathKey, SessionKey>,
    pub(super) cms: BTreeMap<CmRef, Owner>,
    /// Connection requests of paths whose home is another share.
    pub(super) asked: BTreeMap<Ask, Asked>,
    pub(super) next_ask: u64,
    /// Queue pairs of such paths.
    pub(super) qps: BTreeMap<QpId, Place>,
    /// Memory that was asked for.
    tickets: BTreeMap<Ticket, SessionKey>,
    next_session: u64,
    next_ticket: u64,
    pub(super) effects: Effects,
    /// Room for the next list of connections that the end of a turn looks after.
    spare: Vec<Place>,
    pub(super) log: Log,
    /// When a path is to be looked at; perhaps somewhat early.
    due: Option<Instant>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("listens", &self.listens)
            .field("half_open", &self.half_open.len())
            .field("sessions", &self.sessions.len())
            .field("counters", &self.effects.counters)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Starts to listen. Returns where, at the first of its addresses.
    ///
    /// # Errors
    /// Says what is wrong with the configuration, or why the address can't be listened on.
    pub fn listen(cx: &mut Cx<'_>, config: ServerConfig) -> Result<(Self, SocketAddr), Error> {
        let admission = Admission::new(config.limits(), config.allow.clone());
        Self::listen_share(cx, config, Box::new(admission), Share::WHOLE)
    }

    /// Starts to listen as one share of a server, of which each is in a loop of its own, and all ask the same one who gets in: what
    /// the configuration says of that is his affair. The connection requests of a session have to come to the shares that
    /// [`Share::of_connection`] of the session's home says, and letters ([`poll_letter`](Self::poll_letter)) to those that they are
    /// for. Returns where it listens, at the first of its addresses.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_share(
        cx: &mut Cx<'_>,
        config: ServerConfig,
        admission: Box<dyn Doorkeeper>,
        share: Share,
    ) -> Result<(Self, SocketAddr), Error> {
        let mut layout = None;
        let devices = cx.provider.devices().iter().enumerate();
        for (device, caps) in devices.filter(|(_, caps)| config.listens_at(&caps.addrs)) {
            layout = Some(config.check(&caps.limits)?);
            if config.always_invalidate && KeyStrategy::for_chunks(caps, true) == KeyStrategy::Static {
                tracing::warn!(
                    device,
                    "the device can't renew keys: clients can change chunks that are worked on"
                );
            }
        }
        let layout = layout.ok_or_else(|| VerbsError::Address("there is no device".into()))?;
        let backlog = BACKLOG.saturating_add(u32::try_from(config.limits().held).unwrap_or(u32::MAX));
        let listeners = listen_on(cx, &config, backlog)?;
        let local = |listener: &CmRef| cx.provider.cm_addrs(*listener).map(|(local, _)| local);
        for local in listeners.iter().filter_map(local) {
            tracing::info!(%local, "RTRS server listens");
        }
        let local = listeners
            .first()
            .and_then(local)
            .unwrap_or_else(|| config.listen_addr());
        let server = Self {
            share,
            admission,
            config,
            layout,
            listeners,
            listens: true,
            half_open: BTreeMap::new(),
            domains: Domains::default(),
            borrowed: Domains::default(),
            sessions: BTreeMap::new(),
            by_uuid: BTreeMap::new(),
            paths: BTreeMap::new(),
            cms: BTreeMap::new(),
            asked: BTreeMap::new(),
            next_ask: 1,
            qps: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_session: share.first_session().0,
            next_ticket: 1,
            effects: Effects::default(),
            spare: Vec::new(),
            log: Log::new(),
            due: None,
        };
        Ok((server, local))
    }

    /// Its configuration.
    pub fn config(&self) -> &ServerConfig {
        &self.config
    }

    /// Events so far.
    pub fn counters(&self) -> ServerCounters {
        self.effects.counters
    }

    /// Share of the server that this is.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Sessions that exist, also those still being opened by clients that have proved their address: those whose home this share
    /// is, with the requests that are with its user.
    pub fn sessions(&self) -> Vec<SessionSummary> {
        self.at_home().map(Session::summary).collect()
    }

    fn at_home(&self) -> impl Iterator<Item = &Session> {
        self.sessions.values().filter(|session| session.home.is_none())
    }

    /// The chunks of a session, one after the other; [`Request::data_offset`](super::request::Request::data_offset) says where
    /// in them a request's data is. Clients may change them at any time. `None` when there is no such session, or no memory of
    /// it yet.
    pub fn memory(&self, session: SessionKey) -> Option<&Arc<Pages>> {
        self.sessions.get(&session)?.memory()
    }

    /// A work request is done. False: its queue pair is not the server's.
    pub fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) -> bool {
        let Some(place) = self.qps.get(&qp).copied() else {
            return false;
        };
        let Some(session) = self.sessions.get_mut(&place.session) else {
            return true;
        };
        match session.completion(cx, place, wc, &mut self.effects) {
            Ok(None) => {}
            Ok(Some(name)) => self.information(cx, place, &name),
            Err(why) => self.effects.broken.push_back((place.session, place.path, why)),
        }
        if !wc.is_ok() {
            let due = self.path(place.session, place.path).and_then(Path::next_timeout);
            self.wake(due);
        }
        self.settle(cx);
        true
    }

    /// Handles an event. False: it is not the server's, or also others'.
    pub fn event(&mut self, cx: &mut Cx<'_>, event: &Event) -> bool {
        let mine = match event {
            Event::Cm {
                id,
                kind:
                    CmKind::ConnectRequest {
                        listener,
                        device,
                        private_data,
                        ..
                    },
            } => {
                let mine = self.listeners.contains(listener);
                match self.listens {
                    true if mine => self.connect_request(cx, *id, *device, private_data),
                    // It came before the listener went.
                    false if mine => cx.provider.cm_destroy(*id),
                    _ => {}
                }
                mine
            }
            Event::Cm { id, kind } => self.cm_event(cx, *id, kind),
            Event::Drained(qp) => self.drained(cx, *qp),
            Event::DeviceRemoved(device) => {
                self.device_removed(cx, *device);
                false
            }
            Event::Async(..) => false,
        };
        self.settle(cx);
        mine
    }

    /// The memory that was asked for has come, or there is none. That of a session that has gone meanwhile comes back as
    /// [`Output::Free`].
    pub fn ready(&mut self, cx: &mut Cx<'_>, ticket: Ticket, memory: Result<Arc<Pages>, MemError>) {
        let Some(key) = self.tickets.remove(&ticket) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        session.ticket = None;
        let alive = session.paths.values().filter(|path| path.is_alive());
        let paths: Vec<PathKey> = alive.map(|path| path.id.key).collect();
        let enough = |pages: &Arc<Pages>| pages.len() as u64 >= self.config.session_bytes();
        match memory.ok().filter(enough) {
            Some(pages) => {
                session.set_memory(pages);
                for path in paths {
                    if let Some(Err(e)) = self.sessions.get_mut(&key).map(|s| s.register(cx, path)) {
                        self.no_room(key, path, e);
                    }
                }
            }
            None => {
                for path in paths {
                    self.no_room(key, path, VerbsError::Limit("memory").into());
                }
            }
        }
        self.name_waiting(cx, key);
        self.settle(cx);
    }

    /// A half-open path has given way to one of another server that has the same [`Doorkeeper`].
    pub fn gave_way(&mut self, cx: &mut Cx<'_>, path: PathKey) {
        self.admission.ended(path);
        self.give_way(cx, path);
        self.settle(cx);
    }

    /// Answers a request: 0, or an error number of either sign. A successful read sends the client what lies in the chunk. To be
    /// called once for each request; a second call does nothing.
    pub fn answer(&mut self, cx: &mut Cx<'_>, request: RequestKey, errno: i32) {
        let Some(session) = self.sessions.get_mut(&request.session) else {
            return;
        };
        if let Some(path) = session.answer(cx, request, errno, &mut self.effects) {
            self.look_after(cx, request.session, path);
            self.name_waiting(cx, request.session);
        }
        self.settle(cx);
    }

    /// Copies data into a request's chunk, `offset` bytes behind the start of its data.
    ///
    /// # Errors
    /// When the range is outside the request's data, or the request has been answered.
    pub fn write_data(&self, request: RequestKey, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        let nowhere = RangeError {
            offset,
            len: data.len(),
            size: 0,
        };
        let session = self.sessions.get(&request.session).ok_or(nowhere)?;
        session.write_data(request, offset, data)
    }

    /// Disconnects a session; false when there is none of this number. Its end is told as usual, when all its requests have been
    /// answered.
    pub fn close_session(&mut self, cx: &mut Cx<'_>, session: SessionKey) -> bool {
        let Some(known) = self.sessions.get(&session) else {
            return false;
        };
        if let Some(home) = known.home {
            self.effects.write(home, Message::Close(session));
            return true;
        }
        let closed = known.paths.keys().map(|path| (session, *path, PathError::Closed));
        self.effects.broken.extend(closed);
        self.settle(cx);
        true
    }

    /// Disconnects a path, as the kernel's `disconnect` does: its client may connect it again. False when there is none of this number
    /// here. Its end is told as usual, when all its requests have been answered.
    pub fn close_path(&mut self, cx: &mut Cx<'_>, session: SessionKey, path: PathKey) -> bool {
        let known = self.sessions.get(&session).filter(|s| s.paths.contains_key(&path));
        let Some(known) = known else { return false };
        match known.home {
            Some(home) => self
                .effects
                .write(home, Message::Lost(Part { session, path }, PathError::Closed)),
            None => self.effects.broken.push_back((session, path, PathError::Closed)),
        }
        self.settle(cx);
        true
    }

    /// Sessions and paths that it has, also of those whose home is another share.
    pub fn listing(&self) -> Vec<SessionListing> {
        self.sessions.values().map(Session::listing).collect()
    }

    /// Sets the statistics of a path to 0, those of this share. False when there is none of this number here.
    pub fn reset_stats(&mut self, session: SessionKey, path: PathKey) -> bool {
        let found = self.path_mut(session, path);
        found.map(|path| path.rdma = RdmaStats::default()).is_some()
    }

    /// Stops to listen, and disconnects all sessions whose home it is: all shares have to be stopped.
    pub fn stop(&mut self, cx: &mut Cx<'_>) {
        if core::mem::take(&mut self.listens) {
            self.listeners
                .iter()
                .for_each(|listener| cx.provider.cm_destroy(*listener));
        }
        let half_open: Vec<PathKey> = self.half_open.keys().copied().collect();
        for path in half_open {
            self.admission.ended(path);
            self.forget(cx, path);
        }
        self.ask_no_more(cx);
        let sessions: Vec<SessionKey> = self.at_home().map(|session| session.key).collect();
        for session in sessions {
            self.close_session(cx, session);
        }
    }

    /// Whether nothing is left: it has been stopped, and all requests of its sessions have been answered.
    pub fn is_idle(&self) -> bool {
        let nobody = self.half_open.is_empty() && self.asked.is_empty() && self.sessions.is_empty();
        !self.listens && nobody && self.domains.is_empty() && self.borrowed.is_empty()
    }

    /// The turn of the loop ends: receives go back first, so that a peer that is answered always finds them; then what has
    /// gathered is posted.
    pub fn end_batch(&mut self, cx: &mut Cx<'_>) {
        while !self.effects.dirty.is_empty() {
            let mut dirty = core::mem::replace(&mut self.effects.dirty, core::mem::take(&mut self.spare));
            for place in &dirty {
                if let Some(session) = self.sessions.get_mut(&place.session) {
                    session.give_back(cx, *place, &mut self.effects);
                }
            }
            for place in &dirty {
                if let Some(session) = self.sessions.get_mut(&place.session) {
                    session.post(cx, *place, &mut self.effects);
                }
            }
            self.settle(cx);
            dirty.clear();
            self.spare = dirty;
        }
    }

    /// Runs what is due.
    pub fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.expire(cx);
        if self.due.is_some_and(|due| due <= cx.now) {
            for session in self.sessions.values_mut() {
                session.tick(cx.now, &mut self.effects);
            }
            self.settle(cx);
            self.due = self.sessions.values().filter_map(Session::next_timeout).min();
        }
        self.settle(cx);
        self.log.tick(cx.now);
    }

    /// When [`Server::timeout`] wants to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        let all = [self.due, self.admission.next_deadline(), self.log.next_timeout()];
        all.into_iter().flatten().min()
    }

    /// The next letter, and the share that it is for. Letters to a share have to come there in their order.
    pub fn poll_letter(&mut self) -> Option<(usize, Letter)> {
        self.effects.letters.pop_front()
    }

    /// A letter of another share has come.
    pub fn letter(&mut self, cx: &mut Cx<'_>, from: usize, letter: Letter) {
        match letter.0 {
            Message::Free(session, chunk) => {
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.release(cx, chunk, &mut self.effects);
                }
            }
            message @ (Message::Asks { .. }
            | Message::AsksNoMore(_)
            | Message::IsReady(_)
            | Message::Settled(_)
            | Message::Lost(..)
            | Message::Gone(_)
            | Message::Busy(_)
            | Message::Close(_)) => self.letter_to_home(cx, from, message),
            message => self.letter_from_home(cx, from, message),
        }
        self.settle(cx);
    }

    /// The next thing that the user is to know or do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.effects.outputs.pop_front()
    }

    pub(super) fn path(&self, session: SessionKey, path: PathKey) -> Option<&Path> {
        self.sessions.get(&session)?.paths.get(&path)
    }

    pub(super) fn path_mut(&mut self, session: SessionKey, path: PathKey) -> Option<&mut Path> {
        self.sessions.get_mut(&session)?.paths.get_mut(&path)
    }

    fn wake(&mut self, at: Option<Instant>) {
        self.due = self.due.into_iter().chain(at).min();
    }

    /// Makes a session.
    pub(super) fn make_session(&mut self, uuid: Uuid, peer: SocketAddr) -> SessionKey {
        let key = SessionKey(self.next_session);
        self.next_session += self.share.count() as u64;
        let session = Session::new(key, uuid, peer, self.layout, self.share);
        self.sessions.insert(key, session);
        self.by_uuid.insert(uuid, key);
        key
    }

    /// Asks for the memory of a session that has none and has not asked, or was told that there is none.
    pub(super) fn ask_for_memory(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        if session.memory().is_some() || session.ticket.is_some() {
            return;
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        session.ticket = Some(ticket);
        self.tickets.insert(ticket, key);
        let bytes = self.config.session_bytes() as usize;
        self.effects.outputs.push_back(Output::Allocate { ticket, bytes });
    }

    /// A path ends for want of memory or other resources.
    pub(super) fn no_room(&mut self, session: SessionKey, path: PathKey, why: PathError) {
        self.effects.counters.no_resources += 1;
        if let Some(path) = self.path(session, path) {
            tracing::error!(peer = %path.id.peer, error = %why, "no room for a path: it is closed");
        }
        self.effects.broken.push_back((session, path, why));
    }

    fn cm_event(&mut self, cx: &mut Cx<'_>, id: CmRef, kind: &CmKind) -> bool {
        let Some(owner) = self.cms.get(&id).copied() else {
            return false;
        };
        let why = match kind {
            CmKind::Established { .. } => {
                if let Owner::HalfOpen(path) = owner {
                    self.established(cx, path);
                }
                return true;
            }
            CmKind::Resolved { .. } | CmKind::ConnectRequest { .. } | CmKind::TimewaitExit => return true,
            CmKind::Disconnected => PathError::PeerDisconnected,
            CmKind::Rejected { reason, .. } => PathError::Cm(format!("rejected: {reason}")),
            CmKind::Unreachable(_) | CmKind::ConnectError(_) | CmKind::AddressChange => {
                PathError::Cm(format!("{kind:?}"))
            }
        };
        match owner {
            Owner::HalfOpen(path) => {
                self.admission.ended(path);
                self.forget(cx, path);
            }
            Owner::Held(path) => self.drop_held(cx, path, id),
            Owner::Path(place) => self.effects.broken.push_back((place.session, place.path, why)),
            Owner::Asked(ask) => self.asks_no_more(cx, ask),
        }
        true
    }

    fn device_removed(&mut self, cx: &mut Cx<'_>, device: DeviceIx) {
        let of_device = |half_open: &&HalfOpen| half_open.id.device == device;
        let half_open: Vec<PathKey> = self.half_open.values().filter(of_device).map(|h| h.id.key).collect();
        for path in half_open {
            self.admission.ended(path);
            self.forget(cx, path);
        }
        for (key, session) in &self.sessions {
            let paths = session.paths.values().filter(|path| path.id.device == device);
            let broken = paths.map(|path| (*key, path.id.key, PathError::Cm("the device is gone".into())));
            self.effects.broken.extend(broken);
        }
    }

    fn drained(&mut self, cx: &mut Cx<'_>, qp: QpId) -> bool {
        let Some(place) = self.qps.get(&qp).copied() else {
            return false;
        };
        let path = self.path_mut(place.session, place.path);
        let Some(path) = path.filter(|path| path.state == PathState::Closing && !path.drained) else {
            return true;
        };
        if path.drained(place.cid) {
            path.drained = true;
            self.advance(cx, place.session, place.path, PathEvent::Drained);
            self.look_after(cx, place.session, place.path);
        }
        true
    }

    /// A path that is going down may be over.
    pub(super) fn look_after(&mut self, cx: &mut Cx<'_>, session: SessionKey, path: PathKey) {
        let over = self
            .path(session, path)
            .is_some_and(|path| path.drained && path.with_user == 0 && path.others.is_empty());
        if over {
            self.advance(cx, session, path, PathEvent::Idle);
        }
    }

    /// The client has asked for the chunks, by the session's name.
    fn information(&mut self, cx: &mut Cx<'_>, place: Place, name: &str) {
        if let Err(why) = self.take_name(place, name) {
            return self.effects.broken.push_back((place.session, place.path, why));
        }
        let now = cx.now;
        let Some(session) = self.sessions.get_mut(&place.session) else {
            return;
        };
        if session.has_late_requests() {
            self.effects.counters.paths_held += 1;
        }
        if let Some(path) = session.paths.get_mut(&place.path) {
            path.asked = true;
        }
        session.begin_to_wait(now, place.path, &mut self.effects);
        self.name_waiting(cx, place.session);
    }

    /// Gives the path's session its name, and the number of connections of the path that asks, unless it may not have it or
    /// another has it. One that is only still being cleaned up does not count: its client may be back already.
    fn take_name(&mut self, place: Place, name: &str) -> Result<(), PathError> {
        let others = self.at_home().filter(|s| s.key != place.session);
        if others.filter(|s| s.name() == name).any(Session::lives) {
            return Err(PathError::NameTaken(name.into()));
        }
        self.admission.name(place.path, name).map_err(|refusal| match refusal {
            Refusal::NameTaken => PathError::NameTaken(name.into()),
            refusal => refusal.into(),
        })?;
        let connections = self
            .path(place.session, place.path)
            .map_or(0, |path| path.id.connections);
        if let Some(session) = self.sessions.get_mut(&place.session) {
            session.named.get_or_insert_with(|| Named {
                name: name.into(),
                connections,
            });
        }
        Ok(())
    }

    /// Answers the paths of a session that have asked for the chunks, once there are any and nobody works on requests that came
    /// by paths that are lost, or before a path asked.
    pub(super) fn name_waiting(&mut self, cx: &mut Cx<'_>, key: SessionKey) {
        let Some(session) = self.sessions.get(&key).filter(|s| !s.has_late_requests()) else {
            return;
        };
        let may = |path: &Path| path.asked && path.has_chunks() && !session.waits(path);
        let waits = |path: &&Path| path.state == PathState::Connecting && may(path);
        let waiting: Vec<PathKey> = session.paths.values().filter(waits).map(|path| path.id.key).collect();
        for path in waiting {
            if self.prepare(cx, Part { session: key, path }) {
                self.advance(cx, key, path, PathEvent::Named);
            }
        }
    }

    /// Takes down the paths that can't go on, and notes when to look at the others.
    fn settle(&mut self, cx: &mut Cx<'_>) {
        let wake = self.effects.wake.take();
        self.wake(wake);
        loop {
            self.look_at_settled(cx);
            let Some((session, path, why)) = self.effects.broken.pop_front() else {
                return;
            };
            self.fail(cx, session, path, why);
        }
    }

    /// Takes a path down.
    fn fail(&mut self, cx: &mut Cx<'_>, key: SessionKey, path_key: PathKey, why: PathError) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let name = session.named.as_ref().map_or("", |named| &named.name);
        let path = session.paths.get_mut(&path_key);
        let Some(path) = path.filter(|path| path.is_alive()) else {
            return;
        };
        let why = path.cause(cx, why);
        let peer = path.id.peer;
        if session.home.is_none() {
            self.effects.counters.ended(&why);
        }
        match why {
            _ if session.home.is_some() => tracing::debug!(session = name, %peer, reason = %why, "path lost here"),
            PathError::Closed | PathError::PeerDisconnected | PathError::GivenUp => {
                tracing::info!(session = name, %peer, reason = %why, "path closed");
            }
            _ => tracing::warn!(session = name, %peer, error = %why, "path closed"),
        }
        path.why = Some(why);
        self.advance(cx, key, path_key, PathEvent::Broken);
        let empty = |path: &&mut Path| path.conns().next().is_none();
        if let Some(path) = self.path_mut(key, path_key).filter(empty) {
            // None of its connections is here: there is nothing to drain.
            path.drained = true;
            self.advance(cx, key, path_key, PathEvent::Drained);
            self.look_after(cx, key, path_key);
        }
    }

    /// A path meets something.
    pub(super) fn advance(&mut self, cx: &mut Cx<'_>, session: SessionKey, path: PathKey, event: PathEvent) {
        let Some(entry) = self.path_mut(session, path) else {
            return;
        };
        let Some((next, actions)) = step(entry.table, entry.state, event) else {
            return;
        };
        entry.state = next;
        for action in actions {
            self.act(cx, session, path, *action);
        }
    }

    fn act(&mut self, cx: &mut Cx<'_>, key: SessionKey, path_key: PathKey, action: PathAction) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let Some(path) = session.paths.get_mut(&path_key) else {
            return;
        };
        match action {
            PathAction::StartHeartbeat => {
                path.start_heartbeat(cx.now);
                let due = path.next_timeout();
                self.wake(due);
            }
            PathAction::StopHeartbeat => path.stop_timers(),
            PathAction::Announce => self.announce(key, path_key),
            PathAction::PostInfo => {
                let work = ServerWork::info(self.config.queue_depth, path.renewal());
                let place = Place {
                    session: key,
                    path: path_key,
                    cid: 0,
                };
                if let Err(why) = session.push(place, work, &mut self.effects) {
                    self.effects.broken.push_back((key, path_key, why));
                }
            }
            PathAction::DropParked => session.drop_parked(path_key, &mut self.effects),
            PathAction::DrainQps => path.drain(cx),
            PathAction::Disconnect => session.disconnect(cx, path_key),
            PathAction::TellAdmission => {
                let (peer, access_error) = (path.id.peer.ip(), matches!(path.why, Some(PathError::AccessError)));
                self.admission.closing(path_key);
                if access_error {
                    self.admission.access_error(cx.now, peer);
                }
            }
            PathAction::TellShares => {
                let part = Part {
                    session: key,
                    path: path_key,
                };
                let why = path.why.clone().unwrap_or(PathError::Closed);
                for share in path.others.shares() {
                    self.effects.write(share, Message::Down(part, why.clone()));
                }
            }
            PathAction::DropAnswers => session.drop_answers(path_key, &mut self.effects),
            PathAction::ReleaseParked => session.release_all(cx, &mut self.effects),
            PathAction::DestroyQps => {
                for conn in path.conns() {
                    self.cms.remove(&conn.cm);
                    self.qps.remove(&conn.qp);
                }
                path.destroy(cx);
            }
            PathAction::Withdraw => self.withdraw(cx, key, path_key),
            PathAction::Report => self.report(key, path_key),
            PathAction::TellHome => self.tell_home(key, path_key),
            PathAction::Leave => self.leave(cx, key, path_key),
        }
    }

    /// A path has finished its handshake.
    fn announce(&mut self, key: SessionKey, path_key: PathKey) {
        self.admission.up(path_key);
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let Some(path) = session.paths.get_mut(&path_key) else {
            return;
        };
        path.is_up = true;
        session.up += 1;
        let (peer, local, connections) = (path.id.peer, path.id.local, path.id.connections);
        let summary = session.summary();
        tracing::info!(session = summary.name, %peer, connections, "path is up");
        if !core::mem::replace(&mut session.introduced, true) {
            self.effects.counters.sessions_opened += 1;
            self.effects.outputs.push_back(Output::SessionOpened(SessionOpened {
                session: key,
                name: summary.name,
                peer: summary.peer,
                connections: summary.connections,
            }));
        }
        self.effects.outputs.push_back(Output::PathUp {
            session: key,
            peer,
            local,
            connections,
        });
    }

    /// A path is over: its objects are gone, and the user has none of its requests.
    fn withdraw(&mut self, cx: &mut Cx<'_>, key: SessionKey, path_key: PathKey) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let Some(path) = session.remove_path(path_key) else {
            return;
        };
        session.deregister_unused(cx);
        self.domains.leave(cx, session.uuid, path.id.device);
        let why = path.why.unwrap_or(PathError::Closed);
        if path.is_up {
            session.up = session.up.saturating_sub(1);
            self.effects.outputs.push_back(Output::PathDown {
                session: key,
                peer: path.id.peer,
                local: path.id.local,
                why: why.clone(),
            });
        }
        self.paths.remove(&path_key);
        self.admission.ended(path_key);
        if session.paths.is_empty() {
            self.remove_session(key, &why);
        }
    }

    /// A session has no path left.
    fn remove_session(&mut self, key: SessionKey, why: &PathError) {
        let Some(session) = self.sessions.remove(&key) else {
            return;
        };
        if session.introduced {
            self.effects.outputs.push_back(Output::SessionClosed {
                session: key,
                why: why.clone(),
            });
        }
        for share in &session.told {
            self.effects.write(*share, Message::Over(key, why.clone()));
        }
        if self.by_uuid.get(&session.uuid) == Some(&key) {
            self.by_uuid.remove(&session.uuid);
        }
        let outputs = &mut self.effects.outputs;
        if let Some(unwanted) = session.ticket {
            self.tickets.remove(&unwanted);
            outputs.retain(|output| !matches!(output, Output::Allocate { ticket, .. } if *ticket == unwanted));
        }
        outputs.extend(session.into_memory().map(Output::Free));
    }
}

/// Listens on all addresses, or on none.
fn listen_on(cx: &mut Cx<'_>, config: &ServerConfig, backlog: u32) -> Result<Vec<CmRef>, VerbsError> {
    let mut listeners = Vec::new();
    for addr in config.listen_addrs() {
        match cx.provider.cm_listen(addr, backlog) {
            Ok(listener) => listeners.push(listener),
            Err(e) => {
                listeners
                    .into_iter()
                    .for_each(|listener| cx.provider.cm_destroy(listener));
                return Err(e);
            }
        }
    }
    Ok(listeners)
}
