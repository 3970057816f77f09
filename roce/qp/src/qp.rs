//! Queue pair: attributes, states, posting and the order in which packets are sent.

use roce_bth::{Class, Opcode, Packet, Psn, Service};
use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Instant, PathMigState, Payload, Placement, QpAttr, QpAttrMask,
    QpState, QpType, Qpn, RecvWr, Selectivity, SendOp, SendWr, SrqType, Target, WcStatus, legal, wr::PostError,
};

use std::sync::Arc;

use crate::{
    cq::CompletionQueue,
    ctx::{CreateError, Ctx, ModifyError, QpConfig},
    dcqcn::ReactionPoint,
    failure::Failure,
    recvq::ReceiveQueue,
    reorder::{ReorderBudget, ReorderBuffer},
    replies::AckDue,
    requester::Requester,
    responder::Responder,
    sendq::{Checked, Kind, SendQueue, kind_of},
    seq::Seq,
    source::Sources,
    state,
    tx::{Poll, Step, TxSink},
};

/// Largest number of packets per call of [`QueuePair::poll_transmit`].
const POLL_BUDGET: u32 = 128;
/// Packets of one kind (requests or responses) sent before the other kind, so that neither starves. A GSO train is no
/// longer, so that alternating does not split trains.
const BURST: u32 = 16;
/// Completion status of an operation that the service does not have.
const UNSUPPORTED: WcStatus = WcStatus::LocalQpOperationError;
/// Largest `max_rd_atomic` and `max_dest_rd_atomic`.
const MAX_RD_ATOMIC: u8 = 128;

/// Queue pair of any service: send queue, receive queue, requester and responder.
#[derive(Debug)]
pub struct QueuePair {
    pub(crate) config: QpConfig,
    pub(crate) state: QpState,
    pub(crate) attr: QpAttr,
    /// Path MTU, bytes. This and the next two fields are copies of attributes needed for every packet.
    pub(crate) mtu: usize,
    pub(crate) peer: Qpn,
    pub(crate) access: AccessFlags,
    /// Transport service of the packets.
    pub(crate) service: Service,
    /// The service acknowledges packets.
    pub(crate) reliable: bool,
    pub(crate) sq: SendQueue,
    pub(crate) req: Requester,
    pub(crate) rq: Arc<ReceiveQueue>,
    pub(crate) resp: Responder,
    /// A completion was lost because its queue was full: the queue pair must fail.
    pub(crate) overflowed: bool,
    /// Why it has failed, until that is taken.
    pub(crate) failure: Option<Box<Failure>>,
    /// Both sides buffer packets beyond a gap and report them in selective ACKs.
    pub(crate) selective: bool,
    /// UDP source ports of the peer.
    pub(crate) sources: Sources,
    /// DCQCN state after a congestion notification. `None`: sending is not limited.
    reaction_point: Option<Box<ReactionPoint>>,
    /// DCQCN permits only acknowledgements before this time.
    pub(crate) slowed_until: Option<Instant>,
}

/// Error of a receive posted to a queue pair with a shared receive queue, or with none.
pub const NO_RECEIVE_QUEUE: PostError = PostError::Invalid("the queue pair has no receive queue of its own");

impl QueuePair {
    /// Creates a queue pair in RESET.
    ///
    /// # Errors
    /// If the type doesn't permit the shared receive queue or XRC domain, or requires one that is missing.
    pub fn new(config: QpConfig) -> Result<Self, CreateError> {
        let qp_type = config.qp_type;
        let shares = |srq: &crate::SharedReceiveQueue| qp_type.receives() && srq.config().srq_type == SrqType::Basic;
        if config.srq.as_ref().is_some_and(|srq| !shares(srq)) {
            return Err(CreateError::SharedReceiveQueue(qp_type));
        }
        if config.xrcd.is_some() != (qp_type == QpType::XrcTgt) {
            return Err(CreateError::XrcDomain);
        }
        let first = Seq::start(Psn::new(0));
        Ok(Self {
            state: QpState::Reset,
            attr: QpAttr::default(),
            mtu: match qp_type.is_datagram() {
                true => config.port_mtu.bytes(),
                false => 256,
            },
            service: qp_type.service(),
            reliable: qp_type.is_reliable(),
            rq: ReceiveQueue::new(&config.caps),
            config,
            peer: Qpn::default(),
            access: AccessFlags::empty(),
            sq: SendQueue::new(first),
            req: Requester::new(first),
            resp: Responder::new(first),
            overflowed: false,
            failure: None,
            selective: false,
            sources: Sources::default(),
            reaction_point: None,
            slowed_until: None,
        })
    }

    /// Buffers packets beyond a gap and reports them in selective ACKs, which the peer announced in its REQ or REP.
    ///
    /// Call in RTR; only RC queue pairs do it. `budget` limits the memory.
    pub fn enable_selective_ack(&mut self, budget: &Arc<ReorderBudget>) {
        self.selective = self.config.qp_type == QpType::Rc && self.state == QpState::Rtr;
        if self.selective {
            self.enable_reorder(budget);
        }
    }

    /// Buffers packets beyond a gap without reporting them, for a peer that only goes back.
    ///
    /// If a retransmitted packet is lost again, its buffered copy is used. Call in RTR. `budget` limits the memory.
    pub fn enable_reorder(&mut self, budget: &Arc<ReorderBudget>) {
        let enabled = self.reliable && self.state == QpState::Rtr;
        self.resp.reorder = enabled.then(|| Box::new(ReorderBuffer::new(budget.clone())));
    }

    /// Returns whether both sides report buffered packets in selective ACKs.
    pub fn uses_selective_ack(&self) -> bool {
        self.selective
    }

    /// Processes a congestion notification packet: a switch has ECN-marked packets that this queue pair sent.
    pub fn handle_notification(&mut self, now: Instant) {
        match &mut self.reaction_point {
            Some(point) => point.on_notified(now, self.req.rtt.smoothed()),
            None => self.reaction_point = Some(Box::new(ReactionPoint::new(now))),
        }
    }

    /// Returns whether DCQCN forbids sending now, and sets `slowed_until` then.
    fn is_slowed(&mut self, now: Instant) -> bool {
        let Some(point) = &mut self.reaction_point else {
            return false;
        };
        if point.is_over(now) {
            self.reaction_point = None;
        } else if let Err(at) = point.may_send(now) {
            self.slowed_until = Some(at);
            return true;
        }
        false
    }

    /// Counts sent bytes against the DCQCN rate.
    pub(crate) fn note_sent(&mut self, bytes: usize) {
        if let Some(point) = &mut self.reaction_point {
            point.on_sent(bytes);
        }
    }

    /// Returns the queue pair number.
    pub fn qpn(&self) -> Qpn {
        self.config.qpn
    }

    /// Returns the configuration passed to [`QueuePair::new`].
    pub fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Returns the state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Returns path and number of the peer, once they are set.
    pub fn remote(&self) -> Option<(AddressVector, Qpn)> {
        Some((self.attr.av?, self.attr.dest_qpn?))
    }

    /// Returns the current attributes (`ibv_query_qp`).
    pub fn query(&self) -> QpAttr {
        QpAttr {
            state: Some(self.state),
            cur_state: Some(self.state),
            path_mig_state: Some(PathMigState::Migrated),
            sq_draining: self.state == QpState::Sqd && !self.req.drained,
            ..self.attr
        }
    }

    /// Returns the bytes in flight towards the peer, as counted in the window.
    pub fn in_flight(&self) -> usize {
        self.req.in_flight
    }

    /// Returns the oldest PSN that is not acknowledged; of a READ, whose response has not arrived.
    ///
    /// `None` if the state does not permit sending or the service has no acknowledgements.
    pub fn acknowledged(&self) -> Option<Psn> {
        (self.reliable && self.is_sending()).then(|| self.req.una.psn())
    }

    /// Returns the number of packets that are posted and not acknowledged. A READ counts its responses.
    pub fn outstanding_packets(&self) -> u64 {
        self.sq.tail.since(self.req.una)
    }

    /// Returns the number of READs and atomics that the peer may have outstanding (`max_dest_rd_atomic`).
    pub fn max_reads(&self) -> u8 {
        self.attr.max_dest_rd_atomic.unwrap_or(0)
    }

    /// Returns whether [`QueuePair::poll_transmit`] has nothing to do.
    ///
    /// Then the send queue is empty and no response or acknowledgement is due now. One may be due later
    /// ([`QueuePair::next_timeout`]).
    pub fn is_idle(&self) -> bool {
        self.sq.wqes.is_empty() && self.resp.replies.is_idle()
    }

    /// Returns the number of send work requests that have not completed.
    pub fn send_queue_len(&self) -> usize {
        self.sq.wqes.len()
    }

    /// Returns the receive queue. `None` if the queue pair has a shared one or receives nothing.
    pub fn receive_queue(&self) -> Option<&Arc<ReceiveQueue>> {
        let own = self.config.srq.is_none() && self.config.qp_type.receives();
        own.then_some(&self.rq)
    }

    /// Returns the number of receive work requests that no message has consumed.
    pub fn recv_queue_len(&self) -> usize {
        self.rq.len()
    }

    /// Changes attributes and state (`ibv_modify_qp`).
    ///
    /// # Errors
    /// If the transition or an attribute is not permitted. Then nothing changes.
    pub fn modify(&mut self, ctx: &mut Ctx<'_>, attr: &QpAttr) -> Result<(), ModifyError> {
        let to = attr.state.unwrap_or(self.state);
        if attr.cur_state.is_some_and(|s| s != self.state) {
            return Err(ModifyError::CurrentState(self.state));
        }
        state::check(self.config.qp_type, self.state, to, attr.mask())?;
        check_values(attr)?;
        self.apply(attr);
        match (self.state, to) {
            (from, to) if from == to => {}
            (_, QpState::Reset) => self.reset(ctx),
            (_, QpState::Err) => {
                self.resp.replies.clear();
                self.enter_error(ctx);
            }
            (_, QpState::Rtr) => {
                self.selective = false;
                self.sources = Sources::default();
                self.resp = Responder::new(Seq::start(self.attr.rq_psn.unwrap_or_default()));
                self.state = to;
            }
            (QpState::Rtr, QpState::Rts) => {
                let first = Seq::start(self.attr.sq_psn.unwrap_or_default());
                self.sq = SendQueue::new(first);
                self.req = Requester::new(first);
                self.req.retries_left = self.attr.retry_cnt.unwrap_or(0);
                self.req.rnr_left = self.attr.rnr_retry.unwrap_or(0);
                self.state = to;
            }
            (_, QpState::Sqd) => {
                self.req.drained = false;
                self.state = to;
                self.check_drained(ctx);
            }
            (QpState::Reset, to) => {
                self.state = to;
                self.rq.follow(to);
            }
            (_, to) => self.state = to,
        }
        Ok(())
    }

    /// Stores the attributes that are set.
    fn apply(&mut self, attr: &QpAttr) {
        let current = &mut self.attr;
        macro_rules! store {
            ($($field:ident),*) => { $( if attr.$field.is_some() { current.$field = attr.$field; } )* };
        }
        store!(
            en_sqd_async_notify,
            access,
            pkey_index,
            port,
            qkey,
            av,
            path_mtu,
            timeout,
            retry_cnt,
            rnr_retry
        );
        store!(
            rq_psn,
            max_rd_atomic,
            min_rnr_timer,
            sq_psn,
            max_dest_rd_atomic,
            dest_qpn
        );
        self.mtu = current.path_mtu.map_or(self.mtu, |m| m.bytes());
        self.peer = current.dest_qpn.unwrap_or_default();
        self.access = current.access.unwrap_or_default();
        // Set in SQD, the retry limits apply at once, also to outstanding requests.
        self.req.retries_left = attr.retry_cnt.unwrap_or(self.req.retries_left);
        self.req.rnr_left = attr.rnr_retry.unwrap_or(self.req.rnr_left);
    }

    /// Returns to RESET without completing work requests. Completions already in the completion queues stay there.
    fn reset(&mut self, ctx: &mut Ctx<'_>) {
        ctx.window.forget(self.req.in_flight);
        let first = Seq::start(Psn::new(0));
        self.attr = QpAttr::default();
        self.sq = SendQueue::new(first);
        self.req = Requester::new(first);
        self.resp = Responder::new(first);
        self.overflowed = false;
        self.failure = None;
        self.sources = Sources::default();
        (self.reaction_point, self.slowed_until) = (None, None);
        self.state = QpState::Reset;
        self.rq.follow(self.state);
    }

    /// Destroys the queue pair without completing work requests.
    ///
    /// Returns its bytes in flight to the congestion window and invalidates its memory windows.
    pub fn destroy(&mut self, ctx: &mut Ctx<'_>) {
        ctx.mem.forget_qp(self.config.qpn);
        self.reset(ctx);
    }

    /// Moves to SQE (IBA 10.3.1): flushes the send queue and goes on receiving. For unacknowledged services only.
    pub(crate) fn enter_send_error(&mut self, ctx: &mut Ctx<'_>) {
        self.state = QpState::Sqe;
        self.flush_sends(ctx);
        self.fail_on_overflow(ctx);
    }

    fn flush_sends(&mut self, ctx: &mut Ctx<'_>) {
        while !self.sq.wqes.is_empty() {
            self.complete_send(ctx, WcStatus::FlushError);
        }
        self.req = Requester::new(self.sq.tail);
    }

    /// Moves to the error state and flushes both queues in order.
    pub(crate) fn enter_error(&mut self, ctx: &mut Ctx<'_>) {
        self.state = QpState::Err;
        ctx.window.forget(core::mem::take(&mut self.req.in_flight));
        if !self.resp.closing {
            self.resp.replies.clear();
        }
        self.resp.reorder = None;
        (self.resp.flushing, self.resp.persist_job) = (None, None);
        self.flush_sends(ctx);
        self.flush_receives(ctx);
        self.overflowed = false;
        if self.config.srq.is_some() {
            // IBA 10.2.9: the queue pair takes no more work requests from the shared queue. Those it took are flushed.
            ctx.events.push_back(AsyncEvent::LastWqeReached(self.config.qpn));
        }
    }

    /// Moves to the error state if a completion was lost (IBA 11.6.3.2, class G).
    pub(crate) fn fail_on_overflow(&mut self, ctx: &mut Ctx<'_>) {
        if self.overflowed && self.state != QpState::Err {
            self.note_overflow();
            ctx.events.push_back(AsyncEvent::QpFatal(self.config.qpn));
            self.enter_error(ctx);
        }
    }

    pub(crate) fn push_send(&mut self, ctx: &mut Ctx<'_>, completion: Completion) {
        self.overflowed |= !push(&self.config.send_cq, ctx, completion);
    }

    pub(crate) fn push_recv(&mut self, ctx: &mut Ctx<'_>, completion: Completion) {
        // XRC receives complete into the completion queue of their shared receive queue.
        let shared = self.resp.srq.as_ref().and_then(|srq| srq.config().cq.as_ref());
        let cq = shared.unwrap_or(&self.config.recv_cq);
        self.overflowed |= !push(cq, ctx, completion);
    }

    /// Queues a send work request to the peer. In the error states it is flushed at once.
    ///
    /// # Errors
    /// If it is invalid or the queue is full. Then nothing is queued.
    pub fn post_send(&mut self, ctx: &mut Ctx<'_>, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.post_send_to(ctx, wr, Target::Peer)
    }

    /// Queues a send work request with its target: a datagram's destination, or an XRC message's shared receive queue.
    ///
    /// # Errors
    /// If it is invalid or the queue is full. Then nothing is queued.
    pub fn post_send_to(&mut self, ctx: &mut Ctx<'_>, wr: &SendWr<'_>, target: Target) -> Result<(), PostError> {
        self.post_send_within(ctx, wr, target, self.mtu)
    }

    /// Queues a send work request like [`QueuePair::post_send_to`], with the path MTU of a datagram, bytes.
    ///
    /// A longer datagram is not sent, without an error (IBA C10-93.1.1).
    ///
    /// # Errors
    /// If it is invalid or the queue is full. Then nothing is queued.
    pub fn post_send_within(
        &mut self,
        ctx: &mut Ctx<'_>,
        wr: &SendWr<'_>,
        target: Target,
        path_mtu: usize,
    ) -> Result<(), PostError> {
        let checked = self.checked(wr, &target, 0)?;
        self.resp.replies.policy.on_posted(ctx.now);
        match self.config.qp_type {
            QpType::Rc | QpType::Uc => self.sq.push(wr, checked, self.mtu),
            _ => {
                let mtu = match target {
                    Target::Datagram(_) => path_mtu.min(self.mtu),
                    _ => self.mtu,
                };
                self.sq.push_to(wr, target, checked, mtu);
            }
        }
        if matches!(self.state, QpState::Err | QpState::Sqe)
            && let Some(wqe) = self.sq.wqes.front()
        {
            // A flushed work request consumes no PSN.
            self.sq.tail = wqe.first;
            self.complete_send(ctx, WcStatus::FlushError);
        }
        Ok(())
    }

    /// Checks whether a send work request can be queued after `ahead` others that are not queued yet.
    ///
    /// # Errors
    /// The error that posting it would return.
    pub fn check_post(&self, wr: &SendWr<'_>, target: &Target, ahead: usize) -> Result<(), PostError> {
        self.checked(wr, target, ahead).map(drop)
    }

    fn checked(&self, wr: &SendWr<'_>, target: &Target, ahead: usize) -> Result<Checked, PostError> {
        let ahead = match self.state {
            QpState::Reset | QpState::Init | QpState::Rtr => return Err(PostError::State(self.state)),
            // Work requests are flushed at once and occupy no entry.
            QpState::Err | QpState::Sqe => 0,
            QpState::Rts | QpState::Sqd => ahead,
        };
        if self.sq.wqes.len() + ahead >= self.config.caps.max_send_wr as usize {
            return Err(PostError::QueueFull);
        }
        let checked = self.check_send(wr)?;
        if checked.fault != Some(UNSUPPORTED) {
            self.check_target(kind_of(&wr.op), target)?;
        }
        Ok(checked)
    }

    /// Checks a work request's arguments.
    ///
    /// Like hardware it accepts operations that the service does not have, and atomics of other than 8 bytes. These
    /// complete with an error in their turn (IBA 11.6.2).
    fn check_send(&self, wr: &SendWr<'_>) -> Result<Checked, PostError> {
        let kind = kind_of(&wr.op);
        let row = legal::operation(wr.op.code());
        let unsupported = !row.services.contains(self.config.qp_type);
        let binds = matches!(wr.op, SendOp::BindWindow(_) | SendOp::FastRegister(_));
        if unsupported && (binds || self.config.qp_type == QpType::XrcTgt) {
            return Err(PostError::Invalid("this transport service does not have the operation"));
        }
        let caps = &self.config.caps;
        let len: u64 = match wr.payload {
            Payload::Sges(sges) => {
                let (given, max) = (sges.len(), caps.max_send_sge as usize);
                if given > max {
                    return Err(PostError::TooManySges { given, max });
                }
                sges.iter().map(|s| u64::from(s.length)).sum()
            }
            Payload::Inline(bytes) => {
                let (given, max) = (bytes.len(), caps.max_inline_data as usize);
                if given > max {
                    return Err(PostError::InlineTooLong { given, max });
                }
                if !row.inline {
                    return Err(PostError::Invalid("this operation takes no inline data"));
                }
                given as u64
            }
        };
        let possible = match kind {
            Kind::Local | Kind::Flush => len == 0,
            _ => len <= u64::from(self.config.max_msg_size.min(1 << 31)),
        };
        if !possible {
            return Err(PostError::Length(len));
        }
        if let SendOp::Flush(flush) = &wr.op
            && (flush.placement == Placement::default() || matches!(flush.selectivity, Selectivity::Reserved(_)))
        {
            return Err(PostError::Invalid(
                "a FLUSH needs a placement type and a selectivity level",
            ));
        }
        let answered = matches!(kind, Kind::Read | Kind::Atomic | Kind::AtomicWrite | Kind::Flush);
        if answered && !unsupported && self.attr.max_rd_atomic.unwrap_or(0) == 0 {
            return Err(PostError::Invalid("max_rd_atomic is 0"));
        }
        let word = matches!(kind, Kind::Atomic | Kind::AtomicWrite);
        let fault = match unsupported {
            true => Some(UNSUPPORTED),
            false => (word && len != 8).then_some(WcStatus::LocalLengthError),
        };
        let len = len as u32;
        Ok(Checked { len, fault })
    }

    /// Checks that the service sends work requests of this kind to such a target.
    fn check_target(&self, kind: Kind, target: &Target) -> Result<(), PostError> {
        let fits = match (self.config.qp_type, target) {
            (QpType::Rc | QpType::Uc, Target::Peer) => true,
            (QpType::Ud | QpType::Gsi, Target::Datagram(to)) => {
                let av = &to.av;
                if av.remote.is_unspecified() || av.local.is_ipv4() != av.remote.is_ipv4() {
                    return Err(PostError::Invalid(
                        "the datagram's remote address is unspecified or of another IP version than the local one",
                    ));
                }
                true
            }
            (QpType::XrcIni, Target::Srq(_)) => true,
            (QpType::XrcIni, Target::Peer) => kind == Kind::Local,
            _ => false,
        };
        match fits {
            true => Ok(()),
            false => Err(PostError::Invalid(
                "this transport service does not send to such a target",
            )),
        }
    }

    /// Queues a receive work request. In the error state it is flushed at once.
    ///
    /// # Errors
    /// If the queue pair has no receive queue, the work request is invalid, or the queue is full. Then nothing is
    /// queued.
    pub fn post_recv(&mut self, ctx: &mut Ctx<'_>, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let queue = self.receive_queue().ok_or(NO_RECEIVE_QUEUE)?;
        let queued = queue.post(core::slice::from_ref(wr)).map_err(|(_, e)| e)?;
        if queued == 0 {
            self.complete_receive_error(ctx, wr.wr_id, WcStatus::FlushError);
        }
        Ok(())
    }

    /// Processes a packet to this queue pair. The caller has checked its ICRC and both addresses.
    pub fn handle_packet(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        let info = packet.header.bth.opcode.info();
        let is_response = matches!(
            info.class,
            Class::Acknowledge | Class::ReadResponse | Class::AtomicAcknowledge
        );
        match (self.config.qp_type, is_response) {
            (QpType::Rc, _) if info.class == Class::SelectiveAcknowledge => self.handle_selective_ack(ctx, packet),
            _ if info.service != self.service => ctx.counters.dropped_opcode += 1,
            (QpType::Rc | QpType::XrcIni, true) => self.handle_response(ctx, packet),
            (QpType::Rc | QpType::XrcTgt, false) => self.handle_request(ctx, packet),
            (QpType::Uc, false) => self.handle_unacknowledged(ctx, packet),
            // `handle_datagram` takes datagrams, because it also needs their network header.
            _ => ctx.counters.dropped_opcode += 1,
        }
    }

    /// Returns an RC opcode's equivalent in this queue pair's service.
    pub(crate) fn wire(&self, opcode: Opcode) -> Opcode {
        in_service(opcode, self.service)
    }

    /// Writes packets that are due into `tx`: acknowledgements, then responses and requests in turn.
    ///
    /// Writes at most 128 requests and responses, so that one queue pair can't starve the others.
    pub fn poll_transmit(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Poll {
        if self.transmit_ack(tx) == Step::Full || self.transmit_probe(ctx, tx) == Step::Full {
            return Poll::More;
        }
        let mut budget = POLL_BUDGET;
        let mut blocked = false;
        let (mut replies, mut requests) = (true, true);
        self.slowed_until = None;
        while (replies || requests) && !self.is_slowed(ctx.now) {
            if replies {
                match self.transmit_burst(&mut budget, |qp| qp.transmit_reply(ctx, tx)) {
                    Step::Full => return Poll::More,
                    step => replies = step == Step::Sent,
                }
            }
            if requests {
                let before = budget;
                let step = self.transmit_burst(&mut budget, |qp| qp.transmit_request(ctx, tx));
                if step == Step::Full {
                    return Poll::More;
                }
                if budget < before {
                    // A delayed acknowledgement waits for this request: send both in one train.
                    self.resp.replies.held_until = None;
                }
                if self.transmit_ack(tx) == Step::Full {
                    return Poll::More;
                }
                // A request may have to wait for an acknowledgement, which waits for responses: retry after each burst.
                let waits = step == Step::Idle && self.resp.replies.ack != AckDue::No && !self.resp.replies.is_held();
                requests = step == Step::Sent || (waits && replies);
                blocked = step == Step::Blocked;
            }
            if budget == 0 {
                return Poll::More;
            }
        }
        // The acknowledgement may have waited for the responses just sent.
        if self.transmit_ack(tx) == Step::Full {
            return Poll::More;
        }
        if blocked { Poll::Blocked } else { Poll::Idle }
    }

    /// Sends up to [`BURST`] packets of one kind. Returns `Sent` if more may follow.
    fn transmit_burst(&mut self, budget: &mut u32, mut send: impl FnMut(&mut Self) -> Step) -> Step {
        for _ in 0..BURST.min(*budget) {
            match send(self) {
                Step::Sent => *budget -= 1,
                other => return other,
            }
        }
        Step::Sent
    }
}

/// Adds a completion to its queue. Returns false if the queue was full and the completion is lost.
fn push(cq: &CompletionQueue, ctx: &mut Ctx<'_>, mut completion: Completion) -> bool {
    completion.timestamp = ctx.now;
    match cq.push(completion) {
        Ok(()) => true,
        Err(first) => {
            ctx.counters.cq_overflow += 1;
            if first {
                ctx.events.push_back(AsyncEvent::CqError(cq.handle()));
            }
            false
        }
    }
}

/// Returns an RC opcode's equivalent in `service`, which must have the operation.
pub(crate) fn in_service(opcode: Opcode, service: Service) -> Opcode {
    match service {
        Service::Rc => opcode,
        other => opcode.in_service(other).unwrap_or(opcode),
    }
}

/// Checks the values of attributes.
fn check_values(attr: &QpAttr) -> Result<(), ModifyError> {
    use QpAttrMask as M;
    let checks = [
        (attr.port.is_none_or(|p| p == 1), M::PORT),
        (attr.pkey_index.is_none_or(|i| i == 0), M::PKEY_INDEX),
        (attr.timeout.is_none_or(|t| t <= 31), M::TIMEOUT),
        (
            attr.path_mig_state.is_none_or(|s| s == PathMigState::Migrated),
            M::PATH_MIG_STATE,
        ),
        (attr.retry_cnt.is_none_or(|n| n <= 7), M::RETRY_CNT),
        (attr.rnr_retry.is_none_or(|n| n <= 7), M::RNR_RETRY),
        (attr.max_rd_atomic.is_none_or(|n| n <= MAX_RD_ATOMIC), M::MAX_RD_ATOMIC),
        (
            attr.max_dest_rd_atomic.is_none_or(|n| n <= MAX_RD_ATOMIC),
            M::MAX_DEST_RD_ATOMIC,
        ),
        (
            attr.av.is_none_or(|av| {
                av.local.is_ipv4() == av.remote.is_ipv4() && !av.remote.is_unspecified() && !av.is_multicast()
            }),
            M::AV,
        ),
    ];
    match checks.into_iter().find(|(ok, _)| !ok) {
        Some((_, which)) => Err(ModifyError::Value(which)),
        None => Ok(()),
    }
}
