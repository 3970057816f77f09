//! QP context: configuration, attributes, state and negotiated options of a queue pair.
//!
//! Requester, responder and replies read it and report to it: failures, lost completions, sent bytes. [`QueuePair`]
//! changes attributes and state.
//!
//! [`QueuePair`]: crate::QueuePair

use std::sync::Arc;

use core::{net::IpAddr, time::Duration};

use roce_bth::{Class, Opcode, Service};
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, Instant, PathMigState, QKey, QpAttr, QpState, QpType, Qpn, Target, WcStatus,
};

use crate::{
    cq::CompletionQueue,
    ctx::{Ctx, QpConfig},
    dcqcn::ReactionPoint,
    failure::{Detail, Failure},
    refusal::Refusal,
    sendq::SendWqe,
    source::{Direction, Sources},
    srq::SharedReceiveQueue,
};

/// Path MTU of a connected queue pair before it is set, bytes.
const SMALLEST_MTU: usize = 256;

/// QP context: what requester, responder and replies of one queue pair share.
#[derive(Debug)]
pub(crate) struct QpContext {
    config: QpConfig,
    state: QpState,
    attr: QpAttr,
    /// Path MTU, bytes. This and the next two fields are copies of attributes needed for every packet.
    mtu: usize,
    peer: Qpn,
    access: AccessFlags,
    /// Transport service of the packets.
    service: Service,
    /// The service acknowledges packets.
    reliable: bool,
    /// Both sides buffer packets beyond a gap and report them in selective ACKs.
    selective: bool,
    /// An in-order packet has arrived since RTR.
    established: bool,
    /// UDP source ports of the peer.
    sources: Sources,
    /// DCQCN state after a congestion notification. `None`: sending is not limited.
    reaction_point: Option<Box<ReactionPoint>>,
    /// DCQCN permits only acknowledgements before this time.
    slowed_until: Option<Instant>,
    /// A completion was lost because its queue was full: the queue pair must fail.
    overflowed: bool,
    /// The queue pair has entered the error state, and its queues must be flushed.
    stopping: bool,
    /// Why it has failed, until that is taken.
    failure: Option<Box<Failure>>,
}

impl QpContext {
    /// Creates the context of a queue pair in RESET.
    pub(crate) fn new(config: QpConfig) -> Self {
        let qp_type = config.qp_type;
        Self {
            state: QpState::Reset,
            attr: QpAttr::default(),
            mtu: match qp_type.is_datagram() {
                true => config.port_mtu.bytes(),
                false => SMALLEST_MTU,
            },
            peer: Qpn::default(),
            access: AccessFlags::empty(),
            service: qp_type.service(),
            reliable: qp_type.is_reliable(),
            selective: false,
            established: false,
            sources: Sources::default(),
            reaction_point: None,
            slowed_until: None,
            overflowed: false,
            stopping: false,
            failure: None,
            config,
        }
    }

    pub(crate) fn config(&self) -> &QpConfig {
        &self.config
    }

    pub(crate) fn qpn(&self) -> Qpn {
        self.config.qpn
    }

    pub(crate) fn state(&self) -> QpState {
        self.state
    }

    pub(crate) fn attr(&self) -> &QpAttr {
        &self.attr
    }

    /// Returns the path MTU, bytes.
    pub(crate) fn mtu(&self) -> usize {
        self.mtu
    }

    /// Returns the peer's queue pair number.
    pub(crate) fn peer(&self) -> Qpn {
        self.peer
    }

    /// Returns the operations that the peer may request.
    pub(crate) fn access(&self) -> AccessFlags {
        self.access
    }

    pub(crate) fn service(&self) -> Service {
        self.service
    }

    /// Returns whether the service acknowledges packets.
    pub(crate) fn is_reliable(&self) -> bool {
        self.reliable
    }

    /// Returns whether both sides report buffered packets in selective ACKs.
    pub(crate) fn is_selective(&self) -> bool {
        self.selective
    }

    /// Returns whether the state permits requests to be sent.
    pub(crate) fn is_sending(&self) -> bool {
        matches!(self.state, QpState::Rts | QpState::Sqd)
    }

    /// Returns whether state and type accept requests.
    pub(crate) fn takes_requests(&self) -> bool {
        let open = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        open && self.config.qp_type != QpType::XrcIni
    }

    /// Returns the number of READs and atomics that may be outstanding (`max_rd_atomic`).
    pub(crate) fn max_rd_atomic(&self) -> u32 {
        u32::from(self.attr.max_rd_atomic.unwrap_or(0))
    }

    /// Returns the number of READs and atomics that the peer may have outstanding (`max_dest_rd_atomic`).
    pub(crate) fn max_reads(&self) -> u8 {
        self.attr.max_dest_rd_atomic.unwrap_or(0)
    }

    /// Returns the Q_Key that datagrams to this queue pair must have.
    pub(crate) fn qkey(&self) -> QKey {
        match self.config.qp_type {
            QpType::Gsi => QKey::GSI,
            _ => QKey(self.attr.qkey.unwrap_or(0)),
        }
    }

    /// Returns an RC opcode's equivalent in this queue pair's service.
    pub(crate) fn wire(&self, opcode: Opcode) -> Opcode {
        in_service(opcode, self.service)
    }

    /// Returns the current attributes but for the state of the send queue.
    pub(crate) fn query(&self) -> QpAttr {
        QpAttr {
            state: Some(self.state),
            cur_state: Some(self.state),
            path_mig_state: Some(PathMigState::Migrated),
            ..self.attr
        }
    }

    pub(crate) fn set_state(&mut self, state: QpState) {
        self.state = state;
    }

    /// Stores the attributes that are set.
    pub(crate) fn apply(&mut self, attr: &QpAttr) {
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
    }

    /// Forgets everything that belongs to a connection, on the way to RESET.
    pub(crate) fn reset(&mut self) {
        self.attr = QpAttr::default();
        self.overflowed = false;
        self.stopping = false;
        self.failure = None;
        self.established = false;
        self.sources = Sources::default();
        (self.reaction_point, self.slowed_until) = (None, None);
        self.state = QpState::Reset;
    }

    /// Moves to RTR, where the peer's options are not known yet.
    pub(crate) fn enter_rtr(&mut self) {
        self.selective = false;
        self.established = false;
        self.sources = Sources::default();
        self.state = QpState::Rtr;
    }

    /// Lets both sides report buffered packets in selective ACKs, until the next RTR.
    pub(crate) fn set_selective(&mut self) {
        self.selective = true;
    }

    /// Moves to the error state. [`QueuePair`](crate::QueuePair) flushes the queues at the end of the call.
    pub(crate) fn fail(&mut self) {
        self.state = QpState::Err;
        self.stopping = true;
    }

    /// Returns whether the queues must be flushed after [`QpContext::fail`], once.
    pub(crate) fn take_stopping(&mut self) -> bool {
        core::mem::take(&mut self.stopping)
    }

    /// Records the flushing of the queues: completions lost in it fail nothing.
    pub(crate) fn on_flushed(&mut self) {
        self.overflowed = false;
    }

    /// Moves to the error state if a completion was lost (IBA 11.6.3.2, class G).
    pub(crate) fn fail_on_overflow(&mut self, ctx: &mut Ctx<'_>) {
        if self.overflowed && self.state != QpState::Err {
            let (qpn, peer) = (self.config.qpn, self.peer_address());
            self.record_failure(|| Failure::of_overflow(qpn, peer));
            ctx.events.push_back(AsyncEvent::QpFatal(self.config.qpn));
            self.fail();
        }
    }

    fn peer_address(&self) -> Option<IpAddr> {
        self.attr.av.map(|av| av.remote)
    }

    /// Stores the first failure.
    fn record_failure(&mut self, failure: impl FnOnce() -> Failure) {
        self.failure.get_or_insert_with(|| Box::new(failure()));
    }

    /// Records why the oldest send work request fails.
    pub(crate) fn note_send_failure(&mut self, ctx: &Ctx<'_>, wqe: &SendWqe, target: &Target, status: WcStatus) {
        let (config, attr) = (&self.config, &self.attr);
        self.failure
            .get_or_insert_with(|| Box::new(Failure::of_send(ctx, config, attr, (wqe, target), status)));
    }

    /// Records why a request of the peer is refused.
    pub(crate) fn note_refusal(&mut self, class: Class, refusal: Refusal, detail: Detail) {
        let (qpn, peer) = (self.config.qpn, self.peer_address());
        self.record_failure(|| Failure::of_request(qpn, peer, class, refusal, detail));
    }

    pub(crate) fn take_failure(&mut self) -> Option<Failure> {
        self.failure.take().map(|failure| *failure)
    }

    /// Completes a send work request.
    pub(crate) fn push_send(&mut self, ctx: &mut Ctx<'_>, completion: Completion) {
        self.overflowed |= !push(&self.config.send_cq, ctx, completion);
    }

    /// Completes a receive work request, which `srq` has served if it is one of XRC.
    pub(crate) fn push_recv(
        &mut self,
        ctx: &mut Ctx<'_>,
        srq: Option<&Arc<SharedReceiveQueue>>,
        completion: Completion,
    ) {
        // XRC receives complete into the completion queue of their shared receive queue.
        let shared = srq.and_then(|srq| srq.config().cq.as_ref());
        let cq = shared.unwrap_or(&self.config.recv_cq);
        self.overflowed |= !push(cq, ctx, completion);
    }

    pub(crate) fn is_established(&self) -> bool {
        self.established
    }

    /// Records an answer of the peer.
    pub(crate) fn on_answer(&mut self) {
        self.established = true;
    }

    /// Reports the first packet of a connection in RTR as an event.
    ///
    /// Call only for packets at the expected PSN: others may be forged.
    pub(crate) fn note_established(&mut self, ctx: &mut Ctx<'_>) {
        if self.established {
            return;
        }
        self.established = true;
        if self.state == QpState::Rtr {
            ctx.events
                .push_back(AsyncEvent::CommunicationEstablished(self.config.qpn));
        }
    }

    pub(crate) fn sources(&self) -> &Sources {
        &self.sources
    }

    pub(crate) fn sources_mut(&mut self) -> &mut Sources {
        &mut self.sources
    }

    /// Returns whether the port of responses is known. Until then only one request packet may be outstanding.
    pub(crate) fn knows_responder(&self) -> bool {
        !self.reliable || self.sources.knows(Direction::Response)
    }

    /// Takes the shared receive queue away; see [`QueuePair::hide_receives`](crate::QueuePair::hide_receives).
    pub(crate) fn take_srq(&mut self) -> Option<Arc<SharedReceiveQueue>> {
        self.config.srq.take()
    }

    /// Gives the shared receive queue back.
    pub(crate) fn restore_srq(&mut self, srq: Option<Arc<SharedReceiveQueue>>) {
        self.config.srq = srq;
    }

    /// Processes a congestion notification. `rtt`: the usual round trip.
    pub(crate) fn on_notified(&mut self, now: Instant, rtt: Duration) {
        match &mut self.reaction_point {
            Some(point) => point.on_notified(now, rtt),
            None => self.reaction_point = Some(Box::new(ReactionPoint::new(now))),
        }
    }

    /// Returns whether DCQCN forbids sending now, and sets `slowed_until` then.
    pub(crate) fn is_slowed(&mut self, now: Instant) -> bool {
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

    /// Returns the time before which DCQCN permits only acknowledgements.
    pub(crate) fn slowed_until(&self) -> Option<Instant> {
        self.slowed_until
    }

    /// Ends the DCQCN wait before `now`; without a time, whatever is left of it.
    pub(crate) fn end_slowed(&mut self, now: Option<Instant>) {
        self.slowed_until = self.slowed_until.filter(|at| now.is_some_and(|now| *at > now));
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
