//! Requester: turns send work requests into request packets, and retransmits them.

use core::{
    cmp::Ordering,
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use roce_bth::{AtomicEth, Bth, Deth, ExtHeader, Feth, Header, QKey, Reth, XrcEth};
use roce_verbs::{AccessFlags, Instant, QpState, QpType, RemoteAddr, SendFlags, SendOp, Target, WcStatus};

use crate::{
    congestion::Loss,
    ctx::{Ctx, WaitReason},
    qp::QueuePair,
    recovery::{Change, Recovery},
    reorder::max_window,
    sendq::{Data, Kind, PACKET_OVERHEAD, Progress, SendWqe, resolve},
    seq::{MAX_OUTSTANDING, Seq},
    timers::{Rtt, Timers, attribute},
    tx::{Step, TxKind, TxSink},
};

/// Acknowledgements requested per window. Each costs both sides a system call.
const ACKS_PER_WINDOW: usize = 4;
/// Bounds of the distance between acknowledgement requests, packets. rdma_rxe requests one every 64 packets.
const ACK_INTERVAL: RangeInclusive<usize> = 16..=64;

/// Window, packets, below which every packet requests an acknowledgement.
const SMALL_WINDOW: usize = 8;
/// Largest part of a READ requested again after a probe timeout, bytes.
const READ_PROBE: usize = 64 << 10;
/// Last stage of probe timeouts, counted from 0, that leaves a READ longer than [`READ_PROBE`] alone.
///
/// The responder may only be slow, and would send all of it twice.
const LAST_IDLE_READ_STAGE: u32 = 3;
/// [`LAST_IDLE_READ_STAGE`] with selective ACKs. The responder has reported its buffered packets: the rest is missing.
const LAST_IDLE_SELECTIVE_READ_STAGE: u32 = 0;

/// PSN state, timers and recovery state of the requester and completer.
#[derive(Debug)]
pub(crate) struct Requester {
    /// Oldest PSN that is not acknowledged; of a READ, whose response has not arrived.
    pub(crate) una: Seq,
    /// PSN to send next. Set back to `una` to retransmit.
    pub(crate) next: Seq,
    /// One past the highest PSN ever sent.
    pub(crate) top: Seq,
    /// Index in the send queue of the work request that `next` belongs to.
    pub(crate) cur: usize,
    /// Bytes of `una..next` counted in the window.
    pub(crate) in_flight: usize,
    /// READ and atomic requests sent and not answered.
    pub(crate) rd_outstanding: u32,
    /// Packets since the last acknowledgement request.
    since_ack_req: u32,
    /// Retries left before the work request fails.
    pub(crate) retries_left: u8,
    /// RNR retries left.
    pub(crate) rnr_left: u8,
    pub(crate) timers: Timers,
    pub(crate) rtt: Rtt,
    /// Round trip being measured: one past the PSN of the packet, and the time it was sent.
    pub(crate) sample: Option<(Seq, Instant)>,
    /// PSN and time of the last go-back.
    pub(crate) last_go_back: Option<(Seq, Instant)>,
    /// A probe must be sent, see [`QueuePair::transmit_probe`].
    probe_due: bool,
    /// End of the READ part that the last probe requested. A further probe timeout at that PSN means the rest is lost.
    probed: Option<Seq>,
    /// One packet is sent at a time until the peer answers, after a probe timeout or RNR NAK.
    ///
    /// All packets before this PSN were sent before and may have arrived.
    pub(crate) cautious: Option<Seq>,
    /// Responses beyond a gap were dropped since the last go-back. They must be requested again.
    pub(crate) skipped: bool,
    /// The last go-back was due to a timeout.
    pub(crate) timed_out: bool,
    /// READs were requested again in parts, so that responses may end at any packet.
    pub(crate) read_in_parts: bool,
    /// The window was closed at the last attempt to send.
    window_closed: bool,
    /// The drained send queue was reported.
    pub(crate) drained: bool,
    /// Time before which pacing permits no unacknowledged packet.
    paced_until: Option<Instant>,
    /// State of the packets in flight, if the peer sends selective ACKs.
    pub(crate) recovery: Recovery,
    /// Time when the newest packet was sent again, so that the peer reports all packets before it.
    pub(crate) tail_probe_sent: Option<Instant>,
    /// Expected PSN in the peer's last selective ACK, until it is sent again.
    pub(crate) wanted: Option<Seq>,
    /// PSN before which all requests were executed, as an acknowledgement or response implies.
    pub(crate) implied: Seq,
    /// Reused buffer for the changes that [`Recovery`] makes.
    pub(crate) changes: Vec<Change>,
}

/// Reason to go back to the oldest unacknowledged PSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GoBack {
    /// The peer reported a gap, or responses have one.
    Gap,
    /// No answer within the probe timeout: packets may only be late.
    ProbeTimeout,
    /// No answer within the retransmission timeout or the queue pair's `timeout` attribute: packets count as lost.
    Timeout,
    /// RNR NAK: the peer had no receive work request.
    Rnr,
}

impl Requester {
    pub(crate) fn new(first: Seq) -> Self {
        Self {
            una: first,
            next: first,
            top: first,
            cur: 0,
            in_flight: 0,
            rd_outstanding: 0,
            since_ack_req: 0,
            retries_left: 0,
            rnr_left: 0,
            timers: Timers::default(),
            rtt: Rtt::default(),
            sample: None,
            last_go_back: None,
            probe_due: false,
            probed: None,
            cautious: None,
            skipped: false,
            timed_out: false,
            read_in_parts: false,
            window_closed: false,
            drained: false,
            paced_until: None,
            recovery: Recovery::default(),
            tail_probe_sent: None,
            wanted: None,
            implied: first,
            changes: Vec::new(),
        }
    }

    pub(crate) fn forget_probe(&mut self) {
        self.probe_due = false;
    }

    pub(crate) fn note_window_closed(&mut self) {
        self.window_closed = true;
    }

    /// Restarts timers and retry count after an answer that makes progress.
    pub(crate) fn on_progress(&mut self, now: Instant, retries: u8) {
        self.retries_left = retries;
        self.timers.base = now;
        self.timers.interval = now;
        self.timers.backoff = 0;
        self.rtt.on_progress();
    }

    /// Completes the round-trip measurement if `una` has reached its packet. Returns the round trip.
    pub(crate) fn take_sample(&mut self, now: Instant) -> Option<core::time::Duration> {
        let (seq, sent) = self.sample?;
        if self.una < seq {
            return None;
        }
        self.sample = None;
        let rtt = now.saturating_since(sent);
        self.rtt.sample(rtt);
        Some(rtt)
    }
}

/// Reason why a packet was not built: no space, or an error that completes the work request.
pub(crate) enum Unsent {
    Full,
    Fault(WcStatus),
}

impl QueuePair {
    /// Checks whether the requester may send the next packet, except for window and pacing.
    fn check_transmit(&self) -> Result<(), WaitReason> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            return Err(WaitReason::State(self.state));
        }
        if self.req.timers.rnr_until.is_some() {
            return Err(WaitReason::Rnr);
        }
        let Some(wqe) = self.sq.wqes.get(self.req.cur) else {
            return Err(match self.req.una < self.req.top {
                true => WaitReason::Acks,
                false => WaitReason::Empty,
            });
        };
        if !self.knows_responder() && self.req.una < self.req.next {
            return Err(WaitReason::Acks);
        }
        // The peer's reorder buffer drops packets further ahead.
        if self.req.recovery.is_active() && self.req.next.since(self.req.una) >= max_window(self.mtu) {
            return Err(WaitReason::Psn);
        }
        match wqe.progress {
            Progress::Failed(_) => Err(WaitReason::Local),
            Progress::Executed => Ok(()),
            Progress::Started => self.check_continue(wqe),
            Progress::Posted if self.state == QpState::Sqd => Err(WaitReason::Draining),
            Progress::Posted => self.check_start(wqe),
        }
    }

    /// Checks whether the started work request may send its next packet.
    fn check_continue(&self, wqe: &SendWqe) -> Result<(), WaitReason> {
        let req = &self.req;
        if req.cautious.is_some() && req.in_flight > 0 {
            return Err(WaitReason::Acks);
        }
        if wqe.kind() != Kind::Read {
            return Ok(());
        }
        if req.next >= req.top && req.rd_outstanding >= u32::from(self.attr.max_rd_atomic.unwrap_or(0)) {
            return Err(WaitReason::RdAtomic);
        }
        // Parts of one READ request are requested again one at a time.
        if req.next > req.una && req.next > wqe.request_start(req.next) {
            return Err(WaitReason::Acks);
        }
        Ok(())
    }

    /// Checks whether the work request may start: fence, READs and atomics outstanding, and PSNs outstanding.
    fn check_start(&self, wqe: &SendWqe) -> Result<(), WaitReason> {
        if wqe.flags.contains(SendFlags::FENCE) && self.req.rd_outstanding > 0 {
            return Err(WaitReason::Fence);
        }
        // Retransmissions of earlier requests still need the key (local invalidate fence, IBA 10.6.5.1).
        let local_fence = wqe.flags.contains(SendFlags::FENCE) && matches!(wqe.op, SendOp::LocalInvalidate(_));
        if local_fence && self.req.cur > 0 {
            return Err(WaitReason::Local);
        }
        if wqe.has_response() && self.req.rd_outstanding >= u32::from(self.attr.max_rd_atomic.unwrap_or(0)) {
            return Err(WaitReason::RdAtomic);
        }
        if wqe.end().since(self.req.una) > MAX_OUTSTANDING {
            return Err(WaitReason::Psn);
        }
        Ok(())
    }

    /// Returns the reason why the requester is not sending.
    pub fn wait_reason(&self) -> WaitReason {
        match self.check_transmit() {
            Err(reason) => reason,
            Ok(()) if self.req.paced_until.is_some() || self.slowed_until.is_some() => WaitReason::Pace,
            Ok(()) if self.req.window_closed => WaitReason::Window,
            Ok(()) => WaitReason::Ready,
        }
    }

    /// Sends one request packet, after executing the local operations that are due before it.
    pub(crate) fn transmit_request(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        self.req.window_closed = false;
        self.req.paced_until = None;
        if self.selective
            && let Some(step) = self.transmit_lost(ctx, tx)
        {
            return step;
        }
        loop {
            if self.check_transmit().is_err() {
                return Step::Idle;
            }
            match self.sq.wqes[self.req.cur].progress {
                Progress::Executed => {
                    self.req.cur += 1;
                    continue;
                }
                Progress::Posted => {
                    self.start(ctx);
                    if self.sq.wqes[self.req.cur].progress != Progress::Started {
                        self.reap(ctx);
                    }
                    continue;
                }
                Progress::Started | Progress::Failed(_) => {}
            }
            if let Some(step) = self.acknowledge_before(self.req.cur, tx) {
                return step;
            }
            let to = self.next_end(ctx);
            let wqe = &self.sq.wqes[self.req.cur];
            let cost = wqe.cost(self.req.next, to, self.mtu);
            let sent = if !self.reliable {
                let dest = self.destination();
                if let Err(at) = ctx.paces.may_send(ctx.now, dest) {
                    self.req.paced_until = Some(at);
                    return Step::Idle;
                }
                self.emit_unacknowledged(ctx, tx, dest, to, cost)
            } else if self.fits(ctx, wqe.kind(), cost) {
                self.emit_next(ctx, tx, to, cost)
            } else {
                self.req.window_closed = true;
                return Step::Blocked;
            };
            match sent {
                Ok(()) => return Step::Sent,
                Err(Unsent::Full) => return Step::Full,
                Err(Unsent::Fault(status)) => {
                    ctx.counters.send_err += 1;
                    self.sq.wqes[self.req.cur].progress = Progress::Failed(status);
                    self.reap(ctx);
                }
            }
        }
    }

    /// Returns the length of the next request packet without its ICRC.
    pub(crate) fn next_len(&self) -> Option<usize> {
        let wqe = self.sq.wqes.get(self.req.cur)?;
        let index = self.req.next.since(wqe.first);
        let (_, len) = wqe.payload(index, self.mtu);
        Some(self.wire(wqe.opcode(index)).info().header_len + len.next_multiple_of(4))
    }

    /// Starts the current work request: checks its memory, or executes it if it is local.
    fn start(&mut self, ctx: &mut Ctx<'_>) {
        let (pd, qpn) = (self.config.pd, self.config.qpn);
        let wqe = &mut self.sq.wqes[self.req.cur];
        if let Some(status) = wqe.fault {
            wqe.progress = Progress::Failed(status);
            return;
        }
        let need = match wqe.is_answered_with_data() {
            true => AccessFlags::LOCAL_WRITE,
            false => AccessFlags::empty(),
        };
        if let Data::Sges(sges) = &wqe.data {
            match resolve(ctx.mem, pd, sges, need) {
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
                    let packets = ctx.window.read_limit() / (self.mtu + PACKET_OVERHEAD);
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
    pub(crate) fn fits(&self, ctx: &Ctx<'_>, kind: Kind, cost: usize) -> bool {
        let room = ctx.window.available();
        let packet = self.mtu + PACKET_OVERHEAD;
        let alone = self.req.in_flight == 0 && cost <= packet;
        room >= cost || alone || (kind == Kind::Read && room >= packet)
    }

    /// Returns one past the last PSN of the next packet; of a READ, of all responses that it requests.
    fn next_end(&self, ctx: &Ctx<'_>) -> Seq {
        let wqe = &self.sq.wqes[self.req.cur];
        match wqe.kind() {
            Kind::Read => self.read_end(ctx, wqe, self.req.next),
            _ => self.req.next.plus(1),
        }
    }

    /// Returns one past the last PSN that a READ request from `seq` on covers.
    ///
    /// Until a response has arrived, the request itself may have been lost: it is repeated unchanged then.
    pub(crate) fn read_end(&self, ctx: &Ctx<'_>, wqe: &SendWqe, seq: Seq) -> Seq {
        let all = wqe.request_end(seq);
        // An answer to something later shows that the request arrived: request only what is missing.
        let end = self.first_answered(seq, all);
        if seq == wqe.request_start(seq) && end == all {
            return end;
        }
        let bytes = match self.req.timers.backoff {
            // Parts are requested one at a time.
            0 => ctx.window.piece_limit(),
            _ => ctx.window.read_limit().min(READ_PROBE),
        };
        let packets = bytes / (self.mtu + PACKET_OVERHEAD);
        end.min(seq.plus(packets.max(1) as u64))
    }

    fn emit_next(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink, to: Seq, cost: usize) -> Result<(), Unsent> {
        let seq = self.req.next;
        let wqe = &self.sq.wqes[self.req.cur];
        let retry = seq < self.req.top;
        let last = wqe.kind() == Kind::Read || to == wqe.end();
        // Without an answer to the packet that closes the window, it would stay closed until a timeout.
        let closes = ctx.window.available().saturating_sub(cost) < self.mtu * 2;
        // On a lossy path one lost acknowledgement must not cause a timeout.
        let lossy = retry || ctx.window.size() < SMALL_WINDOW * (self.mtu + PACKET_OVERHEAD);
        let interval_over = self.req.since_ack_req + 1 >= self.ack_interval(ctx);
        let ack_req = last || closes || lossy || !self.knows_responder() || interval_over;
        let kind = if retry { TxKind::Retransmission } else { TxKind::Request };
        self.emit_request(self.req.cur, seq, to, ack_req, kind, tx)?;
        self.on_sent(ctx, to, cost, ack_req, retry);
        Ok(())
    }

    /// Returns the distance between acknowledgement requests, packets.
    fn ack_interval(&self, ctx: &Ctx<'_>) -> u32 {
        let window = ctx.window.size() / (self.mtu + PACKET_OVERHEAD);
        (window / ACKS_PER_WINDOW).clamp(*ACK_INTERVAL.start(), *ACK_INTERVAL.end()) as u32
    }

    /// Returns the destination address of the current work request.
    fn destination(&self) -> IpAddr {
        match self.sq.target(self.req.cur) {
            Target::Datagram(to) => to.av.remote,
            Target::Peer | Target::Srq(_) => self.attr.av.map_or(Ipv4Addr::UNSPECIFIED.into(), |av| av.remote),
        }
    }

    /// Sends the next packet of an unacknowledged service. It is complete when sent.
    fn emit_unacknowledged(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut impl TxSink,
        dest: IpAddr,
        to: Seq,
        cost: usize,
    ) -> Result<(), Unsent> {
        self.emit_request(self.req.cur, self.req.next, to, false, TxKind::Request, tx)?;
        ctx.paces.on_sent(ctx.now, dest, cost);
        self.note_sent(cost);
        let req = &mut self.req;
        req.cur += usize::from(to == self.sq.wqes[req.cur].end());
        (req.una, req.next, req.top) = (to, to, to);
        self.reap(ctx);
        Ok(())
    }

    /// Updates timers, counters and window after a packet was sent.
    fn on_sent(&mut self, ctx: &mut Ctx<'_>, to: Seq, cost: usize, ack_req: bool, retry: bool) {
        let req = &mut self.req;
        let wqe = &self.sq.wqes[req.cur];
        let is_read = wqe.kind() == Kind::Read;
        if req.una == req.next {
            req.timers.base = ctx.now;
        }
        if req.una == req.top {
            req.timers.interval = ctx.now;
            req.timers.backoff = 0;
            req.skipped = false;
        }
        if retry {
            ctx.counters.retransmits += 1;
            req.read_in_parts |= wqe.kind() == Kind::Read && to < wqe.request_end(req.next);
        } else {
            req.rd_outstanding += u32::from(wqe.has_response());
        }
        // After a timeout the answer may be to either transmission (Karn's rule); after a reported gap it can't.
        if ack_req && req.sample.is_none() && req.timers.backoff == 0 {
            req.sample = Some((req.next.plus(1), ctx.now));
        }
        req.since_ack_req = if ack_req { 0 } else { req.since_ack_req + 1 };
        ctx.window.on_sent(cost);
        req.in_flight += cost;
        req.next = to;
        req.cur += usize::from(to == wqe.end());
        req.top = req.top.max(req.next);
        // The data of a READ counts against the peer's DCQCN rate.
        if !is_read {
            self.note_sent(cost);
        }
    }

    /// Writes the request packet for the PSNs `seq..to` of the work request at `index` of the send queue.
    pub(crate) fn emit_request(
        &self,
        index: usize,
        seq: Seq,
        to: Seq,
        ack_req: bool,
        kind: TxKind,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let (wqe, target) = (&self.sq.wqes[index], self.sq.target(index));
        let index = seq.since(wqe.first);
        let opcode = self.wire(wqe.opcode(index));
        let info = opcode.info();
        let (offset, len) = wqe.payload(index, self.mtu);
        let (end, last_len) = wqe.slice(to.prev().since(wqe.first), self.mtu);
        let pad = len.wrapping_neg() & 3;
        let mut peer = self.peer;
        if let Target::Datagram(to) = target {
            peer = to.qpn;
            if !tx.direct(&to.av, peer) {
                return Err(Unsent::Fault(WcStatus::LocalQpOperationError));
            }
        }
        let mut bth = Bth::new(opcode, peer, seq.psn());
        bth.ack_req = ack_req;
        bth.pad = pad as u8;
        bth.solicited = wqe.flags.contains(SendFlags::SOLICITED)
            && info.position.ends()
            && (wqe.kind() == Kind::Send || info.has(ExtHeader::Imm));
        let mut header = Header::new(bth);
        fill_extended(&mut header, wqe, offset, end + last_len);
        self.fill_target(&mut header, target);
        let head = info.header_len;
        let out = tx.reserve(kind, head + len + pad).ok_or(Unsent::Full)?;
        header.emit(out);
        if len > 0 {
            let filled = wqe.data.read_at(offset, &mut out[head..head + len]);
            filled.map_err(|_| Unsent::Fault(WcStatus::LocalProtectionError))?;
            out[head + len..].fill(0);
        }
        tx.commit();
        Ok(())
    }

    /// Fills the DETH of a datagram or the XRCETH of an XRC message.
    fn fill_target(&self, header: &mut Header, target: &Target) {
        match *target {
            Target::Peer => {}
            Target::Datagram(to) => {
                header.deth = Some(Deth {
                    qkey: if to.qkey.is_controlled() { self.qkey() } else { to.qkey },
                    reserved: 0,
                    src_qp: self.config.qpn,
                });
            }
            Target::Srq(srqn) => header.xrceth = Some(XrcEth { reserved: 0, srqn }),
        }
    }

    /// Returns the Q_Key that datagrams to this queue pair must have.
    pub(crate) fn qkey(&self) -> QKey {
        match self.config.qp_type {
            QpType::Gsi => QKey::GSI,
            _ => QKey(self.attr.qkey.unwrap_or(0)),
        }
    }

    /// Sends the newest packet again, so that the peer acknowledges all packets or reports a gap.
    ///
    /// If the oldest outstanding request is a READ, its next part is requested instead.
    pub(crate) fn transmit_probe(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        let due = core::mem::take(&mut self.req.probe_due);
        if !due || self.req.una >= self.req.next || self.req.timers.rnr_until.is_some() {
            return Step::Idle;
        }
        let Some((index, from, to)) = self.probe_target(ctx) else {
            return Step::Idle;
        };
        match self.emit_request(index, from, to, true, TxKind::Retransmission, tx) {
            Err(Unsent::Full) => {
                self.req.probe_due = true;
                return Step::Full;
            }
            // The memory was deregistered: the next retransmission fails the work request.
            Err(Unsent::Fault(_)) => {}
            Ok(()) => {
                ctx.counters.tail_probes += 1;
                ctx.counters.retransmits += 1;
                let wqe = &self.sq.wqes[index];
                let read = wqe.kind() == Kind::Read;
                self.req.read_in_parts |= read && to < wqe.request_end(from);
                if read {
                    self.note_probed(ctx, from, to);
                }
                self.req.probed = read.then_some(to);
                self.req.tail_probe_sent = (!read).then_some(ctx.now);
            }
        }
        Step::Sent
    }

    /// Returns the packet that a probe sends: index of the work request, first PSN and one past the last PSN.
    fn probe_target(&self, ctx: &Ctx<'_>) -> Option<(usize, Seq, Seq)> {
        if let Some((index, wqe)) = self.oldest_read() {
            return Some((index, self.req.una, self.read_end(ctx, wqe, self.req.una)));
        }
        let last = self.req.next.prev();
        let upto = self.req.cur.saturating_add(1).min(self.sq.wqes.len());
        let is_last = |w: &SendWqe| w.packets > 0 && w.first <= last && last < w.end();
        let index = (0..upto).rev().find(|i| is_last(&self.sq.wqes[*i]))?;
        // Responses to a READ that is not the oldest would be dropped.
        (self.sq.wqes[index].kind() != Kind::Read).then_some((index, last, last.plus(1)))
    }

    /// Goes back to the oldest unacknowledged PSN (Go-Back-N), or starts selective recovery.
    pub(crate) fn go_back(&mut self, ctx: &mut Ctx<'_>, reason: GoBack) {
        if self.selective {
            return self.go_on(ctx, reason);
        }
        ctx.counters.completer_retry_err += u64::from(reason != GoBack::Rnr);
        let weight = core::mem::take(&mut self.req.in_flight);
        let unanswered = matches!(reason, GoBack::ProbeTimeout | GoBack::Timeout);
        match reason {
            GoBack::Rnr | GoBack::ProbeTimeout => ctx.window.forget(weight),
            GoBack::Timeout => {
                ctx.window.forget(weight);
                ctx.window.on_loss(ctx.now, Loss::Timeout, 0);
            }
            GoBack::Gap => {
                // Only one packet is known to be lost: the receiver drops all packets after a gap.
                let lost = weight.min(self.mtu);
                ctx.window.forget(weight - lost);
                ctx.window.on_loss(ctx.now, Loss::Gap, lost);
                self.req.rtt.on_loss();
            }
        }
        let req = &mut self.req;
        req.cautious = match reason {
            // The peer dropped all later packets, and may still have no receive work request.
            GoBack::Rnr => Some(req.una),
            GoBack::Gap => None,
            GoBack::ProbeTimeout | GoBack::Timeout if req.skipped => Some(req.una),
            GoBack::ProbeTimeout | GoBack::Timeout => req.cautious.or(Some(req.next)),
        };
        req.skipped &= unanswered;
        req.timed_out = unanswered && (req.timed_out || reason == GoBack::Timeout);
        req.next = req.una;
        req.cur = 0;
        req.since_ack_req = 0;
        req.sample = None;
        req.probe_due = false;
        req.last_go_back = Some((req.una, ctx.now));
        req.timers.base = ctx.now;
    }

    /// Returns the time when [`QueuePair::handle_timeout`] must be called next.
    pub fn next_timeout(&self) -> Option<Instant> {
        let replies = &self.resp.replies;
        let reply = [replies.paced_until, replies.held_until].into_iter().flatten().min();
        let reply = reply.filter(|_| self.may_reply());
        [
            self.next_request_timeout(),
            reply,
            self.req.paced_until,
            self.slowed_until,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn next_request_timeout(&self) -> Option<Instant> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            return None;
        }
        let timers = &self.req.timers;
        if timers.rnr_until.is_some() {
            return timers.rnr_until;
        }
        if self.req.una >= self.req.next {
            return None;
        }
        let retry = attribute(self.attr.timeout.unwrap_or(0)).map(|t| timers.interval + t);
        let pause = timers.base + self.req.rtt.pause();
        Some(retry.map_or(pause, |r| r.min(pause)))
    }

    /// Returns whether the oldest unacknowledged packet was already retransmitted.
    ///
    /// The peer reports a gap only once, so it does not report the loss of the retransmission.
    fn is_recovering(&self) -> bool {
        self.req.last_go_back.is_some_and(|(at, _)| at == self.req.una)
    }

    /// Runs the timers that are due. Calling it early is harmless.
    pub fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) {
        if self.resp.replies.paced_until.is_some_and(|at| at <= ctx.now) {
            self.resp.replies.paced_until = None;
        }
        if self.resp.replies.held_until.is_some_and(|at| at <= ctx.now) {
            self.resp.replies.held_until = None;
        }
        if self.req.paced_until.is_some_and(|at| at <= ctx.now) {
            self.req.paced_until = None;
        }
        self.slowed_until = self.slowed_until.filter(|at| *at > ctx.now);
        if self.next_request_timeout().is_none_or(|at| at > ctx.now) {
            return;
        }
        if self.req.timers.rnr_until.take().is_some() {
            self.req.timers.base = ctx.now;
            self.req.timers.interval = ctx.now;
            return;
        }
        let code = self.attr.timeout.unwrap_or(0);
        let mut timeout = self.req.rtt.is_timeout(self.req.timers.backoff);
        if attribute(code).is_some_and(|t| self.req.timers.interval + t <= ctx.now) {
            let Some(left) = self.req.retries_left.checked_sub(1) else {
                ctx.counters.retry_exceeded_err += 1;
                self.fail_head(ctx, WcStatus::RetryExceeded);
                return;
            };
            self.req.retries_left = left;
            self.req.timers.interval = ctx.now;
            timeout = true;
        }
        self.handle_probe_timeout(ctx, timeout);
    }

    /// Handles a probe timeout in stages: sends a probe, then goes back with one packet at a time.
    ///
    /// With `timeout` the wait was longer than packets can be late: all count as lost.
    fn handle_probe_timeout(&mut self, ctx: &mut Ctx<'_>, timeout: bool) {
        let stage = self.req.timers.backoff;
        self.req.timers.backoff += 1;
        self.req.rtt.on_silence();
        self.req.timers.base = ctx.now;
        // The next answer may be to either transmission (Karn's rule).
        self.req.sample = None;
        if timeout {
            ctx.counters.timeouts += 1;
            self.go_back(ctx, GoBack::Timeout);
        } else if self.is_recovering() {
            self.go_back(ctx, GoBack::ProbeTimeout);
        } else if self.oldest_is_long_read(ctx) && stage <= self.last_idle_read_stage() {
            // The responses may only be late, and all of them would be sent twice.
        } else if stage == 0 && self.req.probed != Some(self.req.una) {
            self.req.probe_due = true;
        } else {
            self.go_back(ctx, GoBack::ProbeTimeout);
        }
    }

    /// Returns index and work request of the oldest outstanding PSN, if it is a READ.
    fn oldest_read(&self) -> Option<(usize, &SendWqe)> {
        let una = self.req.una;
        let mut wqes = self.sq.wqes.iter().enumerate();
        let oldest = wqes.find(|(_, w)| w.packets > 0 && una < w.end());
        oldest.filter(|(_, w)| w.kind() == Kind::Read)
    }

    fn last_idle_read_stage(&self) -> u32 {
        match self.selective {
            true => LAST_IDLE_SELECTIVE_READ_STAGE,
            false => LAST_IDLE_READ_STAGE,
        }
    }

    /// Returns whether retransmitting the oldest packet would request more than [`READ_PROBE`] bytes of a READ.
    fn oldest_is_long_read(&self, ctx: &Ctx<'_>) -> bool {
        let una = self.req.una;
        let cost = |w: &SendWqe| w.cost(una, self.read_end(ctx, w, una), self.mtu);
        self.oldest_read().is_some_and(|(_, w)| cost(w) > READ_PROBE)
    }

    /// Ends sending one packet at a time, after an answer.
    ///
    /// If it acknowledges more than was retransmitted, the first transmission was only late: the rest is not
    /// retransmitted (as in F-RTO, RFC 5682).
    pub(crate) fn end_caution(&mut self, ctx: &mut Ctx<'_>, acknowledged: Seq, resent: Seq) {
        let Some(sent) = self.req.cautious.take() else {
            return;
        };
        let timed_out = core::mem::take(&mut self.req.timed_out);
        if self.selective {
            return;
        }
        if acknowledged <= resent {
            return;
        }
        if timed_out {
            ctx.counters.spurious_timeouts += 1;
            ctx.window.on_spurious_timeout();
        }
        let req = &mut self.req;
        if sent <= req.next {
            return;
        }
        let covered = self.sq.wqes.iter().take_while(|w| w.first < sent);
        let weight: usize = covered.map(|w| w.cost(req.next, sent, self.mtu)).sum();
        ctx.window.on_sent(weight);
        req.in_flight += weight;
        req.next = sent;
        req.cur = self.sq.wqes.iter().take_while(|w| is_sent(w, sent)).count();
        req.last_go_back = None;
    }
}

/// Returns whether a work request is entirely sent or executed if all PSNs before `to` are.
fn is_sent(wqe: &SendWqe, to: Seq) -> bool {
    matches!(wqe.progress, Progress::Started | Progress::Executed) && wqe.end() <= to
}

/// Fills the extended headers of a request. `offset..end` is the part of the message that a READ requests, bytes.
fn fill_extended(header: &mut Header, wqe: &SendWqe, offset: usize, end: usize) {
    let info = header.bth.opcode.info();
    if info.has(ExtHeader::Reth) {
        let RemoteAddr { addr, rkey } = match wqe.op {
            SendOp::Write(to) | SendOp::WriteWithImm(to, _) | SendOp::Read(to) | SendOp::AtomicWrite(to) => to,
            SendOp::Flush(flush) => flush.remote,
            _ => RemoteAddr::default(),
        };
        header.reth = Some(Reth {
            va: addr.wrapping_add(offset as u64),
            rkey,
            dma_len: match (wqe.kind(), &wqe.op) {
                (Kind::Read, _) => (end - offset) as u32,
                (_, SendOp::Flush(flush)) => flush.length,
                _ => wqe.len,
            },
        });
    }
    match wqe.op {
        SendOp::SendWithImm(imm) | SendOp::WriteWithImm(_, imm) if info.has(ExtHeader::Imm) => header.imm = Some(imm),
        SendOp::SendWithInv(key) if info.has(ExtHeader::Ieth) => header.ieth = Some(key),
        SendOp::Flush(flush) => {
            header.feth = Some(Feth {
                placement: flush.placement,
                selectivity: flush.selectivity,
                reserved: 0,
            });
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            header.atomic_eth = Some(AtomicEth {
                va: remote.addr,
                rkey: remote.rkey,
                swap_add: swap,
                compare,
            });
        }
        SendOp::FetchAdd { remote, add } => {
            header.atomic_eth = Some(AtomicEth {
                va: remote.addr,
                rkey: remote.rkey,
                swap_add: add,
                compare: 0,
            });
        }
        _ => {}
    }
}

/// Compares a PSN with the outstanding ones, `una..top`. `Equal`: it is one of them.
pub(crate) fn compare_outstanding(seq: Seq, una: Seq, top: Seq) -> Ordering {
    if seq < una {
        Ordering::Less
    } else if seq >= top {
        Ordering::Greater
    } else {
        Ordering::Equal
    }
}
