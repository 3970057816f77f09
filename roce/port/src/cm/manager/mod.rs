//! Connection manager.

mod build;
mod conn;
mod farewell;
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
    provider::{ConnParams, RejectReason, VerbsError},
};

use self::{
    conn::{Conn, Connections, Key},
    farewell::Farewells,
    ids::IdSequence,
    rate::Buckets,
    state::{Input, State},
    validation::Cause,
};
use crate::cm::{
    cma::ServiceId,
    counters::Counters,
    drops::DropReason,
    mad::{Attribute, MAD_LEN, Mad, Message, SidrRep, sidr_status},
    types::{
        AcceptArgs, CmConfig, ConnChange, ConnId, ConnectArgs, Event, ListenArgs, ListenId, OutMad, RemoteQp, Usage,
        overlap,
    },
};

/// Connection manager of one port (one GSI).
///
/// On the wire it behaves as Linux's `ib_cm` and `rdma_cm`, with these choices of its own:
/// * First retransmissions come early ([`CmConfig::first_retry`]) and attempts end within [`CmConfig::give_up`];
///   giving up sends a REJ with reason 4, as IBA 12.9.8.3.1 asks and the kernel only does when an id is destroyed.
///   After a REP that was answered with an MRA and no RTU a DREQ follows, because a REJ may be lost.
/// * The address of a REQ is unverified until it has shown that it receives what we send. Until then our timers send at most three
///   REPs and a DREQ there, at intervals of at least [`CmConfig::first_retry`] whatever response timeout the REQ names, three MADs in
///   all for each copy of the REQ, and no REJ. (The kernel repeats a REP as often and as soon as the REQ requests: 15 times, each
///   millisecond.)
/// * Newer requests evict half-open connections of such addresses, the oldest first; a request that its peer does
///   not repeat waits for the consumer for [`CmConfig::give_up`] only, or as long as our last MRA requested, and its REP for the RTU as
///   long. If the peer repeats it, the REP waits as long as the REQ says, at most 69 s.
/// * The rate of MADs processed for one address is limited ([`CmConfig::mad_rate`]).
/// * A REQ that reuses an established connection's queue pair is rejected as stale, but ends the old connection only if the
///   peer does not have it any more: it gets our REP again, and answers with its RTU if it has it, with a REJ if it has restarted.
///   IBA 12.9.8.3.1 and the kernel end it at once, which one forged REQ with a guessed queue pair number could cause. (A connection
///   that we requested has no REP; its owner finds out by using it. A half-open one of an unverified address makes no queue pair
///   stale.)
/// * A DREQ is answered at once, without the consumer. If the consumer ends an accepted connection before its RTU, we send a DREQ, which
///   is acknowledged, instead of a REJ, which isn't.
/// * A REJ is repeated for late duplicates of what it rejected; a REQ in the state REP sent is answered with the REP;
///   a REP or RTU for a communication ID that we don't have is rejected with reason 6.
/// * Communication IDs are random, not counted up, and a peer is known by its address besides its GUID: another host
///   can't tear down a connection by naming its numbers. MADs from other addresses than the connection's are dropped.
/// * A DREQ may also be sent between other addresses ([`Manager::send_farewell`]); we accept none that was.
/// * A REQ whose header or GIDs name other addresses than it travelled between is rejected (12); one for an
///   address without listener with reason 8 (the kernel: 28).
pub struct Manager {
    config: CmConfig,
    rng: ChaCha8Rng,
    ids: IdSequence,
    transaction_high: u32,
    listeners: BTreeMap<ListenId, ListenArgs>,
    next_listener: u64,
    table: Connections,
    farewells: Farewells,
    buckets: Buckets,
    /// Time when a limit that is reached was last logged.
    limit_logged: Option<Instant>,
    out: VecDeque<OutMad>,
    events: VecDeque<Event>,
    counters: Counters,
}

impl Manager {
    /// Creates a manager without connections. `seed`: source of communication IDs, transaction IDs and ephemeral ports.
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
            farewells: Farewells::default(),
            buckets: Buckets::default(),
            limit_logged: None,
            out: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Sets the largest path MTUs.
    pub fn set_path_mtus(&mut self, mtus: PathMtus) {
        self.config.mtus = mtus;
    }

    /// Listens on a port of the RDMA_CM TCP port space, on one address or on all. [`ListenArgs::backlog`] tells what
    /// happens beyond `backlog` pending requests.
    ///
    /// # Errors
    /// A listener has the port on this address already.
    pub fn listen(&mut self, addr: Option<IpAddr>, port: u16, backlog: u32) -> Result<ListenId, VerbsError> {
        self.listen_for(&ListenArgs::new(addr, port, backlog))
    }

    /// Listens on a port of any port space.
    ///
    /// # Errors
    /// A listener has the port on this address already.
    pub fn listen_for(&mut self, args: &ListenArgs) -> Result<ListenId, VerbsError> {
        let args = ListenArgs {
            addr: args.addr.map(|a| a.to_canonical()),
            backlog: args.backlog.max(1),
            ..*args
        };
        let (key, addr) = ((args.space, args.port), args.addr);
        if self
            .listeners
            .values()
            .any(|l| (l.space, l.port) == key && overlap(l.addr, addr))
        {
            let at = addr.map_or_else(|| "all addresses".to_owned(), |addr| addr.to_string());
            let port = args.port;
            return Err(VerbsError::Address(format!(
                "port {port} of {at} has another listener of this process"
            )));
        }
        let id = ListenId(self.next_listener);
        self.next_listener += 1;
        self.listeners.insert(id, args);
        Ok(id)
    }

    fn listener_for(&self, local: IpAddr, service: ServiceId) -> Option<(ListenId, ListenArgs)> {
        let space = service.space()?;
        let port = service.port(space)?;
        let mut found = self.listeners.iter();
        found
            .find(|(_, l)| (l.space, l.port) == (space, port) && overlap(l.addr, Some(local)))
            .map(|(id, l)| (*id, *l))
    }

    /// Stops listening. Requests already reported stay.
    pub fn unlisten(&mut self, id: ListenId) {
        self.listeners.remove(&id);
    }

    /// Sends a REQ. The outcome is an event.
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn connect(&mut self, now: Instant, args: &ConnectArgs) -> Result<ConnId, VerbsError> {
        let (local, remote) = self.check_request(args.local, args.remote)?;
        let args = &ConnectArgs {
            local,
            remote,
            ..args.clone()
        };
        let local_id = self.new_comm_id();
        let req = build::req(&self.config, args, local_id)?;
        let c = Conn {
            local_id,
            transaction_id: self.transaction(local_id),
            local_qpn: args.qp.qpn,
            max_pause: build::code_time(build::RESPONSE_TIMEOUT) + 2 * build::code_time(build::PACKET_LIFE_TIME),
            max_retries: build::MAX_RETRIES,
            ..Conn::new(now, State::ReqSent, (local, remote), build::requested_peer(args))
        };
        let timeout = args.params.timeout.unwrap_or(self.config.give_up);
        Ok(self.begin(now, c, req, timeout))
    }

    /// Returns the addresses of a new request of ours in canonical form, with an ephemeral local port if none is given.
    ///
    /// # Errors
    /// The addresses can't be used, or a limit is reached.
    fn check_request(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<(SocketAddr, SocketAddr), VerbsError> {
        let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        let (mut local, remote) = (canonical(local), canonical(remote));
        let unusable = |a: SocketAddr| a.ip().is_unspecified() || a.ip().is_multicast();
        if local.is_ipv4() != remote.is_ipv4() || unusable(local) || unusable(remote) {
            return Err(VerbsError::Address(
                "local and remote address cannot be used together".into(),
            ));
        }
        if self.table.len() >= self.config.max_connections {
            return Err(VerbsError::Limit("connections"));
        }
        if local.port() == 0 {
            local.set_port(32_768 + (self.rng.next_u32() % 28_232) as u16);
        }
        Ok((local, remote))
    }

    /// Returns the path of a waiting request, with the depths and the type of service that accepting with `params` negotiates. Move the
    /// queue pair to RTS with it before [`Manager::accept`].
    ///
    /// # Errors
    /// The connection is not a waiting request, or there is too much private data.
    pub fn accept_path(&mut self, conn: ConnId, params: &ConnParams) -> Result<RemoteQp, VerbsError> {
        self.consumer(conn, |_, c| accept_path(c, params))
    }

    /// Removes an unanswered request from its listener's backlog, for programs that collect requests before they answer any.
    ///
    /// [`CmConfig::max_half_open`] then bounds the connect requests that have not ended; an event reports each end.
    /// [`CmConfig::max_lingering`] bounds the SIDR requests until the program destroys them: if one expires, no event reports it.
    pub fn leave_backlog(&mut self, conn: ConnId) {
        self.with(conn, |m, c| m.table.leave_backlog(c));
    }

    /// Accepts a request: sends the REP. The queue pair must be in RTS (the peer's first packet may come before its
    /// RTU).
    ///
    /// # Errors
    /// The connection is not a waiting request, or there is too much private data.
    pub fn accept(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), VerbsError> {
        self.consumer(conn, |m, c| {
            let path = accept_path(c, &args.params)?;
            let rep = build::rep(&m.config, c, args, &path)?;
            (c.local_qpn, c.peer) = (args.qp.qpn, path);
            m.perform(now, c, Input::Accept(&rep)).map_err(wrong_state)
        })
    }

    /// Rejects a request or a reply (`rdma_reject`). The connection has ended; destroy it.
    ///
    /// # Errors
    /// There is neither, or there are more than 148 bytes of private data.
    pub fn reject(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), VerbsError> {
        let data = build::private_data(&[], private_data)?;
        self.call(now, conn, Input::Reject(reason, data))
    }

    /// Sends the RTU after [`Event::Reply`]: the queue pair is in RTS, and the connection is established.
    ///
    /// # Errors
    /// The connection has no reply. The peer may have ended it.
    pub fn qp_ready(&mut self, now: Instant, conn: ConnId) -> Result<(), VerbsError> {
        self.call(now, conn, Input::QpReady)
    }

    /// Passive: treats a packet on the queue pair as the RTU (`rdma_notify`, IBA 12.9.7.2 "communication
    /// established"). Harmless at any other time.
    pub fn communication_established(&mut self, now: Instant, conn: ConnId) {
        let _ = self.call(now, conn, Input::Communication);
    }

    /// Ends an established (or accepted) connection with a DREQ; takes an unanswered connect back; rejects a waiting
    /// request. [`Event::Disconnected`] follows. Harmless when the connection has ended or is ending.
    pub fn disconnect(&mut self, now: Instant, conn: ConnId) {
        let _ = self.consumer(conn, |m, c| {
            m.perform(now, c, Input::Disconnect).map_err(wrong_state)?;
            if !c.state.holds_qp() {
                let timed_out = false;
                m.report_end(c, Event::Disconnected { conn, timed_out });
            }
            Ok(())
        });
    }

    /// Disconnects if necessary and destroys the connection or resolution, with its queued events. Messages that the peer still needs
    /// are sent in the background.
    pub fn destroy(&mut self, now: Instant, conn: ConnId) {
        let Some(mut c) = self.table.take_attached(conn) else {
            return;
        };
        let refusal = SidrRep {
            status: sidr_status::REJECT,
            ..SidrRep::default()
        };
        let last = match c.state {
            // The peer needs no message, or is not known to have received any.
            State::Over | State::SidrSent => return self.table.remove(c),
            State::SidrReceived => Input::Answer(&refusal),
            _ => Input::Disconnect,
        };
        self.table.leave_backlog(&mut c);
        self.table.detach(&mut c);
        // One that is ending needs none.
        let _ = self.perform(now, &mut c, last);
        self.table.put(c);
        while self.table.forget_excess(self.config.max_lingering) {
            self.counters.forgotten += 1;
        }
    }

    /// Returns the next MAD to send.
    pub fn poll_mad(&mut self) -> Option<OutMad> {
        self.out.pop_front()
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        while let Some(event) = self.events.pop_front() {
            if self.table.attached(event.conn()).is_some() {
                return Some(event);
            }
        }
        None
    }

    /// Returns the next of the changes that [`CmConfig::report_changes`] asks for, in their order.
    pub fn poll_change(&mut self) -> Option<ConnChange> {
        self.table.poll_change()
    }

    /// Returns the time when [`Manager::handle_timeout`] must be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        let all = [self.table.next_timeout(), self.farewells.next_timeout()];
        all.into_iter().flatten().min()
    }

    /// Runs the timers that are due. Calling it early is harmless.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(mut c) = self.table.take_due(now) {
            self.counters.expired += u64::from(c.state.waits_for_consumer());
            let _ = self.perform(now, &mut c, Input::Timer);
            self.table.put(c);
        }
        self.on_farewell_timers(now);
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the state of a connection or resolution, for diagnosis. `None` if it was destroyed.
    pub fn state(&self, conn: ConnId) -> Option<State> {
        Some(self.table.attached(conn)?.state)
    }

    /// Returns our queue pair, which is QP0 until the consumer accepts, and the peer's. `None` if the peer has named none: before its
    /// reply, and of a resolution.
    pub fn queue_pairs(&self, conn: ConnId) -> Option<(Qpn, RemoteQp)> {
        let c = self.table.attached(conn)?;
        let named = c.remote_id.is_some() && !c.is_resolution() && c.peer.qpn != Qpn::default();
        named.then_some((c.local_qpn, c.peer))
    }

    /// Returns the amount of state that is kept, for diagnosis.
    pub fn usage(&self) -> Usage {
        Usage {
            rated_peers: self.buckets.len(),
            queued_mads: self.out.len(),
            ..self.table.usage()
        }
    }

    /// Runs a change of a connection or resolution. `None` if there is none.
    fn with<R>(&mut self, id: ConnId, change: impl FnOnce(&mut Self, &mut Conn) -> R) -> Option<R> {
        let mut c = self.table.take(id)?;
        let result = change(self, &mut c);
        self.table.put(c);
        Some(result)
    }

    /// Runs a call of the consumer, which has not destroyed its connection. A request leaves the backlog unless it still waits.
    fn consumer<R>(
        &mut self,
        id: ConnId,
        call: impl FnOnce(&mut Self, &mut Conn) -> Result<R, VerbsError>,
    ) -> Result<R, VerbsError> {
        let mut c = self.table.take_attached(id).ok_or_else(no_connection)?;
        let result = call(self, &mut c);
        if !c.state.waits_for_consumer() {
            self.table.leave_backlog(&mut c);
        }
        self.table.put(c);
        result
    }

    /// Performs an input of the consumer, which the state may refuse.
    fn call(&mut self, now: Instant, id: ConnId, input: Input<'_>) -> Result<(), VerbsError> {
        self.consumer(id, |m, c| m.perform(now, c, input).map_err(wrong_state))
    }

    /// Returns a communication ID that no connection has, never 0.
    fn new_comm_id(&mut self) -> u32 {
        loop {
            let id = self.ids.draw();
            if id != 0 && self.table.find(Key::LocalId(id)).is_none() {
                return id;
            }
        }
    }

    /// Returns the transaction ID of a connection's own exchanges (`cm_form_tid`).
    fn transaction(&self, local_id: u32) -> u64 {
        (u64::from(self.transaction_high) << 32) | u64::from(local_id)
    }

    /// Queues an answer to a MAD of a connection.
    fn answer_to(&mut self, c: &mut Conn, transaction_id: u64, message: impl Into<Message>) {
        self.send_of(c, Mad::new(transaction_id, message).emit(), Cause::Answer);
    }

    /// Queues a MAD of a connection. Returns false if its peer's address must not get it.
    fn send_of(&mut self, c: &mut Conn, mad: [u8; MAD_LEN], cause: Cause) -> bool {
        if !c.validation.take(attribute_of(&mad), cause) {
            self.counters.withheld += 1;
            return false;
        }
        self.send(c.local.ip(), c.remote.ip(), mad);
        true
    }

    fn send(&mut self, local: IpAddr, remote: IpAddr, mad: [u8; MAD_LEN]) {
        if self.out.len() >= self.config.max_queued_mads {
            self.counters.count_drop(DropReason::OutQueueFull);
            return;
        }
        self.counters.count_sent(attribute_of(&mad));
        self.out.push_back(OutMad { local, remote, mad });
    }

    /// Queues an event, unless the consumer has destroyed the connection.
    fn report(&mut self, c: &Conn, event: Event) {
        if c.detached.is_none() {
            self.events.push_back(event);
        }
    }

    /// Queues the event that ends an attempt or connection, once.
    fn report_end(&mut self, c: &mut Conn, event: Event) {
        if !core::mem::replace(&mut c.end_reported, true) {
            self.report(c, event);
        }
    }

    /// Logs that a limit is reached, at most once a minute.
    fn log_limit(&mut self, now: Instant, remote: IpAddr, limit: &'static str) {
        const PAUSE: Duration = Duration::from_secs(60);
        if self.limit_logged.is_none_or(|at| now.saturating_since(at) >= PAUSE) {
            self.limit_logged = Some(now);
            tracing::warn!(%remote, limit, "connection manager: a limit is met (counted; told once a minute)");
        }
    }
}

/// Returns the path of a waiting request, as accepting it with `params` negotiates.
fn accept_path(c: &Conn, params: &ConnParams) -> Result<RemoteQp, VerbsError> {
    build::accept_data(&params.private_data)?;
    if c.state != State::ReqReceived {
        return Err(wrong_state(c.state));
    }
    Ok(RemoteQp {
        av: AddressVector {
            traffic_class: params.tos.unwrap_or(c.peer.av.traffic_class),
            ..c.peer.av
        },
        responder_resources: c.peer.responder_resources.min(params.responder_resources),
        initiator_depth: c.peer.initiator_depth.min(params.initiator_depth),
        ..c.peer
    })
}

fn no_connection() -> VerbsError {
    VerbsError::State("no such connection".into())
}

fn wrong_state(state: State) -> VerbsError {
    VerbsError::State(format!("not possible in connection state {state:?}"))
}

/// Returns the attribute of a MAD of ours.
fn attribute_of(mad: &[u8; MAD_LEN]) -> Attribute {
    Attribute::from_id(u16::from_be_bytes([mad[16], mad[17]])).unwrap_or(Attribute::Req)
}
