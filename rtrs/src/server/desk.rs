//! Accept path: a connection request gets no more than a queue pair until the client has proved that it receives what is
//! sent to its address.

use core::{fmt, net::SocketAddr};

use roce_verbs::provider::{CmRef, ConnParams, DeviceIx, KeyStrategy, RejectReason, VerbsError};
use zerocopy::IntoBytes;

use crate::{
    PathError,
    admission::{Admitted, ConnectRequest, Opened, PathKey, Refusal},
    cx::Cx,
    proto::{ConnReq, ConnRsp, MAX_HDR_SIZE, MsgFlags, ProtoError, errno},
    server::{
        config::ServerConfig,
        effects::Place,
        half_open::{Arrival, Guest, HalfOpen},
        letter::{Message, Part},
        path::{Path, device_caps, entries, service_caps},
        path_id::PathId,
        server::{Owner, Server},
    },
};

/// Why a request got no further.
#[derive(Debug)]
pub(super) enum Denied {
    Refused(Refusal),
    Malformed(ProtoError),
    NoAddress,
    Failed(PathError),
}

impl Denied {
    pub(super) fn errno(&self) -> i32 {
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

impl Server {
    /// Somebody wants to connect.
    pub(super) fn connect_request(&mut self, cx: &mut Cx<'_>, id: CmRef, device: DeviceIx, private_data: &[u8]) {
        match self.understand(cx, id, device, private_data) {
            Ok(arrival) => self.arrived(cx, arrival),
            Err(denied) => {
                let peer = cx.provider.cm_addrs(id).and_then(|(_, peer)| peer);
                self.deny(cx, Guest::Here(id), peer, &denied);
            }
        }
    }

    fn understand(
        &mut self,
        cx: &mut Cx<'_>,
        id: CmRef,
        device: DeviceIx,
        private_data: &[u8],
    ) -> Result<Arrival, Denied> {
        let addrs = cx.provider.cm_addrs(id);
        let Some((local, Some(peer))) = addrs else {
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
        Ok(Arrival {
            guest: Guest::Here(id),
            request,
            peer,
            device,
        })
    }

    /// A connection request is decided about, here or at its session's home.
    pub(super) fn arrived(&mut self, cx: &mut Cx<'_>, arrival: Arrival) {
        let home = self.share.home_of(arrival.request.cid);
        let decided = match arrival.guest {
            Guest::Here(id) if home != self.share.index() => self.ask(home, id, &arrival),
            _ => self.admit(cx, arrival),
        };
        if let Err(denied) = decided {
            self.deny(cx, arrival.guest, Some(arrival.peer), &denied);
        }
    }

    fn deny(&mut self, cx: &mut Cx<'_>, guest: Guest, peer: Option<SocketAddr>, denied: &Denied) {
        self.effects.counters.denied(match denied {
            Denied::Refused(refusal) => Some(*refusal),
            _ => None,
        });
        let errno = denied.errno();
        self.log.refused.hit(cx.now, || {
            tracing::warn!(?peer, errno, reason = %denied, "connection refused");
        });
        match guest {
            Guest::Here(id) => self.reject(cx, id, errno),
            Guest::There(share, ask) => self.effects.write(share, Message::Refuse { ask, errno }),
        }
    }

    /// Refuses a connection request that came here.
    pub(super) fn reject(&mut self, cx: &mut Cx<'_>, id: CmRef, errno: i32) {
        self.cms.remove(&id);
        let rsp = ConnRsp::reject(errno);
        if let Err(e) = cx.provider.cm_reject(id, RejectReason::CONSUMER, rsp.as_bytes()) {
            tracing::debug!(error = %e, "reject");
            cx.provider.cm_destroy(id);
        }
    }

    fn admit(&mut self, cx: &mut Cx<'_>, arrival: Arrival) -> Result<(), Denied> {
        let Arrival {
            guest,
            request,
            peer,
            device,
        } = arrival;
        match (self.admission.request(cx.now, &request)?, guest) {
            (Admitted::HalfOpen { path, gives_way }, Guest::Here(id)) => {
                if let Some(old) = gives_way {
                    self.give_way(cx, old);
                }
                let path_id = PathId {
                    key: path,
                    session: request.session,
                    uuid: request.path,
                    local: request.local,
                    device,
                    peer,
                    connections: request.connections,
                };
                self.greet(cx, path_id, id).map_err(|e| {
                    self.admission.ended(path);
                    self.effects.counters.no_resources += 1;
                    Denied::Failed(e.into())
                })
            }
            // Connections 0 are home's.
            (Admitted::HalfOpen { path, .. }, Guest::There(..)) => {
                self.admission.ended(path);
                Err(Refusal::Unexpected.into())
            }
            (Admitted::GivenUp(path), _) => {
                self.given_up(cx, path);
                Err(Refusal::Unexpected.into())
            }
            (Admitted::Held(path), _) => {
                let half_open = self.half_open.get_mut(&path).ok_or(Refusal::Unexpected)?;
                self.effects.counters.requests_held += 1;
                half_open.held.push(arrival);
                if let Guest::Here(id) = guest {
                    self.cms.insert(id, Owner::Held(path));
                }
                Ok(())
            }
            (Admitted::Connection(path), guest) => {
                // It may just have ended.
                let session = *self.paths.get(&path).ok_or(Refusal::Unexpected)?;
                match guest {
                    Guest::Here(id) => self.connect(cx, Part { session, path }, request.cid, device, id),
                    Guest::There(share, ask) => self.refer(Part { session, path }, request.cid, device, share, ask),
                }
            }
        }
    }

    /// The client of a path that we have still connects it anew.
    fn given_up(&mut self, cx: &mut Cx<'_>, path: PathKey) {
        self.effects.counters.paths_given_up += 1;
        match self.paths.get(&path) {
            Some(session) => self.effects.broken.push_back((*session, path, PathError::GivenUp)),
            None => {
                self.admission.ended(path);
                self.forget(cx, path);
            }
        }
    }

    /// A half-open path has given way to a newcomer.
    pub(super) fn give_way(&mut self, cx: &mut Cx<'_>, path: PathKey) {
        let Some(old) = self.forget(cx, path) else { return };
        self.effects.counters.half_open_gave_way += 1;
        let peer = old.peer;
        self.log.gave_way.hit(cx.now, || {
            tracing::warn!(%peer, "a client that has not answered gives way to another");
        });
    }

    /// Answers connection 0 of a new path.
    fn greet(&mut self, cx: &mut Cx<'_>, id: PathId, cm: CmRef) -> Result<(), VerbsError> {
        let params = response(cx, id.device, &self.config)?;
        let limits = &device_caps(cx, id.device)?.limits;
        let caps = service_caps(limits, &self.config);
        let entries = entries(limits, &caps, 1);
        let make = || cx.provider.alloc_pd(id.device);
        let pd = self.domains.enter(id.session, id.device, make)?;
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
        let half_open = accepted.inspect_err(|_| self.domains.leave(cx, id.session, id.device))?;
        self.effects.counters.connections_accepted += 1;
        self.cms.insert(cm, Owner::HalfOpen(id.key));
        self.half_open.insert(id.key, half_open);
        Ok(())
    }

    /// Forgets a half-open path: its connection is ended, and what was held is refused.
    pub(super) fn forget(&mut self, cx: &mut Cx<'_>, path: PathKey) -> Option<PathId> {
        let half_open = self.half_open.remove(&path)?;
        let held = half_open.held.iter().map(|held| held.guest);
        for guest in held.chain([Guest::Here(half_open.conn.cm)]) {
            match guest {
                Guest::Here(cm) => {
                    self.cms.remove(&cm);
                    cx.provider.cm_destroy(cm);
                }
                Guest::There(share, ask) => {
                    let errno = Refusal::NoPath.errno();
                    self.effects.write(share, Message::Refuse { ask, errno });
                }
            }
        }
        half_open.destroy_objects(cx);
        self.domains.leave(cx, half_open.id.session, half_open.id.device);
        Some(half_open.id)
    }

    /// A connection request that waits is over: its client has given it up.
    pub(super) fn drop_held(&mut self, cx: &mut Cx<'_>, path: PathKey, id: CmRef) {
        if let Some(half_open) = self.half_open.get_mut(&path) {
            half_open.held.retain(|held| held.guest != Guest::Here(id));
        }
        self.cms.remove(&id);
        cx.provider.cm_destroy(id);
    }

    /// Connection 0 of a path stands: now it gets what a session needs.
    pub(super) fn established(&mut self, cx: &mut Cx<'_>, path: PathKey) {
        let Some(half_open) = self.half_open.get_mut(&path) else {
            return;
        };
        let Some(opened) = self.admission.established(path) else {
            return;
        };
        let held = core::mem::take(&mut half_open.held);
        let peer = half_open.id.peer;
        match opened {
            Ok(opened) => {
                if let Err(e) = self.open(cx, &opened, path) {
                    self.effects.counters.no_resources += 1;
                    tracing::error!(%peer, error = %e, "no room for a path: it is closed");
                }
            }
            Err(refusal) => {
                self.forget(cx, path);
                self.effects.counters.denied(Some(refusal));
                self.log.refused.hit(cx.now, || {
                    tracing::warn!(%peer, reason = %refusal, "path refused: others were faster");
                });
            }
        }
        for arrival in held {
            self.arrived(cx, arrival);
        }
    }

    /// Makes the path, and perhaps its session. If that fails nothing is left of it.
    fn open(&mut self, cx: &mut Cx<'_>, opened: &Opened, key: PathKey) -> Result<(), PathError> {
        let half_open = self.half_open.remove(&key).ok_or(PathError::Closed)?;
        let (id, cm, qp) = (half_open.id, half_open.conn.cm, half_open.conn.qp);
        self.cms.remove(&cm);
        let path = match Path::open(cx, half_open, self.share, &self.config) {
            Ok(path) => path,
            Err(e) => {
                self.domains.leave(cx, id.session, id.device);
                self.admission.ended(key);
                return Err(e);
            }
        };
        let known = self.by_uuid.get(&opened.session).copied();
        let session = known.unwrap_or_else(|| self.make_session(opened.session, id.peer));
        let place = Place {
            session,
            path: key,
            cid: 0,
        };
        self.paths.insert(key, session);
        self.cms.insert(cm, Owner::Path(place));
        self.qps.insert(qp, place);
        let Some(entry) = self.sessions.get_mut(&session) else {
            return Err(PathError::Closed);
        };
        entry.paths.insert(key, path);
        let registered = entry.register(cx, key);
        self.ask_for_memory(session);
        let registered = registered.and_then(|()| self.tell_branches(cx, Part { session, path: key }));
        // From here on it ends as any other path does.
        registered.inspect_err(|e| self.effects.broken.push_back((session, key, e.clone())))
    }

    /// Answers a further connection of a path, whose queue pair is here.
    pub(super) fn connect(
        &mut self,
        cx: &mut Cx<'_>,
        part: Part,
        cid: u16,
        device: DeviceIx,
        id: CmRef,
    ) -> Result<(), Denied> {
        let Part { session, path: key } = part;
        let path = self.sessions.get_mut(&session).and_then(|s| s.paths.get_mut(&key));
        let path = path.filter(|path| path.is_alive()).ok_or(Refusal::Unexpected)?;
        let place = Place {
            session,
            path: key,
            cid,
        };
        let accepted = match path.id.device == device {
            true => response(cx, device, &self.config)
                .map_err(PathError::from)
                .and_then(|params| path.add_connection(cx, cid, id, &params)),
            false => Err(PathError::Unexpected("a connection through another device")),
        };
        if let Err(e) = accepted {
            self.effects.broken.push_back((session, key, e.clone()));
            return Err(Denied::Failed(e));
        }
        if let Some(conn) = path.conn(cid) {
            self.cms.insert(id, Owner::Path(place));
            self.qps.insert(conn.qp, place);
        }
        self.effects.counters.connections_accepted += 1;
        tracing::debug!(cid, peer = %path.id.peer, "connection accepted");
        Ok(())
    }

    /// Ends paths whose handshake has taken too long.
    pub(super) fn expire(&mut self, cx: &mut Cx<'_>) {
        while let Some(key) = self.admission.expired(cx.now) {
            let why = PathError::HandshakeTimeout(self.config.handshake_timeout);
            if let Some(session) = self.paths.get(&key) {
                self.effects.broken.push_back((*session, key, why));
            } else if let Some(old) = self.forget(cx, key) {
                self.effects.counters.ended(&why);
                let peer = old.peer;
                self.log.timed_out.hit(cx.now, || {
                    tracing::warn!(%peer, error = %why, "a client has not answered");
                });
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
