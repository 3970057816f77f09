//! The queue pair: its attributes and life, posting, and the turn that it takes at sending.

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

/// Packets that one turn at sending may take.
const TURN: u32 = 128;
/// Packets of one kind (requests or responses) before the other kind gets its share; a train's length, so that
/// fairness does not cut trains.
const RUN: u32 = 16;
/// What an operation that a service lacks fails with.
const LACKING: WcStatus = WcStatus::LocalQpOperationError;
/// The most READs and atomics outstanding that an attribute may ask for.
const MAX_RD_ATOMIC: u8 = 128;

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    pub(crate) config: QpConfig,
    pub(crate) state: QpState,
    pub(crate) attr: QpAttr,
    /// Copies of attributes that every packet needs.
    pub(crate) mtu: usize,
    pub(crate) peer: Qpn,
    pub(crate) access: AccessFlags,
    /// The service of its packets.
    pub(crate) service: Service,
    /// Whether its packets are acknowledged.
    pub(crate) reliable: bool,
    pub(crate) sq: SendQueue,
    pub(crate) req: Requester,
    pub(crate) rq: Arc<ReceiveQueue>,
    pub(crate) resp: Responder,
    /// A completion was lost: the queue pair can't go on.
    pub(crate) overflowed: bool,
    /// Both sides keep packets beyond a gap and say which.
    pub(crate) selective: bool,
    /// UDP source ports of the peer.
    pub(crate) sources: Sources,
    /// The peer has notified it of congestion.
    notified: Option<Box<ReactionPoint>>,
    /// Nothing but acknowledgements before this, for that reason.
    pub(crate) slowed_until: Option<Instant>,
}

/// Why receives are refused by a queue pair that takes them from elsewhere, or takes none.
pub const NO_RECEIVE_QUEUE: PostError = PostError::Invalid("the queue pair has no receive queue of its own");

impl QueuePair {
    /// A queue pair in RESET.
    ///
    /// # Errors
    /// When type, shared receive queue and XRC domain don't go together.
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
            selective: false,
            sources: Sources::default(),
            notified: None,
            slowed_until: None,
        })
    }

    /// The peer keeps packets beyond a gap and understands what says so (the connection manager's exchange has told): so do we from now
    /// on, in this memory. To be called in RTR; of reliable connections.
    pub fn keep_packets(&mut self, budget: &Arc<ReorderBudget>) {
        self.selective = self.config.qp_type == QpType::Rc && self.state == QpState::Rtr;
        if self.selective {
            self.keep_quietly(budget);
        }
    }

    /// Keeps packets beyond a gap, in this memory, and does not tell: nothing is known of the peer, which goes back. What it loses
    /// once more, of what it sends again, does no harm if it was kept. To be called in RTR.
    pub fn keep_quietly(&mut self, budget: &Arc<ReorderBudget>) {
        let keeps = self.reliable && self.state == QpState::Rtr;
        self.resp.reorder = keeps.then(|| Box::new(ReorderBuffer::new(budget.clone())));
    }

    /// Whether both ends do, and tell.
    pub fn keeps_packets(&self) -> bool {
        self.selective
    }

    /// A congestion notification packet came from the peer: a switch has marked what this queue pair sends.
    pub fn handle_notification(&mut self, now: Instant) {
        match &mut self.notified {
            Some(point) => point.on_notified(now, self.req.rtt.smoothed()),
            None => self.notified = Some(Box::new(ReactionPoint::new(now))),
        }
    }

    /// Whether it has to wait because of notifications.
    fn is_slowed(&mut self, now: Instant) -> bool {
        let Some(point) = &mut self.notified else {
            return false;
        };
        if point.is_over(now) {
            self.notified = None;
        } else if let Err(at) = point.may_send(now) {
            self.slowed_until = Some(at);
            return true;
        }
        false
    }

    /// Packets with data went out.
    pub(crate) fn note_sent(&mut self, bytes: usize) {
        if let Some(point) = &mut self.notified {
            point.on_sent(bytes);
        }
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.config.qpn
    }

    /// What it was made with.
    pub fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Path and number of the peer, once they are set.
    pub fn remote(&self) -> Option<(AddressVector, Qpn)> {
        Some((self.attr.av?, self.attr.dest_qpn?))
    }

    /// The attributes as they are.
    pub fn query(&self) -> QpAttr {
        QpAttr {
            state: Some(self.state),
            cur_state: Some(self.state),
            path_mig_state: Some(PathMigState::Migrated),
            sq_draining: self.state == QpState::Sqd && !self.req.drained,
            ..self.attr
        }
    }

    /// Its bytes in the window towards its peer.
    pub fn in_flight(&self) -> usize {
        self.req.in_flight
    }

    /// The oldest PSN that the peer has not acknowledged (of a READ: whose response has not come). `None` unless it sends and
    /// is answered.
    pub fn acknowledged(&self) -> Option<Psn> {
        (self.reliable && self.is_sending()).then(|| self.req.una.psn())
    }

    /// The READs and atomics that the peer may have outstanding here.
    pub fn max_reads(&self) -> u8 {
        self.attr.max_dest_rd_atomic.unwrap_or(0)
    }

    /// Whether [`QueuePair::poll_transmit`] has nothing to do: no send work request has to be completed, and nothing answered but what
    /// may wait.
    pub fn is_idle(&self) -> bool {
        self.sq.wqes.is_empty() && self.resp.replies.is_idle()
    }

    /// Send work requests that have not completed.
    pub fn send_queue_len(&self) -> usize {
        self.sq.wqes.len()
    }

    /// Its receive queue, unless it takes from a shared one or receives nothing.
    pub fn receive_queue(&self) -> Option<&Arc<ReceiveQueue>> {
        let own = self.config.srq.is_none() && self.config.qp_type.receives();
        own.then_some(&self.rq)
    }

    /// Receive work requests that no message has taken.
    pub fn recv_queue_len(&self) -> usize {
        self.rq.len()
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// When the transition or an attribute is not allowed; then nothing changes.
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

    /// Takes over the attributes that are set.
    fn apply(&mut self, attr: &QpAttr) {
        let mine = &mut self.attr;
        macro_rules! take {
            ($($field:ident),*) => { $( if attr.$field.is_some() { mine.$field = attr.$field; } )* };
        }
        take!(
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
        take!(
            rq_psn,
            max_rd_atomic,
            min_rnr_timer,
            sq_psn,
            max_dest_rd_atomic,
            dest_qpn
        );
        self.mtu = mine.path_mtu.map_or(self.mtu, |m| m.bytes());
        self.peer = mine.dest_qpn.unwrap_or_default();
        self.access = mine.access.unwrap_or_default();
        // In SQD they count at once, also for what waits for an acknowledgement.
        self.req.retries_left = attr.retry_cnt.unwrap_or(self.req.retries_left);
        self.req.rnr_left = attr.rnr_retry.unwrap_or(self.req.rnr_left);
    }

    /// Back to the beginning. Nothing is completed; completions that wait in their queues stay there.
    fn reset(&mut self, ctx: &mut Ctx<'_>) {
        ctx.window.forget(self.req.in_flight);
        let first = Seq::start(Psn::new(0));
        self.attr = QpAttr::default();
        self.sq = SendQueue::new(first);
        self.req = Requester::new(first);
        self.resp = Responder::new(first);
        self.overflowed = false;
        self.sources = Sources::default();
        (self.notified, self.slowed_until) = (None, None);
        self.state = QpState::Reset;
        self.rq.follow(self.state);
    }

    /// Ends the queue pair: its bytes in flight return to the window, its windows close. Nothing is completed.
    pub fn destroy(&mut self, ctx: &mut Ctx<'_>) {
        ctx.mem.forget_qp(self.config.qpn);
        self.reset(ctx);
    }

    /// Moves the send queue to error (services without acknowledgements, IBA 10.3.1): what waits in it is flushed, what
    /// comes in goes on.
    pub(crate) fn enter_send_error(&mut self, ctx: &mut Ctx<'_>) {
        self.state = QpState::Sqe;
        self.flush_sends(ctx);
        self.settle(ctx);
    }

    fn flush_sends(&mut self, ctx: &mut Ctx<'_>) {
        while let Some(wqe) = self.sq.pop() {
            self.complete_send(ctx, &wqe, WcStatus::FlushError);
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
            // It takes no more from the shared queue, and what it had taken is flushed (IBA 10.2.9).
            ctx.events.push(AsyncEvent::LastWqeReached(self.config.qpn));
        }
    }

    /// Acts on a lost completion: the queue pair fails (IBA 11.6.3.2, class G).
    pub(crate) fn settle(&mut self, ctx: &mut Ctx<'_>) {
        if self.overflowed && self.state != QpState::Err {
            ctx.events.push(AsyncEvent::QpFatal(self.config.qpn));
            self.enter_error(ctx);
        }
    }

    pub(crate) fn push_send(&mut self, ctx: &mut Ctx<'_>, completion: Completion) {
        self.overflowed |= !push(&self.config.send_cq, ctx, completion);
    }

    pub(crate) fn push_recv(&mut self, ctx: &mut Ctx<'_>, completion: Completion) {
        // An extended reliable connection's receives complete where their shared queue's do.
        let shared = self.resp.srq.as_ref().and_then(|srq| srq.config().cq.as_ref());
        let cq = shared.unwrap_or(&self.config.recv_cq);
        self.overflowed |= !push(cq, ctx, completion);
    }

    /// Queues a send work request to the peer. In the error states it is flushed at once.
    ///
    /// # Errors
    /// When it can't be queued; then nothing was.
    pub fn post_send(&mut self, ctx: &mut Ctx<'_>, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.post_send_to(ctx, wr, Target::Peer)
    }

    /// Queues a send work request: a datagram to its receiver, an XRC message to a queue of the peer.
    ///
    /// # Errors
    /// When it can't be queued; then nothing was.
    pub fn post_send_to(&mut self, ctx: &mut Ctx<'_>, wr: &SendWr<'_>, target: Target) -> Result<(), PostError> {
        self.post_send_within(ctx, wr, target, self.mtu)
    }

    /// Like [`QueuePair::post_send_to`]; `longest` is what the path of a datagram carries at most, bytes. Nothing is
    /// sent of what is longer, and no error told (IBA C10-93.1.1).
    ///
    /// # Errors
    /// When it can't be queued; then nothing was.
    pub fn post_send_within(
        &mut self,
        ctx: &mut Ctx<'_>,
        wr: &SendWr<'_>,
        target: Target,
        longest: usize,
    ) -> Result<(), PostError> {
        let checked = self.checked(wr, &target, 0)?;
        self.resp.replies.policy.on_posted(ctx.now);
        match self.config.qp_type {
            QpType::Rc | QpType::Uc => self.sq.push(wr, checked, self.mtu),
            _ => {
                let mtu = match target {
                    Target::Datagram(_) => longest.min(self.mtu),
                    _ => self.mtu,
                };
                self.sq.push_to(wr, target, checked, mtu);
            }
        }
        if matches!(self.state, QpState::Err | QpState::Sqe)
            && let Some(wqe) = self.sq.pop()
        {
            // It has taken no packet number.
            self.sq.tail = wqe.first;
            self.complete_send(ctx, &wqe, WcStatus::FlushError);
        }
        Ok(())
    }

    /// Whether a send work request can be queued after `ahead` others that are not queued yet.
    ///
    /// # Errors
    /// Why not.
    pub fn check_post(&self, wr: &SendWr<'_>, target: &Target, ahead: usize) -> Result<(), PostError> {
        self.checked(wr, target, ahead).map(drop)
    }

    fn checked(&self, wr: &SendWr<'_>, target: &Target, ahead: usize) -> Result<Checked, PostError> {
        let ahead = match self.state {
            QpState::Reset | QpState::Init | QpState::Rtr => return Err(PostError::State(self.state)),
            // They are flushed at once and take no room.
            QpState::Err | QpState::Sqe => 0,
            QpState::Rts | QpState::Sqd => ahead,
        };
        if self.sq.wqes.len() + ahead >= self.config.caps.max_send_wr as usize {
            return Err(PostError::QueueFull);
        }
        let checked = self.check_send(wr)?;
        if checked.fault != Some(LACKING) {
            self.check_target(kind_of(&wr.op), target)?;
        }
        Ok(checked)
    }

    /// Checks a work request's arguments. Like hardware it takes operations that the service lacks, and atomics that are not
    /// of 8 bytes, and fails them in their turn (IBA 11.6.2).
    fn check_send(&self, wr: &SendWr<'_>) -> Result<Checked, PostError> {
        let kind = kind_of(&wr.op);
        let row = legal::operation(wr.op.code());
        let lacks = !row.services.contains(&self.config.qp_type);
        let binds = matches!(wr.op, SendOp::BindWindow(_) | SendOp::FastRegister(_));
        if lacks && (binds || self.config.qp_type == QpType::XrcTgt) {
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
        if answered && !lacks && self.attr.max_rd_atomic.unwrap_or(0) == 0 {
            return Err(PostError::Invalid("max_rd_atomic is 0"));
        }
        let word = matches!(kind, Kind::Atomic | Kind::AtomicWrite);
        let fault = match lacks {
            true => Some(LACKING),
            false => (word && len != 8).then_some(WcStatus::LocalLengthError),
        };
        let len = len as u32;
        Ok(Checked { len, fault })
    }

    /// Whether a work request of this kind can go there.
    fn check_target(&self, kind: Kind, target: &Target) -> Result<(), PostError> {
        let fits = match (self.config.qp_type, target) {
            (QpType::Rc | QpType::Uc, Target::Peer) => true,
            (QpType::Ud | QpType::Gsi, Target::Datagram(to)) => {
                let av = &to.av;
                if av.remote.is_unspecified() || av.local.is_ipv4() != av.remote.is_ipv4() {
                    return Err(PostError::Invalid("the datagram's path leads nowhere"));
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
    /// When it can't be queued; then nothing was.
    pub fn post_recv(&mut self, ctx: &mut Ctx<'_>, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let queue = self.receive_queue().ok_or(NO_RECEIVE_QUEUE)?;
        let queued = queue.post(core::slice::from_ref(wr)).map_err(|(_, e)| e)?;
        if queued == 0 {
            self.complete_receive_error(ctx, wr.wr_id, WcStatus::FlushError);
        }
        Ok(())
    }

    /// Takes a packet that was sent to this queue pair. The caller has checked its ICRC and both its addresses.
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
            // Datagrams come with their network header: `handle_datagram`.
            _ => ctx.counters.dropped_opcode += 1,
        }
    }

    /// An operation's packet opcode in this queue pair's service.
    pub(crate) fn wire(&self, opcode: Opcode) -> Opcode {
        in_service(opcode, self.service)
    }

    /// Sends what may be sent, up to a budget that keeps one queue pair from starving the others.
    pub fn poll_transmit(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Poll {
        if self.transmit_ack(tx) == Step::Full || self.transmit_probe(ctx, tx) == Step::Full {
            return Poll::More;
        }
        let mut budget = TURN;
        let mut blocked = false;
        let (mut replies, mut requests) = (true, true);
        self.slowed_until = None;
        while (replies || requests) && !self.is_slowed(ctx.now) {
            if replies {
                match self.run(&mut budget, |qp| qp.transmit_reply(ctx, tx)) {
                    Step::Full => return Poll::More,
                    step => replies = step == Step::Sent,
                }
            }
            if requests {
                let before = budget;
                let step = self.run(&mut budget, |qp| qp.transmit_request(ctx, tx));
                if step == Step::Full {
                    return Poll::More;
                }
                if budget < before {
                    // An acknowledgement that has waited for this request goes now.
                    self.resp.replies.held_until = None;
                }
                if self.transmit_ack(tx) == Step::Full {
                    return Poll::More;
                }
                // A request that waits for an acknowledgement is tried again after each run of responses.
                let waits = step == Step::Idle && self.resp.replies.ack != AckDue::No && !self.resp.replies.is_held();
                requests = step == Step::Sent || (waits && replies);
                blocked = step == Step::Blocked;
            }
            if budget == 0 {
                return Poll::More;
            }
        }
        // What was answered may have been in an acknowledgement's way.
        if self.transmit_ack(tx) == Step::Full {
            return Poll::More;
        }
        if blocked { Poll::Blocked } else { Poll::Idle }
    }

    /// Sends packets of one kind for a while. `Sent`: there may be more.
    fn run(&mut self, budget: &mut u32, mut send: impl FnMut(&mut Self) -> Step) -> Step {
        for _ in 0..RUN.min(*budget) {
            match send(self) {
                Step::Sent => *budget -= 1,
                other => return other,
            }
        }
        Step::Sent
    }
}

/// Puts a completion in its queue; `false` when it is lost.
fn push(cq: &CompletionQueue, ctx: &mut Ctx<'_>, mut completion: Completion) -> bool {
    completion.timestamp = ctx.now;
    match cq.push(completion) {
        Ok(()) => true,
        Err(first) => {
            ctx.counters.cq_overflow += 1;
            if first {
                ctx.events.push(AsyncEvent::CqError(cq.handle()));
            }
            false
        }
    }
}

/// The opcode of a reliable connection's packet in another service, which has been found to have it.
pub(crate) fn in_service(opcode: Opcode, service: Service) -> Opcode {
    match service {
        Service::Rc => opcode,
        other => opcode.in_service(other).unwrap_or(opcode),
    }
}

/// Checks attributes' values.
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
