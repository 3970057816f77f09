//! MADs from the wire.

use core::net::{IpAddr, SocketAddr};

use roce_verbs::{Instant, Qpn, provider::RejectReason};

use super::{
    Manager, address_vector, build,
    build::code_time,
    conn::{Conn, Offer},
    half_open::Displaced,
    perform::{Detail, usable_mtu},
    rate::{PeerGroup, TokenBucket},
    state::{Input, State},
    validation::{AddressValidation, longest_pause},
};
use crate::{
    cma::{CmaHeader, HEADER_LEN, ServiceId},
    guid,
    mad::{Attribute, Dreq, Gid, Mad, MadError, Message, Mra, Rej, Rep, Req, Rtu, Subject, Transport},
    types::{ConnId, ConnTransport, DropReason, Event, ListenId, RemoteQp},
};

/// Reject reason: the message names a communication ID that does not exist.
pub(super) const INVALID_COMM_ID: RejectReason = RejectReason(6);
/// Reject reason: the transport type is not supported.
const INVALID_TRANSPORT: RejectReason = RejectReason(9);
/// Reject reason: the GID is not that of the port.
const INVALID_GID: RejectReason = RejectReason(12);

/// Addresses and transaction of a MAD.
#[derive(Clone, Copy)]
struct Way {
    local: IpAddr,
    remote: IpAddr,
    transaction_id: u64,
}

/// Decision about a new REQ.
enum Admission {
    /// It is reported to a listener.
    Listener(ListenId, CmaHeader),
    /// It is rejected, with additional information.
    Refused(RejectReason, Vec<u8>),
}

/// Result of a MAD.
type Outcome = Result<(), DropReason>;

impl Manager {
    /// Takes a MAD that arrived on QP1 at `local` from `remote`. Whatever its bytes are, the worst that happens is a
    /// counted drop.
    pub fn handle_mad(&mut self, now: Instant, local: IpAddr, remote: IpAddr, mad: &[u8]) {
        let outcome = match Mad::parse(mad) {
            Ok(mad) => {
                self.counters.count_received(mad.message.attribute());
                let way = Way {
                    local: local.to_canonical(),
                    remote: remote.to_canonical(),
                    transaction_id: mad.transaction_id,
                };
                self.dispatch(now, way, &mad.message)
            }
            Err(e) => Err(match e {
                MadError::Length(_) => DropReason::Length,
                MadError::Attribute(_) => DropReason::Attribute,
                MadError::Field(..) => DropReason::Field,
                MadError::BaseVersion(_) | MadError::Class(_) | MadError::ClassVersion(_) | MadError::Method(_) => {
                    DropReason::Header
                }
            }),
        };
        if let Err(reason) = outcome {
            tracing::trace!(%remote, ?reason, "cm drop");
            self.counters.count_drop(reason);
            use DropReason as R;
            if matches!(
                reason,
                R::HalfOpen | R::HalfOpenPeer | R::Backlog | R::BacklogPeer | R::Connections | R::Rate
            ) {
                self.tell_limit(now, remote, reason.name());
            }
        }
    }

    fn dispatch(&mut self, now: Instant, way: Way, message: &Message) -> Outcome {
        if way.remote.is_unspecified() || way.remote.is_multicast() || way.local.is_ipv4() != way.remote.is_ipv4() {
            return Err(DropReason::WrongAddress);
        }
        if !self.is_of_known(way, message) {
            let (limit, max) = (self.config.mad_rate, self.config.max_rated_peers);
            if !self.buckets.take(now, PeerGroup::of(way.remote), limit, max) {
                return Err(DropReason::Rate);
            }
        }
        match message {
            Message::Req(m) => self.on_req(now, way, m),
            Message::Mra(m) => self.on_mra(now, way, m),
            Message::Rej(m) => self.on_rej(now, way, m),
            Message::Rep(m) => self.on_rep(now, way, m),
            Message::Rtu(m) => self.on_rtu(now, way, m),
            Message::Dreq(m) => self.on_dreq(now, way, m),
            Message::Drep(m) if self.farewells.answer(way.local, way.remote, m) => Ok(()),
            Message::Drep(m) => {
                let id = self.find(way, m.remote_comm_id, Some(m.local_comm_id))?;
                self.input_with_id(now, id, Input::Drep, Detail::None)
            }
            Message::SidrReq(m) => self.on_sidr_req(now, (way.local, way.remote), way.transaction_id, m),
            Message::SidrRep(m) => self.on_sidr_rep(way.local, way.remote, m),
        }
    }

    fn input(&mut self, now: Instant, id: ConnId, input: Input, detail: Detail<'_>) -> Outcome {
        self.step(now, id, input, detail).map_err(|_| DropReason::State)
    }

    /// An input by a MAD that names our ID: its sender has received something from us.
    fn input_with_id(&mut self, now: Instant, id: ConnId, input: Input, detail: Detail<'_>) -> Outcome {
        self.table.prove(id);
        self.input(now, id, input, detail)
    }

    /// Whether a MAD is about something that we know, by numbers that no stranger knows. Such are not counted with what its
    /// address sends otherwise, so that nobody uses up what belongs to the peers of our connections.
    fn is_of_known(&self, way: Way, message: &Message) -> bool {
        let named = |ours, theirs| self.find(way, ours, theirs).is_ok();
        match message {
            Message::Req(m) => self
                .table
                .by_remote_id(way.remote, m.local_ca_guid, m.local_comm_id)
                .is_some_and(|id| self.is_same_request(id, way, m)),
            Message::Mra(m) => named(m.remote_comm_id, (m.subject != Subject::Req).then_some(m.local_comm_id)),
            Message::Rej(m) => self.find_rejected(way, m).is_ok(),
            Message::Rep(m) => self
                .table
                .by_local_id(m.remote_comm_id)
                .is_some_and(|id| self.on_its_way(id, way).is_ok()),
            Message::Rtu(m) => named(m.remote_comm_id, Some(m.local_comm_id)),
            Message::Dreq(m) => named(m.remote_comm_id, Some(m.local_comm_id)) || named(m.remote_comm_id, None),
            Message::Drep(m) => named(m.remote_comm_id, Some(m.local_comm_id)),
            Message::SidrReq(m) => self.sidr.knows(way.remote, m.request_id, way.transaction_id),
            Message::SidrRep(m) => self.sidr.is_asked(m.request_id),
        }
    }

    /// The connection with our ID and the peer's (`None`: not told to us yet), if the MAD travelled its way.
    fn find(&self, way: Way, local_id: u32, remote_id: Option<u32>) -> Result<ConnId, DropReason> {
        let id = self.table.by_local_id(local_id).ok_or(DropReason::UnknownConnection)?;
        let c = self.table.get(id).ok_or(DropReason::UnknownConnection)?;
        if c.remote_id != remote_id {
            return Err(DropReason::UnknownConnection);
        }
        self.on_its_way(id, way)
    }

    fn on_its_way(&self, id: ConnId, way: Way) -> Result<ConnId, DropReason> {
        match self.table.get(id) {
            Some(c) if (c.local.ip(), c.remote.ip()) == (way.local, way.remote) => Ok(id),
            Some(_) => Err(DropReason::WrongAddress),
            None => Err(DropReason::UnknownConnection),
        }
    }

    /// Rejects a MAD without a connection of ours (`cm_issue_rej`).
    fn issue_rej(&mut self, way: Way, ids: (u32, u32), subject: Subject, reason: RejectReason, info: &[u8]) {
        let mad = Mad::new(way.transaction_id, build::bare_rej(ids.0, ids.1, subject, reason, info));
        self.send_to(way.local, way.remote, Attribute::Rej, mad.emit());
    }

    fn on_req(&mut self, now: Instant, way: Way, req: &Req) -> Outcome {
        // A queue pair number that no queue pair has is the program's business: one may connect to exchange data only. The kernel's
        // `cm_req_handler` looks at none either.
        if req.local_comm_id == 0 {
            return Err(DropReason::Field);
        }
        let known = self
            .table
            .by_remote_id(way.remote, req.local_ca_guid, req.local_comm_id);
        if let Some(id) = known {
            if self.is_same_request(id, way, req) {
                return self.on_repeated_req(now, id);
            }
            return self.doubt(now, way, id, req);
        }
        if let Some(id) = self.table.by_remote_qp(way.remote, req.local_ca_guid, req.local_qpn) {
            return self.doubt(now, way, id, req);
        }
        match self.admit(now, way, req)? {
            Admission::Listener(listener, header) => self.new_request(now, way, req, listener, header),
            Admission::Refused(reason, info) => {
                self.issue_rej(way, (0, req.local_comm_id), Subject::Req, reason, &info);
            }
        }
        Ok(())
    }

    /// A REQ came again.
    fn on_repeated_req(&mut self, now: Instant, id: ConnId) -> Outcome {
        let limit = self.config.repeat_rate;
        let c = self.table.get_mut(id).ok_or(DropReason::UnknownConnection)?;
        if !c.repeats.take(now, limit) {
            return Err(DropReason::Rate);
        }
        c.validation.on_repeat();
        self.input(now, id, Input::Req, Detail::None)
    }

    /// Whether a REQ with a connection's communication ID is the one that made it.
    fn is_same_request(&self, id: ConnId, way: Way, req: &Req) -> bool {
        self.table.get(id).is_some_and(|c| {
            !c.active
                && c.local.ip() == way.local
                && c.peer
                    .is_some_and(|p| (p.qpn, p.sq_psn) == (req.local_qpn, req.starting_psn))
        })
    }

    /// A REQ names the numbers of an old connection: the peer has restarted, or somebody uses its name. The new attempt is
    /// rejected (IBA 12.9.8.3.1; `cm_match_req`), and the peer asked about the old connection.
    fn doubt(&mut self, now: Instant, way: Way, old: ConnId, req: &Req) -> Outcome {
        self.counters.stale += 1;
        let ids = (0, req.local_comm_id);
        self.issue_rej(way, ids, Subject::Req, RejectReason::STALE_CONNECTION, &[]);
        let _ = self.step(now, old, Input::Doubt, Detail::None);
        Ok(())
    }

    /// The peer, in an answer to our REQ, uses the numbers of an old connection for a new one: it has restarted. The new
    /// attempt is rejected, the old connection torn down (IBA 12.9.8.3.1; `cm_match_rep`).
    fn stale(&mut self, now: Instant, way: Way, old: ConnId, ids: (u32, u32), subject: Subject) -> Outcome {
        self.counters.stale += 1;
        self.issue_rej(way, ids, subject, RejectReason::STALE_CONNECTION, &[]);
        let _ = self.step(now, old, Input::Stale, Detail::None);
        Ok(())
    }

    /// Whether a new REQ is let in. Dropped when there is no room: the peer repeats it.
    fn admit(&mut self, now: Instant, way: Way, req: &Req) -> Result<Admission, DropReason> {
        let refuse = |reason, info: &[u8]| Ok(Admission::Refused(reason, info.to_vec()));
        let heard = self.listener_for(way.local, ServiceId(req.service_id));
        let Some(listener) = heard.filter(|l| !l.space.is_datagram()) else {
            return refuse(RejectReason::INVALID_SERVICE_ID, &[]);
        };
        let wanted = transport_of(req);
        if wanted.is_none() || listener.transport.is_some_and(|t| Some(t) != wanted) {
            return refuse(INVALID_TRANSPORT, &[]);
        }
        let here = Gid::from(way.local);
        if (req.primary_local_gid, req.primary_remote_gid) != (Gid::from(way.remote), here) {
            return refuse(INVALID_GID, &here.0);
        }
        let most = self.config.mtus.of(way.local);
        if usable_mtu(req.path_mtu, most).is_none() {
            return refuse(RejectReason::INVALID_MTU, &[most as u8]);
        }
        let header = match CmaHeader::parse(&req.private_data) {
            Ok(h) if (h.src.to_canonical(), h.dst.to_canonical()) == (way.remote, way.local) => h,
            Ok(_) => return refuse(INVALID_GID, &here.0),
            Err(_) => return refuse(RejectReason::CONSUMER, &[]),
        };
        if self.table.len() >= self.config.max_connections {
            return Err(DropReason::Connections);
        }
        let peer = PeerGroup::of(way.remote);
        let room = self.table.room_for(peer, listener.id, listener.backlog, &self.config)?;
        let is_young = |c: &Conn| now.saturating_since(c.since) < self.config.first_retry;
        if let Displaced::OfPeer(id) = room
            && self.table.get(id).is_some_and(is_young)
        {
            // Many connections of one host at a time: each has time to answer, and the host to ask again.
            return Err(DropReason::HalfOpenPeer);
        }
        if let Some(id) = self.count_displaced(now, way.remote, room) {
            let _ = self.step(now, id, Input::Displaced, Detail::None);
        }
        Ok(Admission::Listener(listener.id, header))
    }

    /// Counts who gives way, and names it.
    pub(super) fn count_displaced(&mut self, now: Instant, remote: IpAddr, room: Displaced) -> Option<ConnId> {
        let (id, counter, limit) = match room {
            Displaced::None => return None,
            Displaced::OfAll(id) => (id, &mut self.counters.displaced, "half_open"),
            Displaced::OfPeer(id) => (id, &mut self.counters.displaced_peer, "half_open_peer"),
        };
        *counter += 1;
        self.tell_limit(now, remote, limit);
        Some(id)
    }

    /// Returns the queue pair that a REQ asks a connection for, within the limits of our port.
    fn requester_of(&self, way: Way, req: &Req) -> RemoteQp {
        let most = self.config.mtus.of(way.local);
        let default_timeout = build::ack_timeout_code(self.config.ca_ack_delay, self.config.packet_life_time);
        RemoteQp {
            av: address_vector(way.local, way.remote, req.primary_traffic_class),
            qpn: req.local_qpn,
            sq_psn: req.starting_psn,
            mtu: usable_mtu(req.path_mtu, most).unwrap_or(most),
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            timeout: if req.primary_ack_timeout == 0 {
                default_timeout
            } else {
                req.primary_ack_timeout
            },
            retry_cnt: req.retry_count,
            rnr_retry: req.rnr_retry_count,
            transport: transport_of(req).unwrap_or_default(),
            flow_control: req.flow_control,
            srq: req.srq,
            keeps_packets: guid::keeps_packets(req.local_ca_guid),
            src_port: guid::source_port(req.local_ca_guid, req.local_qkey),
        }
    }

    fn new_request(&mut self, now: Instant, way: Way, req: &Req, listener: ListenId, header: CmaHeader) {
        let path = self.requester_of(way, req);
        // A service ID of a port space ends with the port.
        let port = req.service_id as u16;
        let local = SocketAddr::new(way.local, port);
        let remote = SocketAddr::new(way.remote, header.port);
        let local_id = self.new_comm_id();
        let conn = self.table.insert(Conn {
            state: State::ReqReceived,
            active: false,
            detached: None,
            end_told: false,
            listener: Some(listener),
            in_backlog: true,
            local,
            remote,
            local_id,
            remote_id: Some(req.local_comm_id),
            remote_guid: req.local_ca_guid,
            transaction_id: way.transaction_id,
            local_qpn: Qpn::default(),
            peer: Some(path),
            offer: Offer {
                mtu: path.mtu,
                transport: path.transport,
                retry_count: req.retry_count,
                traffic_class: req.primary_traffic_class,
            },
            granted: false,
            since: now,
            validation: AddressValidation::requested(),
            repeats: TokenBucket::default(),
            max_pause: longest_pause(
                code_time(req.local_cm_response_timeout.min(self.config.response_timeout)),
                self.config.first_retry,
            ),
            max_retries: req.max_cm_retries.min(self.config.max_retries),
            exchange: None,
            rejection: None,
            reply: None,
            timer: None,
        });
        self.table.set_timer(conn, Some(now + self.config.give_up));
        self.tell(Event::Request {
            listener,
            conn,
            local,
            remote,
            private_data: req.private_data[HEADER_LEN..].to_vec(),
            path,
        });
    }

    fn on_mra(&mut self, now: Instant, way: Way, mra: &Mra) -> Outcome {
        let remote = (mra.subject != Subject::Req).then_some(mra.local_comm_id);
        let id = self.find(way, mra.remote_comm_id, remote)?;
        self.table.prove(id);
        let expected = match self.table.get(id).map(|c| c.state) {
            Some(State::ReqSent | State::ReqExtended) => Subject::Req,
            Some(State::RepSent | State::RepExtended) => Subject::Rep,
            _ => return Err(DropReason::State),
        };
        if mra.subject != expected {
            return Err(DropReason::State);
        }
        self.input(now, id, Input::Mra, Detail::Service(mra.service_timeout))
    }

    fn on_rep(&mut self, now: Instant, way: Way, rep: &Rep) -> Outcome {
        let Some(id) = self.table.by_local_id(rep.remote_comm_id) else {
            return self.unwanted_rep(way, rep);
        };
        self.on_its_way(id, way)?;
        let Some(c) = self.table.get(id).filter(|c| c.active) else {
            return Err(DropReason::State);
        };
        if c.remote_id.is_some() || c.state == State::Refused {
            if c.remote_id.is_some_and(|r| r != rep.local_comm_id) {
                return self.unwanted_rep(way, rep);
            }
            return self.input(now, id, Input::Rep, Detail::Reply(rep));
        }
        let qpn = build::qpn_of(rep, c.offer.transport);
        if rep.local_comm_id == 0 {
            return Err(DropReason::Field);
        }
        if self
            .table
            .by_remote_id(way.remote, rep.local_ca_guid, rep.local_comm_id)
            .is_some()
        {
            return Err(DropReason::Duplicate);
        }
        if let Some(old) = self.table.by_remote_qp(way.remote, rep.local_ca_guid, qpn) {
            // The new attempt ends as if the peer had found out: its REP names a queue pair that is in use.
            let stale = Rej {
                reason: RejectReason::STALE_CONNECTION.0,
                ..Rej::default()
            };
            self.stale(now, way, old, (rep.remote_comm_id, rep.local_comm_id), Subject::Rep)?;
            return self.input(now, id, Input::Rej, Detail::Rejection(&stale));
        }
        self.input(now, id, Input::Rep, Detail::Reply(rep))
    }

    /// A REP for an attempt that we don't have, or that another REP answered already.
    fn unwanted_rep(&mut self, way: Way, rep: &Rep) -> Outcome {
        let ids = (rep.remote_comm_id, rep.local_comm_id);
        self.issue_rej(way, ids, Subject::Rep, INVALID_COMM_ID, &[]);
        Err(DropReason::UnknownConnection)
    }

    /// Rejects an RTU for a connection that we don't have: its sender holds itself connected.
    fn on_rtu(&mut self, now: Instant, way: Way, rtu: &Rtu) -> Outcome {
        match self.find(way, rtu.remote_comm_id, Some(rtu.local_comm_id)) {
            Ok(id) => self.input_with_id(now, id, Input::Rtu, Detail::Ready),
            Err(DropReason::UnknownConnection) => {
                let ids = (rtu.remote_comm_id, rtu.local_comm_id);
                self.issue_rej(way, ids, Subject::Other, INVALID_COMM_ID, &[]);
                Err(DropReason::UnknownConnection)
            }
            Err(reason) => Err(reason),
        }
    }

    /// A DREQ for a connection that we don't have is answered all the same: the peer may have lost our DREP.
    fn on_dreq(&mut self, now: Instant, way: Way, dreq: &Dreq) -> Outcome {
        self.take_early_dreq(way, dreq);
        let id = match self.find(way, dreq.remote_comm_id, Some(dreq.local_comm_id)) {
            Err(DropReason::UnknownConnection) => {
                let mad = Mad::new(way.transaction_id, build::drep(dreq.remote_comm_id, dreq.local_comm_id));
                self.send_to(way.local, way.remote, Attribute::Drep, mad.emit());
                return Err(DropReason::UnknownConnection);
            }
            found => found?,
        };
        self.table.prove(id);
        if self.table.get(id).is_some_and(|c| c.local_qpn != dreq.remote_qpn) {
            return Err(DropReason::WrongQp);
        }
        self.input(now, id, Input::Dreq, Detail::Transaction(way.transaction_id))
    }

    /// A DREQ may overtake the REP, or find it lost. Our communication ID and queue pair number in it, from the peer
    /// that we asked, prove that it answers our REQ; now we know the peer's communication ID.
    fn take_early_dreq(&mut self, way: Way, dreq: &Dreq) {
        let Ok(id) = self.find(way, dreq.remote_comm_id, None) else {
            return;
        };
        if let Some(c) = self.table.get_mut(id)
            && matches!(c.state, State::ReqSent | State::ReqExtended)
            && c.local_qpn == dreq.remote_qpn
        {
            c.remote_id = Some(dreq.local_comm_id);
        }
    }

    /// Finds the connection that a REJ names (`cm_acquire_rejected_id`): after a timeout the peer may not know our ID, but we know its. Returns also
    /// whether it names our ID.
    fn find_rejected(&self, way: Way, rej: &Rej) -> Result<(ConnId, bool), DropReason> {
        let guid = rej.info.first_chunk().filter(|_| rej.info_length >= 8);
        let id = match guid {
            Some(guid) if RejectReason(rej.reason) == RejectReason::TIMEOUT => {
                let guid = u64::from_be_bytes(*guid);
                let id = self.table.by_remote_id(way.remote, guid, rej.local_comm_id);
                let id = self.on_its_way(id.ok_or(DropReason::UnknownConnection)?, way)?;
                return Ok((id, false));
            }
            _ if rej.subject == Subject::Req => self.find(way, rej.remote_comm_id, None)?,
            _ => self.find(way, rej.remote_comm_id, Some(rej.local_comm_id))?,
        };
        Ok((id, true))
    }

    fn on_rej(&mut self, now: Instant, way: Way, rej: &Rej) -> Outcome {
        let (id, names_ours) = self.find_rejected(way, rej)?;
        match names_ours {
            true => self.input_with_id(now, id, Input::Rej, Detail::Rejection(rej)),
            false => self.input(now, id, Input::Rej, Detail::Rejection(rej)),
        }
    }
}

/// The transport that a REQ asks for, if it is one of ours (`cm_req_get_qp_type`).
fn transport_of(req: &Req) -> Option<ConnTransport> {
    match (req.transport, req.extended_transport) {
        (Transport::Rc, _) => Some(ConnTransport::Rc),
        (Transport::Uc, _) => Some(ConnTransport::Uc),
        (Transport::Extended, build::EXTENDED_XRC) => Some(ConnTransport::Xrc),
        _ => None,
    }
}
