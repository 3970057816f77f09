//! The server as a state machine: it is told what happens and what time it is, posts what it has to send with its
//! [`Provider`](roce_verbs::provider::Provider), and says what concerns its user.
//!
//! A turn of the loop that drives it: completions ([`Server::completion`]) and events ([`Server::event`]), answers of the user
//! ([`Server::answer`]), timers ([`Server::timeout`]), and at its end [`Server::end_batch`]. [`Server::poll_output`] is to be
//! asked after each of them until it has nothing more. A process may have one in each of several loops: each session is whole at one of
//! them, and all share one [`Admission`].

use core::{fmt, net::SocketAddr};
use std::{collections::BTreeMap, sync::Arc};

use roce_verbs::mem::{MemError, Pages};
use roce_verbs::{
    Completion, Instant,
    provider::{CmKind, CmRef, DeviceIx, Event, KeyStrategy, QpId, RangeError, VerbsError},
};

use crate::{
    Cx, Error, PathError,
    admission::{Admission, PathKey, Refusal, shared::SharedAdmission},
    proto::ChunkLayout,
    server::{
        config::ServerConfig,
        counters::ServerCounters,
        domains::Domains,
        effects::{Effects, Place},
        half_open::Accept,
        listing::SessionListing,
        path::Path,
        request::{Output, RequestKey, SessionKey, SessionSummary, Ticket},
        session::{Named, Session},
        state::PathEvent,
    },
    stats::RdmaStats,
};

/// Connection requests that may wait to be looked at, beside those that are held.
const BACKLOG: u32 = 64;

/// See the module. It has to be [stopped](Server::stop) and driven until it [is idle](Server::is_idle), or what it has of the
/// provider stays there.
pub struct Server {
    pub(super) config: ServerConfig,
    pub(super) layout: ChunkLayout,
    /// One for each address.
    listeners: Vec<CmRef>,
    /// It has not been stopped.
    listens: bool,
    pub(super) accept: Accept,
    pub(super) domains: Domains,
    pub(super) sessions: BTreeMap<SessionKey, Session>,
    /// Connections of paths.
    pub(super) cms: BTreeMap<CmRef, Place>,
    /// Their queue pairs.
    pub(super) qps: BTreeMap<QpId, Place>,
    /// Memory that was asked for.
    pub(super) tickets: BTreeMap<Ticket, SessionKey>,
    next_ticket: u64,
    pub(super) effects: Effects,
    /// Room for the next list of connections that the end of a turn looks after.
    spare: Vec<Place>,
    /// When a path is to be looked at; perhaps somewhat early.
    due: Option<Instant>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("listens", &self.listens)
            .field("half_open", &self.accept.half_open.len())
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
        Self::listen_with(cx, config, SharedAdmission::new(admission), 0)
    }

    /// Starts to listen as server number `at` of several that share an admission, each in a loop of its own. All connection requests of a
    /// session must come to the server that [`Admission::place`] says. Returns the first of its addresses.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn listen_with(
        cx: &mut Cx<'_>,
        config: ServerConfig,
        admission: SharedAdmission,
        at: usize,
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
            accept: Accept::new(admission, at),
            config,
            layout,
            listeners,
            listens: true,
            domains: Domains::default(),
            sessions: BTreeMap::new(),
            cms: BTreeMap::new(),
            qps: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 1,
            effects: Effects::default(),
            spare: Vec::new(),
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

    /// Sessions that exist, also those still being opened by clients that have proved their address.
    pub fn sessions(&self) -> Vec<SessionSummary> {
        self.sessions.values().map(Session::summary).collect()
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
                        self.no_room(cx.now, key, path, e);
                    }
                }
            }
            None => {
                for path in paths {
                    self.no_room(cx.now, key, path, VerbsError::Limit("memory").into());
                }
            }
        }
        self.name_waiting(cx, key);
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
        let closed = known.paths.keys().map(|path| (session, *path, PathError::Closed));
        self.effects.broken.extend(closed);
        self.settle(cx);
        true
    }

    /// Disconnects a path, as the kernel's `disconnect` does: its client may connect it again. False when there is none of this number.
    /// Its end is told as usual, when all its requests have been answered.
    pub fn close_path(&mut self, cx: &mut Cx<'_>, session: SessionKey, path: PathKey) -> bool {
        let known = self.sessions.get(&session).filter(|s| s.paths.contains_key(&path));
        if known.is_none() {
            return false;
        }
        self.effects.broken.push_back((session, path, PathError::Closed));
        self.settle(cx);
        true
    }

    /// Sessions and paths that it has.
    pub fn listing(&self) -> Vec<SessionListing> {
        self.sessions.values().map(Session::listing).collect()
    }

    /// Sets the statistics of a path to 0. False when there is none of this number.
    pub fn reset_stats(&mut self, session: SessionKey, path: PathKey) -> bool {
        let found = self.path_mut(session, path);
        found.map(|path| path.rdma = RdmaStats::default()).is_some()
    }

    /// Stops listening, and disconnects all sessions.
    pub fn stop(&mut self, cx: &mut Cx<'_>) {
        if core::mem::take(&mut self.listens) {
            self.listeners
                .iter()
                .for_each(|listener| cx.provider.cm_destroy(*listener));
        }
        self.close_all_half_open(cx, None);
        let sessions: Vec<SessionKey> = self.sessions.keys().copied().collect();
        for session in sessions {
            self.close_session(cx, session);
        }
    }

    /// Whether nothing is left: it has been stopped, and all requests of its sessions have been answered.
    pub fn is_idle(&self) -> bool {
        !self.listens && self.accept.half_open.is_empty() && self.sessions.is_empty() && self.domains.is_empty()
    }

    /// The turn of the loop ends: receives of all connections go back first, so that a peer that is answered finds them; then the
    /// turn's work is posted.
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
    }

    /// When [`Server::timeout`] wants to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.accept.deadline).min()
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

    pub(super) fn wake(&mut self, at: Option<Instant>) {
        self.due = self.due.into_iter().chain(at).min();
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
    fn no_room(&mut self, now: Instant, session: SessionKey, path: PathKey, why: PathError) {
        self.effects.counters.no_resources += 1;
        let peer = self.path(session, path).map(|path| path.id.peer);
        if let Some(peer) = peer
            && let Some(suppressed) = self.accept.no_room.pass(now)
        {
            tracing::error!(%peer, error = %why, suppressed, "no room for a path: it is closed");
        }
        self.effects.broken.push_back((session, path, why));
    }

    fn cm_event(&mut self, cx: &mut Cx<'_>, id: CmRef, kind: &CmKind) -> bool {
        if self.pending_event(cx, id, kind) {
            return true;
        }
        let Some(place) = self.cms.get(&id).copied() else {
            return false;
        };
        let why = match kind {
            CmKind::Established { .. }
            | CmKind::Resolved { .. }
            | CmKind::ConnectRequest { .. }
            | CmKind::TimewaitExit => return true,
            CmKind::Disconnected => PathError::PeerDisconnected,
            CmKind::Rejected { reason, .. } => PathError::Cm(format!("rejected: {reason}")),
            CmKind::Unreachable(_) | CmKind::ConnectError(_) | CmKind::AddressChange => {
                PathError::Cm(format!("{kind:?}"))
            }
        };
        self.effects.broken.push_back((place.session, place.path, why));
        true
    }

    fn device_removed(&mut self, cx: &mut Cx<'_>, device: DeviceIx) {
        self.close_all_half_open(cx, Some(device));
        for (key, session) in &self.sessions {
            let paths = session.paths.values().filter(|path| path.id.device == device);
            let broken = paths.map(|path| (*key, path.id.key, PathError::Cm("the device is gone".into())));
            self.effects.broken.extend(broken);
        }
    }

    /// The client has asked for the chunks, by the session's name.
    fn information(&mut self, cx: &mut Cx<'_>, place: Place, name: &str) {
        if let Err(why) = self.take_name(place, name) {
            return self.effects.broken.push_back((place.session, place.path, why));
        }
        let Some(session) = self.sessions.get_mut(&place.session) else {
            return;
        };
        if session.has_late_requests() {
            self.effects.counters.paths_held += 1;
        }
        if let Some(path) = session.paths.get_mut(&place.path) {
            path.ask();
        }
        session.await_requests(cx.now, place.path, &mut self.effects);
        self.name_waiting(cx, place.session);
    }

    /// Gives the path's session its name, and the number of connections of the path that asks, unless it may not have it or
    /// another has it.
    fn take_name(&mut self, place: Place, name: &str) -> Result<(), PathError> {
        let named = self.accept.admission(|admission| admission.name(place.path, name));
        named.map_err(|refusal| match refusal {
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
        let may = |path: &Path| path.has_chunks() && !session.awaits(path.id.key);
        let waits = |path: &&Path| path.phase.has_asked() && may(path);
        let waiting: Vec<PathKey> = session.paths.values().filter(waits).map(|path| path.id.key).collect();
        for path in waiting {
            self.advance(cx, key, path, PathEvent::Named);
        }
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
