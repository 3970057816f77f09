//! The thread of the connection manager. It alone makes paths: of a connection request no more than a queue pair, until
//! the client has proved that it receives what is sent to its address.

use core::{sync::atomic::Ordering, time::Duration};
use std::{collections::HashMap, sync::Arc};

use roce_verbs::{
    QpCaps,
    provider::{CmChannel, CmEvent, CmEventKind, CmId, ConnParams, Provider},
};
use zerocopy::IntoBytes;

use super::{
    listener::{Counters, Shared},
    path::{Path, PathId, Queues, SrvConn, service_caps},
    session::SrvSession,
};
use crate::{
    Error, PathError,
    admission::{Admitted, ConnectRequest, Opened, PathKey, Refusal},
    poller::Queue,
    proto::{ConnReq, ConnRsp, MAX_HDR_SIZE, MsgFlags, ProtoError, Uuid, errno},
    throttle::LogThrottle,
};

/// Longest wait for an event: a shutdown is noticed by then.
const MAX_WAIT: Duration = Duration::from_millis(200);

/// A path of which nobody knows yet whether there is a client behind it: all that its connection request gets.
pub(super) struct HalfOpen<P: Provider> {
    pub(super) id: PathId,
    pub(super) session: Uuid,
    /// Of its session, which may be still to come.
    pub(super) pd: P::Pd,
    pub(super) service: Queue<P>,
    pub(super) caps: QpCaps,
    pub(super) conn: SrvConn<P>,
    handle: u64,
    /// Requests for further connections that came before connection 0 was known to stand.
    held: Vec<(P::CmId, Vec<u8>)>,
}

/// What the thread works on.
pub(super) struct Desk<P: Provider> {
    shared: Arc<Shared<P>>,
    half_open: HashMap<PathKey, HalfOpen<P>>,
    /// By the handle of connection 0.
    handles: HashMap<u64, PathKey>,
    log: Log,
}

/// Lines that anybody may cause.
struct Log {
    refused: LogThrottle,
    gave_way: LogThrottle,
    timed_out: LogThrottle,
}

/// A path, its session, and what its threads will poll.
type Made<P> = (Arc<SrvSession<P>>, Arc<Path<P>>, Queues<P>);

/// Why a request got no further.
enum Denied {
    Refused(Refusal),
    Malformed(ProtoError),
    NoAddress,
    Failed(Error),
}

impl Denied {
    fn errno(&self) -> i32 {
        match self {
            Self::Refused(refusal) => refusal.errno(),
            Self::Malformed(_) | Self::NoAddress => errno::ECONNRESET,
            Self::Failed(_) => errno::ENOMEM,
        }
    }
}

impl core::fmt::Display for Denied {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Malformed(e) => e.fmt(f),
            Self::NoAddress => f.write_str("no peer address"),
            Self::Failed(e) => e.fmt(f),
        }
    }
}

impl From<Refusal> for Denied {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl<P: Provider> Desk<P> {
    pub(super) fn new(shared: Arc<Shared<P>>) -> Self {
        Self {
            shared,
            half_open: HashMap::new(),
            handles: HashMap::new(),
            log: Log {
                refused: LogThrottle::new(),
                gave_way: LogThrottle::new(),
                timed_out: LogThrottle::new(),
            },
        }
    }

    /// Runs until the server closes. The listener goes with it.
    pub(super) fn serve(mut self, channel: &P::CmChannel, listener: P::CmId) {
        while !self.shared.closing.load(Ordering::Acquire) {
            match channel.wait(Some(self.patience())) {
                Ok(Some(event)) => self.event(event),
                Ok(None) => {}
                Err(e) => {
                    tracing::error!(error = %e, "the server's connection manager stopped");
                    break;
                }
            }
            self.expire();
            self.summaries();
        }
        drop(listener);
    }

    /// How long to wait for an event.
    fn patience(&self) -> Duration {
        let due = self.shared.registry.lock().admission.next_deadline();
        let left = due.map_or(MAX_WAIT, |due| due.saturating_since(self.shared.now()));
        left.clamp(Duration::from_millis(1), MAX_WAIT)
    }

    fn event(&mut self, event: CmEvent<P::CmId>) {
        let handle = event.id.handle();
        match event.kind {
            CmEventKind::ConnectRequest { id, private_data, .. } => self.connect_request(id, private_data),
            CmEventKind::Established { .. } => self.established(handle),
            CmEventKind::TimewaitExit => {}
            CmEventKind::Disconnected => self.over(handle, || PathError::PeerDisconnected),
            kind @ (CmEventKind::Rejected { .. } | CmEventKind::Unreachable | CmEventKind::ConnectError(_)) => {
                self.over(handle, || PathError::Cm(format!("{kind:?}")));
            }
        }
    }

    /// A connection is over, and its path with it.
    fn over(&mut self, handle: u64, why: impl FnOnce() -> PathError) {
        if let Some(key) = self.handles.get(&handle).copied() {
            self.shared.registry.lock().admission.ended(key);
            return drop(self.forget(key));
        }
        let path = self.shared.registry.lock().connections.get(&handle).cloned();
        if let Some(path) = path.and_then(|p| p.upgrade()) {
            path.fail(why());
        }
    }

    /// Takes a half-open path off the desk. Dropped, its connection is ended, and what was held is refused.
    fn forget(&mut self, key: PathKey) -> Option<HalfOpen<P>> {
        let half_open = self.half_open.remove(&key)?;
        self.handles.remove(&half_open.handle);
        Some(half_open)
    }

    fn connect_request(&mut self, id: P::CmId, private_data: Vec<u8>) {
        let Err(denied) = self.admit(&id, private_data) else {
            return;
        };
        let counters = &self.shared.counters;
        counters.denied(match &denied {
            Denied::Refused(refusal) => Some(*refusal),
            _ => None,
        });
        let (peer, errno) = (id.peer_addr(), denied.errno());
        self.log.refused.hit(
            || tracing::warn!(?peer, errno, reason = %denied, "connection refused"),
            refused_more,
        );
        let rsp = ConnRsp::reject(errno);
        if let Err(e) = id.reject(rsp.as_bytes()) {
            tracing::debug!(error = %e, "reject");
        }
    }

    fn admit(&mut self, id: &P::CmId, private_data: Vec<u8>) -> Result<(), Denied> {
        let peer = id.peer_addr().ok_or(Denied::NoAddress)?;
        let req = *ConnReq::parse(&private_data).map_err(Denied::Malformed)?;
        let request = ConnectRequest {
            peer: peer.ip(),
            local: id.local_addr().ip(),
            session: req.session_uuid,
            path: req.path_uuid,
            cid: req.cid.get(),
            connections: req.cid_num.get(),
            first_conn: req.first_conn(),
        };
        let now = self.shared.now();
        let admitted = self.shared.registry.lock().admission.request(now, &request)?;
        match admitted {
            Admitted::HalfOpen { path, gives_way } => {
                if let Some(old) = gives_way {
                    self.give_way(old);
                }
                let path_id = PathId {
                    key: path,
                    con_num: request.connections,
                    peer,
                };
                self.greet(path_id, request.session, id).map_err(|e| {
                    self.shared.registry.lock().admission.ended(path);
                    Counters::add(&self.shared.counters.no_resources);
                    Denied::Failed(e)
                })
            }
            Admitted::Held(path) => {
                Counters::add(&self.shared.counters.requests_held);
                if let Some(half_open) = self.half_open.get_mut(&path) {
                    half_open.held.push((id.clone(), private_data));
                }
                Ok(())
            }
            Admitted::Connection(path) => self.connect(path, request.cid, id),
        }
    }

    /// A half-open path has given way to a newcomer.
    fn give_way(&mut self, key: PathKey) {
        let Some(old) = self.forget(key) else { return };
        Counters::add(&self.shared.counters.half_open_gave_way);
        let peer = old.id.peer;
        self.log.gave_way.hit(
            || tracing::warn!(%peer, "a client that has not answered gives way to another"),
            gave_way_more,
        );
    }

    /// Answers connection 0 of a new path.
    fn greet(&mut self, id: PathId, session: Uuid, cm: &P::CmId) -> Result<(), Error> {
        let shared = &self.shared;
        let known = shared.registry.lock().sessions.get(&session).map(|s| s.pd.clone());
        let waiting = || self.half_open.values().find(|h| h.session == session);
        let pd = match known.or_else(|| waiting().map(|h| h.pd.clone())) {
            Some(pd) => pd,
            None => shared.provider.alloc_pd()?,
        };
        let caps = service_caps(&shared.provider, &shared.config);
        let service = Queue::new(&shared.provider, caps.max_send_wr + caps.max_recv_wr + 16)?;
        let conn = SrvConn::new(&shared.provider, &pd, &service.cq, 0, caps)?;
        cm.accept(&conn.qp, response(shared))?;
        conn.set_cm(cm.clone());
        Counters::add(&shared.counters.connections_accepted);
        self.handles.insert(cm.handle(), id.key);
        let half_open = HalfOpen {
            id,
            session,
            pd,
            service,
            caps,
            conn,
            handle: cm.handle(),
            held: Vec::new(),
        };
        self.half_open.insert(id.key, half_open);
        Ok(())
    }

    /// Connection 0 of a path stands: now it gets what a session needs.
    fn established(&mut self, handle: u64) {
        let Some(key) = self.handles.get(&handle).copied() else {
            return;
        };
        let opened = self.shared.registry.lock().admission.established(key);
        let (Some(opened), Some(mut half_open)) = (opened, self.forget(key)) else {
            return;
        };
        let held = core::mem::take(&mut half_open.held);
        let peer = half_open.id.peer;
        match opened {
            Ok(opened) => {
                if let Err(e) = self.open(&opened, half_open) {
                    Counters::add(&self.shared.counters.no_resources);
                    tracing::error!(%peer, error = %e, "no room for a path: it is closed");
                }
            }
            Err(refusal) => {
                self.shared.counters.denied(Some(refusal));
                self.log.refused.hit(
                    || tracing::warn!(%peer, reason = %refusal, "path refused: others were faster"),
                    refused_more,
                );
            }
        }
        for (id, private_data) in held {
            self.connect_request(id, private_data);
        }
    }

    /// Makes the path, and perhaps its session. Outside of the registry's lock: only this thread makes any.
    fn open(&self, opened: &Opened, half_open: HalfOpen<P>) -> Result<(), Error> {
        let shared = &self.shared;
        let known = match opened.new_session {
            true => None,
            false => shared.registry.lock().sessions.get(&opened.session).cloned(),
        };
        let (key, handle) = (half_open.id.key, half_open.handle);
        let made = self.make(known, opened.session, half_open);
        let (session, path, queues) = made.inspect_err(|_| {
            shared.registry.lock().admission.ended(key);
        })?;
        {
            let mut registry = shared.registry.lock();
            registry.connections.insert(handle, Arc::downgrade(&path));
            registry.paths.insert(key, Arc::downgrade(&path));
            session.paths.lock().push(path.clone());
            registry.sessions.insert(opened.session, session);
        }
        path.run(queues)
    }

    /// Allocates.
    fn make(&self, session: Option<Arc<SrvSession<P>>>, uuid: Uuid, half_open: HalfOpen<P>) -> Result<Made<P>, Error> {
        let shared = &self.shared;
        let session = match session {
            Some(session) => session,
            None => {
                let (id, peer) = (shared.next_session(), half_open.id.peer);
                let new = SrvSession::new(&shared.provider, &half_open.pd, &shared.config, id, uuid, peer);
                Arc::new(new?)
            }
        };
        let (path, queues) = Path::new(shared, &session, half_open)?;
        Ok((session, path, queues))
    }

    /// Answers a further connection of a path.
    fn connect(&self, key: PathKey, cid: u16, id: &P::CmId) -> Result<(), Denied> {
        let mut registry = self.shared.registry.lock();
        let path = registry.paths.get(&key).and_then(std::sync::Weak::upgrade);
        // The path may just have ended.
        let path = path.ok_or(Refusal::Unexpected)?;
        registry.connections.insert(id.handle(), Arc::downgrade(&path));
        drop(registry);
        let accepted = path.add_connection(cid, id).and_then(|conn| {
            id.accept(&conn.qp, response(&self.shared))?;
            path.accepted(conn);
            Ok(())
        });
        match accepted {
            Ok(()) => {
                Counters::add(&self.shared.counters.connections_accepted);
                tracing::debug!(cid, peer = %path.id.peer, "connection accepted");
                Ok(())
            }
            Err(e) => {
                self.shared.registry.lock().connections.remove(&id.handle());
                path.fail(e.clone());
                Err(Denied::Failed(Error::Path(e)))
            }
        }
    }

    /// Ends paths whose handshake has taken too long.
    fn expire(&mut self) {
        let now = self.shared.now();
        loop {
            let (key, path) = {
                let mut registry = self.shared.registry.lock();
                let Some(key) = registry.admission.expired(now) else {
                    return;
                };
                (key, registry.paths.get(&key).and_then(std::sync::Weak::upgrade))
            };
            let why = PathError::HandshakeTimeout(self.shared.config.handshake_timeout);
            if let Some(path) = path {
                path.fail(why);
            } else if let Some(old) = self.forget(key) {
                self.shared.counters.count(&why);
                let peer = old.id.peer;
                self.log.timed_out.hit(
                    || tracing::warn!(%peer, error = %why, "a client has not answered"),
                    timed_out_more,
                );
            }
        }
    }

    fn summaries(&self) {
        self.log.refused.tick(refused_more);
        self.log.gave_way.tick(gave_way_more);
        self.log.timed_out.tick(timed_out_more);
    }
}

fn refused_more(more: u64) {
    tracing::warn!(more, "connections refused");
}

fn gave_way_more(more: u64) {
    tracing::warn!(more, "clients that had not answered gave way to others");
}

fn timed_out_more(more: u64) {
    tracing::warn!(more, "clients have not answered");
}

/// What goes with an accept.
fn response<P: Provider>(shared: &Shared<P>) -> ConnParams {
    let config = &shared.config;
    let flags = match config.always_invalidate {
        true => MsgFlags::NEW_RKEY,
        false => MsgFlags::empty(),
    };
    let depth = u16::try_from(config.queue_depth).unwrap_or(u16::MAX);
    let rsp = ConnRsp::accept(depth, config.max_io_size(), MAX_HDR_SIZE, flags);
    ConnParams {
        private_data: rsp.as_bytes().to_vec(),
        responder_resources: 0,
        initiator_depth: 0,
        ..ConnParams::default()
    }
}
