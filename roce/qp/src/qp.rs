//! Queue pair: attributes, states, posting and the order in which packets are sent.

use roce_bth::{Class, Packet, Psn};
use roce_verbs::mem::FlushError;
use roce_verbs::{
    AddressVector, AsyncEvent, Instant, PathMigState, QpAttr, QpAttrMask, QpState, QpType, Qpn, RecvWr, SendWr,
    SrqType, Target, WcStatus,
    legal::{Illegal, check_transition},
    wr::PostError,
};

use std::sync::Arc;

use crate::{
    context::{Call, QpContext},
    ctx::{CreateError, Ctx, ModifyError, QpConfig, WaitReason},
    datagram::DatagramSource,
    failure::Failure,
    recvq::ReceiveQueue,
    reorder::ReorderBudget,
    requester::Requester,
    responder::{PersistJob, Responder},
    seq::Seq,
    srq::SharedReceiveQueue,
    tx::{Poll, Step, TxSink},
};

/// Largest number of packets per call of [`QueuePair::poll_transmit`].
const POLL_BUDGET: u32 = 128;
/// Packets of one kind (requests or responses) sent before the other kind, so that neither starves. A GSO train is no
/// longer, so that alternating does not split trains.
const BURST: u32 = 16;
/// Largest `max_rd_atomic` and `max_dest_rd_atomic`.
const MAX_RD_ATOMIC: u8 = 128;

/// Queue pair of any service. Each part has private fields, which only its own module writes.
#[derive(Debug)]
pub struct QueuePair {
    pub(crate) context: QpContext,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
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
        let shares = |srq: &SharedReceiveQueue| qp_type.receives() && srq.config().srq_type == SrqType::Basic;
        if config.srq.as_ref().is_some_and(|srq| !shares(srq)) {
            return Err(CreateError::SharedReceiveQueue(qp_type));
        }
        if config.xrcd.is_some() != (qp_type == QpType::XrcTgt) {
            return Err(CreateError::XrcDomain);
        }
        let first = Seq::start(Psn::new(0));
        Ok(Self {
            requester: Requester::new(first),
            responder: Responder::new(ReceiveQueue::new(&config.caps), first),
            context: QpContext::new(config),
        })
    }

    /// Buffers packets beyond a gap and reports them in selective ACKs, which the peer announced in its REQ or REP.
    ///
    /// Has no effect but in RTR, or in RTS while no request is outstanding; only RC queue pairs do it. `budget` limits the memory.
    pub fn enable_selective_ack(&mut self, budget: &Arc<ReorderBudget>) {
        let early = match self.state() {
            QpState::Rtr => true,
            QpState::Rts => self.outstanding_packets() == 0,
            _ => false,
        };
        if self.config().qp_type == QpType::Rc && early {
            self.context.set_selective();
            if !self.responder.has_reorder() {
                self.responder.set_reorder(Some(budget));
            }
        }
    }

    /// Buffers packets beyond a gap without reporting them, for a peer that only goes back.
    ///
    /// If a retransmitted packet is lost again, its buffered copy is used. Call in RTR. `budget` limits the memory.
    pub fn enable_reorder(&mut self, budget: &Arc<ReorderBudget>) {
        let enabled = self.context.is_reliable() && self.state() == QpState::Rtr;
        self.responder.set_reorder(enabled.then_some(budget));
    }

    /// Returns whether both sides report buffered packets in selective ACKs.
    pub fn uses_selective_ack(&self) -> bool {
        self.context.is_selective()
    }

    /// Processes a congestion notification packet: a switch has ECN-marked packets that this queue pair sent.
    pub fn handle_notification(&mut self, now: Instant) {
        self.context.on_notified(now, self.requester.rtt());
    }

    /// Returns the queue pair number.
    pub fn qpn(&self) -> Qpn {
        self.context.qpn()
    }

    /// Returns the configuration passed to [`QueuePair::new`].
    pub fn config(&self) -> &QpConfig {
        self.context.config()
    }

    /// Returns the state.
    pub fn state(&self) -> QpState {
        self.context.state()
    }

    /// Returns path and number of the peer, once they are set.
    pub fn remote(&self) -> Option<(AddressVector, Qpn)> {
        let attr = self.context.attr();
        Some((attr.av?, attr.dest_qpn?))
    }

    /// Returns the current attributes (`ibv_query_qp`).
    pub fn query(&self) -> QpAttr {
        QpAttr {
            sq_draining: self.state() == QpState::Sqd && !self.requester.is_drained(),
            ..self.context.query()
        }
    }

    /// Returns the bytes in flight towards the peer, as counted in the window.
    pub fn in_flight(&self) -> usize {
        self.requester.in_flight()
    }

    /// Returns the oldest PSN that is not acknowledged; of a READ, whose response has not arrived.
    ///
    /// `None` if the state does not permit sending or the service has no acknowledgements.
    pub fn acknowledged(&self) -> Option<Psn> {
        let acknowledges = self.context.is_reliable() && self.context.is_sending();
        acknowledges.then(|| self.requester.una().psn())
    }

    /// Returns the number of packets that are posted and not acknowledged. A READ counts its responses.
    pub fn outstanding_packets(&self) -> u64 {
        self.requester.outstanding_packets()
    }

    /// Returns the number of READs and atomics that the peer may have outstanding (`max_dest_rd_atomic`).
    pub fn max_reads(&self) -> u8 {
        self.context.max_reads()
    }

    /// Returns whether [`QueuePair::poll_transmit`] has nothing to do.
    ///
    /// Then the send queue is empty and no response or acknowledgement is due now. One may be due later
    /// ([`QueuePair::next_timeout`]).
    pub fn is_idle(&self) -> bool {
        self.requester.len() == 0 && self.responder.replies().is_idle()
    }

    /// Returns the number of send work requests that have not completed.
    pub fn send_queue_len(&self) -> usize {
        self.requester.len()
    }

    /// Returns the receive queue. `None` if the queue pair has a shared one or receives nothing. Threads may post to it without the port.
    pub fn receive_queue(&self) -> Option<&Arc<ReceiveQueue>> {
        let config = self.config();
        let own = config.srq.is_none() && config.qp_type.receives();
        own.then_some(self.responder.receives())
    }

    /// Returns the number of receive work requests that no message has consumed.
    pub fn recv_queue_len(&self) -> usize {
        self.responder.receives().len()
    }

    /// Changes attributes and state (`ibv_modify_qp`).
    ///
    /// # Errors
    /// If the transition or an attribute is not permitted. Then nothing changes.
    pub fn modify(&mut self, ctx: &mut Ctx<'_>, attr: &QpAttr) -> Result<(), ModifyError> {
        let from = self.state();
        let to = attr.state.unwrap_or(from);
        if attr.cur_state.is_some_and(|s| s != from) {
            return Err(ModifyError::CurrentState(from));
        }
        check_transition(self.config().qp_type, from, to, attr.mask()).map_err(|illegal| match illegal {
            Illegal::Transition => ModifyError::Transition { from, to },
            Illegal::Missing(which) => ModifyError::Missing(which),
            Illegal::NotAllowed(which) => ModifyError::NotAllowed(which),
        })?;
        check_values(attr)?;
        self.context.apply(attr);
        // Set in SQD, the retry limits apply at once.
        self.requester.set_retries(attr.retry_cnt, attr.rnr_retry);
        match (from, to) {
            (from, to) if from == to => {}
            (_, QpState::Reset) => self.reset(ctx),
            (_, QpState::Err) => {
                self.responder.replies_mut().clear();
                self.context.fail();
                self.flush_if_failed(ctx);
            }
            (_, QpState::Rtr) => {
                let first = Seq::start(self.context.attr().rq_psn.unwrap_or_default());
                self.responder.restart(first);
                self.context.enter_rtr();
            }
            (QpState::Rtr, QpState::Rts) => {
                let attr = self.context.attr();
                self.requester = Requester::new(Seq::start(attr.sq_psn.unwrap_or_default()));
                self.requester.set_retries(attr.retry_cnt, attr.rnr_retry);
                self.context.set_state(to);
            }
            (_, QpState::Sqd) => {
                self.context.set_state(to);
                self.requester.drain(&mut Call::new(&mut self.context, ctx));
            }
            (QpState::Reset, to) => {
                self.context.set_state(to);
                self.responder.receives().follow(to);
            }
            (_, to) => self.context.set_state(to),
        }
        Ok(())
    }

    /// Returns to RESET without completing work requests. Completions already in the completion queues stay there.
    fn reset(&mut self, ctx: &mut Ctx<'_>) {
        let first = Seq::start(Psn::new(0));
        ctx.window.forget(self.requester.in_flight());
        self.requester = Requester::new(first);
        self.responder.restart(first);
        self.context.reset();
        self.responder.receives().follow(QpState::Reset);
    }

    /// Destroys the queue pair without completing work requests.
    ///
    /// Returns its bytes in flight to the congestion window and invalidates its memory windows.
    pub fn destroy(&mut self, ctx: &mut Ctx<'_>) {
        ctx.mem.forget_qp(self.qpn());
        self.reset(ctx);
    }

    /// Flushes both queues in order if the queue pair has failed. Ends every call that may have failed it.
    #[inline]
    fn flush_if_failed(&mut self, ctx: &mut Ctx<'_>) {
        if !self.context.take_stopping() {
            return;
        }
        let call = &mut Call::new(&mut self.context, ctx);
        self.requester.flush(call);
        self.responder.stop(call);
        if call.qp.config().srq.is_some() {
            // IBA 10.2.9: the queue pair takes no more work requests from the shared queue. Those it took are flushed.
            call.events.push_back(AsyncEvent::LastWqeReached(call.qp.qpn()));
        }
    }

    /// Takes the reason why the queue pair has failed. `None` if it has not, or the reason was taken before.
    pub fn take_failure(&mut self) -> Option<Failure> {
        self.context.take_failure()
    }

    /// Queues a send work request with its target: the peer, a datagram's destination, or an XRC message's shared receive queue. In the
    /// error states it is flushed at once.
    ///
    /// `path_mtu` is that of a datagram, bytes. A longer one is not sent, without an error (IBA C10-93.1.1).
    ///
    /// # Errors
    /// If it is invalid or the queue is full. Then nothing is queued.
    pub fn post_send(
        &mut self,
        ctx: &mut Ctx<'_>,
        wr: &SendWr<'_>,
        target: Target,
        path_mtu: usize,
    ) -> Result<(), PostError> {
        let checked = self.context.check_post(wr, &target, (self.requester.len(), 0))?;
        self.responder.replies_mut().on_posted(ctx.now);
        self.requester.post(&self.context, wr, target, checked, path_mtu);
        if matches!(self.state(), QpState::Err | QpState::Sqe) {
            self.requester.flush_posted(&mut Call::new(&mut self.context, ctx));
        }
        Ok(())
    }

    /// Checks whether a send work request can be queued after `ahead` others that are not queued yet.
    ///
    /// # Errors
    /// The error that posting it would return.
    pub fn check_post(&self, wr: &SendWr<'_>, target: &Target, ahead: usize) -> Result<(), PostError> {
        let queued = self.requester.len();
        self.context.check_post(wr, target, (queued, ahead)).map(drop)
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
            let call = &mut Call::new(&mut self.context, ctx);
            self.responder
                .complete_receive_error(call, wr.wr_id, WcStatus::FlushError);
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
        let call = &mut Call::new(&mut self.context, ctx);
        match (call.qp.config().qp_type, is_response) {
            (QpType::Rc, _) if info.class == Class::SelectiveAcknowledge => {
                self.requester.handle_selective_ack(call, packet);
            }
            _ if info.service != call.qp.service() => call.counters.dropped_opcode += 1,
            (QpType::Rc | QpType::XrcIni, true) => self.requester.handle_response(call, packet),
            (QpType::Rc | QpType::XrcTgt, false) => self.responder.handle_request(call, packet),
            (QpType::Uc, false) => self.responder.handle_unacknowledged(call, packet),
            // `handle_datagram` takes datagrams, because it also needs their network header.
            _ => call.counters.dropped_opcode += 1,
        }
        self.flush_if_failed(ctx);
    }

    /// Processes a datagram to this queue pair, or to a multicast group that it is in. The caller has checked its ICRC and
    /// its partition key.
    pub fn handle_datagram(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>, source: &DatagramSource) {
        let call = &mut Call::new(&mut self.context, ctx);
        self.responder.handle_datagram(call, packet, source);
        self.flush_if_failed(ctx);
    }

    /// Takes the pending job of a FLUSH. Call [`QueuePair::persisted`] with its result to resume the queue pair.
    pub fn take_persist_job(&mut self) -> Option<PersistJob> {
        self.responder.take_persist_job()
    }

    /// Resumes after a job. Ignores a job that the queue pair no longer waits for.
    pub fn persisted(&mut self, ctx: &mut Ctx<'_>, job: &PersistJob, result: Result<(), FlushError>) {
        let call = &mut Call::new(&mut self.context, ctx);
        self.responder.persisted(call, job, result);
        self.flush_if_failed(ctx);
    }

    /// Hides the receive work requests from a packet that would take one: it is refused as by a receiver that is not ready, and
    /// changes nothing else. `None` shows them again.
    pub fn hide_receives(&mut self, packet: Option<&Packet<'_>>) {
        self.responder.hide_receives(&self.context, packet);
    }

    /// Returns the reason why the requester is not sending.
    pub fn wait_reason(&self) -> WaitReason {
        self.requester.wait_reason(&self.context)
    }

    /// Returns the time when [`QueuePair::handle_timeout`] must be called next.
    pub fn next_timeout(&self) -> Option<Instant> {
        let qp = &self.context;
        let timers = [
            self.requester.next_timeout(qp),
            self.responder.replies().next_timeout(qp),
            qp.slowed_until(),
        ];
        timers.into_iter().flatten().min()
    }

    /// Runs the timers that are due. Calling it early is harmless.
    pub fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) {
        self.responder.replies_mut().handle_timeout(ctx.now);
        self.context.end_slowed(Some(ctx.now));
        let call = &mut Call::new(&mut self.context, ctx);
        self.requester.handle_timeout(call);
        self.flush_if_failed(ctx);
    }

    /// Sends the acknowledgement that is due, even if it is delayed.
    ///
    /// Call before the queue pair stops. Otherwise the peer would retry requests completed here until it fails.
    pub fn flush_ack(&mut self, tx: &mut impl TxSink) {
        self.responder.replies_mut().release();
        self.responder.acknowledgement().transmit(&self.context, 0, tx);
    }

    /// Writes packets that are due into `tx`: acknowledgements, then responses and requests in turn.
    ///
    /// Writes at most 128 requests and responses, so that one queue pair can't starve the others.
    pub fn poll_transmit(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Poll {
        let mut budget = POLL_BUDGET;
        let (mut replies, mut requests, mut blocked) = (true, true, false);
        self.context.end_slowed(None);
        let mut full = !self.responder.acknowledgement().transmit(&self.context, 0, tx);
        if !full {
            let call = &mut Call::new(&mut self.context, ctx);
            full = self.requester.transmit_probe(call, tx) == Step::Full;
        }
        while !full && (replies || requests) && budget > 0 && !self.context.is_slowed(ctx.now) {
            if replies {
                let step = self.transmit_replies(ctx, &mut budget, tx);
                (replies, full) = (step == Step::Sent, step == Step::Full);
            }
            if requests && !full {
                let before = budget;
                let step = self.transmit_requests(ctx, &mut budget, tx);
                full = step == Step::Full;
                if budget < before && !full {
                    // A delayed acknowledgement waits for this request: send both in one train.
                    self.responder.replies_mut().release();
                }
                full = full || !self.responder.acknowledgement().transmit(&self.context, 0, tx);
                // A request may have to wait for an acknowledgement, which waits for responses: retry after each burst.
                let waits = step == Step::Idle && self.responder.replies().ack_waits();
                requests = step == Step::Sent || (waits && replies);
                blocked = step == Step::Blocked;
            }
        }
        // The acknowledgement may have waited for the responses just sent.
        let more = full || budget == 0 || !self.responder.acknowledgement().transmit(&self.context, 0, tx);
        self.flush_if_failed(ctx);
        match (more, blocked) {
            (true, _) => Poll::More,
            (false, true) => Poll::Blocked,
            (false, false) => Poll::Idle,
        }
    }

    /// Sends up to [`BURST`] responses. Returns `Sent` if more may follow.
    fn transmit_replies(&mut self, ctx: &mut Ctx<'_>, budget: &mut u32, tx: &mut impl TxSink) -> Step {
        let call = &mut Call::new(&mut self.context, ctx);
        for _ in 0..BURST.min(*budget) {
            match self.responder.transmit_reply(call, tx) {
                Step::Sent => *budget -= 1,
                other => return other,
            }
        }
        Step::Sent
    }

    /// Sends up to [`BURST`] requests, each after the acknowledgement that is due before it. Returns `Sent` if more may follow.
    fn transmit_requests(&mut self, ctx: &mut Ctx<'_>, budget: &mut u32, tx: &mut impl TxSink) -> Step {
        let call = &mut Call::new(&mut self.context, ctx);
        let rest = budget.saturating_sub(BURST);
        while *budget > rest {
            let Some(next) = self.requester.prepare(call) else {
                return Step::Idle;
            };
            if self.responder.replies().is_due() {
                let outline = self.requester.outline(call.qp, next);
                if let Some(step) = self.responder.acknowledgement().transmit_before(call.qp, outline, tx) {
                    return step;
                }
            }
            match self.requester.transmit(call, next, tx) {
                Some(Step::Sent) => *budget -= 1,
                Some(other) => return other,
                // Its work request has failed, and another one may be due.
                None => {}
            }
        }
        Step::Sent
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
