//! The requester: turns work requests into request packets.

use core::{
    cmp::Ordering,
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use roce_bth::{AtomicEth, Bth, Deth, Feth, Header, QKey, Reth, XrcEth};
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

/// Acknowledgements asked for in each window. Each costs both sides a system call.
const ACKS_PER_WINDOW: usize = 4;
/// Bounds for the packets from one that asks for an acknowledgement to the next. rdma_rxe asks every 64 packets.
const ACK_INTERVAL: RangeInclusive<usize> = 16..=64;

/// A window of fewer packets has every one acknowledged.
const SMALL_WINDOW: usize = 8;
/// READ responses asked for again in one piece are not more than this, bytes, as long as nobody answers.
const READ_PROBE: usize = 64 << 10;
/// Asking for more than that again waits for so many pauses: the peer may just be slow. One that keeps packets is left alone for fewer:
/// it has told of all that it has, so that what is asked for again is missing.
const READ_PATIENCE: u32 = 3;
const SELECTIVE_READ_PATIENCE: u32 = 0;

/// Where the requester and the completer are in the packet sequence, and what they wait for.
#[derive(Debug)]
pub(crate) struct Requester {
    /// The oldest PSN that is not acknowledged (READ: whose response has not come).
    pub(crate) una: Seq,
    /// The PSN to send next; goes back to `una` to retransmit.
    pub(crate) next: Seq,
    /// One past the highest PSN ever sent.
    pub(crate) top: Seq,
    /// Index in the send queue of the work request that `next` belongs to.
    pub(crate) cur: usize,
    /// Weight of `una..next` in the window.
    pub(crate) in_flight: usize,
    /// READ and atomic requests sent and not answered.
    pub(crate) rd_outstanding: u32,
    /// Packets since the last one that asked for an acknowledgement.
    unasked: u32,
    /// Retries left before the work request fails.
    pub(crate) retries_left: u8,
    /// RNR retries left.
    pub(crate) rnr_left: u8,
    pub(crate) timers: Timers,
    pub(crate) rtt: Rtt,
    /// A packet whose round trip is being measured: done when `una` reaches the number.
    pub(crate) sample: Option<(Seq, Instant)>,
    /// Where and when the requester went back last.
    pub(crate) went_back: Option<(Seq, Instant)>,
    /// A packet shall be sent once more, see [`QueuePair::transmit_probe`].
    probe_due: bool,
    /// Where the READ that was asked for again last ends. Silence again there: the others were lost, too.
    probed: Option<Seq>,
    /// After a silence, and when the peer was not ready, one packet goes out at a time, until something comes back. Up to
    /// this number everything was sent and may well have arrived.
    pub(crate) cautious: Option<Seq>,
    /// Responses behind a gap were dropped since everything from there was asked for again: they don't come again.
    pub(crate) skipped: bool,
    /// The silence before was a timeout.
    pub(crate) timed_out: bool,
    /// READs were asked for again in pieces, so that responses may end anywhere.
    pub(crate) read_in_pieces: bool,
    /// The last attempt to send found the window closed.
    window_closed: bool,
    /// The drained send queue was reported.
    pub(crate) drained: bool,
    /// Packets without acknowledgement wait for this.
    paced_until: Option<Instant>,
    /// What has become of packets in flight, towards a peer that tells.
    pub(crate) recovery: Recovery,
    /// When the newest packet was sent once more, to be told of all before it.
    pub(crate) asked_all: Option<Instant>,
    /// What the peer has said last that it waits for, until that is sent again.
    pub(crate) wanted: Option<Seq>,
    /// Requests before this have been executed: an acknowledgement or answer has said so.
    pub(crate) implied: Seq,
    /// Memory for what [`Recovery`] changes.
    pub(crate) changes: Vec<Change>,
}

/// Why the requester goes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Back {
    /// The peer saw a gap, or we saw one in its responses.
    Gap,
    /// Nothing came back for a while.
    Silence,
    /// Nothing came back for too long.
    Timeout,
    /// The peer had no receive work request.
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
            unasked: 0,
            retries_left: 0,
            rnr_left: 0,
            timers: Timers::default(),
            rtt: Rtt::default(),
            sample: None,
            went_back: None,
            probe_due: false,
            probed: None,
            cautious: None,
            skipped: false,
            timed_out: false,
            read_in_pieces: false,
            window_closed: false,
            drained: false,
            paced_until: None,
            recovery: Recovery::default(),
            asked_all: None,
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

    /// Something has come back: silence and retries count from here.
    pub(crate) fn heard(&mut self, now: Instant, retries: u8) {
        self.retries_left = retries;
        self.timers.base = now;
        self.timers.interval = now;
        self.timers.backoff = 0;
        self.rtt.on_progress();
    }

    /// The round trip that reaching `una` completes, if one was being measured.
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

/// Why a packet was not built.
pub(crate) enum Unsent {
    Full,
    Fault(WcStatus),
}

impl QueuePair {
    /// Whether the requester may go on with the current work request, as far as that depends on nothing shared.
    fn gate(&self) -> Result<(), WaitReason> {
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
        // What is further away the peer would not keep.
        if self.req.recovery.is_active() && self.req.next.since(self.req.una) >= max_window(self.mtu) {
            return Err(WaitReason::Psn);
        }
        match wqe.progress {
            Progress::Failed(_) => Err(WaitReason::Local),
            Progress::Executed => Ok(()),
            Progress::Started => self.gate_next(wqe),
            Progress::Posted if self.state == QpState::Sqd => Err(WaitReason::Draining),
            Progress::Posted => self.gate_start(wqe),
        }
    }

    fn gate_next(&self, wqe: &SendWqe) -> Result<(), WaitReason> {
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
        // The rest of what one request has asked for already is asked for piece by piece.
        if req.next > req.una && req.next > wqe.request_start(req.next) {
            return Err(WaitReason::Acks);
        }
        Ok(())
    }

    fn gate_start(&self, wqe: &SendWqe) -> Result<(), WaitReason> {
        if wqe.flags.contains(SendFlags::FENCE) && self.req.rd_outstanding > 0 {
            return Err(WaitReason::Fence);
        }
        // What was sent through the key may have to be read again (the local invalidate fence, IBA 10.6.5.1).
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

    /// Why the requester is not sending.
    pub fn wait_reason(&self) -> WaitReason {
        match self.gate() {
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
            if self.gate().is_err() {
                return Step::Idle;
            }
            match self.sq.wqes[self.req.cur].progress {
                Progress::Executed => {
                    self.req.cur += 1;
                    continue;
                }
                Progress::Posted => {
                    self.start(ctx);
                    self.reap(ctx);
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

    /// Begins the current work request: checks its memory, or executes it if it is local.
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
        wqe.progress = match done {
            Ok(()) => Progress::Executed,
            Err(_) => Progress::Failed(failure),
        };
    }

    /// Whether the window has room. A queue pair may always have one packet in flight. What a READ asks for may go
    /// beyond the window, by one request at a time: else it would wait for ever while others send.
    pub(crate) fn fits(&self, ctx: &Ctx<'_>, kind: Kind, cost: usize) -> bool {
        let room = ctx.window.available();
        let packet = self.mtu + PACKET_OVERHEAD;
        let alone = self.req.in_flight == 0 && cost <= packet;
        room >= cost || alone || (kind == Kind::Read && room >= packet)
    }

    /// One past the last PSN that the next packet takes: for a READ, those of all responses that it asks for.
    fn next_end(&self, ctx: &Ctx<'_>) -> Seq {
        let wqe = &self.sq.wqes[self.req.cur];
        match wqe.kind() {
            Kind::Read => self.read_end(ctx, wqe, self.req.next),
            _ => self.req.next.plus(1),
        }
    }

    /// How far a READ request from `seq` on asks. As long as no response has come, the peer may never have seen the
    /// request: then it must be repeated as it was.
    pub(crate) fn read_end(&self, ctx: &Ctx<'_>, wqe: &SendWqe, seq: Seq) -> Seq {
        let all = wqe.request_end(seq);
        // The peer has seen the request if anything behind it was answered: then only what is missing is asked for.
        let end = self.first_answered(seq, all);
        if seq == wqe.request_start(seq) && end == all {
            return end;
        }
        let bytes = match self.req.timers.backoff {
            // Pieces go one by one.
            0 => ctx.window.piece_limit(),
            _ => ctx.window.read_limit().min(READ_PROBE),
        };
        let packets = bytes / (self.mtu + PACKET_OVERHEAD);
        end.min(seq.plus(packets.max(1) as u64))
    }

    fn emit_next(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink, to: Seq, cost: usize) -> Result<(), Unsent> {
        let seq = self.req.next;
        let wqe = &self.sq.wqes[self.req.cur];
        let again = seq < self.req.top;
        let last = wqe.kind() == Kind::Read || to == wqe.end();
        // The peer must answer the packet that closes the window, or nothing would open it again.
        let closes = ctx.window.available().saturating_sub(cost) < self.mtu * 2;
        // Where losses are many, one lost answer must not mean silence.
        let lossy = again || ctx.window.size() < SMALL_WINDOW * (self.mtu + PACKET_OVERHEAD);
        let ask = last || closes || lossy || !self.knows_responder() || self.req.unasked + 1 >= self.ack_interval(ctx);
        let kind = if again { TxKind::Retransmission } else { TxKind::Request };
        self.emit_request(self.req.cur, seq, to, ask, kind, tx)?;
        self.sent(ctx, to, cost, ask, again);
        Ok(())
    }

    /// Packets from one that asks for an acknowledgement to the next.
    fn ack_interval(&self, ctx: &Ctx<'_>) -> u32 {
        let window = ctx.window.size() / (self.mtu + PACKET_OVERHEAD);
        (window / ACKS_PER_WINDOW).clamp(*ACK_INTERVAL.start(), *ACK_INTERVAL.end()) as u32
    }

    /// The address that the current work request's packets go to.
    fn destination(&self) -> IpAddr {
        match self.sq.target(self.req.cur) {
            Target::Datagram(to) => to.av.remote,
            Target::Peer | Target::Srq(_) => self.attr.av.map_or(Ipv4Addr::UNSPECIFIED.into(), |av| av.remote),
        }
    }

    /// Sends the next packet of a service without acknowledgements: what is sent is done.
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

    /// Books a packet that went out.
    fn sent(&mut self, ctx: &mut Ctx<'_>, to: Seq, cost: usize, asked: bool, again: bool) {
        let req = &mut self.req;
        let wqe = &self.sq.wqes[req.cur];
        let asks = wqe.kind() == Kind::Read;
        if req.una == req.next {
            req.timers.base = ctx.now;
        }
        if req.una == req.top {
            req.timers.interval = ctx.now;
            req.timers.backoff = 0;
            req.skipped = false;
        }
        if again {
            ctx.counters.retransmits += 1;
            req.read_in_pieces |= wqe.kind() == Kind::Read && to < wqe.request_end(req.next);
        } else {
            req.rd_outstanding += u32::from(wqe.has_response());
        }
        // After a reported gap it is clear which transmission is answered, after a silence it is not (Karn's rule).
        if asked && req.sample.is_none() && req.timers.backoff == 0 {
            req.sample = Some((req.next.plus(1), ctx.now));
        }
        req.unasked = if asked { 0 } else { req.unasked + 1 };
        ctx.window.on_sent(cost);
        req.in_flight += cost;
        req.next = to;
        req.cur += usize::from(to == wqe.end());
        req.top = req.top.max(req.next);
        // What a READ asks for is the peer's to send.
        if !asks {
            self.note_sent(cost);
        }
    }

    /// Builds the request packet for the PSNs `seq..to` of the work request at an index.
    pub(crate) fn emit_request(
        &self,
        index: usize,
        seq: Seq,
        to: Seq,
        ask: bool,
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
        bth.ack_req = ask;
        bth.pad = pad as u8;
        bth.solicited =
            wqe.flags.contains(SendFlags::SOLICITED) && info.position.ends() && (wqe.kind() == Kind::Send || info.imm);
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

    /// Fills the headers that say where a message goes behind the destination queue pair.
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

    /// The key that datagrams to this queue pair must have.
    pub(crate) fn qkey(&self) -> QKey {
        match self.config.qp_type {
            QpType::Gsi => QKey::GSI,
            _ => QKey(self.attr.qkey.unwrap_or(0)),
        }
    }

    /// Sends the newest packet once more: the peer acknowledges everything, or reports a gap. Of READs it is the oldest.
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
            // Memory is gone: the next retransmission finds out.
            Err(Unsent::Fault(_)) => {}
            Ok(()) => {
                ctx.counters.tail_probes += 1;
                ctx.counters.retransmits += 1;
                let wqe = &self.sq.wqes[index];
                let read = wqe.kind() == Kind::Read;
                self.req.read_in_pieces |= read && to < wqe.request_end(from);
                if read {
                    self.note_probed(ctx, from, to);
                }
                self.req.probed = read.then_some(to);
                self.req.asked_all = (!read).then_some(ctx.now);
            }
        }
        Step::Sent
    }

    /// What a probe sends: the index of the work request, and the PSNs of the packet.
    fn probe_target(&self, ctx: &Ctx<'_>) -> Option<(usize, Seq, Seq)> {
        if let Some((index, wqe)) = self.oldest_read() {
            return Some((index, self.req.una, self.read_end(ctx, wqe, self.req.una)));
        }
        let last = self.req.next.prev();
        let upto = self.req.cur.saturating_add(1).min(self.sq.wqes.len());
        let is_last = |w: &SendWqe| w.packets > 0 && w.first <= last && last < w.end();
        let index = (0..upto).rev().find(|i| is_last(&self.sq.wqes[*i]))?;
        // A READ that is not the oldest would be answered in vain.
        (self.sq.wqes[index].kind() != Kind::Read).then_some((index, last, last.plus(1)))
    }

    /// Starts over from the oldest unacknowledged PSN.
    pub(crate) fn go_back(&mut self, ctx: &mut Ctx<'_>, why: Back) {
        if self.selective {
            return self.go_on(ctx, why);
        }
        ctx.counters.completer_retry_err += u64::from(why != Back::Rnr);
        let weight = core::mem::take(&mut self.req.in_flight);
        let silent = matches!(why, Back::Silence | Back::Timeout);
        match why {
            Back::Rnr | Back::Silence => ctx.window.forget(weight),
            Back::Timeout => {
                ctx.window.forget(weight);
                ctx.window.on_loss(ctx.now, Loss::Timeout, 0);
            }
            Back::Gap => {
                // One packet is known to be lost; the receiver dropped what came after it on purpose.
                let lost = weight.min(self.mtu);
                ctx.window.forget(weight - lost);
                ctx.window.on_loss(ctx.now, Loss::Gap, lost);
            }
        }
        let req = &mut self.req;
        req.cautious = match why {
            // It dropped all that came behind, and may not be ready yet.
            Back::Rnr => Some(req.una),
            Back::Gap => None,
            Back::Silence | Back::Timeout if req.skipped => Some(req.una),
            Back::Silence | Back::Timeout => req.cautious.or(Some(req.next)),
        };
        req.skipped &= silent;
        req.timed_out = silent && (req.timed_out || why == Back::Timeout);
        req.next = req.una;
        req.cur = 0;
        req.unasked = 0;
        req.sample = None;
        req.probe_due = false;
        req.went_back = Some((req.una, ctx.now));
        req.timers.base = ctx.now;
    }

    /// When [`QueuePair::handle_timeout`] wants to be called next.
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

    /// Whether what was sent last was a retransmission that nothing has come of yet. The peer reports a gap only once,
    /// so it will not tell when the retransmission is lost as well.
    fn is_recovering(&self) -> bool {
        self.req.went_back.is_some_and(|(at, _)| at == self.req.una)
    }

    /// Lets timers run out that are due. Calling it early does no harm.
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
        self.handle_silence(ctx, timeout);
    }

    /// Silence has stages: the newest packet once more; everything anew, carefully; and when it lasts as long as nothing
    /// that is only late would, everything is taken for lost.
    fn handle_silence(&mut self, ctx: &mut Ctx<'_>, timeout: bool) {
        let stage = self.req.timers.backoff;
        self.req.timers.backoff += 1;
        self.req.rtt.on_silence();
        self.req.timers.base = ctx.now;
        // What comes now may be the answer to what is sent again (Karn's rule).
        self.req.sample = None;
        if timeout {
            ctx.counters.timeouts += 1;
            self.go_back(ctx, Back::Timeout);
        } else if self.is_recovering() {
            self.go_back(ctx, Back::Silence);
        } else if self.asks_much(ctx) && stage <= self.read_patience() {
            // If it is on its way, all of it would come twice.
        } else if stage == 0 && self.req.probed != Some(self.req.una) {
            self.req.probe_due = true;
        } else {
            self.go_back(ctx, Back::Silence);
        }
    }

    /// The work request that the oldest outstanding PSN belongs to, if it is a READ.
    fn oldest_read(&self) -> Option<(usize, &SendWqe)> {
        let una = self.req.una;
        let mut wqes = self.sq.wqes.iter().enumerate();
        let oldest = wqes.find(|(_, w)| w.packets > 0 && una < w.end());
        oldest.filter(|(_, w)| w.kind() == Kind::Read)
    }

    fn read_patience(&self) -> u32 {
        match self.selective {
            true => SELECTIVE_READ_PATIENCE,
            false => READ_PATIENCE,
        }
    }

    /// Whether sending the oldest packet means to ask for a long READ.
    fn asks_much(&self, ctx: &Ctx<'_>) -> bool {
        let una = self.req.una;
        let cost = |w: &SendWqe| w.cost(una, self.read_end(ctx, w, una), self.mtu);
        self.oldest_read().is_some_and(|(_, w)| cost(w) > READ_PROBE)
    }

    /// Something came back after a silence. When it acknowledges more than was sent since, the first transmission was not
    /// lost but late, and need not be repeated (the idea of F-RTO, RFC 5682).
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
        req.went_back = None;
    }
}

/// Whether all of a work request was done or sent, when everything before `to` was.
fn is_sent(wqe: &SendWqe, to: Seq) -> bool {
    matches!(wqe.progress, Progress::Started | Progress::Executed) && wqe.end() <= to
}

/// Fills the extended headers of a request. `offset` and `end` are the part of the message that a READ asks for.
fn fill_extended(header: &mut Header, wqe: &SendWqe, offset: usize, end: usize) {
    let info = header.bth.opcode.info();
    if info.reth {
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
        SendOp::SendWithImm(imm) | SendOp::WriteWithImm(_, imm) if info.imm => header.imm = Some(imm),
        SendOp::SendWithInv(key) if info.ieth => header.ieth = Some(key),
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

/// Where a number lies relative to what is outstanding.
pub(crate) fn place(seq: Seq, una: Seq, top: Seq) -> Ordering {
    if seq < una {
        Ordering::Less
    } else if seq >= top {
        Ordering::Greater
    } else {
        Ordering::Equal
    }
}
