//! Connections begin and end.

use core::net::{IpAddr, Ipv4Addr};

use roce_verbs::{
    Instant,
    provider::{CmKind, CmRef, ConnParams, Cx, DeviceIx, NoAnswer, PdId, Provider, RejectReason, VerbsError},
};

use super::Node;
use crate::{
    conn::{ConnId, Connection, Link, Phase},
    event::{Failure, Output},
    handshake::{self, Agreed, Next, Refusal},
    peer::Peer,
    proto::{Body, ConnParams as Params, MAX_MSG, Message, Nid, PORT},
};

/// Retries of the queue pair without any answer, and without a receive there (`retry_count`, `rnr_retry_count`).
const RETRIES: (u8, u8) = (5, 6);
/// Time for an answer to a connect request, at least.
const TIMEOUT: core::time::Duration = core::time::Duration::from_secs(5);

/// Connect request of a peer.
pub(super) struct Request<'a> {
    pub(super) cm: CmRef,
    pub(super) device: DeviceIx,
    pub(super) private_data: &'a [u8],
}

impl Node {
    /// Begins to connect to a peer, if messages wait for that, or later.
    pub(super) fn wake(&mut self, cx: &mut Cx<'_>, nid: Nid) {
        let Some(peer) = self.peers.get_mut(&nid) else { return };
        if !peer.wants_connection(cx.now) {
            let later = peer.retry_at().filter(|at| *at > cx.now);
            self.retries.update(nid, &mut peer.armed, later);
            return;
        }
        let depth = peer.offer().0;
        let (own, there) = (self.us.nid.address(), nid.address());
        match cx.provider.cm_resolve(Some(own.into()), (there, PORT).into()) {
            Ok(cm) => {
                let conn = Connection::new(nid, Phase::Resolving, Link::new(cm, depth), cx.now);
                let id = self.conns.insert(conn);
                self.by_cm.insert(cm, id);
                peer.begun(id);
            }
            Err(e) => self.unreachable(nid, &e.into()),
        }
    }

    /// A peer can't be reached: what waits for it fails.
    fn unreachable(&mut self, nid: Nid, why: &Failure) {
        let Some(peer) = self.peers.get_mut(&nid) else { return };
        peer.forget(&self.config);
        self.counters.connect_failures += 1;
        let queue = core::mem::take(&mut peer.queue);
        self.out.push_back(Output::Down(nid, why.clone()));
        self.fail_all(queue, why);
        self.forget_idle(nid);
    }

    fn forget_idle(&mut self, nid: Nid) {
        if self.peers.get(&nid).is_some_and(Peer::is_idle) {
            self.peers.remove(&nid);
        }
    }

    /// Handles an event of a connection.
    pub(super) fn conn_event(&mut self, cx: &mut Cx<'_>, id: ConnId, kind: &CmKind) {
        let phase = self.conns[id].phase;
        if phase == Phase::Closing {
            return;
        }
        let done = match kind {
            CmKind::Resolved { device } => self.resolved(cx, id, *device),
            CmKind::Established { private_data } if phase == Phase::Connecting => self.accepted(cx, id, private_data),
            CmKind::Established { .. } => {
                self.established(cx.provider, id);
                Ok(())
            }
            CmKind::Rejected { reason, private_data } => return self.rejected(cx, id, *reason, private_data),
            CmKind::Unreachable(why) => Err(Failure::Unreachable(*why)),
            CmKind::ConnectError(text) => Err(Failure::Local(text.clone())),
            CmKind::Disconnected => Err(Failure::Disconnected),
            CmKind::AddressChange => Err(Failure::Local("the address is gone".into())),
            CmKind::ConnectRequest { .. } | CmKind::TimewaitExit => Ok(()),
        };
        if let Err(why) = done {
            self.lose(cx.provider, id, why);
        }
    }

    /// The device is known: creates the queue pair and asks.
    fn resolved(&mut self, cx: &mut Cx<'_>, id: ConnId, device: DeviceIx) -> Result<(), Failure> {
        let qp = self.create(cx.provider, id, device)?;
        let conn = &mut self.conns[id];
        conn.phase = Phase::Connecting;
        let Some(peer) = self.peers.get(&conn.peer) else {
            return Err(Failure::Disconnected);
        };
        let (queue_depth, max_frags) = peer.offer();
        let asked = Params {
            queue_depth,
            max_frags,
            max_msg_size: MAX_MSG as u32,
        };
        let message = Message {
            src_stamp: self.us.stamp,
            dst_stamp: peer.stamp(),
            ..Message::new(self.us.nid, conn.peer, Body::ConnReq(asked))
        };
        let timeout = self.config.interval().max(TIMEOUT);
        let params = params(&message, self.config.tos, Some(timeout));
        Ok(cx.provider.cm_connect(conn.link.cm, qp, &params)?)
    }

    fn create(
        &mut self,
        provider: &mut dyn Provider,
        id: ConnId,
        device: DeviceIx,
    ) -> Result<roce_verbs::provider::QpId, VerbsError> {
        let pd = self.domain(provider, device)?;
        let link = &mut self.conns[id].link;
        let created = link.create(provider, (device, pd));
        // Also of a queue pair whose receives could not be posted: it is drained.
        if let Some(qp) = link.qp() {
            self.by_qp.insert(qp, id);
        }
        created
    }

    fn domain(&mut self, provider: &mut dyn Provider, device: DeviceIx) -> Result<PdId, VerbsError> {
        if let Some(pd) = self.pds.get(&device) {
            return Ok(*pd);
        }
        let pd = provider.alloc_pd(device)?;
        self.pds.insert(device, pd);
        Ok(pd)
    }

    /// The peer has accepted.
    fn accepted(&mut self, cx: &mut Cx<'_>, id: ConnId, private_data: &[u8]) -> Result<(), Failure> {
        let nid = self.conns[id].peer;
        let Some(peer) = self.peers.get(&nid) else {
            return Err(Failure::Disconnected);
        };
        let agreed = handshake::answer(&self.us, nid, peer.offer(), private_data)?;
        self.conns[id].agree(&agreed, &self.config);
        self.established(cx.provider, id);
        for (buffer, len) in self.conns[id].take_early() {
            self.received(cx, id, buffer, len)?;
        }
        Ok(())
    }

    /// A connection stands: what has waited for one goes by it. Only now it is proven that the peer has asked, so only now connections of
    /// its earlier incarnations end. The kernel ends them when a request comes, which anybody can forge.
    pub(super) fn established(&mut self, provider: &mut dyn Provider, id: ConnId) {
        let conn = &mut self.conns[id];
        if !matches!(conn.phase, Phase::Connecting | Phase::Accepting) {
            return;
        }
        conn.phase = Phase::Established;
        self.counters.connected += 1;
        self.dirty.insert(id);
        let (nid, negotiated) = (conn.peer, conn.negotiated());
        self.out.push_back(Output::Up(nid, negotiated));
        let Some(peer) = self.peers.get_mut(&nid) else { return };
        peer.established(id);
        peer.queue.drain(..).for_each(|tx| conn.push(tx));
        let standing = peer.conns.clone();
        for former in standing {
            if self.conns[former].stamp != negotiated.incarnation {
                self.lose(provider, former, Failure::Restarted);
            }
        }
    }

    /// The peer has refused.
    fn rejected(&mut self, cx: &mut Cx<'_>, id: ConnId, reason: RejectReason, private_data: &[u8]) {
        let nid = self.conns[id].peer;
        let Some(peer) = self.peers.get_mut(&nid) else { return };
        self.counters.rejects_received.add(handshake::why(reason, private_data));
        let next = handshake::rejected(reason, private_data, peer.offer());
        if let Next::GiveUp(why) = next {
            return self.lose(cx.provider, id, why.into());
        }
        peer.forget_connection(id);
        peer.refused(&next, cx.now);
        self.close(cx.provider, id, Failure::Disconnected);
        self.waking.insert(nid);
    }

    /// Handles a peer's connect request.
    pub(super) fn request(&mut self, cx: &mut Cx<'_>, request: &Request<'_>) {
        let from = cx.provider.cm_addrs(request.cm).and_then(|(_, peer)| Some(peer?.ip()));
        let from = from.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let Err(why) = self.try_accept(cx, request, from) else {
            return;
        };
        let reject = why.reject(&self.us, &self.config).to_bytes();
        self.counters.rejects_sent.add(Some(why.why()));
        let refused = cx.provider.cm_reject(request.cm, RejectReason::CONSUMER, &reject);
        if refused.is_err() {
            // The peer has withdrawn it meanwhile.
            cx.provider.cm_destroy(request.cm);
        }
        self.out.push_back(Output::Refused(from, why));
    }

    fn try_accept(&mut self, cx: &mut Cx<'_>, request: &Request<'_>, from: IpAddr) -> Result<(), Refusal> {
        let IpAddr::V4(from) = from else {
            return Err(Refusal::Resources);
        };
        let agreed = handshake::request(&self.us, &self.config, from, request.private_data)?;
        self.admit(cx, &agreed)?;
        let conn = Connection::new(
            agreed.peer,
            Phase::Accepting,
            Link::new(request.cm, agreed.depth),
            cx.now,
        );
        let id = self.conns.insert(conn);
        self.by_cm.insert(request.cm, id);
        if let Some(peer) = self.peers.get_mut(&agreed.peer) {
            peer.accepted(id, cx.now);
        }
        self.conns[id].agree(&agreed, &self.config);
        if let Err(e) = self.accept(cx, id, request.device, &agreed) {
            self.lose(cx.provider, id, e.into());
        }
        Ok(())
    }

    /// Decides whether a peer may have another connection.
    fn admit(&mut self, cx: &mut Cx<'_>, agreed: &Agreed) -> Result<(), Refusal> {
        let nid = agreed.peer;
        if self.stopping || (!self.peers.contains_key(&nid) && self.peers.len() >= self.config.max_peers) {
            return Err(Refusal::Resources);
        }
        // A request that was forged must not take the place of the peer's own.
        let most = self.config.max_connections;
        if let Some(peer) = self.peers.get(&nid).filter(|peer| peer.connections() >= most) {
            let oldest = peer.oldest_half_open().ok_or(Refusal::Resources)?;
            self.lose(cx.provider, oldest, Failure::Disconnected);
        }
        let (us, config) = (self.us.nid, &self.config);
        let peer = self.peers.entry(nid).or_insert_with(|| Peer::new(config));
        if peer.attempt.is_some() && config.tie_break.is_lower(nid, us) && peer.loses_race() {
            return Err(Refusal::Race);
        }
        Ok(())
    }

    fn accept(&mut self, cx: &mut Cx<'_>, id: ConnId, device: DeviceIx, agreed: &Agreed) -> Result<(), VerbsError> {
        let qp = self.create(cx.provider, id, device)?;
        let taken = Params {
            queue_depth: agreed.depth,
            max_frags: agreed.frags,
            max_msg_size: MAX_MSG as u32,
        };
        let message = Message {
            src_stamp: self.us.stamp,
            dst_stamp: agreed.stamp,
            ..Message::new(self.us.nid, agreed.peer, Body::ConnAck(taken))
        };
        let params = params(&message, self.config.tos, None);
        cx.provider.cm_accept(self.conns[id].link.cm, qp, &params)
    }

    /// A connection has failed, or an attempt to have one.
    pub(super) fn lose(&mut self, provider: &mut dyn Provider, id: ConnId, why: Failure) {
        let conn = &self.conns[id];
        if conn.phase == Phase::Closing {
            return;
        }
        let nid = conn.peer;
        self.counters.disconnected += u64::from(conn.phase == Phase::Established);
        self.counters.connection_timeouts += u64::from(is_timeout(&why));
        self.close(provider, id, why.clone());
        let Some(peer) = self.peers.get_mut(&nid) else { return };
        let was_attempt = peer.forget_connection(id);
        let is_alone = peer.conns.is_empty();
        match was_attempt && is_alone {
            true => self.unreachable(nid, &why),
            false => self.out.push_back(Output::Down(nid, why.clone())),
        }
        if is_alone || why == Failure::Restarted {
            self.give_up(&why, |peer, _| peer == nid);
        }
        self.waking.insert(nid);
        self.forget_idle(nid);
    }

    /// Ends a connection. It goes when it is drained.
    fn close(&mut self, provider: &mut dyn Provider, id: ConnId, why: Failure) {
        let conn = &mut self.conns[id];
        conn.phase = Phase::Closing;
        conn.why = why;
        self.dirty.remove(&id);
        match conn.link.qp() {
            Some(qp) => {
                provider.cm_disconnect(conn.link.cm);
                provider.drain(qp);
            }
            None => self.remove(provider, id),
        }
    }

    /// Nothing of a connection is under way: its transfers have failed.
    pub(super) fn remove(&mut self, provider: &mut dyn Provider, id: ConnId) {
        let Some(conn) = self.conns.try_remove(id) else { return };
        self.by_cm.remove(&conn.link.cm);
        if let Some(qp) = conn.link.qp() {
            self.by_qp.remove(&qp);
        }
        let why = conn.why.clone();
        for of in conn.destroy(provider) {
            self.ended(of, Err(why.clone()));
        }
        self.free_domains(provider);
    }

    /// Looks for what has waited too long.
    pub(super) fn look(&mut self, cx: &mut Cx<'_>) {
        let now: Instant = cx.now;
        let late: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, c)| c.is_overdue(now))
            .map(|(id, _)| id)
            .collect();
        for id in late {
            self.lose(cx.provider, id, Failure::Timeout);
        }
        let is_late = |peer: &Peer| peer.queue.front().is_some_and(|tx| tx.deadline <= now);
        let late: Vec<Nid> = self
            .peers
            .iter()
            .filter(|(_, p)| is_late(p))
            .map(|(nid, _)| *nid)
            .collect();
        for nid in late {
            if let Some(peer) = self.peers.get_mut(&nid) {
                let over = peer.queue.iter().take_while(|tx| tx.deadline <= now).count();
                let over: Vec<_> = peer.queue.drain(..over).collect();
                self.fail_all(over, &Failure::Timeout);
            }
            self.forget_idle(nid);
        }
        self.give_up(&Failure::Timeout, |_, deadline| deadline <= now);
        // Those that have been silent for long say that they are there.
        let standing = self.conns.iter().filter(|(_, c)| c.phase == Phase::Established);
        self.dirty.extend(standing.map(|(id, _)| id));
    }
}

const fn is_timeout(why: &Failure) -> bool {
    matches!(why, Failure::Timeout | Failure::Unreachable(NoAnswer::Timeout))
}

fn params(message: &Message<'_>, tos: Option<u8>, timeout: Option<core::time::Duration>) -> ConnParams {
    ConnParams {
        private_data: message.to_bytes(),
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: RETRIES.0,
        rnr_retry_count: RETRIES.1,
        timeout,
        tos,
        min_rnr_timer: None,
    }
}
