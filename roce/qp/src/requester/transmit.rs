//! Sending of requests for the first time: what may be sent next, and its bookkeeping.

use core::{
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use roce_verbs::{AccessFlags, QpState, SendFlags, SendOp, Target, WcStatus};

use super::{
    READ_PROBE, Requester,
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

impl Requester {
    /// Checks whether the requester may send the next packet, except for window and pacing.
    fn check_transmit(&self, qp: &QpContext) -> Result<(), WaitReason> {
        if !qp.is_sending() {
            return Err(WaitReason::State(qp.state()));
        }
        if self.timers.rnr_until.is_some() {
            return Err(WaitReason::Rnr);
        }
        let Some(wqe) = self.sq.wqes.get(self.cur) else {
            return Err(match self.una < self.top {
                true => WaitReason::Acks,
                false => WaitReason::Empty,
            });
        };
        if !qp.knows_responder() && self.una < self.next {
            return Err(WaitReason::Acks);
        }
        // The peer's reorder buffer drops packets further ahead.
        if self.scoreboard.is_active() && self.next.since(self.una) >= max_window(qp.mtu()) {
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
        if self.cautious.is_some() && self.in_flight > 0 {
            return Err(WaitReason::Acks);
        }
        if wqe.kind() != Kind::Read {
            return Ok(());
        }
        if self.next >= self.top && self.rd_outstanding >= qp.max_rd_atomic() {
            return Err(WaitReason::RdAtomic);
        }
        // Parts of one READ request are requested again one at a time.
        if self.next > self.una && self.next > wqe.request_start(self.next) {
            return Err(WaitReason::Acks);
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

    /// Begins another attempt to send: forgets why the last one failed.
    pub(crate) fn begin_transmit(&mut self) {
        self.window_closed = false;
        self.paced_until = None;
    }

    /// Returns the reason why the requester is not sending.
    pub(crate) fn wait_reason(&self, qp: &QpContext) -> WaitReason {
        match self.check_transmit(qp) {
            Err(reason) => reason,
            Ok(()) if self.paced_until.is_some() || qp.slowed_until().is_some() => WaitReason::Pace,
            Ok(()) if self.window_closed => WaitReason::Window,
            Ok(()) => WaitReason::Ready,
        }
    }

    /// Prepares the next request packet: executes the local operations that are due before it.
    ///
    /// Returns `Sent` if a packet is due. The acknowledgement that is due is sent before it.
    pub(crate) fn prepare(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>) -> Step {
        loop {
            if self.check_transmit(qp).is_err() {
                return Step::Idle;
            }
            match self.sq.wqes[self.cur].progress {
                Progress::Executed => self.cur += 1,
                Progress::Posted => {
                    self.start(qp, ctx);
                    if self.sq.wqes[self.cur].progress != Progress::Started {
                        self.reap(qp, ctx);
                    }
                }
                Progress::Started | Progress::Failed(_) => return Step::Sent,
            }
        }
    }

    /// Returns whether the next request completes a receive of the peer.
    pub(crate) fn completes_receive(&self) -> bool {
        self.sq.wqes.get(self.cur).is_some_and(SendWqe::completes_receive)
    }

    /// Sends the next request packet. Returns `None` if its work request has failed, and another one may be due.
    pub(crate) fn transmit_next(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        tx: &mut impl TxSink,
    ) -> Option<Step> {
        let to = self.next_end(qp, ctx);
        let wqe = &self.sq.wqes[self.cur];
        let cost = wqe.cost(self.next, to, qp.mtu());
        let sent = if !qp.is_reliable() {
            let dest = self.destination(qp);
            if let Err(at) = ctx.paces.may_send(ctx.now, dest) {
                self.paced_until = Some(at);
                return Some(Step::Idle);
            }
            self.emit_unacknowledged(qp, ctx, tx, dest, to, cost)
        } else if self.fits(qp, ctx, wqe.kind(), cost) {
            self.emit_next(qp, ctx, tx, to, cost)
        } else {
            self.window_closed = true;
            return Some(Step::Blocked);
        };
        match sent {
            Ok(()) => Some(Step::Sent),
            Err(Unsent::Full) => Some(Step::Full),
            Err(Unsent::Fault(status)) => {
                ctx.counters.send_err += 1;
                self.sq.wqes[self.cur].progress = Progress::Failed(status);
                self.reap(qp, ctx);
                None
            }
        }
    }

    /// Returns the length of the next request packet without its ICRC.
    pub(crate) fn next_len(&self, qp: &QpContext) -> Option<usize> {
        let wqe = self.sq.wqes.get(self.cur)?;
        let index = self.next.since(wqe.first);
        let (_, len) = wqe.payload(index, qp.mtu());
        Some(qp.wire(wqe.opcode(index)).info().header_len + len.next_multiple_of(4))
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

    /// Returns one past the last PSN of the next packet; of a READ, of all responses that it requests.
    fn next_end(&self, qp: &QpContext, ctx: &Ctx<'_>) -> Seq {
        let wqe = &self.sq.wqes[self.cur];
        match wqe.kind() {
            Kind::Read => self.read_end(qp, ctx, wqe, self.next),
            _ => self.next.plus(1),
        }
    }

    /// Returns one past the last PSN that a READ request from `seq` on covers.
    ///
    /// Until a response has arrived, the request itself may have been lost: it is repeated unchanged then.
    pub(super) fn read_end(&self, qp: &QpContext, ctx: &Ctx<'_>, wqe: &SendWqe, seq: Seq) -> Seq {
        let all = wqe.request_end(seq);
        // An answer to something later shows that the request arrived: request only what is missing.
        let end = self.first_answered(seq, all);
        if seq == wqe.request_start(seq) && end == all {
            return end;
        }
        let bytes = match self.timers.backoff {
            // Parts are requested one at a time.
            0 => ctx.window.piece_limit(),
            _ => ctx.window.read_limit().min(READ_PROBE),
        };
        let packets = bytes / (qp.mtu() + PACKET_OVERHEAD);
        end.min(seq.plus(packets.max(1) as u64))
    }

    fn emit_next(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        tx: &mut impl TxSink,
        to: Seq,
        cost: usize,
    ) -> Result<(), Unsent> {
        let wqe = &self.sq.wqes[self.cur];
        let retry = self.next < self.top;
        let last = wqe.kind() == Kind::Read || to == wqe.end();
        // Without an answer to the packet that closes the window, it would stay closed until a timeout.
        let closes = ctx.window.available().saturating_sub(cost) < qp.mtu() * 2;
        // On a lossy path one lost acknowledgement must not cause a timeout.
        let lossy = retry || ctx.window.size() < SMALL_WINDOW * (qp.mtu() + PACKET_OVERHEAD);
        let interval_over = self.since_ack_req + 1 >= self.ack_interval(qp, ctx);
        let ack_req = last || closes || lossy || !qp.knows_responder() || interval_over;
        let kind = if retry { TxKind::Retransmission } else { TxKind::Request };
        let (index, from) = (self.cur, self.next);
        self.emit_request(qp, Request { index, from, to }, ack_req, kind, tx)?;
        self.on_sent(qp, ctx, to, cost, ack_req, retry);
        Ok(())
    }

    /// Returns the distance between acknowledgement requests, packets.
    fn ack_interval(&self, qp: &QpContext, ctx: &Ctx<'_>) -> u32 {
        let window = ctx.window.size() / (qp.mtu() + PACKET_OVERHEAD);
        (window / ACKS_PER_WINDOW).clamp(*ACK_INTERVAL.start(), *ACK_INTERVAL.end()) as u32
    }

    /// Returns the destination address of the current work request.
    fn destination(&self, qp: &QpContext) -> IpAddr {
        match self.sq.target(self.cur) {
            Target::Datagram(to) => to.av.remote,
            Target::Peer | Target::Srq(_) => qp.attr().av.map_or(Ipv4Addr::UNSPECIFIED.into(), |av| av.remote),
        }
    }

    /// Sends the next packet of an unacknowledged service. It is complete when sent.
    fn emit_unacknowledged(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        tx: &mut impl TxSink,
        dest: IpAddr,
        to: Seq,
        cost: usize,
    ) -> Result<(), Unsent> {
        let (index, from) = (self.cur, self.next);
        self.emit_request(qp, Request { index, from, to }, false, TxKind::Request, tx)?;
        ctx.paces.on_sent(ctx.now, dest, cost);
        qp.note_sent(cost);
        self.cur += usize::from(to == self.sq.wqes[self.cur].end());
        (self.una, self.next, self.top) = (to, to, to);
        self.reap(qp, ctx);
        Ok(())
    }

    /// Updates timers, counters and window after a packet was sent.
    fn on_sent(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, to: Seq, cost: usize, ack_req: bool, retry: bool) {
        let wqe = &self.sq.wqes[self.cur];
        let is_read = wqe.kind() == Kind::Read;
        if self.una == self.next {
            self.timers.base = ctx.now;
        }
        if self.una == self.top {
            self.timers.interval = ctx.now;
            self.timers.backoff = 0;
            self.skipped = false;
        }
        if retry {
            ctx.counters.retransmits += 1;
            self.read_in_parts |= wqe.kind() == Kind::Read && to < wqe.request_end(self.next);
        } else {
            self.rd_outstanding += u32::from(wqe.has_response());
        }
        // After a timeout the answer may be to either transmission (Karn's rule); after a reported gap it can't.
        if ack_req && self.sample.is_none() && self.timers.backoff == 0 {
            self.sample = Some((self.next.plus(1), ctx.now));
        }
        self.since_ack_req = if ack_req { 0 } else { self.since_ack_req + 1 };
        ctx.window.on_sent(cost);
        self.in_flight += cost;
        self.next = to;
        self.cur += usize::from(to == wqe.end());
        self.top = self.top.max(self.next);
        // The data of a READ counts against the peer's DCQCN rate.
        if !is_read {
            qp.note_sent(cost);
        }
    }
}
