//! Sending of requests: what may be sent next, and the bookkeeping of what is sent for the first time.

use core::{
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use roce_verbs::{AccessFlags, QpState, SendFlags, SendOp, Target, WcStatus};

use super::{
    Hold, Requester,
    emit::{Request, Unsent},
};
use crate::{
    context::QpContext,
    ctx::{Ctx, WaitReason},
    reorder::max_window,
    sendq::{Data, Kind, PACKET_OVERHEAD, Progress, SendWqe, resolve},
    seq::{MAX_OUTSTANDING, Seq},
    tx::{Step, TxKind, TxSink},
};

/// Acknowledgements requested per window. Each costs both sides a system call.
const ACKS_PER_WINDOW: usize = 4;
/// Bounds of the distance between acknowledgement requests, packets. rdma_rxe requests one every 64 packets.
const ACK_INTERVAL: RangeInclusive<usize> = 16..=64;
/// Window, packets, below which every packet requests an acknowledgement.
const SMALL_WINDOW: usize = 8;

/// Request packet to send next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// For the first time.
    New(Request),
    Lost(Request),
}

impl Next {
    fn request(self) -> Request {
        match self {
            Self::New(request) | Self::Lost(request) => request,
        }
    }
}

impl Requester {
    /// Checks whether the requester may send the next packet, except for window and pacing.
    fn check_transmit(&self, qp: &QpContext) -> Result<(), WaitReason> {
        if !qp.is_sending() {
            return Err(WaitReason::State(qp.state()));
        }
        if self.phase.rnr_until().is_some() {
            return Err(WaitReason::Rnr);
        }
        let Some(wqe) = self.sq.wqes.get(self.cur) else {
            return Err(match self.una < self.next {
                true => WaitReason::Acks,
                false => WaitReason::Empty,
            });
        };
        if !qp.knows_responder() && self.una < self.next {
            return Err(WaitReason::Acks);
        }
        // The peer's reorder buffer drops packets further ahead.
        if qp.is_selective() && self.scoreboard.is_active() && self.next.since(self.una) >= max_window(qp.mtu()) {
            return Err(WaitReason::Psn);
        }
        match wqe.progress {
            Progress::Failed(_) => Err(WaitReason::Local),
            Progress::Executed => Ok(()),
            Progress::Started => self.check_continue(qp, wqe),
            Progress::Posted if qp.state() == QpState::Sqd => Err(WaitReason::Draining),
            Progress::Posted => self.check_start(qp, wqe),
        }
    }

    /// Checks whether the started work request may send its next packet.
    fn check_continue(&self, qp: &QpContext, wqe: &SendWqe) -> Result<(), WaitReason> {
        if self.phase.caution().is_some() && self.in_flight > 0 {
            return Err(WaitReason::Acks);
        }
        if wqe.kind() == Kind::Read && self.rd_outstanding >= qp.max_rd_atomic() {
            return Err(WaitReason::RdAtomic);
        }
        Ok(())
    }

    /// Checks whether the work request may start: fence, READs and atomics outstanding, and PSNs outstanding.
    fn check_start(&self, qp: &QpContext, wqe: &SendWqe) -> Result<(), WaitReason> {
        if wqe.flags.contains(SendFlags::FENCE) && self.rd_outstanding > 0 {
            return Err(WaitReason::Fence);
        }
        // Retransmissions of earlier requests still need the key (local invalidate fence, IBA 10.6.5.1).
        let local_fence = wqe.flags.contains(SendFlags::FENCE) && matches!(wqe.op, SendOp::LocalInvalidate(_));
        if local_fence && self.cur > 0 {
            return Err(WaitReason::Local);
        }
        if wqe.has_response() && self.rd_outstanding >= qp.max_rd_atomic() {
            return Err(WaitReason::RdAtomic);
        }
        if wqe.end().since(self.una) > MAX_OUTSTANDING {
            return Err(WaitReason::Psn);
        }
        Ok(())
    }

    /// Returns the reason why the requester is not sending.
    pub(crate) fn wait_reason(&self, qp: &QpContext) -> WaitReason {
        let waits = match self.next_resend(qp) {
            Some(from) => self.check_lost(qp, from),
            None => self.check_transmit(qp),
        };
        match (waits, self.hold) {
            (Err(reason), _) => reason,
            (Ok(()), Hold::Pace(_)) => WaitReason::Pace,
            (Ok(()), _) if qp.slowed_until().is_some() => WaitReason::Pace,
            (Ok(()), Hold::Window) => WaitReason::Window,
            (Ok(()), Hold::None) => WaitReason::Ready,
        }
    }

    /// Returns the request packet to send next, after executing the local operations that are due before it.
    ///
    /// Lost packets precede new ones. The acknowledgement that is due is sent before the packet.
    pub(crate) fn prepare(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>) -> Option<Next> {
        self.hold = Hold::None;
        if let Some(from) = self.next_resend(qp) {
            self.check_lost(qp, from).ok()?;
            return self.lost_request(qp, ctx, from).map(Next::Lost);
        }
        loop {
            self.check_transmit(qp).ok()?;
            let index = self.cur;
            let wqe = &self.sq.wqes[index];
            match wqe.progress {
                Progress::Executed => self.cur += 1,
                Progress::Posted => {
                    self.start(qp, ctx);
                    let wqe = &self.sq.wqes[index];
                    if wqe.progress == Progress::Started {
                        self.check_continue(qp, wqe).ok()?;
                        return Some(self.new_request(index));
                    }
                    self.reap(qp, ctx);
                }
                Progress::Started | Progress::Failed(_) => return Some(self.new_request(index)),
            }
        }
    }

    /// Returns the next request packet of a work request.
    fn new_request(&self, index: usize) -> Next {
        let (wqe, from) = (&self.sq.wqes[index], self.next);
        let to = match wqe.kind() {
            Kind::Read => wqe.request_end(from),
            _ => from.plus(1),
        };
        Next::New(Request { index, from, to })
    }

    /// Returns whether a request completes a receive of the peer.
    pub(crate) fn completes_receive(&self, next: Next) -> bool {
        self.sq.wqes[next.request().index].completes_receive()
    }

    /// Returns the length of a request packet without its ICRC.
    pub(crate) fn packet_len(&self, qp: &QpContext, next: Next) -> usize {
        let Request { index, from, .. } = next.request();
        let wqe = &self.sq.wqes[index];
        let index = from.since(wqe.first);
        let (_, len) = wqe.payload(index, qp.mtu());
        qp.wire(wqe.opcode(index)).info().header_len + len.next_multiple_of(4)
    }

    /// Sends a request packet. Returns `None` if its work request has failed, and another one may be due.
    pub(crate) fn transmit(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        next: Next,
        tx: &mut impl TxSink,
    ) -> Option<Step> {
        let Request { index, from, to } = next.request();
        let wqe = &self.sq.wqes[index];
        let cost = wqe.cost(from, to, qp.mtu());
        let fits = !qp.is_reliable() || self.fits(qp, ctx, wqe.kind(), cost);
        let sent = match next {
            // The packet that the peer waits for ignores the window: READ responses that fill it may wait for that packet.
            Next::Lost(request) if fits || self.scoreboard.is_wanted(from) => self.resend(qp, ctx, request, tx),
            Next::New(request) if fits && qp.is_reliable() => self.send_new(qp, ctx, request, cost, tx),
            Next::New(request) if fits => self.send_unreliable(qp, ctx, request, cost, tx),
            Next::Lost(_) | Next::New(_) => {
                self.hold = Hold::Window;
                return Some(Step::Blocked);
            }
        };
        match sent {
            Ok(()) => Some(Step::Sent),
            Err(Unsent::Full) => Some(Step::Full),
            Err(Unsent::Paced(until)) => {
                self.hold = Hold::Pace(until);
                Some(Step::Idle)
            }
            Err(Unsent::Fault(status)) => {
                // It completes in order.
                ctx.counters.send_err += 1;
                self.sq.wqes[index].progress = Progress::Failed(status);
                self.reap(qp, ctx);
                None
            }
        }
    }

    /// Starts the current work request: checks its memory, or executes it if it is local.
    fn start(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>) {
        let (pd, qpn) = (qp.config().pd, qp.qpn());
        let wqe = &mut self.sq.wqes[self.cur];
        if let Some(status) = wqe.fault {
            wqe.progress = Progress::Failed(status);
            return;
        }
        let need = match wqe.is_answered_with_data() {
            true => AccessFlags::LOCAL_WRITE,
            false => AccessFlags::empty(),
        };
        if let Data::Sges(sges) = &wqe.data {
            match resolve(&mut self.keys, ctx.mem, pd, sges, need) {
                Some(list) => wqe.data = Data::List(list),
                None => {
                    wqe.progress = Progress::Failed(WcStatus::LocalProtectionError);
                    return;
                }
            }
        }
        let (done, failure) = match &wqe.op {
            SendOp::LocalInvalidate(key) => (ctx.mem.invalidate(pd, qpn, *key), WcStatus::LocalQpOperationError),
            SendOp::FastRegister(args) => (ctx.mem.fast_register(pd, args), WcStatus::LocalQpOperationError),
            SendOp::BindWindow(args) => (ctx.mem.bind_window(pd, qpn, args), WcStatus::MwBindError),
            _ if wqe.packets == 0 => (Ok(()), WcStatus::Success),
            _ => {
                wqe.progress = Progress::Started;
                if wqe.kind() == Kind::Read {
                    let packets = ctx.window.read_limit() / (qp.mtu() + PACKET_OVERHEAD);
                    wqe.stride = wqe.packets.min(packets.max(1) as u32);
                }
                return;
            }
        };
        wqe.key_error = done.err();
        wqe.progress = match done {
            Ok(()) => Progress::Executed,
            Err(_) => Progress::Failed(failure),
        };
    }

    /// Returns whether the window permits sending `cost` bytes.
    ///
    /// A queue pair may always have one packet in flight. A READ may exceed the window by one request, because a large
    /// one would otherwise never fit while other queue pairs send.
    pub(super) fn fits(&self, qp: &QpContext, ctx: &Ctx<'_>, kind: Kind, cost: usize) -> bool {
        let room = ctx.window.available();
        let packet = qp.mtu() + PACKET_OVERHEAD;
        let alone = self.in_flight == 0 && cost <= packet;
        room >= cost || alone || (kind == Kind::Read && room >= packet)
    }

    /// Sends a packet for the first time.
    fn send_new(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        request: Request,
        cost: usize,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let wqe = &self.sq.wqes[request.index];
        let ack_req = wqe.kind() == Kind::Read
            || request.to == wqe.end()
            || !qp.knows_responder()
            // Without an answer to the packet that closes the window, it would stay closed until a timeout.
            || ctx.window.available().saturating_sub(cost) < qp.mtu() * 2
            // On a lossy path one lost acknowledgement must not cause a timeout.
            || ctx.window.size() < SMALL_WINDOW * (qp.mtu() + PACKET_OVERHEAD)
            || self.since_ack_req + 1 >= ack_interval(qp, ctx);
        self.emit_request(qp, request, ack_req, TxKind::Request, tx)?;
        self.on_sent(qp, ctx, request.to, cost, ack_req);
        Ok(())
    }

    /// Returns the destination address of the current work request.
    fn destination(&self, qp: &QpContext) -> IpAddr {
        match self.sq.target(self.cur) {
            Target::Datagram(to) => to.av.remote,
            Target::Peer | Target::Srq(_) => qp.attr().av.map_or(Ipv4Addr::UNSPECIFIED.into(), |av| av.remote),
        }
    }

    /// Sends the next packet of a service without acknowledgements. It is complete when sent.
    fn send_unreliable(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        request: Request,
        cost: usize,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let dest = self.destination(qp);
        ctx.paces.may_send(ctx.now, dest).map_err(Unsent::Paced)?;
        self.emit_request(qp, request, false, TxKind::Request, tx)?;
        ctx.paces.on_sent(ctx.now, dest, cost);
        qp.note_sent(cost);
        let Request { index, to, .. } = request;
        self.cur += usize::from(to == self.sq.wqes[index].end());
        (self.una, self.next) = (to, to);
        self.reap(qp, ctx);
        Ok(())
    }

    /// Updates timers, counters and window after a packet was sent for the first time.
    fn on_sent(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, to: Seq, cost: usize, ack_req: bool) {
        let wqe = &self.sq.wqes[self.cur];
        let is_read = wqe.kind() == Kind::Read;
        if self.una == self.next {
            self.timers.base = ctx.now;
            self.timers.interval = ctx.now;
            self.timers.backoff = 0;
            self.reads.end_skipped();
        }
        self.rd_outstanding += u32::from(wqe.has_response());
        // After a silence the answer may be to another transmission (Karn's rule).
        if ack_req && self.sample.is_none() && self.timers.backoff == 0 {
            self.sample = Some((self.next.plus(1), ctx.now));
        }
        self.since_ack_req = if ack_req { 0 } else { self.since_ack_req + 1 };
        ctx.window.on_sent(cost);
        self.in_flight += cost;
        self.next = to;
        self.cur += usize::from(to == wqe.end());
        // The data of a READ counts against the peer's DCQCN rate.
        if !is_read {
            qp.note_sent(cost);
        }
    }
}

/// Returns the distance between acknowledgement requests, packets.
fn ack_interval(qp: &QpContext, ctx: &Ctx<'_>) -> u32 {
    let window = ctx.window.size() / (qp.mtu() + PACKET_OVERHEAD);
    (window / ACKS_PER_WINDOW).clamp(*ACK_INTERVAL.start(), *ACK_INTERVAL.end()) as u32
}
