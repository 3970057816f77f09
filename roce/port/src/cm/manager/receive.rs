//! Processing of received MADs.

use core::net::{IpAddr, SocketAddr};

use roce_verbs::{Instant, provider::RejectReason};

use super::{
    Manager, build,
    build::{code_time, transport_of},
    conn::{Conn, Key},
    perform::INVALID_COMM_ID,
    state::{Input, State},
};
use crate::cm::{
    cma::{CmaHeader, HEADER_LEN, ServiceId},
    drops::DropReason,
    half_open::{Displaced, peer_group},
    mad::{Drep, Mad, Message, Mra, Rej, Rep, Req, Subject, gid},
    types::{ConnId, Event, ListenArgs, ListenId, RateLimit},
};

/// Reject reason: the transport type is not supported.
const INVALID_TRANSPORT: RejectReason = RejectReason(9);
/// Reject reason: the GID is not that of the port.
const INVALID_GID: RejectReason = RejectReason(12);

/// Addresses and transaction of a MAD.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    pub(super) transaction_id: u64,
}

/// Connection or resolution that a MAD is for.
type Found = Result<ConnId, DropReason>;

/// Result of a MAD.
pub(super) type Outcome = Result<(), DropReason>;

impl Manager {
    /// Processes a MAD that arrived on QP1 at `local` from `remote`. Accepts any bytes: invalid MADs are dropped and counted.
    pub fn handle_mad(&mut self, now: Instant, local: IpAddr, remote: IpAddr, mad: &[u8]) {
        let outcome = Mad::parse(mad).and_then(|mad| {
            self.counters.count_received(mad.message.attribute());
            let way = Way {
                local: local.to_canonical(),
                remote: remote.to_canonical(),
                transaction_id: mad.transaction_id,
            };
            self.dispatch(now, way, &mad.message)
        });
        if let Err(reason) = outcome {
            tracing::trace!(%remote, ?reason, "cm drop");
            self.counters.count_drop(reason);
            use DropReason as R;
            if matches!(
                reason,
                R::HalfOpen | R::HalfOpenPeer | R::Backlog | R::BacklogPeer | R::Connections | R::Rate
            ) {
                self.log_limit(now, remote, reason.name());
            }
        }
    }

    fn dispatch(&mut self, now: Instant, way: Way, message: &Message) -> Outcome {
        if way.remote.is_unspecified() || way.remote.is_multicast() || way.local.is_ipv4() != way.remote.is_ipv4() {
            return Err(DropReason::WrongAddress);
        }
        let found = self.addressee(way, message);
        // MADs that name a connection or request by numbers that no stranger knows don't use up the rate of their address, and others
        // of the address can't keep them out.
        if found.is_err() {
            let (limit, max) = (self.config.mad_rate, self.config.max_rated_peers);
            if !self.buckets.take(now, peer_group(way.remote), limit, max) {
                return Err(DropReason::Rate);
            }
        }
        match (message, found) {
            (Message::Drep(m), _) if self.farewells.answer(way.local, way.remote, m) => Ok(()),
            (_, Ok(id)) => {
                let known = self.with(id, |m, c| m.on_known(now, way, c, message));
                known.unwrap_or(Err(DropReason::UnknownConnection))
            }
            (Message::Req(m), _) => self.on_req(now, way, m),
            (Message::SidrReq(m), _) => self.on_sidr_req(now, way, m),
            (_, Err(DropReason::UnknownConnection)) => self.on_unknown(way, message),
            (_, Err(reason)) => Err(reason),
        }
    }

    /// Processes a MAD of a connection or resolution.
    fn on_known(&mut self, now: Instant, way: Way, c: &mut Conn, message: &Message) -> Outcome {
        // One that names our ID: its sender has received something from us.
        let proves = match message {
            Message::Mra(_) | Message::Rtu(_) | Message::Dreq(_) | Message::Drep(_) => true,
            Message::Rej(m) => timeout_guid(m).is_none(),
            _ => false,
        };
        let input = match message {
            // Our communication ID and queue pair number in it, from the peer that we asked, prove that it answers our REQ: it has
            // overtaken the REP, or that was lost.
            Message::Dreq(m) if c.remote_id.is_none() && !(c.state.is_request() && c.local_qpn == m.remote_qpn) => {
                return self.on_unknown(way, message);
            }
            Message::Rep(_) if !c.is_active() => return Err(DropReason::State),
            Message::Rep(m) if c.remote_id.is_some_and(|id| id != m.local_comm_id) => {
                return self.on_unknown(way, message);
            }
            Message::Rep(m) if c.remote_id.is_none() && c.state != State::Refused => {
                return self.on_first_rep(now, way, c, m);
            }
            Message::SidrRep(m) if c.service_id != m.service_id => return Err(DropReason::Field),
            Message::Req(_) => self.repeated(now, c, Input::Req)?,
            Message::SidrReq(_) => self.repeated(now, c, Input::SidrReq)?,
            Message::Mra(m) => Input::Mra(m.subject, m.service_timeout),
            Message::Rej(m) => Input::Rej(m),
            Message::Rep(m) => Input::Rep(m),
            Message::Rtu(_) => Input::Rtu,
            Message::Dreq(_) => Input::Dreq(way.transaction_id),
            Message::Drep(_) => Input::Drep,
            Message::SidrRep(m) => Input::SidrRep(m),
        };
        if proves {
            self.table.prove(c);
        }
        if let Message::Dreq(m) = message {
            c.remote_id = Some(m.local_comm_id);
            if c.local_qpn != m.remote_qpn {
                return Err(DropReason::WrongQp);
            }
        }
        self.perform(now, c, input).map_err(|_| DropReason::State)
    }

    /// Answers a message that names a connection or an attempt which we don't have: its sender believes that it has one, or may have
    /// lost our DREP.
    fn on_unknown(&mut self, way: Way, message: &Message) -> Outcome {
        let (theirs, ours) = message.comm_ids().unwrap_or_default();
        let reject = |subject| build::rej((ours, theirs), subject, INVALID_COMM_ID, &[]);
        match message {
            Message::Rep(_) => self.respond(way, reject(Subject::Rep)),
            Message::Rtu(_) => self.respond(way, reject(Subject::Other)),
            Message::Dreq(_) => self.respond(way, Drep::between((ours, theirs))),
            _ => {}
        }
        Err(DropReason::UnknownConnection)
    }

    /// Finds the connection or resolution that a MAD is for by its numbers.
    fn addressee(&self, way: Way, message: &Message) -> Found {
        let (theirs, ours) = message.comm_ids().unwrap_or_default();
        if let Message::Rej(m) = message
            && let Some(guid) = timeout_guid(m)
        {
            // The peer may not know our ID, but we know its (`cm_acquire_rejected_id`).
            return self.on_its_way(self.table.find(Key::RemoteId(way.remote, guid, theirs)), way);
        }
        match message {
            Message::Req(m) => {
                let id = self
                    .table
                    .find(Key::RemoteId(way.remote, m.local_ca_guid, m.local_comm_id));
                let same = id.filter(|id| self.is_same_request(*id, way, m));
                same.ok_or(DropReason::UnknownConnection)
            }
            Message::SidrReq(m) => {
                let id = self
                    .table
                    .find(Key::Question(way.remote, way.transaction_id, m.request_id));
                id.ok_or(DropReason::UnknownConnection)
            }
            Message::SidrRep(m) => self.on_its_way(self.table.by_local_id(m.request_id, true), way),
            Message::Rep(_) => self.on_its_way(self.table.by_local_id(ours, false), way),
            // The peer's answer to our REQ may come before we know its ID.
            Message::Mra(Mra { subject, .. }) | Message::Rej(Rej { subject, .. }) if *subject == Subject::Req => {
                self.find(way, ours, None)
            }
            Message::Dreq(_) => match self.find(way, ours, Some(theirs)) {
                Err(e @ DropReason::UnknownConnection) => self.find(way, ours, None).map_err(|_| e),
                found => found,
            },
            Message::Mra(_) | Message::Rej(_) | Message::Rtu(_) | Message::Drep(_) => {
                self.find(way, ours, Some(theirs))
            }
        }
    }

    /// Finds the connection with our ID and the peer's (`None`: unknown so far), if the MAD travelled between its addresses.
    fn find(&self, way: Way, local_id: u32, remote_id: Option<u32>) -> Found {
        let is_named = |id: &ConnId| self.table.get(*id).is_some_and(|c| c.remote_id == remote_id);
        self.on_its_way(self.table.by_local_id(local_id, false).filter(is_named), way)
    }

    fn on_its_way(&self, id: Option<ConnId>, way: Way) -> Found {
        let id = id.ok_or(DropReason::UnknownConnection)?;
        let is_between = |c: &Conn| (c.local.ip(), c.remote.ip()) == (way.local, way.remote);
        match self.table.get(id).is_some_and(is_between) {
            true => Ok(id),
            false => Err(DropReason::WrongAddress),
        }
    }

    /// Answers a MAD without a connection of ours.
    pub(super) fn respond(&mut self, way: Way, message: impl Into<Message>) {
        let mad = Mad::new(way.transaction_id, message);
        self.send(way.local, way.remote, mad.emit());
    }

    /// Processes a REQ that repeats none.
    fn on_req(&mut self, now: Instant, way: Way, req: &Req) -> Outcome {
        // A queue pair number that no queue pair has is the program's business: one may connect to exchange data only. The kernel's
        // `cm_req_handler` looks at none either.
        if req.local_comm_id == 0 {
            return Err(DropReason::Field);
        }
        let (peer, guid) = (way.remote, req.local_ca_guid);
        let old = [
            Key::RemoteId(peer, guid, req.local_comm_id),
            Key::RemoteQp(peer, guid, req.local_qpn),
        ];
        if let Some(id) = old.into_iter().find_map(|key| self.table.find(key)) {
            return self.doubt(now, way, id, req);
        }
        match self.check_req(way, req) {
            Ok((listener, header)) => {
                self.make_room(now, State::ReqReceived, way, listener)?;
                self.new_request(now, way, req, listener.0, header);
            }
            Err(rej) => self.respond(way, *rej),
        }
        Ok(())
    }

    /// Counts the repetition of a request. Returns its input.
    fn repeated<'a>(&mut self, now: Instant, c: &mut Conn, input: Input<'a>) -> Result<Input<'a>, DropReason> {
        // Peers repeat after 0.2 s at the earliest; networks duplicate packets occasionally.
        const LIMIT: RateLimit = RateLimit {
            per_second: 16,
            burst: 16,
        };
        if !c.repeats.take(now, LIMIT) {
            return Err(DropReason::Rate);
        }
        c.validation.on_repeat();
        Ok(input)
    }

    /// Returns whether a REQ with a connection's communication ID is the one that made it.
    fn is_same_request(&self, id: ConnId, way: Way, req: &Req) -> bool {
        self.table.get(id).is_some_and(|c| {
            !c.is_active()
                && c.local.ip() == way.local
                && (c.peer.qpn, c.peer.sq_psn) == (req.local_qpn, req.starting_psn)
        })
    }

    /// Rejects a REQ with the numbers of an old connection (IBA 12.9.8.3.1; `cm_match_req`) and asks the peer about that: it has
    /// restarted, or somebody uses its name.
    fn doubt(&mut self, now: Instant, way: Way, old: ConnId, req: &Req) -> Outcome {
        self.counters.stale += 1;
        self.respond(way, reject_req(req, RejectReason::STALE_CONNECTION, &[]));
        let _ = self.step(now, old, Input::Doubt);
        Ok(())
    }

    /// Checks a new REQ. Returns its listener and RDMA_CM header.
    ///
    /// # Errors
    /// Its rejection.
    fn check_req(&self, way: Way, req: &Req) -> Result<((ListenId, ListenArgs), CmaHeader), Box<Rej>> {
        let refuse = |reason, info: &[u8]| Err(Box::new(reject_req(req, reason, info)));
        let heard = self.listener_for(way.local, ServiceId(req.service_id));
        let Some((id, listener)) = heard.filter(|(_, l)| !l.space.is_datagram()) else {
            return refuse(RejectReason::INVALID_SERVICE_ID, &[]);
        };
        let wanted = transport_of(req);
        if wanted.is_none() || listener.transport.is_some_and(|t| Some(t) != wanted) {
            return refuse(INVALID_TRANSPORT, &[]);
        }
        if (req.primary_local_gid, req.primary_remote_gid) != (way.remote, way.local) {
            return refuse(INVALID_GID, &gid(way.local));
        }
        let most = self.config.mtus.of(way.local);
        if build::usable_mtu(req.path_mtu, most).is_none() {
            return refuse(RejectReason::INVALID_MTU, &[most as u8]);
        }
        let header = match CmaHeader::parse(&req.private_data) {
            Some(h) if h.names(way.remote, way.local) => h,
            Some(_) => return refuse(INVALID_GID, &gid(way.local)),
            None => return refuse(RejectReason::CONSUMER, &[]),
        };
        Ok(((id, listener), header))
    }

    /// Makes room for a new request, which enters `state`: evicts another if necessary.
    ///
    /// # Errors
    /// There is none. The request is dropped, and its peer repeats it.
    pub(super) fn make_room(
        &mut self,
        now: Instant,
        state: State,
        way: Way,
        listener: (ListenId, ListenArgs),
    ) -> Outcome {
        let peer = peer_group(way.remote);
        let room = self.table.room_for(state, peer, listener, &self.config)?;
        let is_young = |c: &Conn| now.saturating_since(c.since) < self.config.first_retry;
        let (id, counter, limit) = match room {
            Displaced::None => return Ok(()),
            Displaced::OfAll(id) => (id, &mut self.counters.displaced, "half_open"),
            // Many requests of one peer at a time: each has time for its answer, and the peer to repeat the new one.
            Displaced::OfPeer(id) if self.table.get(ConnId(id)).is_some_and(is_young) => {
                return Err(DropReason::HalfOpenPeer);
            }
            Displaced::OfPeer(id) => (id, &mut self.counters.displaced_peer, "half_open_peer"),
        };
        *counter += 1;
        self.log_limit(now, way.remote, limit);
        let _ = self.step(now, ConnId(id), Input::Displaced);
        Ok(())
    }

    fn new_request(&mut self, now: Instant, way: Way, req: &Req, listener: ListenId, header: CmaHeader) {
        let path = build::requester(&self.config, way.local, way.remote, req);
        // A service ID of a port space ends with the port.
        let local = SocketAddr::new(way.local, req.service_id as u16);
        let remote = SocketAddr::new(way.remote, header.port);
        let local_id = self.new_comm_id();
        // Never below our own first pause: a peer that names no time would get all repetitions at once.
        let max_pause = code_time(req.local_cm_response_timeout.min(build::RESPONSE_TIMEOUT));
        let c = self.table.register(Conn {
            listener: Some(listener),
            local_id,
            remote_id: Some(req.local_comm_id),
            remote_guid: req.local_ca_guid,
            transaction_id: way.transaction_id,
            max_pause: max_pause.max(self.config.first_retry),
            max_retries: req.max_cm_retries,
            ..Conn::new(now, State::ReqReceived, (local, remote), path)
        });
        let event = Event::Request {
            listener,
            conn: c.id,
            local,
            remote,
            private_data: req.private_data[HEADER_LEN..].to_vec(),
            path,
        };
        self.request(now, c, event);
    }

    /// Reports a new request, which waits for the consumer.
    pub(super) fn request(&mut self, now: Instant, mut c: Conn, event: Event) {
        self.table.set_timer(&mut c, Some(now + self.config.give_up));
        self.report(&c, event);
        self.table.put(c);
    }

    /// Processes the REP of a connection that has none yet.
    fn on_first_rep(&mut self, now: Instant, way: Way, c: &mut Conn, rep: &Rep) -> Outcome {
        if rep.local_comm_id == 0 {
            return Err(DropReason::Field);
        }
        let (peer, guid) = (way.remote, rep.local_ca_guid);
        if self.table.find(Key::RemoteId(peer, guid, rep.local_comm_id)).is_some() {
            return Err(DropReason::Duplicate);
        }
        let qpn = build::qpn_of(rep, c.peer.transport);
        let ids = (rep.remote_comm_id, rep.local_comm_id);
        let stale = build::rej(ids, Subject::Rep, RejectReason::STALE_CONNECTION, &[]);
        let input = match self.table.find(Key::RemoteQp(peer, guid, qpn)) {
            None => Input::Rep(rep),
            Some(old) => {
                // The peer has restarted: its REP names the queue pair of an old connection. The new attempt is rejected, as if the
                // peer had found out, and the old connection torn down (IBA 12.9.8.3.1; `cm_match_rep`).
                self.counters.stale += 1;
                self.respond(way, stale);
                let _ = self.step(now, old, Input::Stale);
                Input::Rej(&stale)
            }
        };
        self.perform(now, c, input).map_err(|_| DropReason::State)
    }
}

/// Returns the REJ for a REQ without a connection (`cm_issue_rej`).
fn reject_req(req: &Req, reason: RejectReason, info: &[u8]) -> Rej {
    build::rej((0, req.local_comm_id), Subject::Req, reason, info)
}

/// Returns the sender's GUID in a REJ after a timeout, which may not name our communication ID.
fn timeout_guid(rej: &Rej) -> Option<u64> {
    let guid = rej.info.first_chunk().filter(|_| rej.info_length >= 8)?;
    (RejectReason(rej.reason) == RejectReason::TIMEOUT).then_some(u64::from_be_bytes(*guid))
}
