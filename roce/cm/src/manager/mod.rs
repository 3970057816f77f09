//! The connection manager.

mod build;
mod conn;
mod farewell;
mod half_open;
mod ids;
mod perform;
mod quote;
mod rate;
mod receive;
mod sidr;
pub mod state;
mod validation;

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::collections::{BTreeMap, VecDeque};

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use roce_bth::Qpn;
use roce_verbs::{
    AddressVector, Instant, PathMtus,
    provider::{ConnParams, RejectReason},
};

use self::{
    conn::{Conn, Connections, Offer},
    farewell::Farewells,
    ids::IdSequence,
    perform::Detail,
    rate::{Buckets, TokenBucket},
    sidr::Resolutions,
    state::{Input, State},
    validation::{AddressValidation, Cause},
};
use crate::{
    cma::{PortSpace, ServiceId},
    mad::{Attribute, MAD_LEN, Mad},
    types::{
        AcceptArgs, CmConfig, CmError, ConnChange, ConnId, ConnTransport, ConnectArgs, Counters, DropReason, Event,
        ListenArgs, ListenId, OutMad, RemoteQp, Usage, overlap,
    },
};

/// A listener.
struct Listener {
    addr: Option<IpAddr>,
    space: PortSpace,
    port: u16,
    transport: Option<ConnTransport>,
    backlog: u32,
}

/// A listener that a message is for.
#[derive(Clone, Copy)]
struct Heard {
    id: ListenId,
    space: PortSpace,
    transport: Option<ConnTransport>,
    backlog: u32,
}

impl Heard {
    /// It may be asked for a queue pair that takes datagrams.
    const fn is_datagram(self) -> bool {
        self.space.is_datagram() || matches!(self.space, PortSpace::Ib)
    }
}

/// The connection manager of one port (one GSI).
///
/// On the wire it behaves as Linux's `ib_cm` and `rdma_cm`, with these choices of its own:
/// * First retransmissions come early ([`CmConfig::first_retry`]) and attempts end within [`CmConfig::give_up`];
///   giving up sends a REJ with reason 4, as IBA 12.9.8.3.1 asks and the kernel only does when an id is destroyed.
///   After a REP that was answered with an MRA and no RTU a DREQ follows, because a REJ may be lost.
/// * An address that sends a REQ is not believed before it has shown that it receives what we send: until then our
///   timers send it three REPs and a DREQ at most, no sooner than [`CmConfig::first_retry`] after one another whatever
///   response timeout the REQ names, three MADs in all for each of the REQ, and no REJ. (The kernel repeats a REP as often
///   and as soon as the REQ says: 15 times, each millisecond.)
/// * Half-open connections of such addresses give way, the oldest first, to newer requests; a request that its peer does
///   not repeat waits for the consumer for [`CmConfig::give_up`] only, or as long as our last MRA asked for.
/// * There is a bound to the MADs that one address may have us process ([`CmConfig::mad_rate`]).
/// * A REQ that reuses an established connection's queue pair is rejected as stale, but ends the old connection only if the
///   peer does not have it any more: it gets our REP again, and answers with its RTU if it has, with a REJ if it has been
///   started anew. IBA 12.9.8.3.1 and the kernel end it at once, which one forged REQ with a guessed queue pair number can
///   have done. (Of a connection that we asked for there is no REP; its owner finds out by using it. A half-open one of an
///   address that has not proved itself makes nobody's queue pair stale.)
/// * A DREQ is answered at once, not when the consumer gets round to it. The consumer's end of an accepted
///   connection before its RTU is a DREQ, which is acknowledged, not a REJ, which isn't.
/// * A REJ is repeated for late duplicates of what it rejected; a REQ in the state REP sent is answered with the REP;
///   a REP or RTU for a communication ID that we don't have is rejected with reason 6.
/// * Communication IDs are random, not counted up, and a peer is known by its address besides its GUID: another host
///   can't tear down a connection by naming its numbers. MADs from other addresses than the connection's are dropped.
/// * A DREQ may also be sent between other addresses ([`Manager::send_farewell`]); we don't take one that was.
/// * A REQ whose header or GIDs name other addresses than it travelled between is rejected (12); one for an
///   address that nobody listens on with reason 8 (the kernel: 28).
pub struct Manager {
    config: CmConfig,
    rng: ChaCha8Rng,
    ids: IdSequence,
    transaction_high: u32,
    listeners: BTreeMap<ListenId, Listener>,
    next_listener: u64,
    table: Connections,
    sidr: Resolutions,
    farewells: Farewells,
    buckets: Buckets,
    /// When it was last said that a limit was met.
    limit_told: Option<Instant>,
    out: VecDeque<OutMad>,
    events: VecDeque<Event>,
    counters: Counters,
}

impl Manager {
    /// A manager without connections; `seed` makes communication IDs, transaction IDs and ephemeral ports.
    pub fn new(config: CmConfig, seed: [u8; 32]) -> Self {
        let mut rng = ChaCha8Rng::from_seed(seed);
        Self {
            transaction_high: rng.next_u32(),
            ids: IdSequence::new(config.comm_ids, &mut rng),
            table: Connections::new(config.report_changes),
            config,
            rng,
            listeners: BTreeMap::new(),
            next_listener: 0,
            sidr: Resolutions::default(),
            farewells: Farewells::default(),
            buckets: Buckets::default(),
            limit_told: None,
            out: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// The largest path MTUs from now on.
    pub fn set_path_mtus(&mut self, mtus: PathMtus) {
        self.config.mtus = mtus;
    }

    /// Listens on a port of the RDMA_CM TCP port space, on one address or on all. [`ListenArgs::backlog`] tells what
    /// happens beyond `backlog` pending requests.
    ///
    /// # Errors
    /// When a listener has the port on this address already.
    pub fn listen(&mut self, addr: Option<IpAddr>, port: u16, backlog: u32) -> Result<ListenId, CmError> {
        self.listen_for(&ListenArgs::new(addr, port, backlog))
    }

    /// Listens on a port of any port space.
    ///
    /// # Errors
    /// When a listener has the port on this address already.
    pub fn listen_for(&mut self, args: &ListenArgs) -> Result<ListenId, CmError> {
        let ListenArgs { space, port, .. } = *args;
        let addr = args.addr.map(|a| a.to_canonical());
        let clash = |l: &Listener| (l.space, l.port) == (space, port) && overlap(l.addr, addr);
        if self.listeners.values().any(clash) {
            return Err(CmError::AddressInUse);
        }
        let id = ListenId(self.next_listener);
        self.next_listener += 1;
        self.listeners.insert(
            id,
            Listener {
                addr,
                space,
                port,
                transport: args.transport,
                backlog: args.backlog.max(1),
            },
        );
        Ok(id)
    }

    fn listener_for(&self, local: IpAddr, service: ServiceId) -> Option<Heard> {
        let space = service.space()?;
        let port = service.port(space)?;
        self.listeners
            .iter()
            .find(|(_, l)| (l.space, l.port) == (space, port) && overlap(l.addr, Some(local)))
            .map(|(id, l)| Heard {
                id: *id,
                space,
                transport: l.transport,
                backlog: l.backlog,
            })
    }

    /// Stops listening. Requests already reported stay.
    pub fn unlisten(&mut self, id: ListenId) {
        self.listeners.remove(&id);
    }

    /// Sends a REQ. The outcome is an event.
    ///
    /// # Errors
    /// When an argument is wrong or a limit is reached.
    pub fn connect(&mut self, now: Instant, args: &ConnectArgs) -> Result<ConnId, CmError> {
        let args = &ConnectArgs {
            local: canonical(args.local),
            remote: canonical(args.remote),
            ..args.clone()
        };
        let (l, r) = (args.local.ip(), args.remote.ip());
        let unusable = |ip: IpAddr| ip.is_unspecified() || ip.is_multicast();
        if l.is_ipv4() != r.is_ipv4() || unusable(l) || unusable(r) {
            return Err(CmError::Address);
        }
        if self.table.len() >= self.config.max_connections {
            return Err(CmError::Limit);
        }
        let port = self.local_port(args.local.port());
        let local_id = self.new_comm_id();
        let req = build::req(&self.config, args, local_id, port)?;
        let transaction_id = self.transaction(local_id);
        let max_pause =
            build::code_time(self.config.response_timeout) + 2 * build::code_time(self.config.packet_life_time);
        let id = self.table.insert(Conn {
            state: State::ReqSent,
            active: true,
            detached: None,
            end_told: false,
            listener: None,
            in_backlog: false,
            local: SocketAddr::new(l, port),
            remote: args.remote,
            local_id,
            remote_id: None,
            remote_guid: 0,
            transaction_id,
            local_qpn: args.qpn,
            peer: None,
            offer: Offer {
                mtu: args.mtu,
                transport: args.transport,
                retry_count: args.params.retry_count.min(7),
                traffic_class: args.params.tos.unwrap_or(0),
            },
            granted: false,
            since: now,
            validation: AddressValidation::initiated(),
            repeats: TokenBucket::default(),
            max_pause,
            max_retries: self.config.max_retries,
            exchange: None,
            rejection: None,
            reply: None,
            timer: None,
        });
        let patience = args.params.patience.unwrap_or(self.config.give_up);
        self.start_patient_exchange(now, id, &Mad::new(transaction_id, req), patience);
        Ok(id)
    }

    /// The path of a waiting request with depths as accepting with `params` would negotiate them, and their type of service
    /// if they name one: what to bring the queue pair to RTS with before [`Manager::accept`].
    ///
    /// # Errors
    /// When the connection is not a waiting request, or there is too much private data: the queue pair is not to be brought up
    /// for nothing.
    pub fn accept_path(&mut self, conn: ConnId, params: &ConnParams) -> Result<RemoteQp, CmError> {
        build::check_accept_data(&params.private_data)?;
        self.leave_backlog_if_answered(conn);
        let c = self
            .table
            .get(conn)
            .filter(|c| c.detached.is_none())
            .ok_or(CmError::NoConnection)?;
        match (c.state, c.peer) {
            (State::ReqReceived, Some(peer)) => Ok(RemoteQp {
                av: AddressVector {
                    traffic_class: params.tos.unwrap_or(peer.av.traffic_class),
                    ..peer.av
                },
                responder_resources: peer.responder_resources.min(params.responder_resources),
                initiator_depth: peer.initiator_depth.min(params.initiator_depth),
                ..peer
            }),
            (state, _) => Err(CmError::State(state)),
        }
    }

    /// Takes an unanswered request out of its listener's backlog: the consumer keeps it in a place of its own.
    ///
    /// For programs that collect requests before they answer any. The number of half-open connections bounds those.
    pub fn leave_backlog(&mut self, conn: ConnId) {
        self.table.leave_backlog(conn);
        self.sidr.leave_backlog(conn);
    }

    /// Accepts a request: sends the REP. The queue pair must be in RTS (the peer's first packet may come before its
    /// RTU).
    ///
    /// # Errors
    /// When the connection is not a waiting request, or there is too much private data.
    pub fn accept(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), CmError> {
        let path = self.accept_path(conn, &args.params)?;
        let depths = (path.responder_resources, path.initiator_depth);
        let c = self.table.get_mut(conn).ok_or(CmError::NoConnection)?;
        let rep = build::rep(&self.config, c, args, depths)?;
        c.local_qpn = args.qpn;
        c.peer = Some(path);
        self.call(now, conn, Input::Accept, Detail::Reply(&rep))
    }

    /// Refuses a request (`rdma_reject`). The connection is over; destroy it.
    ///
    /// # Errors
    /// When the connection is not a waiting request, or there are more than 148 bytes of private data.
    pub fn reject(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let data = build::private_data(private_data)?;
        self.call(now, conn, Input::Reject, Detail::Refusal(reason, data))
    }

    /// Answer to [`Event::Reply`]: the queue pair is in RTS; sends the RTU and the connection is established.
    ///
    /// # Errors
    /// When the connection doesn't wait for it (the peer may have ended it meanwhile).
    pub fn qp_ready(&mut self, now: Instant, conn: ConnId) -> Result<(), CmError> {
        self.call(now, conn, Input::QpReady, Detail::None)
    }

    /// Answer to [`Event::Reply`]: the queue pair could not be brought up; rejects the reply.
    ///
    /// # Errors
    /// When the connection doesn't wait for it.
    pub fn qp_failed(&mut self, now: Instant, conn: ConnId, reason: RejectReason) -> Result<(), CmError> {
        self.call(now, conn, Input::QpFailed, Detail::Refusal(reason, [0; 148]))
    }

    /// Like [`Manager::qp_failed`], with private data (at most 148 bytes).
    ///
    /// # Errors
    /// When the connection doesn't wait for it, or there is too much private data.
    pub fn refuse_reply(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let data = build::private_data(private_data)?;
        self.call(now, conn, Input::QpFailed, Detail::Refusal(reason, data))
    }

    /// Passive: a packet arrived on the queue pair before the RTU (`rdma_notify`, IBA 12.9.7.2 "communication
    /// established"). Harmless at any other time.
    pub fn communication_established(&mut self, now: Instant, conn: ConnId) {
        let _ = self.call(now, conn, Input::Communication, Detail::None);
    }

    /// Ends an established (or accepted) connection with a DREQ; takes an unanswered connect back; rejects a waiting
    /// request. [`Event::Disconnected`] follows. Harmless when the connection has ended or is ending.
    pub fn disconnect(&mut self, now: Instant, conn: ConnId) {
        if self.call(now, conn, Input::Disconnect, Detail::None).is_ok()
            && self.table.get(conn).is_some_and(|c| c.state.has_ended())
        {
            let timed_out = false;
            self.tell_end(conn, Event::Disconnected { conn, timed_out });
        }
    }

    /// Disconnects if need be and forgets the connection: no more events of it come, not even queued ones. What the
    /// peer still needs to be told is told in the background.
    pub fn destroy(&mut self, now: Instant, conn: ConnId) {
        if self.destroy_sidr(now, conn) {
            return;
        }
        let Some(c) = self.table.get(conn).filter(|c| c.detached.is_none()) else {
            return;
        };
        if c.state == State::Over {
            self.table.remove(conn);
            return;
        }
        self.table.leave_backlog(conn);
        self.table.detach(conn);
        let _ = self.step(now, conn, Input::Disconnect, Detail::None);
        while let Some(oldest) = self.table.excess_detached(self.config.max_lingering) {
            self.table.remove(oldest);
            self.counters.forgotten += 1;
        }
    }

    /// Takes a MAD to send.
    pub fn poll_mad(&mut self) -> Option<OutMad> {
        self.out.pop_front()
    }

    /// Takes an event.
    pub fn poll_event(&mut self) -> Option<Event> {
        while let Some(event) = self.events.pop_front() {
            if self.is_attached(event.conn()) {
                return Some(event);
            }
        }
        None
    }

    /// Whether the consumer has not destroyed a connection or resolution.
    fn is_attached(&self, conn: ConnId) -> bool {
        self.table.get(conn).is_some_and(|c| c.detached.is_none()) || self.sidr.is_attached(conn)
    }

    /// Takes one of the changes that [`CmConfig::report_changes`] asks for, in their order.
    pub fn poll_change(&mut self) -> Option<ConnChange> {
        self.table.poll_change()
    }

    /// When [`Manager::handle_timeout`] wants to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        let all = [
            self.table.next_timeout(),
            self.sidr.next_timeout(),
            self.farewells.next_timeout(),
        ];
        all.into_iter().flatten().min()
    }

    /// Does what is due. Calling it early is harmless.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(id) = self.table.pop_due(now) {
            let _ = self.step(now, id, Input::Timer, Detail::None);
        }
        self.on_sidr_timers(now);
        self.on_farewell_timers(now);
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// State of a connection, for diagnosis. Destroyed connections have none.
    pub fn state(&self, conn: ConnId) -> Option<State> {
        self.table.get(conn).filter(|c| c.detached.is_none()).map(|c| c.state)
    }

    /// Returns the peer's queue pair, known from its request on, or from its reply on.
    pub fn peer(&self, conn: ConnId) -> Option<RemoteQp> {
        self.table.get(conn).filter(|c| c.detached.is_none())?.peer
    }

    /// Returns the queue pair of ours that a connection was requested or accepted with.
    pub fn local_qpn(&self, conn: ConnId) -> Option<Qpn> {
        let c = self.table.get(conn).filter(|c| c.detached.is_none())?;
        (c.local_qpn != Qpn::default()).then_some(c.local_qpn)
    }

    /// Our and the peer's address of a connection.
    pub fn addresses(&self, conn: ConnId) -> Option<(SocketAddr, SocketAddr)> {
        self.table
            .get(conn)
            .filter(|c| c.detached.is_none())
            .map(|c| (c.local, c.remote))
            .or_else(|| self.sidr.addresses(conn))
    }

    /// Connections kept, destroyed ones that linger included.
    pub fn connections(&self) -> usize {
        self.table.len()
    }

    /// Returns the amount of state that is kept, for diagnosis.
    pub fn usage(&self) -> Usage {
        let (half_open, half_open_of_peer) = self.table.half_open();
        Usage {
            connections: self.table.len(),
            half_open,
            half_open_of_peer,
            lingering: self.table.lingering(),
            rated_peers: self.buckets.len(),
            queued_mads: self.out.len(),
        }
    }

    /// A call of the consumer's: an input that its state may refuse.
    fn call(&mut self, now: Instant, id: ConnId, input: Input, detail: Detail<'_>) -> Result<(), CmError> {
        if self.table.get(id).is_none_or(|c| c.detached.is_some()) {
            return Err(CmError::NoConnection);
        }
        let done = self.step(now, id, input, detail);
        self.leave_backlog_if_answered(id);
        done.map_err(CmError::State)
    }

    /// The consumer has turned to a request, which leaves the backlog unless it still waits.
    fn leave_backlog_if_answered(&mut self, id: ConnId) {
        if self.table.get(id).is_some_and(|c| c.state != State::ReqReceived) {
            self.table.leave_backlog(id);
        }
    }

    /// The port that a request names as ours: an ephemeral one when none is wished for.
    fn local_port(&mut self, wished: u16) -> u16 {
        match wished {
            0 => 32_768 + (self.rng.next_u32() % 28_232) as u16,
            port => port,
        }
    }

    /// A communication ID that no connection has, never 0.
    fn new_comm_id(&mut self) -> u32 {
        loop {
            let id = self.ids.draw();
            if id != 0 && self.table.by_local_id(id).is_none() && !self.sidr.is_asked(id) {
                return id;
            }
        }
    }

    /// The transaction ID of a connection's own exchanges (`cm_form_tid`).
    fn transaction(&self, local_id: u32) -> u64 {
        (u64::from(self.transaction_high) << 32) | u64::from(local_id)
    }

    /// Queues an answer to a MAD of a connection.
    fn answer_with(&mut self, id: ConnId, mad: &Mad) {
        self.send_bytes(id, mad.message.attribute(), mad.emit(), Cause::Answer);
    }

    /// Queues a MAD of a connection, if its peer's address may get it. False: not.
    fn send_bytes(&mut self, id: ConnId, attribute: Attribute, mad: [u8; MAD_LEN], cause: Cause) -> bool {
        let Some(c) = self.table.get_mut(id) else { return false };
        if !c.validation.take(attribute, cause) {
            self.counters.withheld += 1;
            return false;
        }
        let (local, remote) = (c.local.ip(), c.remote.ip());
        self.send_to(local, remote, attribute, mad);
        true
    }

    fn send_to(&mut self, local: IpAddr, remote: IpAddr, attribute: Attribute, mad: [u8; MAD_LEN]) {
        if self.out.len() >= self.config.max_queued_mads {
            self.counters.count_drop(DropReason::OutQueueFull);
            return;
        }
        self.counters.count_sent(attribute);
        self.out.push_back(OutMad { local, remote, mad });
    }

    /// Reports an event, unless the consumer has destroyed the connection.
    fn tell(&mut self, event: Event) {
        if self.is_attached(event.conn()) {
            self.events.push_back(event);
        }
    }

    /// Says in the log that a limit was met, not more often than once a minute.
    fn tell_limit(&mut self, now: Instant, remote: IpAddr, limit: &'static str) {
        const PAUSE: Duration = Duration::from_secs(60);
        if self.limit_told.is_none_or(|at| now.saturating_since(at) >= PAUSE) {
            self.limit_told = Some(now);
            tracing::warn!(%remote, limit, "connection manager: a limit is met (counted; told once a minute)");
        }
    }

    /// Reports the end of an attempt or connection, once.
    fn tell_end(&mut self, id: ConnId, event: Event) {
        if let Some(c) = self.table.get_mut(id)
            && !core::mem::replace(&mut c.end_told, true)
        {
            self.tell(event);
        }
    }
}

fn canonical(a: SocketAddr) -> SocketAddr {
    SocketAddr::new(a.ip().to_canonical(), a.port())
}

/// A path between two addresses.
fn address_vector(local: IpAddr, remote: IpAddr, traffic_class: u8) -> AddressVector {
    AddressVector {
        hop_limit: build::HOP_LIMIT,
        traffic_class,
        ..AddressVector::new(local, remote)
    }
}
