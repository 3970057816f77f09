//! Connection requests: who gets in.

use core::{sync::atomic::Ordering, time::Duration};
use std::sync::Arc;

use roce_verbs::provider::{CmChannel, CmEvent, CmEventKind, CmId, ConnParams, Provider};
use zerocopy::IntoBytes;

use super::{
    listener::{Counters, Registry, Shared},
    path::{Path, PathId},
    session::SrvSession,
};
use crate::{
    PathError,
    proto::{ConnReq, ConnRsp, MAX_HDR_SIZE, MAX_PATHS, MsgFlags, errno},
};

/// Why a connection is refused: what the client is told, and what the log says.
struct Refusal {
    errno: i32,
    why: String,
}

impl Refusal {
    fn new(errno: i32, why: impl ToString) -> Self {
        Self {
            errno,
            why: why.to_string(),
        }
    }
}

impl<P: Provider> Shared<P> {
    /// The thread of the connection manager. The listener goes with it.
    pub(super) fn serve(self: &Arc<Self>, channel: &P::CmChannel, listener: P::CmId) {
        while !self.closing.load(Ordering::Acquire) {
            match channel.wait(Some(Duration::from_millis(200))) {
                Ok(Some(event)) => self.event(event),
                Ok(None) => {}
                Err(e) => {
                    tracing::error!(error = %e, "the server's connection manager stopped");
                    break;
                }
            }
        }
        drop(listener);
    }

    fn event(self: &Arc<Self>, event: CmEvent<P::CmId>) {
        let handle = event.id.handle();
        let path = || {
            self.registry
                .lock()
                .connections
                .get(&handle)
                .and_then(std::sync::Weak::upgrade)
        };
        match event.kind {
            CmEventKind::ConnectRequest { id, private_data, .. } => self.connect_request(&id, &private_data),
            CmEventKind::Established { .. } | CmEventKind::TimewaitExit => {}
            CmEventKind::Disconnected => {
                if let Some(path) = path() {
                    path.fail(PathError::PeerDisconnected);
                }
            }
            kind @ (CmEventKind::Rejected { .. } | CmEventKind::Unreachable | CmEventKind::ConnectError(_)) => {
                if let Some(path) = path() {
                    path.fail(PathError::Cm(format!("{kind:?}")));
                }
            }
        }
    }

    fn connect_request(self: &Arc<Self>, id: &P::CmId, private_data: &[u8]) {
        let peer = id.peer_addr();
        if let Err(refusal) = self.admit(id, private_data) {
            Counters::add(&self.counters.connections_refused);
            tracing::warn!(?peer, errno = refusal.errno, reason = refusal.why, "connection refused");
            let rsp = ConnRsp::reject(refusal.errno);
            if let Err(e) = id.reject(rsp.as_bytes()) {
                tracing::debug!(error = %e, "reject");
            }
        }
    }

    fn admit(self: &Arc<Self>, id: &P::CmId, private_data: &[u8]) -> Result<(), Refusal> {
        let peer = id
            .peer_addr()
            .ok_or_else(|| Refusal::new(errno::ECONNRESET, "no peer address"))?;
        if !self.config.allows(peer.ip()) {
            return Err(Refusal::new(errno::EACCES, "the address is not on the access list"));
        }
        let req = ConnReq::parse(private_data).map_err(|e| Refusal::new(errno::ECONNRESET, e))?;
        let (cid, con_num) = (req.cid.get(), req.cid_num.get());
        if con_num > self.config.max_connections {
            let why = format!("{con_num} connections, allowed are {}", self.config.max_connections);
            return Err(Refusal::new(errno::ECONNRESET, why));
        }
        // Without I/O connection there is nothing that the session could be for.
        if con_num < 2 {
            return Err(Refusal::new(errno::ECONNRESET, "a path without I/O connection"));
        }
        let path_id = PathId {
            uuid: req.path_uuid,
            con_num,
            local: id.local_addr(),
            peer,
        };
        let path = {
            let mut registry = self.registry.lock();
            let path = self.find_path(&mut registry, req, path_id)?;
            registry.connections.insert(id.handle(), Arc::downgrade(&path));
            path
        };
        let accepted = self.accept(&path, cid, id);
        accepted.map_err(|e| {
            self.registry.lock().connections.remove(&id.handle());
            let refusal = Refusal::new(errno::ENOMEM, &e);
            path.fail(e);
            refusal
        })
    }

    /// The path that the request names, which may have to be made, perhaps with its session.
    fn find_path(
        self: &Arc<Self>,
        registry: &mut Registry<P>,
        req: &ConnReq,
        id: PathId,
    ) -> Result<Arc<Path<P>>, Refusal> {
        let known = registry.sessions.get(&req.session_uuid).cloned();
        let session = match &known {
            Some(session) => session.clone(),
            None if !req.first_conn() => return Err(Refusal::new(errno::ENXIO, "no such session")),
            None if registry.sessions.len() >= self.config.max_sessions => {
                return Err(Refusal::new(errno::EUSERS, "as many sessions as allowed"));
            }
            None if registry.sessions_of(id.peer.ip()) >= self.config.max_sessions_per_peer => {
                return Err(Refusal::new(
                    errno::EUSERS,
                    "as many sessions as allowed for one address",
                ));
            }
            None => {
                let new = SrvSession::new(
                    &self.provider,
                    &self.pd,
                    &self.config,
                    registry.next_id,
                    req.session_uuid,
                    id.peer,
                );
                registry.next_id += 1;
                Arc::new(new.map_err(|e| Refusal::new(errno::ENOMEM, e))?)
            }
        };
        let mut paths = session.paths.lock();
        if let Some(path) = paths.iter().find(|p| p.id.uuid == req.path_uuid) {
            return match path.expects(req.cid.get(), &id) {
                true => Ok(path.clone()),
                false => Err(Refusal::new(
                    errno::ECONNRESET,
                    "the path does not expect this connection",
                )),
            };
        }
        if paths.len() >= MAX_PATHS {
            return Err(Refusal::new(errno::ECONNRESET, "too many paths"));
        }
        let same = |p: &Arc<Path<P>>| p.id.local.ip() == id.local.ip() && p.id.peer.ip() == id.peer.ip();
        if paths.iter().any(same) {
            return Err(Refusal::new(errno::EEXIST, "a path between these addresses exists"));
        }
        let path = Path::start(self, &session, id).map_err(|e| Refusal::new(errno::ENOMEM, e))?;
        paths.push(path.clone());
        drop(paths);
        if known.is_none() {
            registry.sessions.insert(req.session_uuid, session);
        }
        Ok(path)
    }

    fn accept(&self, path: &Path<P>, cid: u16, id: &P::CmId) -> Result<(), PathError> {
        let conn = path.add_connection(cid, id)?;
        let flags = match self.config.always_invalidate {
            true => MsgFlags::NEW_RKEY,
            false => MsgFlags::empty(),
        };
        let depth = u16::try_from(self.config.queue_depth).unwrap_or(u16::MAX);
        let rsp = ConnRsp::accept(depth, self.config.max_io_size(), MAX_HDR_SIZE, flags);
        let params = ConnParams {
            private_data: rsp.as_bytes().to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            ..ConnParams::default()
        };
        id.accept(&conn.qp, params)?;
        path.accepted(conn);
        Counters::add(&self.counters.connections_accepted);
        tracing::debug!(cid, peer = %path.id.peer, "connection accepted");
        Ok(())
    }
}
