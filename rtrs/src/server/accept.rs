//! Accept path: connection requests are accepted, held or refused, and half-open paths are established or end.

use core::net::SocketAddr;

use roce_verbs::provider::{CmKind, CmRef, ConnParams, DeviceIx, KeyStrategy, RejectReason, VerbsError};
use zerocopy::IntoBytes;

use crate::{
    Cx, PathError,
    admission::{Admitted, ConnectRequest, Opened, PathKey, Refusal, SessionKey},
    proto::{ConnReq, ConnRsp, MAX_HDR_SIZE, MsgFlags, ProtoError, errno},
    server::{
        config::ServerConfig,
        conn::{cq_entries, device_caps, service_caps},
        effects::Place,
        half_open::{HalfOpen, Incoming, PathId, Pending},
        path::Path,
        server::Server,
        session::Session,
    },
};

/// Why a connection request is refused.
#[derive(Debug, thiserror::Error)]
enum Denied {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Malformed(#[from] ProtoError),
    #[error("no peer address")]
    NoAddress,
    #[error(transparent)]
    Failed(PathError),
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

/// Private data and parameters of an accept.
fn response(cx: &Cx<'_>, device: DeviceIx, config: &ServerConfig) -> Result<ConnParams, VerbsError> {
    let flags = match KeyStrategy::for_chunks(device_caps(cx, device)?, config.always_invalidate) {
        KeyStrategy::Static => MsgFlags::empty(),
        _ => MsgFlags::NEW_RKEY,
    };
    let depth = u16::try_from(config.queue_depth).unwrap_or(u16::MAX);
    let rsp = ConnRsp::accept(depth, config.max_io_size(), MAX_HDR_SIZE, flags);
    Ok(ConnParams {
        private_data: rsp.as_bytes().to_vec(),
        responder_resources: 0,
        initiator_depth: 0,
        ..ConnParams::default()
    })
}

/// Reads a connection request.
fn parse(cx: &Cx<'_>, cm: CmRef, device: DeviceIx, private_data: &[u8]) -> Result<Incoming, Denied> {
    let Some((local, Some(peer))) = cx.provider.cm_addrs(cm) else {
        return Err(Denied::NoAddress);
    };
    let req = *ConnReq::parse(private_data)?;
    let request = ConnectRequest {
        peer: peer.ip(),
        local: local.ip(),
        session: req.session_uuid,
        path: req.path_uuid,
        cid: req.cid.get(),
        connections: req.cid_num.get(),
        first_conn: req.first_conn(),
        recon_cnt: req.recon_cnt.get(),
    };
    Ok(Incoming {
        cm,
        request,
        peer,
        device,
    })
}

impl Server {
    /// A connection request has come.
    pub(super) fn connect_request(&mut self, cx: &mut Cx<'_>, cm: CmRef, device: DeviceIx, private_data: &[u8]) {
        match parse(cx, cm, device, private_data) {
            Ok(incoming) => self.incoming(cx, &incoming),
            Err(denied) => {
                let peer = cx.provider.cm_addrs(cm).and_then(|(_, peer)| peer);
                self.deny(cx, cm, peer, &denied);
            }
        }
    }

    /// A connection request is accepted, held or refused.
    fn incoming(&mut self, cx: &mut Cx<'_>, incoming: &Incoming) {
        if let Err(denied) = self.admit(cx, incoming) {
            self.deny(cx, incoming.cm, Some(incoming.peer), &denied);
        }
    }

    fn deny(&mut self, cx: &mut Cx<'_>, cm: CmRef, peer: Option<SocketAddr>, denied: &Denied) {
        self.effects.counters.denied(match denied {
            Denied::Refused(refusal) => Some(*refusal),
            _ => None,
        });
        let errno = denied.errno();
        if let Some(suppressed) = self.accept.refused.pass(cx.now) {
            tracing::warn!(?peer, errno, reason = %denied, suppressed, "connection refused");
        }
        let rsp = ConnRsp::reject(errno);
        if let Err(e) = cx.provider.cm_reject(cm, RejectReason::CONSUMER, rsp.as_bytes()) {
            tracing::debug!(error = %e, "reject");
            cx.provider.cm_destroy(cm);
        }
    }

    /// Does what the admission decides about a connection request.
    fn admit(&mut self, cx: &mut Cx<'_>, incoming: &Incoming) -> Result<(), Denied> {
        let (request, cm, at) = (&incoming.request, incoming.cm, self.accept.at);
        match self
            .accept
            .admission(|admission| admission.request(cx.now, at, request))?
        {
            Admitted::HalfOpen { path, evicted } => {
                if let Some(old) = evicted.and_then(|old| self.forget(cx, old)) {
                    self.effects.counters.half_open_evicted += 1;
                    if let Some(suppressed) = self.accept.evicted.pass(cx.now) {
                        tracing::warn!(peer = %old.peer, suppressed, "a client that has not answered is evicted for another");
                    }
                }
                let id = PathId {
                    key: path,
                    session: request.session,
                    uuid: request.path,
                    local: request.local,
                    device: incoming.device,
                    peer: incoming.peer,
                    connections: request.connections,
                };
                self.accept_first(cx, id, cm).map_err(|e| {
                    self.accept.admission(|admission| admission.ended(path));
                    self.effects.counters.no_resources += 1;
                    Denied::Failed(e.into())
                })
            }
            Admitted::Held(path) => {
                let half_open = self.accept.half_open.get_mut(&path).ok_or(Refusal::Unexpected)?;
                half_open.held.push(*incoming);
                self.accept.cms.insert(cm, Pending::Held(path));
                self.effects.counters.requests_held += 1;
                Ok(())
            }
            Admitted::Connection(path, session) => self.connect(cx, session, path, incoming),
            Admitted::GivenUp(path, session) => {
                self.effects.counters.paths_given_up += 1;
                match session {
                    Some(session) => self.effects.broken.push_back((session, path, PathError::GivenUp)),
                    None => self.close_half_open(cx, path),
                }
                Err(Refusal::Unexpected.into())
            }
        }
    }

    /// Accepts connection 0 of a new path.
    fn accept_first(&mut self, cx: &mut Cx<'_>, id: PathId, cm: CmRef) -> Result<(), VerbsError> {
        let params = response(cx, id.device, &self.config)?;
        let limits = &device_caps(cx, id.device)?.limits;
        let caps = service_caps(limits, &self.config);
        let entries = cq_entries(limits, &caps, 1);
        let make = || cx.provider.alloc_pd(id.device);
        let pd = self.domains.enter(id.session, id.device, make)?;
        let made = HalfOpen::make(cx, id, pd, caps, entries, cm);
        let accepted = made.and_then(|half_open| {
            let accepted = cx.provider.cm_accept(cm, half_open.conn.qp, &params);
            accepted.inspect_err(|_| half_open.destroy_objects(cx))?;
            Ok(half_open)
        });
        let half_open = accepted.inspect_err(|_| self.domains.leave(cx, id.session, id.device))?;
        self.effects.counters.connections_accepted += 1;
        self.accept.cms.insert(cm, Pending::First(id.key));
        self.accept.half_open.insert(id.key, half_open);
        Ok(())
    }

    /// Accepts a further connection of a path.
    fn connect(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionKey,
        key: PathKey,
        incoming: &Incoming,
    ) -> Result<(), Denied> {
        let (cid, device) = (incoming.request.cid, incoming.device);
        let path = self.sessions.get_mut(&session).and_then(|s| s.paths.get_mut(&key));
        let path = path.filter(|path| path.is_alive()).ok_or(Refusal::Unexpected)?;
        let accepted = match path.id.device == device {
            true => response(cx, device, &self.config)
                .map_err(PathError::from)
                .and_then(|params| path.add_connection(cx, cid, incoming.cm, &params)),
            false => Err(PathError::Unexpected("a connection through another device")),
        };
        let qp = accepted.map_err(|e| {
            self.effects.broken.push_back((session, key, e.clone()));
            Denied::Failed(e)
        })?;
        let place = Place {
            session,
            path: key,
            cid,
        };
        self.cms.insert(incoming.cm, place);
        self.qps.insert(qp, place);
        self.effects.counters.connections_accepted += 1;
        tracing::debug!(cid, peer = %path.id.peer, "connection accepted");
        Ok(())
    }

    /// Releases a half-open path: its connection is ended, and held requests are refused.
    fn forget(&mut self, cx: &mut Cx<'_>, path: PathKey) -> Option<PathId> {
        let half_open = self.accept.half_open.remove(&path)?;
        let held = half_open.held.iter().map(|held| held.cm);
        for cm in held.chain([half_open.conn.cm]) {
            self.accept.cms.remove(&cm);
            cx.provider.cm_destroy(cm);
        }
        debug_assert!(!self.accept.half_open.is_empty() || self.accept.cms.is_empty());
        half_open.destroy_objects(cx);
        self.domains.leave(cx, half_open.id.session, half_open.id.device);
        Some(half_open.id)
    }

    /// Ends a half-open path.
    fn close_half_open(&mut self, cx: &mut Cx<'_>, path: PathKey) {
        self.accept.admission(|admission| admission.ended(path));
        self.forget(cx, path);
    }

    /// Ends the half-open paths through a device; `None`: all of them.
    pub(super) fn close_all_half_open(&mut self, cx: &mut Cx<'_>, device: Option<DeviceIx>) {
        let of_device = |h: &&HalfOpen| device.is_none_or(|device| h.id.device == device);
        let half_open = self.accept.half_open.values().filter(of_device);
        for path in half_open.map(|h| h.id.key).collect::<Vec<_>>() {
            self.close_half_open(cx, path);
        }
    }

    /// Handles an event of a pending connection. False: it is no pending connection's.
    pub(super) fn pending_event(&mut self, cx: &mut Cx<'_>, cm: CmRef, kind: &CmKind) -> bool {
        let Some(pending) = self.accept.cms.get(&cm).copied() else {
            return false;
        };
        match (kind, pending) {
            (CmKind::Established { .. }, Pending::First(path)) => self.established(cx, path),
            (
                CmKind::Established { .. }
                | CmKind::Resolved { .. }
                | CmKind::ConnectRequest { .. }
                | CmKind::TimewaitExit,
                _,
            ) => {}
            (_, Pending::First(path)) => self.close_half_open(cx, path),
            // Its client has given it up.
            (_, Pending::Held(path)) => {
                if let Some(half_open) = self.accept.half_open.get_mut(&path) {
                    half_open.held.retain(|held| held.cm != cm);
                }
                self.accept.cms.remove(&cm);
                cx.provider.cm_destroy(cm);
            }
        }
        true
    }

    /// Connection 0 of a half-open path is established: if there is room for the path it gets what a session needs, and its held
    /// requests are decided about.
    fn established(&mut self, cx: &mut Cx<'_>, path: PathKey) {
        let opened = self.accept.admission(|admission| admission.established(path));
        let (Some(opened), Some(half_open)) = (opened, self.accept.half_open.get_mut(&path)) else {
            return;
        };
        let held = core::mem::take(&mut half_open.held);
        // Their events are the path's once they are accepted.
        for incoming in &held {
            self.accept.cms.remove(&incoming.cm);
        }
        let peer = half_open.id.peer;
        match opened {
            Ok(opened) => {
                self.accept.cms.remove(&half_open.conn.cm);
                let half_open = self.accept.half_open.remove(&path);
                if let Some(Err(e)) = half_open.map(|half_open| self.open(cx, opened, half_open)) {
                    self.effects.counters.no_resources += 1;
                    if let Some(suppressed) = self.accept.no_room.pass(cx.now) {
                        tracing::error!(%peer, error = %e, suppressed, "no room for a path: it is closed");
                    }
                }
            }
            Err(refusal) => {
                self.forget(cx, path);
                self.effects.counters.denied(Some(refusal));
                if let Some(suppressed) = self.accept.refused.pass(cx.now) {
                    tracing::warn!(%peer, reason = %refusal, suppressed, "path refused: others were faster");
                }
            }
        }
        for incoming in held {
            self.incoming(cx, &incoming);
        }
    }

    /// Makes the path, and perhaps its session. If that fails nothing is left of it.
    fn open(&mut self, cx: &mut Cx<'_>, opened: Opened, half_open: HalfOpen) -> Result<(), PathError> {
        let (id, cm, qp) = (half_open.id, half_open.conn.cm, half_open.conn.qp);
        let path = Path::open(cx, half_open, &self.config).inspect_err(|_| {
            self.domains.leave(cx, id.session, id.device);
            self.accept.admission(|admission| admission.ended(id.key));
        })?;
        let (session, layout) = (opened.key, self.layout);
        let place = Place {
            session,
            path: id.key,
            cid: 0,
        };
        self.cms.insert(cm, place);
        self.qps.insert(qp, place);
        let make = || Session::new(session, opened.session, id.peer, layout);
        let entry = self.sessions.entry(session).or_insert_with(make);
        entry.paths.insert(id.key, path);
        let registered = entry.register(cx, id.key);
        self.ask_for_memory(session);
        // From here on it ends as any other path does.
        registered.inspect_err(|e| self.effects.broken.push_back((session, id.key, e.clone())))
    }

    /// Ends paths whose handshake has taken too long.
    pub(super) fn expire(&mut self, cx: &mut Cx<'_>) {
        let at = self.accept.at;
        while self.accept.deadline.is_some_and(|due| due <= cx.now) {
            let Some((path, session)) = self.accept.admission(|admission| admission.expired(cx.now, at)) else {
                break;
            };
            let why = PathError::HandshakeTimeout(self.config.handshake_timeout);
            if let Some(session) = session {
                self.effects.broken.push_back((session, path, why));
            } else if let Some(old) = self.forget(cx, path) {
                self.effects.counters.ended(&why);
                if let Some(suppressed) = self.accept.timed_out.pass(cx.now) {
                    tracing::warn!(peer = %old.peer, error = %why, suppressed, "a client has not answered");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_is_told_a_number_and_the_operator_why() {
        let refused = |refusal: Refusal| Denied::from(refusal);
        for (denied, errno, text) in [
            (
                refused(Refusal::Address),
                errno::EACCES,
                "the address is not on the access list",
            ),
            (refused(Refusal::NoSession), errno::ENXIO, "no such session"),
            (
                refused(Refusal::SamePath),
                errno::EEXIST,
                "a path between these addresses exists",
            ),
            (refused(Refusal::Sessions), errno::EUSERS, "as many sessions as allowed"),
            (
                Denied::Malformed(ProtoError::Magic(1)),
                errno::ECONNRESET,
                "magic 0x0001 instead of 0x1bbd",
            ),
            (Denied::NoAddress, errno::ECONNRESET, "no peer address"),
            (
                Denied::Failed(VerbsError::Limit("queue pairs").into()),
                errno::ENOMEM,
                "limit reached: queue pairs",
            ),
        ] {
            assert_eq!((denied.errno(), denied.to_string().as_str()), (errno, text));
        }
    }
}
