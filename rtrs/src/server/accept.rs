//! Accept path: a connection request gets no more than a queue pair until the client has proved that it receives what is
//! sent to its address.

use core::{
    fmt,
    net::{IpAddr, SocketAddr},
};
use std::collections::BTreeMap;

use roce_verbs::{
    Instant, QpCaps,
    provider::{CmKind, CmRef, ConnParams, CqId, DeviceIx, KeyStrategy, PdId, RejectReason, VerbsError},
};
use zerocopy::IntoBytes;

use crate::{
    PathError,
    admission::{Admission, Admitted, ConnectRequest, Opened, PathKey, Refusal, SessionKey, shared::SharedAdmission},
    cx::Cx,
    proto::{ConnReq, ConnRsp, MAX_HDR_SIZE, MsgFlags, ProtoError, Uuid, errno},
    server::{
        config::ServerConfig,
        conn::{Conn, cq_entries, device_caps, service_caps},
        counters::ServerCounters,
        domains::Domains,
        log::Lines,
    },
};

/// Identity of a path, known from its first connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathId {
    pub(crate) key: PathKey,
    /// The session that it claims to belong to.
    pub(crate) session: Uuid,
    /// The client's UUID of the path.
    pub(crate) uuid: Uuid,
    /// Our address on it.
    pub(crate) local: IpAddr,
    /// Our device on it.
    pub(crate) device: DeviceIx,
    /// The client's address on it.
    pub(crate) peer: SocketAddr,
    /// Connections that it will have.
    pub(crate) connections: u16,
}

/// A well-formed connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incoming {
    pub(crate) cm: CmRef,
    pub(crate) request: ConnectRequest,
    pub(crate) peer: SocketAddr,
    pub(crate) device: DeviceIx,
}

/// Resources of a path before the client has proved its address.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    pub(crate) id: PathId,
    /// Protection domain of its session, which may not exist yet.
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) caps: QpCaps,
    /// Number 0, without receives.
    pub(crate) conn: Conn,
    /// Requests for further connections that came before connection 0 was established.
    held: Vec<Incoming>,
}

impl HalfOpen {
    fn make(cx: &mut Cx<'_>, id: PathId, pd: PdId, caps: QpCaps, entries: u32, cm: CmRef) -> Result<Self, VerbsError> {
        let cq = cx.provider.create_cq(id.device, entries)?;
        let conn = Conn::make(cx, pd, cq, caps, cm).inspect_err(|_| cx.provider.destroy_cq(cq))?;
        Ok(Self {
            id,
            pd,
            cq,
            caps,
            conn,
            held: Vec::new(),
        })
    }

    /// Releases the objects, but for the connection: nothing has been posted.
    fn destroy_objects(&self, cx: &mut Cx<'_>) {
        cx.provider.destroy_qp(self.conn.qp);
        cx.provider.destroy_cq(self.cq);
    }
}

/// Why a connection request is refused.
#[derive(Debug)]
pub(crate) enum Denied {
    Refused(Refusal),
    Malformed(ProtoError),
    NoAddress,
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

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// Decision about a connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Decision {
    /// It is accepted, or waits.
    Done,
    /// It is a further connection of an established path.
    Connect(PathKey, SessionKey),
    /// The client connects an established path again: the path is lost, and the request refused.
    Lost(PathKey, SessionKey),
}

/// A path whose client has proved its address.
#[derive(Debug)]
pub(crate) struct Established {
    pub(crate) opened: Opened,
    pub(crate) half_open: HalfOpen,
}

/// A connection before its path is established.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pending {
    /// Connection 0.
    First(PathKey),
    /// A request for a further connection.
    Held(PathKey),
}

/// Lines that anybody can cause.
struct Log {
    refused: Lines,
    evicted: Lines,
    timed_out: Lines,
}

impl Log {
    fn new() -> Self {
        Self {
            refused: Lines::new(|more| tracing::warn!(more, "connections refused")),
            evicted: Lines::new(|more| tracing::warn!(more, "clients that had not answered were evicted for others")),
            timed_out: Lines::new(|more| tracing::warn!(more, "clients have not answered")),
        }
    }
}

/// Private data and parameters of an accept.
pub(crate) fn response(cx: &Cx<'_>, device: DeviceIx, config: &ServerConfig) -> Result<ConnParams, VerbsError> {
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
    let req = *ConnReq::parse(private_data).map_err(Denied::Malformed)?;
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

/// State of a server that the accept path uses.
pub(crate) struct Env<'a> {
    pub(crate) config: &'a ServerConfig,
    pub(crate) domains: &'a mut Domains,
    pub(crate) counters: &'a mut ServerCounters,
}

/// See the module.
pub(crate) struct Accept {
    admission: SharedAdmission,
    /// Index of the server's loop.
    at: usize,
    /// Earliest deadline of a handshake on this loop.
    deadline: Option<Instant>,
    half_open: BTreeMap<PathKey, HalfOpen>,
    cms: BTreeMap<CmRef, Pending>,
    log: Log,
}

impl Accept {
    pub(crate) fn new(admission: SharedAdmission, at: usize) -> Self {
        Self {
            admission,
            at,
            deadline: None,
            half_open: BTreeMap::new(),
            cms: BTreeMap::new(),
            log: Log::new(),
        }
    }

    /// Whether no path is half-open.
    pub(crate) fn is_idle(&self) -> bool {
        self.half_open.is_empty()
    }

    /// Half-open paths.
    pub(crate) fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Calls the admission, which may change the loop's next deadline.
    pub(crate) fn admission<R>(&mut self, call: impl FnOnce(&mut Admission) -> R) -> R {
        let at = self.at;
        let (result, deadline) = self.admission.with(|admission| {
            let result = call(admission);
            (result, admission.next_deadline(at))
        });
        self.deadline = deadline;
        result
    }

    /// Reads a connection request, and refuses a malformed one.
    pub(crate) fn read(
        &mut self,
        cx: &mut Cx<'_>,
        counters: &mut ServerCounters,
        cm: CmRef,
        device: DeviceIx,
        private_data: &[u8],
    ) -> Option<Incoming> {
        match parse(cx, cm, device, private_data) {
            Ok(incoming) => Some(incoming),
            Err(denied) => {
                let peer = cx.provider.cm_addrs(cm).and_then(|(_, peer)| peer);
                self.deny(cx, counters, cm, peer, &denied);
                None
            }
        }
    }

    /// Refuses a connection request.
    pub(crate) fn deny(
        &mut self,
        cx: &mut Cx<'_>,
        counters: &mut ServerCounters,
        cm: CmRef,
        peer: Option<SocketAddr>,
        denied: &Denied,
    ) {
        counters.denied(match denied {
            Denied::Refused(refusal) => Some(*refusal),
            _ => None,
        });
        let errno = denied.errno();
        self.log.refused.hit(cx.now, || {
            tracing::warn!(?peer, errno, reason = %denied, "connection refused");
        });
        let rsp = ConnRsp::reject(errno);
        if let Err(e) = cx.provider.cm_reject(cm, RejectReason::CONSUMER, rsp.as_bytes()) {
            tracing::debug!(error = %e, "reject");
            cx.provider.cm_destroy(cm);
        }
    }

    /// Decides about a connection request.
    ///
    /// # Errors
    /// Why it must be refused.
    pub(crate) fn admit(
        &mut self,
        cx: &mut Cx<'_>,
        env: &mut Env<'_>,
        incoming: &Incoming,
    ) -> Result<Decision, Denied> {
        let (request, cm, at) = (&incoming.request, incoming.cm, self.at);
        match self.admission(|admission| admission.request(cx.now, at, request))? {
            Admitted::HalfOpen { path, evicted } => {
                if let Some(old) = evicted {
                    self.evict(cx, env, old);
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
                self.accept_first(cx, env, id, cm).map_err(|e| {
                    self.admission(|admission| admission.ended(path));
                    env.counters.no_resources += 1;
                    Denied::Failed(e.into())
                })?;
                Ok(Decision::Done)
            }
            Admitted::Held(path) => {
                let half_open = self.half_open.get_mut(&path).ok_or(Refusal::Unexpected)?;
                env.counters.requests_held += 1;
                half_open.held.push(*incoming);
                self.cms.insert(cm, Pending::Held(path));
                Ok(Decision::Done)
            }
            Admitted::Connection(path, session) => Ok(Decision::Connect(path, session)),
            Admitted::GivenUp(path, session) => {
                env.counters.paths_given_up += 1;
                match session {
                    Some(session) => Ok(Decision::Lost(path, session)),
                    None => {
                        self.close(cx, env.domains, path);
                        Err(Refusal::Unexpected.into())
                    }
                }
            }
        }
    }

    /// Releases a half-open path that was evicted for another.
    fn evict(&mut self, cx: &mut Cx<'_>, env: &mut Env<'_>, path: PathKey) {
        let Some(old) = self.forget(cx, env.domains, path) else {
            return;
        };
        env.counters.half_open_gave_way += 1;
        let peer = old.peer;
        self.log.evicted.hit(cx.now, || {
            tracing::warn!(%peer, "a client that has not answered is evicted for another");
        });
    }

    /// Accepts connection 0 of a new path.
    fn accept_first(&mut self, cx: &mut Cx<'_>, env: &mut Env<'_>, id: PathId, cm: CmRef) -> Result<(), VerbsError> {
        let params = response(cx, id.device, env.config)?;
        let limits = &device_caps(cx, id.device)?.limits;
        let caps = service_caps(limits, env.config);
        let entries = cq_entries(limits, &caps, 1);
        let make = || cx.provider.alloc_pd(id.device);
        let pd = env.domains.enter(id.session, id.device, make)?;
        let made = HalfOpen::make(cx, id, pd, caps, entries, cm);
        let accepted = made.and_then(
            |half_open| match cx.provider.cm_accept(cm, half_open.conn.qp, &params) {
                Ok(()) => Ok(half_open),
                Err(e) => {
                    half_open.destroy_objects(cx);
                    Err(e)
                }
            },
        );
        let half_open = accepted.inspect_err(|_| env.domains.leave(cx, id.session, id.device))?;
        env.counters.connections_accepted += 1;
        self.cms.insert(cm, Pending::First(id.key));
        self.half_open.insert(id.key, half_open);
        Ok(())
    }

    /// Releases a half-open path: its connection is ended, and held requests are refused.
    fn forget(&mut self, cx: &mut Cx<'_>, domains: &mut Domains, path: PathKey) -> Option<PathId> {
        let half_open = self.half_open.remove(&path)?;
        let held = half_open.held.iter().map(|held| held.cm);
        for cm in held.chain([half_open.conn.cm]) {
            self.cms.remove(&cm);
            cx.provider.cm_destroy(cm);
        }
        self.check_cms();
        half_open.destroy_objects(cx);
        domains.leave(cx, half_open.id.session, half_open.id.device);
        Some(half_open.id)
    }

    /// Checks that no connection is pending without its half-open path.
    fn check_cms(&self) {
        debug_assert!(!self.half_open.is_empty() || self.cms.is_empty());
    }

    /// Ends a half-open path.
    fn close(&mut self, cx: &mut Cx<'_>, domains: &mut Domains, path: PathKey) {
        self.admission(|admission| admission.ended(path));
        self.forget(cx, domains, path);
    }

    /// Ends the half-open paths through a device; `None`: all of them.
    pub(crate) fn close_all(&mut self, cx: &mut Cx<'_>, domains: &mut Domains, device: Option<DeviceIx>) {
        let of_device = |h: &&HalfOpen| device.is_none_or(|device| h.id.device == device);
        let paths: Vec<PathKey> = self.half_open.values().filter(of_device).map(|h| h.id.key).collect();
        for path in paths {
            self.close(cx, domains, path);
        }
    }

    /// Handles an event of a pending connection. Returns the path if its connection 0 is established. `None`: it is no pending
    /// connection's.
    pub(crate) fn event(
        &mut self,
        cx: &mut Cx<'_>,
        domains: &mut Domains,
        cm: CmRef,
        kind: &CmKind,
    ) -> Option<Option<PathKey>> {
        let pending = *self.cms.get(&cm)?;
        match (kind, pending) {
            (CmKind::Established { .. }, Pending::First(path)) => return Some(Some(path)),
            (
                CmKind::Established { .. }
                | CmKind::Resolved { .. }
                | CmKind::ConnectRequest { .. }
                | CmKind::TimewaitExit,
                _,
            ) => {}
            (_, Pending::First(path)) => self.close(cx, domains, path),
            // Its client has given it up.
            (_, Pending::Held(path)) => {
                if let Some(half_open) = self.half_open.get_mut(&path) {
                    half_open.held.retain(|held| held.cm != cm);
                }
                self.cms.remove(&cm);
                cx.provider.cm_destroy(cm);
            }
        }
        Some(None)
    }

    /// Connection 0 of a path is established. Returns the path, if there is room for it, and the requests to decide about again.
    pub(crate) fn established(
        &mut self,
        cx: &mut Cx<'_>,
        env: &mut Env<'_>,
        path: PathKey,
    ) -> (Option<Established>, Vec<Incoming>) {
        let opened = self.admission(|admission| admission.established(path));
        let (Some(opened), Some(half_open)) = (opened, self.half_open.get_mut(&path)) else {
            return (None, Vec::new());
        };
        let held = core::mem::take(&mut half_open.held);
        // Their events are the path's once they are accepted.
        for incoming in &held {
            self.cms.remove(&incoming.cm);
        }
        match opened {
            Ok(opened) => {
                self.cms.remove(&half_open.conn.cm);
                let half_open = self.half_open.remove(&path);
                self.check_cms();
                (half_open.map(|half_open| Established { opened, half_open }), held)
            }
            Err(refusal) => {
                let peer = half_open.id.peer;
                self.forget(cx, env.domains, path);
                env.counters.denied(Some(refusal));
                self.log.refused.hit(cx.now, || {
                    tracing::warn!(%peer, reason = %refusal, "path refused: others were faster");
                });
                (None, held)
            }
        }
    }

    /// Ends half-open paths whose handshake has taken too long. Returns the established ones, which are the caller's to end.
    pub(crate) fn expire(&mut self, cx: &mut Cx<'_>, env: &mut Env<'_>) -> Vec<(SessionKey, PathKey, PathError)> {
        let mut expired = Vec::new();
        while self.deadline.is_some_and(|at| at <= cx.now) {
            let at = self.at;
            let Some((path, session)) = self.admission(|admission| admission.expired(cx.now, at)) else {
                break;
            };
            let why = PathError::HandshakeTimeout(env.config.handshake_timeout);
            match session {
                Some(session) => expired.push((session, path, why)),
                None => {
                    let Some(old) = self.forget(cx, env.domains, path) else {
                        continue;
                    };
                    env.counters.ended(&why);
                    let peer = old.peer;
                    self.log.timed_out.hit(cx.now, || {
                        tracing::warn!(%peer, error = %why, "a client has not answered");
                    });
                }
            }
        }
        for lines in [&mut self.log.refused, &mut self.log.evicted, &mut self.log.timed_out] {
            lines.tick(cx.now);
        }
        expired
    }

    /// When [`expire`](Self::expire) is due.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let logs = [&self.log.refused, &self.log.evicted, &self.log.timed_out];
        let logs = logs.into_iter().filter_map(Lines::next_timeout);
        logs.chain(self.deadline).min()
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
