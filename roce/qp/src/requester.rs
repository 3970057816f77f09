//! The requester: turns work requests into request packets.

use core::cmp::Ordering;

use roce_bth::{AtomicEth, Bth, Header, Reth};
use roce_verbs::{AccessFlags, Instant, QpState, RemoteAddr, SendFlags, SendOp, WcStatus};

use crate::{
    ctx::{Ctx, WaitReason},
    qp::QueuePair,
    sendq::{Data, Kind, Progress, SendWqe, resolve},
    seq::{MAX_OUTSTANDING, Seq},
    timers::{Rtt, Timers, attribute},
    tx::{Step, TxKind, TxSink},
};

/// The most packets in a row without asking for an acknowledgement.
const ACK_EVERY: u32 = 16;

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
    /// READs and atomics that have started and not completed.
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
    sample: Option<(Seq, Instant)>,
    /// Where and when the requester went back last.
    pub(crate) went_back: Option<(Seq, Instant)>,
    /// The last packet shall be sent once more.
    probe_due: bool,
    /// The last attempt to send found the window closed.
    window_closed: bool,
    /// The drained send queue was reported.
    pub(crate) drained: bool,
}

/// Why the requester goes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Back {
    /// The peer saw a gap, or we saw one in its responses.
    Gap,
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
            window_closed: false,
            drained: false,
        }
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
enum Unsent {
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
        match wqe.progress {
            Progress::Failed(_) => Err(WaitReason::Local),
            Progress::Started | Progress::Executed => Ok(()),
            Progress::Posted if self.state == QpState::Sqd => Err(WaitReason::Draining),
            Progress::Posted => self.gate_start(wqe),
        }
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
            Ok(()) if self.req.window_closed => WaitReason::Window,
            Ok(()) => WaitReason::Ready,
        }
    }

    /// Sends one request packet, after executing the local operations that are due before it.
    pub(crate) fn transmit_request(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        self.req.window_closed = false;
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
            let cost = self.next_cost();
            if self.req.in_flight > 0 && ctx.window.available() < cost {
                self.req.window_closed = true;
                return Step::Blocked;
            }
            match self.emit_next(ctx, tx, cost) {
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

    /// Begins the current work request: checks its memory, or executes it if it is local.
    fn start(&mut self, ctx: &mut Ctx<'_>) {
        let (pd, qpn) = (self.config.pd, self.config.qpn);
        let wqe = &mut self.sq.wqes[self.req.cur];
        let need = match wqe.has_response() {
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
            _ => {
                wqe.progress = Progress::Started;
                self.req.rd_outstanding += u32::from(wqe.has_response());
                return;
            }
        };
        wqe.progress = match done {
            Ok(()) => Progress::Executed,
            Err(_) => Progress::Failed(failure),
        };
    }

    /// Weight of what the next packet puts in flight: for a READ, all its responses.
    fn next_cost(&self) -> usize {
        let wqe = &self.sq.wqes[self.req.cur];
        let to = match wqe.kind() {
            Kind::Read => wqe.end(),
            _ => self.req.next.plus(1),
        };
        wqe.cost(self.req.next, to, self.mtu)
    }

    fn emit_next(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink, cost: usize) -> Result<(), Unsent> {
        let seq = self.req.next;
        let wqe = &self.sq.wqes[self.req.cur];
        let again = seq < self.req.top;
        let last = wqe.kind() == Kind::Read || seq.plus(1) == wqe.end();
        // The peer must answer the packet that closes the window, or nothing would open it again.
        let closes = ctx.window.available().saturating_sub(cost) < self.mtu * 2;
        // What was lost once shall be known to have arrived as soon as possible.
        let retry = again && seq == self.req.una;
        let ask = last || closes || retry || self.req.unasked + 1 >= ACK_EVERY;
        let kind = if again { TxKind::Retransmission } else { TxKind::Request };
        self.emit_request(wqe, seq, ask, kind, tx)?;
        self.sent(ctx, cost, ask, again, last);
        Ok(())
    }

    /// Books a packet that went out.
    fn sent(&mut self, ctx: &mut Ctx<'_>, cost: usize, asked: bool, again: bool, last: bool) {
        let req = &mut self.req;
        let seq = req.next;
        if req.una == req.next {
            req.timers.base = ctx.now;
        }
        if req.una == req.top {
            req.timers.interval = ctx.now;
            req.timers.probed = false;
        }
        if again {
            ctx.counters.retransmits += 1;
        } else if asked && req.sample.is_none() {
            req.sample = Some((seq.plus(1), ctx.now));
        }
        req.unasked = if asked { 0 } else { req.unasked + 1 };
        ctx.window.on_sent(cost);
        req.in_flight += cost;
        req.next = match last {
            true => self.sq.wqes[req.cur].end(),
            false => seq.plus(1),
        };
        req.cur += usize::from(last);
        req.top = req.top.max(req.next);
    }

    /// Builds the request packet for one PSN of a work request.
    fn emit_request(
        &self,
        wqe: &SendWqe,
        seq: Seq,
        ask: bool,
        kind: TxKind,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let index = seq.since(wqe.first);
        let opcode = wqe.opcode(index);
        let info = opcode.info();
        let (offset, len) = match wqe.kind() {
            Kind::Send | Kind::Write => wqe.slice(index, self.mtu),
            _ => (wqe.slice(index, self.mtu).0, 0),
        };
        let pad = len.wrapping_neg() & 3;
        let mut bth = Bth::new(opcode, self.peer, seq.psn());
        bth.ack_req = ask;
        bth.pad = pad as u8;
        bth.solicited =
            wqe.flags.contains(SendFlags::SOLICITED) && info.position.ends() && (wqe.kind() == Kind::Send || info.imm);
        let mut header = Header::new(bth);
        fill_extended(&mut header, wqe, offset);
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

    /// Sends the last packet once more, so that the peer's answer tells whether something is missing.
    pub(crate) fn transmit_probe(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        if !self.req.probe_due || self.req.una >= self.req.next || self.req.timers.rnr_until.is_some() {
            self.req.probe_due = false;
            return Step::Idle;
        }
        let last = self.req.next.prev();
        let upto = self.req.cur.saturating_add(1).min(self.sq.wqes.len());
        let wqe = self
            .sq
            .wqes
            .range(..upto)
            .rev()
            .find(|w| w.packets > 0 && w.first <= last && last < w.end());
        let seq = match wqe {
            Some(w) if w.kind() != Kind::Read => last,
            // A READ is asked for again only when it is the oldest: what comes before it would be skipped.
            Some(w) if w.first <= self.req.una => self.req.una,
            _ => {
                self.req.probe_due = false;
                return Step::Idle;
            }
        };
        let Some(wqe) = wqe else { return Step::Idle };
        match self.emit_request(wqe, seq, true, TxKind::Retransmission, tx) {
            Err(Unsent::Full) => return Step::Full,
            // Memory is gone: the next retransmission finds out.
            Err(Unsent::Fault(_)) => {}
            Ok(()) => {
                ctx.counters.tail_probes += 1;
                ctx.counters.retransmits += 1;
            }
        }
        self.req.probe_due = false;
        Step::Sent
    }

    /// Starts over from the oldest unacknowledged PSN.
    pub(crate) fn go_back(&mut self, ctx: &mut Ctx<'_>, why: Back) {
        ctx.counters.completer_retry_err += u64::from(why != Back::Rnr);
        let weight = core::mem::take(&mut self.req.in_flight);
        match why {
            Back::Rnr => ctx.window.forget(weight),
            Back::Timeout => {
                ctx.window.forget(weight);
                ctx.window.on_timeout(ctx.now);
            }
            Back::Gap => {
                // One packet is known to be lost; the receiver dropped what came after it on purpose.
                let lost = weight.min(self.mtu);
                ctx.window.forget(weight - lost);
                ctx.window.on_loss(ctx.now, lost);
            }
        }
        let req = &mut self.req;
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
        let code = self.attr.timeout.unwrap_or(0);
        let retransmit = timers.base + self.req.rtt.rto(timers.backoff, code);
        let retry = attribute(code).map(|t| timers.interval + t);
        let probe = self.probe_at();
        [Some(retransmit), retry, probe].into_iter().flatten().min()
    }

    /// Whether what was sent last was a retransmission that nothing has come of yet. The peer reports a gap only once,
    /// so it will not tell when the retransmission is lost as well.
    fn is_recovering(&self) -> bool {
        self.req.went_back.is_some_and(|(at, _)| at == self.req.una)
    }

    /// When to act on silence before the timeout: probe for a lost tail once, repeat a retransmission with doubling
    /// pauses.
    fn probe_at(&self) -> Option<Instant> {
        let timers = &self.req.timers;
        let pause = self.req.rtt.probe()?;
        match self.is_recovering() {
            true => Some(timers.base + pause.saturating_mul(1 << timers.backoff.min(10))),
            false if timers.probed || timers.backoff > 0 => None,
            false => Some(timers.base + pause),
        }
    }

    /// Lets timers run out that are due. Calling it early does no harm.
    pub fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) {
        if self.next_timeout().is_none_or(|at| at > ctx.now) {
            return;
        }
        if self.req.timers.rnr_until.take().is_some() {
            self.req.timers.base = ctx.now;
            self.req.timers.interval = ctx.now;
            return;
        }
        let code = self.attr.timeout.unwrap_or(0);
        if attribute(code).is_some_and(|t| self.req.timers.interval + t <= ctx.now) {
            let Some(left) = self.req.retries_left.checked_sub(1) else {
                ctx.counters.retry_exceeded_err += 1;
                self.fail_head(ctx, WcStatus::RetryExceeded);
                return;
            };
            self.req.retries_left = left;
            self.req.timers.interval = ctx.now;
        }
        if self.req.timers.base + self.req.rtt.rto(self.req.timers.backoff, code) <= ctx.now {
            ctx.counters.timeouts += 1;
            self.req.timers.backoff += 1;
            self.go_back(ctx, Back::Timeout);
        } else if self.probe_at().is_some_and(|at| at <= ctx.now) {
            self.handle_silence(ctx);
        }
    }

    fn handle_silence(&mut self, ctx: &mut Ctx<'_>) {
        if !self.is_recovering() {
            self.req.timers.probed = true;
            self.req.probe_due = true;
            return;
        }
        self.req.timers.backoff += 1;
        // Twice is bad luck, more may be a peer that is gone or a path that is full.
        let why = if self.req.timers.backoff > 2 {
            Back::Timeout
        } else {
            Back::Gap
        };
        self.go_back(ctx, why);
    }
}

/// Fills the extended headers of a request. `offset` is where in the message it begins (a READ asked for again).
fn fill_extended(header: &mut Header, wqe: &SendWqe, offset: usize) {
    let info = header.bth.opcode.info();
    if info.reth {
        let RemoteAddr { addr, rkey } = match wqe.op {
            SendOp::Write(to) | SendOp::WriteWithImm(to, _) | SendOp::Read(to) => to,
            _ => RemoteAddr::default(),
        };
        header.reth = Some(Reth {
            va: addr.wrapping_add(offset as u64),
            rkey,
            dma_len: wqe.len - offset as u32,
        });
    }
    match wqe.op {
        SendOp::SendWithImm(imm) | SendOp::WriteWithImm(_, imm) if info.imm => header.imm = Some(imm),
        SendOp::SendWithInv(key) if info.ieth => header.ieth = Some(key),
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
