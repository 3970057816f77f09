//! QP context: configuration, attributes, state and negotiated options of a queue pair.
//!
//! Requester, responder and replies read it and report to it: failures, lost completions, sent bytes. [`QueuePair`]
//! changes attributes and state.
//!
//! [`QueuePair`]: crate::QueuePair

use std::{collections::VecDeque, sync::Arc};

use core::time::Duration;

use roce_bth::{Class, Opcode, Service};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, Instant, PathMigState, QKey, QpAttr, QpState, QpType, Qpn, Target, WcStatus,
};

use crate::{
    counters::Counters,
    ctx::{Ctx, QpConfig},
    dcqcn::ReactionPoint,
    failure::Failure,
    pace::FreePaces,
    refusal::Refusal,
    sendq::SendWqe,
    source::{Direction, Sources},
    srq::SharedReceiveQueue,
    window::Window,
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
    failure: Option<Failure>,
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
        let current = attr.or(self.attr);
        self.mtu = current.path_mtu.map_or(self.mtu, |m| m.bytes());
        self.peer = current.dest_qpn.unwrap_or_default();
        self.access = current.access.unwrap_or_default();
        self.attr = current;
    }

    /// Returns to RESET.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.config.clone());
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

    /// Records why a request of the peer is refused.
    pub(crate) fn note_refusal(&mut self, class: Class, refusal: Refusal, reason: &str) {
        let peer = self.attr.av.map(|av| av.remote);
        let failure = || Failure::of_request(self.config.qpn, peer, class, refusal, reason);
        self.failure.get_or_insert_with(failure);
    }

    pub(crate) fn take_failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    pub(crate) fn is_established(&self) -> bool {
        self.established
    }

    /// Records an answer of the peer.
    pub(crate) fn on_answer(&mut self) {
        self.established = true;
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

/// Call of a queue pair: its context, and the state that it shares with others.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) qp: &'a mut QpContext,
    pub(crate) now: Instant,
    pub(crate) mem: &'a MemoryTable,
    pub(crate) window: &'a mut Window,
    pub(crate) paces: &'a mut FreePaces,
    pub(crate) events: &'a mut VecDeque<AsyncEvent>,
    pub(crate) counters: &'a mut Counters,
}

impl<'a> Call<'a> {
    pub(crate) fn new(qp: &'a mut QpContext, ctx: &'a mut Ctx<'_>) -> Self {
        Self {
            qp,
            now: ctx.now,
            mem: ctx.mem,
            window: ctx.window,
            paces: ctx.paces,
            events: ctx.events,
            counters: ctx.counters,
        }
    }

    /// Moves to the error state if a completion was lost (IBA 11.6.3.2, class G).
    pub(crate) fn fail_on_overflow(&mut self) {
        if self.qp.overflowed && self.qp.state != QpState::Err {
            let qpn = self.qp.qpn();
            self.qp.failure.get_or_insert_with(|| Failure::of_overflow(qpn));
            self.events.push_back(AsyncEvent::QpFatal(qpn));
            self.counters.qp_failures += 1;
            self.qp.fail();
        }
    }

    /// Records why the oldest send work request fails.
    pub(crate) fn note_send_failure(&mut self, wqe: &SendWqe, target: &Target, status: WcStatus) {
        let (config, attr) = (&self.qp.config, &self.qp.attr);
        let failure = || Failure::of_send(self.mem, config, attr, (wqe, target), status);
        self.counters.qp_failures += 1;
        self.qp.failure.get_or_insert_with(failure);
    }

    /// Reports the first packet of a connection in RTR as an event.
    ///
    /// Call only for packets at the expected PSN: others may be forged.
    pub(crate) fn note_established(&mut self) {
        if !core::mem::replace(&mut self.qp.established, true) && self.qp.state == QpState::Rtr {
            let event = AsyncEvent::CommunicationEstablished(self.qp.qpn());
            self.events.push_back(event);
        }
    }

    /// Completes a send work request.
    pub(crate) fn push_send(&mut self, mut completion: Completion) {
        completion.timestamp = self.now;
        let pushed = self.qp.config.send_cq.push(completion);
        self.note_pushed(pushed);
    }

    /// Completes a receive work request, which `srq` has served if it is one of XRC.
    pub(crate) fn push_recv(&mut self, srq: Option<&Arc<SharedReceiveQueue>>, mut completion: Completion) {
        completion.timestamp = self.now;
        // XRC receives complete into the completion queue of their shared receive queue.
        let shared = srq.and_then(|srq| srq.config().cq.as_ref());
        let pushed = shared.unwrap_or(&self.qp.config.recv_cq).push(completion);
        self.note_pushed(pushed);
    }

    #[inline]
    fn note_pushed(&mut self, pushed: Result<(), Option<AsyncEvent>>) {
        if let Err(event) = pushed {
            self.on_lost(event);
        }
    }

    /// Records a lost completion.
    #[cold]
    fn on_lost(&mut self, event: Option<AsyncEvent>) {
        self.counters.cq_overflow += 1;
        self.events.extend(event);
        self.qp.overflowed = true;
    }
}

/// Returns an RC opcode's equivalent in `service`, which must have the operation.
pub(crate) fn in_service(opcode: Opcode, service: Service) -> Opcode {
    match service {
        Service::Rc => opcode,
        other => opcode.in_service(other).unwrap_or(opcode),
    }
}
