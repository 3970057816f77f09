//! Queue pair: attributes, states, posting and the order in which packets are sent.

use roce_bth::{Class, Packet, Psn};
use roce_mem::FlushError;
use roce_verbs::{
    AddressVector, AsyncEvent, Instant, PathMigState, QpAttr, QpAttrMask, QpState, QpType, Qpn, RecvWr, SendWr,
    SrqType, Target, wr::PostError,
};

use std::sync::Arc;

use crate::{
    context::QpContext,
    ctx::{CreateError, Ctx, ModifyError, QpConfig, WaitReason},
    datagram::DatagramSource,
    failure::Failure,
    recvq::ReceiveQueue,
    reorder::ReorderBudget,
    replies::{AckDue, Replies},
    requester::Requester,
    responder::{HiddenReceives, PersistJob, Responder},
    seq::Seq,
    srq::SharedReceiveQueue,
    state,
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
    replies: Replies,
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
            replies: Replies::new(first),
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
        self.requester.len() == 0 && self.replies.is_idle()
    }

    /// Returns the number of send work requests that have not completed.
    pub fn send_queue_len(&self) -> usize {
        self.requester.len()
    }

    /// Returns the receive queue. `None` if the queue pair has a shared one or receives nothing.
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
        state::check(self.config().qp_type, from, to, attr.mask())?;
        check_values(attr)?;
        self.context.apply(attr);
        // Set in SQD, the retry limits apply at once.
        self.requester.set_retries(attr.retry_cnt, attr.rnr_retry);
        match (from, to) {
            (from, to) if from == to => {}
            (_, QpState::Reset) => self.reset(ctx),
            (_, QpState::Err) => {
                self.replies.clear();
                self.context.fail();
                self.finish(ctx);
            }
            (_, QpState::Rtr) => {
                let first = Seq::start(self.context.attr().rq_psn.unwrap_or_default());
                self.responder.restart(first);
                self.replies = Replies::new(first);
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
                self.requester.drain(&self.context, ctx);
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
        self.requester.clear(ctx, first);
        self.responder.restart(first);
        self.replies = Replies::new(first);
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

    /// Ends a call that may have failed the queue pair: flushes both queues in order if it has.
    fn finish(&mut self, ctx: &mut Ctx<'_>) {
        if !self.context.take_stopping() {
            return;
        }
        self.replies.stop();
        self.requester.flush(&mut self.context, ctx);
        self.responder.stop(&mut self.context, ctx);
        self.context.on_flushed();
        if self.config().srq.is_some() {
            // IBA 10.2.9: the queue pair takes no more work requests from the shared queue. Those it took are flushed.
            ctx.events.push_back(AsyncEvent::LastWqeReached(self.qpn()));
        }
    }

    /// Takes the reason why the queue pair has failed. `None` if it has not, or the reason was taken before.
    pub fn take_failure(&mut self) -> Option<Failure> {
        self.context.take_failure()
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
        self.post_send_within(ctx, wr, target, self.context.mtu())
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
        let checked = self.context.check_post(wr, &target, (self.requester.len(), 0))?;
        self.replies.on_posted(ctx.now);
        self.requester.post(&self.context, wr, target, checked, path_mtu);
        if matches!(self.state(), QpState::Err | QpState::Sqe) {
            self.requester.flush_posted(&mut self.context, ctx);
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
            self.responder.flush_posted(&mut self.context, ctx, wr.wr_id);
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
        let (qp, replies) = (&mut self.context, &mut self.replies);
        match (qp.config().qp_type, is_response) {
            (QpType::Rc, _) if info.class == Class::SelectiveAcknowledge => {
                self.requester.handle_selective_ack(qp, ctx, packet);
            }
            _ if info.service != qp.service() => ctx.counters.dropped_opcode += 1,
            (QpType::Rc | QpType::XrcIni, true) => self.requester.handle_response(qp, ctx, packet),
            (QpType::Rc | QpType::XrcTgt, false) => self.responder.handle_request(qp, replies, ctx, packet),
            (QpType::Uc, false) => self.responder.handle_unacknowledged(qp, replies, ctx, packet),
            // `handle_datagram` takes datagrams, because it also needs their network header.
            _ => ctx.counters.dropped_opcode += 1,
        }
        self.finish(ctx);
    }

    /// Processes a datagram to this queue pair, or to a multicast group that it is in. The caller has checked its ICRC and
    /// its partition key.
    pub fn handle_datagram(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>, source: &DatagramSource) {
        self.responder.handle_datagram(&mut self.context, ctx, packet, source);
        self.finish(ctx);
    }

    /// Takes the pending job of a FLUSH. Call [`QueuePair::persisted`] with its result to resume the queue pair.
    pub fn take_persist_job(&mut self) -> Option<PersistJob> {
        self.responder.take_persist_job()
    }

    /// Resumes after a job. Ignores a job that the queue pair no longer waits for.
    pub fn persisted(&mut self, ctx: &mut Ctx<'_>, job: &PersistJob, result: Result<(), FlushError>) {
        let (qp, replies) = (&mut self.context, &mut self.replies);
        self.responder.persisted(qp, replies, ctx, job, result);
        self.finish(ctx);
    }

    /// Takes the receive queues away until [`QueuePair::restore_receives`], if the packet would find a receive work request
    /// in them: it is refused as by a receiver that is not ready, and changes nothing else. `None`: the packet needs none.
    pub fn hide_receives(&mut self, packet: &Packet<'_>) -> Option<HiddenReceives> {
        self.responder.hide_receives(&mut self.context, packet)
    }

    /// Gives the receive queues back.
    pub fn restore_receives(&mut self, hidden: HiddenReceives) {
        self.responder.restore_receives(&mut self.context, hidden);
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
            self.replies.next_timeout(qp),
            qp.slowed_until(),
        ];
        timers.into_iter().flatten().min()
    }

    /// Runs the timers that are due. Calling it early is harmless.
    pub fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) {
        self.replies.handle_timeout(ctx.now);
        self.context.end_slowed(Some(ctx.now));
        self.requester.handle_timeout(&mut self.context, ctx);
        self.finish(ctx);
    }

    /// Sends the acknowledgement that is due, even if it is delayed.
    ///
    /// Call before the queue pair stops. Otherwise the peer would retry requests completed here until it fails.
    pub fn flush_ack(&mut self, tx: &mut impl TxSink) {
        self.replies.release();
        self.transmit_ack(tx);
    }

    /// Writes packets that are due into `tx`: acknowledgements, then responses and requests in turn.
    ///
    /// Writes at most 128 requests and responses, so that one queue pair can't starve the others.
    pub fn poll_transmit(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Poll {
        let poll = self.transmit(ctx, tx);
        self.finish(ctx);
        poll
    }

    fn transmit(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Poll {
        if self.transmit_ack(tx) == Step::Full
            || self.requester.transmit_probe(&mut self.context, ctx, tx) == Step::Full
        {
            return Poll::More;
        }
        let mut budget = POLL_BUDGET;
        let mut blocked = false;
        let (mut replies, mut requests) = (true, true);
        self.context.end_slowed(None);
        while (replies || requests) && !self.context.is_slowed(ctx.now) {
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
                    self.replies.release();
                }
                if self.transmit_ack(tx) == Step::Full {
                    return Poll::More;
                }
                // A request may have to wait for an acknowledgement, which waits for responses: retry after each burst.
                let waits = step == Step::Idle && self.replies.ack() != AckDue::No && !self.replies.is_held();
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

    fn transmit_ack(&mut self, tx: &mut impl TxSink) -> Step {
        self.replies.transmit_ack(&self.context, &self.responder.received(), tx)
    }

    /// Sends one READ response or atomic result.
    fn transmit_reply(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        let (qp, replies) = (&mut self.context, &mut self.replies);
        replies.transmit_reply(qp, ctx, tx).unwrap_or_else(|(seq, refusal)| {
            // The memory was revoked during the READ.
            self.responder.refuse(qp, replies, ctx, seq, refusal, None);
            Step::Sent
        })
    }

    /// Sends one request packet, after the acknowledgement that is due before it.
    fn transmit_request(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        let (qp, requester) = (&mut self.context, &mut self.requester);
        loop {
            let Some(next) = requester.prepare(qp, ctx) else {
                return Step::Idle;
            };
            if self.replies.is_due() {
                let packet = (requester.completes_receive(next), requester.packet_len(qp, next));
                let received = self.responder.received();
                if let Some(step) = self.replies.acknowledge_before(qp, &received, packet, tx) {
                    return step;
                }
            }
            if let Some(step) = requester.transmit(qp, ctx, next, tx) {
                return step;
            }
        }
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
