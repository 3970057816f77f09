//! Sending of requests: what may be sent next, its packets, and the bookkeeping of what is sent for the first time.

use core::{
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
};

use roce_bth::{AtomicEth, Bth, Deth, ExtHeader, Feth, HeaderWriter, OpcodeInfo, Reth, XrcEth};
use roce_verbs::{Instant, QpState, QpType, RemoteAddr, SendFlags, SendOp, SendWr, Target, WcStatus};

use super::{Hold, Requester};
use crate::{
    context::{Call, QpContext},
    ctx::WaitReason,
    reorder::PACKETS,
    sendq::{Checked, Data, Kind, PACKET_OVERHEAD, Progress, SendWqe, op_info, packets_for, resolve},
    seq::{MAX_OUTSTANDING, Seq},
    tx::{Step, TxKind, TxSink},
};

/// Acknowledgements requested per window. Each costs both sides a system call.
const ACKS_PER_WINDOW: usize = 4;
/// Bounds of the distance between acknowledgement requests, packets. rdma_rxe requests one every 64 packets.
const ACK_INTERVAL: RangeInclusive<usize> = 16..=64;
/// Window, packets, below which every packet requests an acknowledgement.
const SMALL_WINDOW: usize = 8;

/// Reason why a packet was not sent: no space, an error that completes the work request, or pacing.
pub(super) enum Unsent {
    Full,
    Fault(WcStatus),
    /// Pacing permits no packet before this time.
    Paced(Instant),
}

/// A request packet: index of its work request in the send queue, and its PSNs; of a READ, those of the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(super) index: usize,
    pub(super) from: Seq,
    /// One past the last PSN.
    pub(super) to: Seq,
}

impl Requester {
    /// Queues a checked work request. `path_mtu` limits a datagram, bytes.
    pub(crate) fn post(&mut self, qp: &QpContext, wr: &SendWr<'_>, target: Target, checked: Checked, path_mtu: usize) {
        let Checked { len, fault } = checked;
        let row = op_info(&wr.op);
        let packets = match target {
            _ if fault.is_some() || row.kind == Kind::Local => 0,
            // A datagram that is too long is not sent, without an error (IBA C10-93.1.1).
            Target::Datagram(_) if len as usize > path_mtu.min(qp.mtu()) => 0,
            _ => packets_for(len, qp.mtu()),
        };
        // Field by field: a whole one would be built on the stack and copied. All fields are set.
        let wqe = self.sq.wqes.push();
        wqe.wr_id = wr.wr_id;
        wqe.op = wr.op;
        wqe.row = row;
        wqe.flags = wr.flags;
        wqe.progress = Progress::Posted;
        wqe.fault = fault;
        wqe.key_error = None;
        wqe.len = len;
        wqe.packets = packets;
        wqe.stride = 1;
        wqe.first = self.sq.tail;
        wqe.data = Data::new(&wr.payload);
        self.sq.tail = self.sq.tail.plus(u64::from(packets));
        if !matches!(qp.config().qp_type, QpType::Rc | QpType::Uc) {
            self.sq.targets.push_back(target);
        }
    }

    /// Checks whether the requester may send the next packet, except for window and pacing. Returns its work request.
    fn check_transmit(&self, qp: &QpContext) -> Result<&SendWqe, WaitReason> {
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
        if qp.is_selective() && self.scoreboard.is_active() && self.next.since(self.una) >= PACKETS {
            return Err(WaitReason::Psn);
        }
        match wqe.progress {
            Progress::Failed(_) => return Err(WaitReason::Local),
            Progress::Executed => {}
            Progress::Started => self.check_continue(qp, wqe)?,
            Progress::Posted if qp.state() == QpState::Sqd => return Err(WaitReason::Draining),
            Progress::Posted => self.check_start(qp, wqe)?,
        }
        Ok(wqe)
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
            None => self.check_transmit(qp).map(drop),
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
    pub(crate) fn prepare(&mut self, call: &mut Call<'_>) -> Option<Request> {
        self.hold = Hold::None;
        if let Some(from) = self.next_resend(call.qp) {
            self.check_lost(call.qp, from).ok()?;
            return self.lost_request(call, from);
        }
        loop {
            let wqe = self.check_transmit(call.qp).ok()?;
            match wqe.progress {
                Progress::Executed => self.cur += 1,
                Progress::Posted => {
                    self.start(call);
                    let wqe = &self.sq.wqes[self.cur];
                    if wqe.progress == Progress::Started {
                        self.check_continue(call.qp, wqe).ok()?;
                        return Some(self.new_request(wqe));
                    }
                    self.reap(call);
                }
                Progress::Started | Progress::Failed(_) => return Some(self.new_request(wqe)),
            }
        }
    }

    /// Returns the next request packet of the current work request.
    #[inline]
    fn new_request(&self, wqe: &SendWqe) -> Request {
        let (index, from) = (self.cur, self.next);
        let to = match wqe.kind() {
            Kind::Read => wqe.request_end(from),
            _ => from.plus(1),
        };
        Request { index, from, to }
    }

    /// Returns whether a request completes a receive of the peer, and the length of its packet without ICRC.
    pub(crate) fn outline(&self, qp: &QpContext, request: Request) -> (bool, usize) {
        let wqe = &self.sq.wqes[request.index];
        let index = request.from.since(wqe.first);
        let (_, len) = wqe.payload(index, qp.mtu());
        let head = qp.wire(wqe.opcode(index)).info().header_len;
        (wqe.completes_receive(), head + len.next_multiple_of(4))
    }

    /// Sends a request packet. Returns `None` if its work request has failed, and another one may be due.
    pub(crate) fn transmit(&mut self, call: &mut Call<'_>, request: Request, tx: &mut impl TxSink) -> Option<Step> {
        let Request { index, from, to } = request;
        let wqe = &self.sq.wqes[index];
        let cost = wqe.cost(from, to, call.qp.mtu());
        let fits = !call.qp.is_reliable() || self.fits(call, wqe.kind(), cost);
        let is_lost = from < self.next;
        // The packet that the peer waits for ignores the window: READ responses that fill it may wait for that packet.
        if !(fits || is_lost && self.scoreboard.is_wanted(from)) {
            self.hold = Hold::Window;
            return Some(Step::Blocked);
        }
        let sent = match call.qp.is_reliable() {
            true if is_lost => self.resend(call, request, tx),
            true => self.send_new(call, request, cost, tx),
            false => self.send_unreliable(call, request, cost, tx),
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
                call.counters.send_err += 1;
                self.sq.wqes[index].progress = Progress::Failed(status);
                self.reap(call);
                None
            }
        }
    }

    /// Starts the current work request: checks its memory, or executes it if it is local.
    fn start(&mut self, call: &mut Call<'_>) {
        let (pd, qpn) = (call.qp.config().pd, call.qp.qpn());
        let wqe = &mut self.sq.wqes[self.cur];
        if let Some(status) = wqe.fault {
            wqe.progress = Progress::Failed(status);
            return;
        }
        let need = wqe.local_rights();
        if let Data::Sges(sges) = &wqe.data {
            match resolve(&mut self.keys, call.mem, pd, sges, need) {
                Some(list) => wqe.data = Data::List(list),
                None => {
                    wqe.progress = Progress::Failed(WcStatus::LocalProtectionError);
                    return;
                }
            }
        }
        let (done, failure) = match &wqe.op {
            SendOp::LocalInvalidate(key) => (call.mem.invalidate(pd, qpn, *key), WcStatus::LocalQpOperationError),
            SendOp::FastRegister(args) => (call.mem.fast_register(pd, args), WcStatus::LocalQpOperationError),
            SendOp::BindWindow(args) => (call.mem.bind_window(pd, qpn, args), WcStatus::MwBindError),
            _ if wqe.packets == 0 => (Ok(()), WcStatus::Success),
            _ => {
                wqe.progress = Progress::Started;
                if wqe.kind() == Kind::Read {
                    let packets = call.window.read_limit() / (call.qp.mtu() + PACKET_OVERHEAD);
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
    pub(super) fn fits(&self, call: &Call<'_>, kind: Kind, cost: usize) -> bool {
        let room = call.window.available();
        let packet = call.qp.mtu() + PACKET_OVERHEAD;
        let alone = self.in_flight == 0 && cost <= packet;
        room >= cost || alone || (kind == Kind::Read && room >= packet)
    }

    /// Sends a packet for the first time.
    fn send_new(
        &mut self,
        call: &mut Call<'_>,
        request: Request,
        cost: usize,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let wqe = &self.sq.wqes[request.index];
        let ack_req = wqe.kind() == Kind::Read
            || request.to == wqe.end()
            || !call.qp.knows_responder()
            // Without an answer to the packet that closes the window, it would stay closed until a timeout.
            || call.window.available().saturating_sub(cost) < call.qp.mtu() * 2
            // On a lossy path one lost acknowledgement must not cause a timeout.
            || call.window.size() < SMALL_WINDOW * (call.qp.mtu() + PACKET_OVERHEAD)
            || self.since_ack_req + 1 >= ack_interval(call);
        self.emit_request(call.qp, (wqe, request), ack_req, TxKind::Request, tx)?;
        let (is_read, ends) = (wqe.kind() == Kind::Read, request.to == wqe.end());
        self.rd_outstanding += u32::from(wqe.has_response());
        if self.una == self.next {
            self.timers.restart(call.now);
            self.timers.backoff = 0;
            self.reads.skipped = false;
        }
        // After a silence the answer may be to another transmission (Karn's rule).
        if ack_req && self.sample.is_none() && self.timers.backoff == 0 {
            self.sample = Some((self.next.plus(1), call.now));
        }
        self.since_ack_req = if ack_req { 0 } else { self.since_ack_req + 1 };
        call.window.on_sent(cost);
        self.in_flight += cost;
        self.next = request.to;
        self.cur += usize::from(ends);
        // The data of a READ counts against the peer's DCQCN rate.
        if !is_read {
            call.qp.note_sent(cost);
        }
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
        call: &mut Call<'_>,
        request: Request,
        cost: usize,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let dest = self.destination(call.qp);
        call.paces.may_send(call.now, dest).map_err(Unsent::Paced)?;
        let wqe = &self.sq.wqes[request.index];
        self.emit_request(call.qp, (wqe, request), false, TxKind::Request, tx)?;
        call.paces.on_sent(call.now, dest, cost);
        call.qp.note_sent(cost);
        // A work request that ends here is the oldest one, which `reap` removes.
        (self.una, self.next) = (request.to, request.to);
        self.reap(call);
        Ok(())
    }

    /// Writes a request packet of a work request.
    pub(super) fn emit_request(
        &self,
        qp: &QpContext,
        (wqe, request): (&SendWqe, Request),
        ack_req: bool,
        kind: TxKind,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let Request { index, from, to } = request;
        let target = self.sq.target(index);
        let index = from.since(wqe.first);
        let opcode = qp.wire(wqe.opcode(index));
        let info = opcode.info();
        let (offset, len) = wqe.payload(index, qp.mtu());
        let pad = len.wrapping_neg() & 3;
        let mut peer = qp.peer();
        if let Target::Datagram(to) = target {
            peer = to.qpn;
            if !tx.direct(&to.av, peer) {
                return Err(Unsent::Fault(WcStatus::LocalQpOperationError));
            }
        }
        let mut bth = Bth::new(opcode, peer, from.psn());
        bth.ack_req = ack_req;
        bth.pad = pad as u8;
        bth.solicited = wqe.flags.contains(SendFlags::SOLICITED)
            && info.position.ends()
            && (wqe.kind() == Kind::Send || info.has(ExtHeader::Imm));
        let head = info.header_len;
        let out = tx.reserve(kind, head + len + pad).ok_or(Unsent::Full)?;
        let mut header = HeaderWriter::new(&bth, out);
        let requested = match wqe.kind() {
            Kind::Read => {
                let (last, len) = wqe.slice(to.prev().since(wqe.first), qp.mtu());
                last + len - offset
            }
            _ => wqe.len as usize,
        };
        write_extended(&mut header, info, wqe, offset, requested as u32);
        write_target(qp, &mut header, target);
        if len > 0 {
            // The pad, and payload that is written next.
            if let Some(last) = out.last_chunk_mut::<4>() {
                *last = [0; 4];
            }
            let filled = wqe.data.read_at(offset, &mut out[head..head + len]);
            filled.map_err(|_| Unsent::Fault(WcStatus::LocalProtectionError))?;
        }
        tx.commit();
        Ok(())
    }
}

/// Returns the distance between acknowledgement requests, packets.
fn ack_interval(call: &Call<'_>) -> u32 {
    let window = call.window.size() / (call.qp.mtu() + PACKET_OVERHEAD);
    (window / ACKS_PER_WINDOW).clamp(*ACK_INTERVAL.start(), *ACK_INTERVAL.end()) as u32
}

/// Writes the DETH of a datagram or the XRCETH of an XRC message.
fn write_target(qp: &QpContext, header: &mut HeaderWriter<'_>, target: &Target) {
    match *target {
        Target::Peer => {}
        Target::Datagram(to) => header.deth(Deth {
            qkey: if to.qkey.is_controlled() { qp.qkey() } else { to.qkey },
            reserved: 0,
            src_qp: qp.qpn(),
        }),
        Target::Srq(srqn) => header.xrceth(XrcEth { reserved: 0, srqn }),
    }
}

/// Writes the extended headers of a request for `len` bytes of the message from `offset` on.
fn write_extended(header: &mut HeaderWriter<'_>, info: &OpcodeInfo, wqe: &SendWqe, offset: usize, len: u32) {
    let RemoteAddr { addr, rkey } = wqe.remote().unwrap_or_default();
    if info.has(ExtHeader::Reth) {
        header.reth(Reth {
            va: addr.wrapping_add(offset as u64),
            rkey,
            dma_len: match &wqe.op {
                SendOp::Flush(flush) => flush.length,
                _ => len,
            },
        });
    }
    let atomic = |swap_add, compare| AtomicEth {
        va: addr,
        rkey,
        swap_add,
        compare,
    };
    match wqe.op {
        // Only the last packet of a message has them.
        SendOp::SendWithImm(imm) | SendOp::WriteWithImm(_, imm) => header.imm(imm),
        SendOp::SendWithInv(key) => header.ieth(key),
        SendOp::Flush(flush) => header.feth(Feth {
            placement: flush.placement,
            selectivity: flush.selectivity,
            reserved: 0,
        }),
        SendOp::CompareSwap { compare, swap, .. } => header.atomic_eth(atomic(swap, compare)),
        SendOp::FetchAdd { add, .. } => header.atomic_eth(atomic(add, 0)),
        _ => {}
    }
}
