//! Responder: takes each request through named stages until it is executed or refused.

use core::{cmp::Ordering, time::Duration};

use std::{collections::VecDeque, sync::Arc};

use roce_bth::{Class, ExtHeader, Msn, NakCode, Opcode, Packet, Placement, RnrTimer, Selectivity, Service, Syndrome};
use roce_mem::{AtomicError, FlushError, PdHandle, Span};
use roce_verbs::{AccessFlags, AsyncEvent, Completion, QpState, QpType, RKey, WcFlags, WcOpcode, WcStatus};

use crate::{
    completer::nak_status,
    ctx::Ctx,
    persist::{Flushing, PersistJob},
    qp::QueuePair,
    recvq::{ActiveRecv, ReceiveQueue},
    reorder::{BufferedPacket, PACKETS, ReorderBuffer},
    replies::{AckDue, ReadReply, Replies, Resource, Work},
    sendq::{packets_for, resolve},
    seq::{MAX_OUTSTANDING, Seq},
    srq::SharedReceiveQueue,
};

/// Largest gap reported with a NAK, PSNs.
///
/// A forged packet further ahead would make the peer retransmit everything. If the request of a longer READ is lost,
/// the peer's timeout recovers it.
const MAX_GAP: u64 = PACKETS;
/// Age up to which a duplicate SEND or WRITE is acknowledged, PSNs. A peer has far fewer outstanding.
const RECENT: u64 = 1 << 14;

/// Message being received.
#[derive(Debug)]
pub(crate) enum Inbound {
    /// Between messages.
    Idle,
    /// SEND; bytes received.
    Send(usize),
    /// RDMA WRITE: its memory (`None` for 0 bytes), bytes received and total length.
    Write {
        span: Option<Span>,
        received: u32,
        len: u32,
    },
}

/// Receive queues that a queue pair does not see for the time of one packet.
#[derive(Debug)]
pub struct HiddenReceives {
    own: Arc<ReceiveQueue>,
    shared: Option<Arc<SharedReceiveQueue>>,
}

/// State of the responder.
#[derive(Debug)]
pub(crate) struct Responder {
    /// PSN expected next.
    pub(crate) expected: Seq,
    /// Messages completed.
    pub(crate) msn: Msn,
    pub(crate) inbound: Inbound,
    /// Receive work request of the current message.
    pub(crate) receive: Option<ActiveRecv>,
    /// Shared receive queue of the current or last XRC message.
    pub(crate) srq: Option<Arc<SharedReceiveQueue>>,
    /// A gap or a missing receive was reported: drop out-of-order packets until `expected` arrives.
    reported: bool,
    /// The current packet is the one that a report requested.
    resumed: bool,
    /// An in-order packet has arrived since RTR.
    pub(crate) established: bool,
    /// In error, with a refusal still to send.
    pub(crate) closing: bool,
    pub(crate) replies: Replies,
    /// Packets beyond a gap, or behind a FLUSH in progress.
    pub(crate) reorder: Option<Box<ReorderBuffer>>,
    /// FLUSH in progress: execute nothing behind it.
    pub(crate) flushing: Option<Box<Flushing>>,
    /// Job of the FLUSH in progress, until the driver takes it.
    pub(crate) persist_job: Option<PersistJob>,
    /// Result of that job, for the FLUSH that now resumes.
    pub(crate) persisted: Option<Result<(), FlushError>>,
}

/// Progress of a request packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Processed {
    Done,
    /// FLUSH in progress.
    Started,
}

impl Inbound {
    /// Returns the bytes of the message received so far.
    pub(crate) fn received(&self) -> usize {
        match self {
            Self::Idle => 0,
            Self::Send(received) => *received,
            Self::Write { received, .. } => *received as usize,
        }
    }
}

impl Responder {
    pub(crate) fn new(first: Seq) -> Self {
        Self {
            expected: first,
            msn: Msn::new(0),
            inbound: Inbound::Idle,
            receive: None,
            srq: None,
            reported: false,
            resumed: false,
            established: false,
            closing: false,
            replies: Replies::new(first),
            reorder: None,
            flushing: None,
            persist_job: None,
            persisted: None,
        }
    }
}

/// Reason why a request is not executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No receive work request is posted.
    NoReceive,
    /// Middle or last packet without a first.
    MissingFirst,
    /// New message before the last packet of the previous one.
    MissingLast,
    /// The queue pair does not permit the operation.
    Operation,
    /// More READs and atomics than negotiated.
    TooManyRdAtomic,
    /// Payload length wrong for its position in the message.
    Length,
    /// The message is longer than the receive work request.
    ReceiveTooShort,
    /// Invalid key, range or access, or revoked memory.
    RKey,
    /// Misaligned atomic.
    Misaligned,
    /// The memory of the receive work request can't be written.
    LocalProtection,
    /// A SEND may not invalidate its key.
    Invalidate,
    /// The shared receive queue is not in the XRC domain.
    SharedQueue,
    /// Memory could not be made persistent.
    Persist,
}

impl Refusal {
    /// Returns the status that the peer's work request gets; of those that the peer is not told of, our own.
    pub(crate) fn status(self) -> WcStatus {
        let row = refusal_row(self);
        row.nak.and_then(nak_status).unwrap_or(row.status)
    }

    /// Returns the reason in words.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::NoReceive => "no receive is posted",
            Self::MissingFirst => "its first packet is missing",
            Self::MissingLast => "the message before lacks its last packet",
            Self::Operation => "the operation or its fields are not valid for this queue pair",
            Self::TooManyRdAtomic => "more READs and atomics at once than max_dest_rd_atomic",
            Self::Length => "its length does not fit its packets, or the path MTU of the two sides differs",
            Self::ReceiveTooShort => "it is longer than the receive",
            Self::RKey => "its memory is not accessible",
            Self::Misaligned => "the address is not a multiple of 8",
            Self::LocalProtection => "the memory of the receive is not accessible",
            Self::Invalidate => "it may not invalidate the key that it names",
            Self::SharedQueue => "the XRC domain has no shared receive queue of the number that it names",
            Self::Persist => "the memory could not be made persistent",
        }
    }
}

/// Effects of a refusal on both sides (IBA table 57 and 9.9.3; `rxe_resp.c`).
struct RefusalRow {
    /// NAK for the peer. `None`: acknowledge the request, only our side fails (class J).
    nak: Option<NakCode>,
    /// Status of the receive work request, if the message has taken one.
    status: WcStatus,
    /// Event if it has taken none.
    event: fn(roce_verbs::Qpn) -> AsyncEvent,
}

const fn refusal_row(refusal: Refusal) -> RefusalRow {
    let invalid = RefusalRow {
        nak: Some(NakCode::InvalidRequest),
        status: WcStatus::RemoteInvalidRequestError,
        event: AsyncEvent::QpRequestError,
    };
    match refusal {
        Refusal::NoReceive
        | Refusal::MissingFirst
        | Refusal::MissingLast
        | Refusal::Operation
        | Refusal::TooManyRdAtomic
        | Refusal::Length
        | Refusal::Misaligned => invalid,
        Refusal::ReceiveTooShort => RefusalRow {
            status: WcStatus::LocalLengthError,
            ..invalid
        },
        // The status concerns the receive of an RDMA WRITE with immediate data (IBA 11.6.2).
        Refusal::RKey => RefusalRow {
            nak: Some(NakCode::RemoteAccessError),
            status: WcStatus::LocalAccessError,
            event: AsyncEvent::QpAccessError,
        },
        Refusal::SharedQueue => RefusalRow {
            event: AsyncEvent::QpAccessError,
            ..invalid
        },
        Refusal::Persist => RefusalRow {
            nak: Some(NakCode::RemoteOperationalError),
            status: WcStatus::LocalQpOperationError,
            event: AsyncEvent::QpFatal,
        },
        Refusal::LocalProtection => RefusalRow {
            nak: Some(NakCode::RemoteOperationalError),
            status: WcStatus::LocalProtectionError,
            event: AsyncEvent::QpFatal,
        },
        Refusal::Invalidate => RefusalRow {
            nak: None,
            status: WcStatus::RemoteInvalidRequestError,
            event: AsyncEvent::QpRequestError,
        },
    }
}

impl QueuePair {
    /// GET_REQ: processes a request packet.
    pub(crate) fn handle_request(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        if !self.may_receive(ctx) {
            return;
        }
        if self.resp.flushing.is_some() {
            self.wait_for_flush(ctx, packet);
            return;
        }
        let Some(seq) = self.chk_psn(ctx, packet) else { return };
        self.note_established(ctx);
        self.run_request(ctx, seq, packet, seq);
    }

    /// Executes the expected packet and those buffered behind it. `arrived`: the packet received last.
    pub(crate) fn run_request(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>, arrived: Seq) {
        match self.process(ctx, seq, packet) {
            Ok(Processed::Done) => self.process_buffered(ctx, arrived),
            Ok(Processed::Started) => {}
            Err(refusal) => self.refuse(ctx, seq, refusal, Some(packet)),
        }
        self.fail_on_overflow(ctx);
    }

    /// Takes the expected packet through the stages from CHK_OP_SEQ to ACKNOWLEDGE.
    fn process(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> Result<Processed, Refusal> {
        self.chk_op_seq(packet)?;
        self.chk_shared_queue(packet)?;
        self.chk_op_valid(packet)?;
        self.chk_resource(ctx, packet)?;
        self.chk_length(packet)?;
        self.chk_rkey(ctx, packet)?;
        if packet.header.bth.opcode.info().class == Class::Flush && self.start_flush(ctx, seq, packet)? {
            return Ok(Processed::Started);
        }
        self.execute(ctx, seq, packet)?;
        self.complete(ctx, packet);
        self.acknowledge(ctx, packet);
        Ok(Processed::Done)
    }

    /// Executes buffered packets if the packet just executed closed the gap. `arrived`: the packet received last.
    fn process_buffered(&mut self, ctx: &mut Ctx<'_>, arrived: Seq) {
        self.note_outstanding();
        if self.resp.reorder.as_ref().is_none_or(|buffer| buffer.is_empty()) {
            return;
        }
        let refused = self.execute_buffered(ctx);
        self.note_outstanding();
        let expected = self.resp.expected;
        let Some(buffer) = &mut self.resp.reorder else { return };
        match refused {
            // The peer resends the packet, which is refused then.
            Some((Refusal::NoReceive, _)) if !self.selective => {}
            Some((refusal @ Refusal::NoReceive, packet)) => {
                buffer.put_back(expected, packet);
                self.refuse(ctx, expected, refusal, None);
            }
            Some((refusal, packet)) => self.refuse(ctx, expected, refusal, Some(&packet.packet())),
            None => {}
        }
        if let Some(buffer) = &mut self.resp.reorder {
            buffer.advance(expected);
        }
        let replies = &mut self.resp.replies;
        match (self.selective, replies.ack) {
            (_, AckDue::Refuse(..)) => {}
            // The peer waits for a report that the gap is closed and where the next gap is.
            (true, _) => replies.ack_due(ctx, Duration::ZERO),
            // Acknowledge only what the peer has resent: rdma_rxe never completes a message that is acknowledged as a
            // whole before it has resent all of it (specs/kernel.md).
            (false, AckDue::Ack) if replies.executed.0 > arrived.plus(1) => replies.ack_now(AckDue::Duplicate(arrived)),
            (false, _) => {}
        }
    }

    /// Updates the reorder buffer's record of PSNs that the peer had outstanding.
    fn note_outstanding(&mut self) {
        let outstanding = self.resp.expected.since(self.resp.replies.acked());
        if let Some(buffer) = &mut self.resp.reorder {
            buffer.note_outstanding(outstanding);
        }
    }

    /// Executes buffered packets up to the next gap or refusal. Returns the refused packet.
    fn execute_buffered(&mut self, ctx: &mut Ctx<'_>) -> Option<(Refusal, BufferedPacket)> {
        while self.takes_requests() && self.resp.flushing.is_none() {
            let expected = self.resp.expected;
            let buffered = self.resp.reorder.as_mut()?.take(expected)?;
            if let Err(refusal) = self.process(ctx, expected, &buffered.packet()) {
                return Some((refusal, buffered));
            }
        }
        None
    }

    /// Buffers a packet beyond a gap. Returns true if a selective ACK reports the gap, so that it needs no NAK.
    fn buffer_ahead(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> bool {
        let (expected, mtu) = (self.resp.expected, self.mtu);
        // A response would implicitly acknowledge more than the peer has resent.
        let is_simple = matches!(packet.header.bth.opcode.info().class, Class::Send | Class::Write);
        let Some(buffer) = self.resp.reorder.as_mut().filter(|_| self.selective || is_simple) else {
            return false;
        };
        if !self.selective {
            buffer.insert(expected, seq, packet, mtu);
            return false;
        }
        match buffer.insert(expected, seq, packet, mtu) {
            true => ctx.counters.out_of_seq_request += 1,
            false => ctx.counters.dropped_requests += 1,
        }
        // Don't replace a pending refusal: it reports that the expected packet was not executed.
        if !buffer.is_empty() && !matches!(self.resp.replies.ack, AckDue::Refuse(..)) {
            self.resp.replies.ack_now(AckDue::Ack);
        }
        true
    }

    /// Returns whether the state accepts requests; counts a dropped packet if not.
    pub(crate) fn may_receive(&self, ctx: &mut Ctx<'_>) -> bool {
        let may = self.takes_requests();
        ctx.counters.dropped_state += u64::from(!may);
        may
    }

    /// Reports the first packet of a connection in RTR as an event.
    ///
    /// Call only for packets at the expected PSN: others may be forged.
    pub(crate) fn note_established(&mut self, ctx: &mut Ctx<'_>) {
        if self.resp.established {
            return;
        }
        self.resp.established = true;
        if self.state == QpState::Rtr {
            ctx.events
                .push_back(AsyncEvent::CommunicationEstablished(self.config.qpn));
        }
    }

    /// CHK_PSN: passes only the expected packet, reports a gap once and answers duplicates.
    fn chk_psn(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) -> Option<Seq> {
        let expected = self.resp.expected;
        let seq = expected.nearest(packet.header.bth.psn);
        match seq.cmp(&expected) {
            Ordering::Equal => {
                self.resp.resumed = core::mem::take(&mut self.resp.reported);
                // The gap closed before its NAK was sent. Send the acknowledgement that the NAK may have replaced.
                if matches!(self.resp.replies.ack, AckDue::Refuse(..)) {
                    self.resp.replies.ack_now(AckDue::Ack);
                }
                Some(seq)
            }
            Ordering::Greater if self.buffer_ahead(ctx, seq, packet) => None,
            Ordering::Greater => {
                if self.resp.reported || seq.since(expected) > MAX_GAP {
                    ctx.counters.dropped_requests += 1;
                } else {
                    ctx.counters.out_of_seq_request += 1;
                    self.resp.reported = true;
                    let nak = Syndrome::Nak(NakCode::PsnSequenceError);
                    self.resp.replies.ack_now(AckDue::Refuse(expected, nak));
                }
                None
            }
            Ordering::Less => {
                self.answer_duplicate(ctx, seq, packet);
                None
            }
        }
    }

    /// CHK_OP_SEQ: checks that messages are complete and don't overlap.
    fn chk_op_seq(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let starts = info.position.starts();
        match (&self.resp.inbound, info.class) {
            (Inbound::Idle, _) if starts => Ok(()),
            (Inbound::Idle, _) => Err(Refusal::MissingFirst),
            (Inbound::Send(_), Class::Send) | (Inbound::Write { .. }, Class::Write) if !starts => Ok(()),
            _ => Err(Refusal::MissingLast),
        }
    }

    /// Finds the shared receive queue that an XRC message names (IBA Annex A14). Its PD applies to keys.
    fn chk_shared_queue(&mut self, packet: &Packet<'_>) -> Result<(), Refusal> {
        if self.service != Service::Xrc || !packet.header.bth.opcode.info().position.starts() {
            return Ok(());
        }
        self.resp.srq = self.named_queue(packet);
        match self.resp.srq {
            Some(_) => Ok(()),
            None => Err(Refusal::SharedQueue),
        }
    }

    fn named_queue(&self, packet: &Packet<'_>) -> Option<Arc<SharedReceiveQueue>> {
        self.config.xrcd.as_ref()?.find(packet.header.xrceth()?.srqn)
    }

    /// Returns the protection domain for checks of the peer's keys.
    pub(crate) fn key_domain(&self) -> PdHandle {
        self.resp.srq.as_ref().map_or(self.config.pd, |srq| srq.pd())
    }

    /// CHK_OP_VALID: checks that the queue pair permits the operation (IBA 9.7.4.1.3).
    pub(crate) fn chk_op_valid(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let need = match packet.header.bth.opcode.info().class {
            Class::Flush => flush_rights(packet).ok_or(Refusal::Operation)?,
            Class::Write | Class::AtomicWrite => AccessFlags::REMOTE_WRITE,
            Class::ReadRequest => AccessFlags::REMOTE_READ,
            Class::Atomic => AccessFlags::REMOTE_ATOMIC,
            _ => AccessFlags::empty(),
        };
        match self.access.contains(need) {
            true => Ok(()),
            false => Err(Refusal::Operation),
        }
    }

    /// CHK_RESOURCE: takes a receive work request, or makes room for a response.
    fn chk_resource(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        match info.class {
            Class::Send if info.position.starts() => self.take_receive(ctx, true),
            Class::Write if info.has(ExtHeader::Imm) => self.take_receive(ctx, false),
            Class::ReadRequest | Class::Atomic | Class::Flush | Class::AtomicWrite => {
                let max = usize::from(self.attr.max_dest_rd_atomic.unwrap_or(0));
                match self.resp.replies.make_room(max) {
                    true => Ok(()),
                    false => Err(Refusal::TooManyRdAtomic),
                }
            }
            _ => Ok(()),
        }
    }

    /// Returns whether a packet is the expected start of a message that takes a receive work request here, but for its length and
    /// memory. Reliable connected queue pairs only.
    fn would_take_receive(&self, packet: &Packet<'_>) -> bool {
        let info = packet.header.bth.opcode.info();
        let takes = match info.class {
            Class::Send => info.position.starts(),
            Class::Write => info.has(ExtHeader::Imm),
            _ => false,
        };
        takes
            && self.config.qp_type == QpType::Rc
            && self.takes_requests()
            && self.resp.flushing.is_none()
            && packet.header.bth.psn == self.resp.expected.psn()
            && self.chk_op_seq(packet).is_ok()
            && self.chk_op_valid(packet).is_ok()
    }

    /// Takes the receive queues away until [`QueuePair::restore_receives`], if the packet would find a receive work request in them: it
    /// is refused as by a receiver that is not ready, and changes nothing else. `None`: the packet needs none.
    pub fn hide_receives(&mut self, packet: &Packet<'_>) -> Option<HiddenReceives> {
        let none = ReceiveQueue::new(&self.config.caps);
        self.would_take_receive(packet).then(|| HiddenReceives {
            own: core::mem::replace(&mut self.rq, none),
            shared: self.config.srq.take(),
        })
    }

    /// Gives the receive queues back.
    pub fn restore_receives(&mut self, hidden: HiddenReceives) {
        self.rq = hidden.own;
        self.config.srq = hidden.shared;
    }

    pub(crate) fn take_receive(&mut self, ctx: &mut Ctx<'_>, with_memory: bool) -> Result<(), Refusal> {
        let shared = self.config.srq.as_ref().or(self.resp.srq.as_ref());
        let (wqe, pd) = match shared {
            None => (self.rq.pop().ok_or(Refusal::NoReceive)?, self.config.pd),
            Some(srq) => {
                let (wqe, low) = srq.take().ok_or(Refusal::NoReceive)?;
                if low {
                    ctx.events.push_back(AsyncEvent::SrqLimitReached(srq.handle()));
                }
                (wqe, srq.pd())
            }
        };
        let list = match with_memory {
            true => resolve(ctx.mem, pd, &wqe.sges, AccessFlags::LOCAL_WRITE),
            false => Some(roce_mem::SgList::new()),
        };
        let found = list.is_some();
        self.resp.receive = Some(ActiveRecv {
            wqe,
            list: list.unwrap_or_default(),
        });
        if found { Ok(()) } else { Err(Refusal::LocalProtection) }
    }

    /// CHK_LENGTH: checks packet and message lengths (IBA 9.7.4.1.6).
    ///
    /// All packets but the last are full, and the last of several is not empty.
    pub(crate) fn chk_length(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let len = packet.payload.len();
        let position = info.position;
        let shape = match (position.starts(), position.ends()) {
            (_, false) => len == self.mtu,
            (false, true) => len >= 1 && len <= self.mtu,
            (true, true) => len <= self.mtu,
        };
        if !shape {
            return Err(Refusal::Length);
        }
        match info.class {
            Class::Send => {
                let before = if let Inbound::Send(n) = self.resp.inbound { n } else { 0 };
                let room = self.resp.receive.as_ref().map_or(0, |r| r.list.len());
                if before + len > self.config.max_msg_size as usize {
                    return Err(Refusal::Length);
                }
                match before + len <= room {
                    true => Ok(()),
                    false => Err(Refusal::ReceiveTooShort),
                }
            }
            Class::Write => {
                let left = match (&self.resp.inbound, packet.header.reth()) {
                    (Inbound::Write { received, len, .. }, _) => len - received,
                    (_, Some(reth)) if reth.dma_len <= self.config.max_msg_size => reth.dma_len,
                    _ => return Err(Refusal::Length),
                } as usize;
                // The last packet completes the message, any other doesn't.
                match if position.ends() { len == left } else { len < left } {
                    true => Ok(()),
                    false => Err(Refusal::Length),
                }
            }
            Class::ReadRequest => match packet.header.reth() {
                Some(reth) if reth.dma_len <= self.config.max_msg_size => Ok(()),
                _ => Err(Refusal::Length),
            },
            Class::AtomicWrite => match packet.header.reth() {
                Some(reth) if reth.dma_len == 8 && len == 8 => Ok(()),
                _ => Err(Refusal::Length),
            },
            _ => Ok(()),
        }
    }

    pub(crate) fn remote_span(
        &self,
        ctx: &Ctx<'_>,
        pd: PdHandle,
        rkey: RKey,
        va: u64,
        len: u32,
        need: AccessFlags,
    ) -> Result<Option<Span>, Refusal> {
        if len == 0 {
            return Ok(None);
        }
        let qpn = self.config.qpn;
        let span = ctx.mem.resolve_remote(pd, qpn, rkey, va, len, need);
        span.map(Some).map_err(|_| Refusal::RKey)
    }

    /// CHK_RKEY: checks the whole range of a message with its first packet (IBA 9.7.4.1.5).
    pub(crate) fn chk_rkey(&mut self, ctx: &Ctx<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        if info.class == Class::Write
            && let Some(reth) = packet.header.reth()
        {
            self.resp.inbound = Inbound::Write {
                span: self.remote_span(
                    ctx,
                    self.key_domain(),
                    reth.rkey,
                    reth.va,
                    reth.dma_len,
                    AccessFlags::REMOTE_WRITE,
                )?,
                received: 0,
                len: reth.dma_len,
            };
        }
        Ok(())
    }

    /// EXECUTE: copies the payload and advances the responder to the next packet.
    pub(crate) fn execute(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let mut packets = 1;
        match info.class {
            Class::Send => self.execute_send(ctx, packet)?,
            Class::Write => self.execute_write(packet)?,
            Class::ReadRequest => packets = self.execute_read(ctx, seq, packet)?,
            Class::Atomic => self.execute_atomic(ctx, seq, packet)?,
            Class::AtomicWrite => self.execute_atomic_write(ctx, seq, packet)?,
            // `start_flush` has executed it.
            Class::Flush => self.add_resource(ctx, seq, 1, Work::Done),
            _ => return Err(Refusal::Operation),
        }
        self.resp.expected = seq.plus(u64::from(packets));
        if info.position.ends() {
            // A READ counts when accepted (IBA C9-148), other messages when executed.
            self.resp.msn = self.resp.msn.next();
            self.resp.inbound = match (info.class, core::mem::replace(&mut self.resp.inbound, Inbound::Idle)) {
                // COMPLETE still needs the length.
                (Class::Send | Class::Write, inbound) if self.resp.receive.is_some() => inbound,
                _ => Inbound::Idle,
            };
        }
        if info.class != Class::ReadRequest {
            self.resp.replies.executed = (self.resp.expected, self.resp.msn);
        }
        Ok(())
    }

    fn execute_send(&mut self, ctx: &Ctx<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let before = if let Inbound::Send(n) = self.resp.inbound { n } else { 0 };
        let receive = self.resp.receive.as_ref().ok_or(Refusal::NoReceive)?;
        let written = receive.list.write_at(before, packet.payload);
        written.map_err(|_| Refusal::LocalProtection)?;
        if let Some(key) = packet.header.ieth() {
            let done = ctx.mem.invalidate(self.key_domain(), self.config.qpn, key);
            done.map_err(|_| Refusal::Invalidate)?;
        }
        self.resp.inbound = Inbound::Send(before + packet.payload.len());
        Ok(())
    }

    fn execute_write(&mut self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let Inbound::Write { span, received, .. } = &mut self.resp.inbound else {
            return Err(Refusal::MissingFirst);
        };
        if let Some(span) = span {
            let written = span.write(*received as usize, packet.payload);
            written.map_err(|_| Refusal::RKey)?;
        }
        *received += packet.payload.len() as u32;
        Ok(())
    }

    fn execute_read(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> Result<u32, Refusal> {
        let reth = packet.header.reth().unwrap_or_default();
        let packets = packets_for(reth.dma_len, self.mtu);
        if u64::from(packets) > MAX_OUTSTANDING {
            return Err(Refusal::Length);
        }
        let span = self.remote_span(
            ctx,
            self.key_domain(),
            reth.rkey,
            reth.va,
            reth.dma_len,
            AccessFlags::REMOTE_READ,
        )?;
        let work = Work::Read(ReadReply {
            va: reth.va,
            rkey: reth.rkey,
            len: reth.dma_len,
            span,
            begin: 0,
            sent: ctx.now,
            offset: 0,
            end: reth.dma_len,
            opens: true,
            more: VecDeque::new(),
        });
        self.add_resource(ctx, seq, packets, work);
        Ok(packets)
    }

    fn execute_atomic(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> Result<(), Refusal> {
        let eth = packet.header.atomic_eth().unwrap_or_default();
        // An invalid request takes precedence over a forbidden one (IBA 9.7.4.1).
        if !eth.va.is_multiple_of(8) {
            return Err(Refusal::Misaligned);
        }
        let span = self.remote_span(ctx, self.key_domain(), eth.rkey, eth.va, 8, AccessFlags::REMOTE_ATOMIC)?;
        let span = span.ok_or(Refusal::RKey)?;
        let swap = matches!(packet.header.bth.opcode, Opcode::RcCompareSwap | Opcode::XrcCompareSwap);
        let done = match swap {
            true => span.compare_swap(eth.compare, eth.swap_add),
            false => span.fetch_add(eth.swap_add),
        };
        self.add_resource(ctx, seq, 1, Work::Atomic(done.map_err(atomic_refusal)?));
        Ok(())
    }

    /// Writes 8 bytes atomically (IBA Annex A19). A duplicate only gets the response again.
    fn execute_atomic_write(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> Result<(), Refusal> {
        let reth = packet.header.reth().unwrap_or_default();
        if !reth.va.is_multiple_of(8) {
            return Err(Refusal::Misaligned);
        }
        let span = self.remote_span(ctx, self.key_domain(), reth.rkey, reth.va, 8, AccessFlags::REMOTE_WRITE)?;
        let span = span.ok_or(Refusal::RKey)?;
        let bytes = packet.payload.try_into().map_err(|_| Refusal::Length)?;
        span.store(bytes).map_err(atomic_refusal)?;
        self.add_resource(ctx, seq, 1, Work::Done);
        Ok(())
    }

    fn add_resource(&mut self, ctx: &mut Ctx<'_>, first: Seq, packets: u32, work: Work) {
        self.resp.replies.ack_implied(ctx);
        self.resp.replies.push(Resource {
            first,
            packets,
            msn: self.resp.msn.next(),
            work,
            pending: true,
            replay: false,
        });
    }

    /// COMPLETE: completes the receive work request at the end of a message.
    pub(crate) fn complete(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        let info = packet.header.bth.opcode.info();
        if !info.position.ends() {
            return;
        }
        let Some(receive) = self.resp.receive.take() else {
            return;
        };
        let (opcode, byte_len) = match core::mem::replace(&mut self.resp.inbound, Inbound::Idle) {
            Inbound::Send(n) => (WcOpcode::Recv, n as u32),
            Inbound::Write { len, .. } => (WcOpcode::RecvRdmaWithImm, len),
            Inbound::Idle => (WcOpcode::Recv, 0),
        };
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::WITH_IMM, info.has(ExtHeader::Imm));
        flags.set(WcFlags::WITH_INV, info.has(ExtHeader::Ieth));
        ctx.counters.rdma_recvs += 1;
        let completion = Completion {
            wr_id: receive.wqe.wr_id,
            status: WcStatus::Success,
            opcode,
            byte_len,
            imm: packet.header.imm().unwrap_or(0),
            invalidated: packet.header.ieth().unwrap_or_default(),
            qpn: self.config.qpn,
            src_qp: self.peer,
            flags,
            solicited: packet.header.bth.solicited,
            ..Completion::default()
        };
        self.push_recv(ctx, completion);
    }

    /// ACKNOWLEDGE: acknowledges a SEND or WRITE on request, or when the peer resumes after a report.
    ///
    /// rdma_rxe decrements its retry count for every NAK and restores it only for acknowledgements (`rxe_comp.c`:
    /// `check_ack`). Without the second case, a long message fails on a lossy path although it makes progress.
    fn acknowledge(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        let class = packet.header.bth.opcode.info().class;
        let needed = packet.header.bth.ack_req || self.resp.resumed;
        if matches!(class, Class::Send | Class::Write) && needed {
            // After a reported gap the requester waits for the acknowledgement before it sends more.
            let hold = self.resp.replies.policy.on_received(ctx.now);
            let hold = if self.resp.resumed { Duration::ZERO } else { hold };
            self.resp.replies.ack_due(ctx, hold);
        }
    }

    /// Answers a duplicate request (IBA 9.7.5.1.2).
    ///
    /// Acknowledges a SEND or WRITE again, repeats a READ, and replays the saved result of an atomic.
    pub(crate) fn answer_duplicate(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) {
        ctx.counters.duplicate_request += 1;
        match packet.header.bth.opcode.info().class {
            // Too old: the peer can't be waiting for this acknowledgement.
            Class::Send | Class::Write if self.resp.expected.since(seq) > RECENT => ctx.counters.dropped_requests += 1,
            Class::Send | Class::Write if self.selective => self.resp.replies.ack_due(ctx, Duration::ZERO),
            Class::Send | Class::Write => self.resp.replies.ack_duplicate(ctx, seq),
            Class::ReadRequest => self.duplicate_read(ctx, seq, packet),
            class @ (Class::Atomic | Class::AtomicWrite | Class::Flush) => {
                let saved = self.resp.replies.find(seq);
                match (class, saved.map(|r| &r.work)) {
                    (Class::Atomic, Some(Work::Atomic(_))) | (Class::AtomicWrite | Class::Flush, Some(Work::Done)) => {
                        self.resp.replies.replay(seq);
                    }
                    _ => ctx.counters.dropped_requests += 1,
                }
            }
            _ => ctx.counters.dropped_opcode += 1,
        }
    }

    /// Answers a duplicate READ request, which must be all or part of the original.
    fn duplicate_read(&mut self, ctx: &mut Ctx<'_>, seq: Seq, packet: &Packet<'_>) {
        let mtu = self.mtu as u64;
        let reth = packet.header.reth().unwrap_or_default();
        let Some((first, va, rkey, len)) = self.resp.replies.find(seq).and_then(|r| match &r.work {
            Work::Read(read) => Some((r.first, read.va, read.rkey, read.len)),
            Work::Atomic(_) | Work::Done => None,
        }) else {
            ctx.counters.dropped_requests += 1;
            return;
        };
        let offset = seq.since(first) * mtu;
        let fits = reth.rkey == rkey
            && reth.va == va.wrapping_add(offset)
            && offset + u64::from(reth.dma_len) <= u64::from(len);
        if !fits {
            ctx.counters.dropped_requests += 1;
            return;
        }
        // Check access again, but don't fail the queue pair: this may be a late copy of a completed READ whose key has
        // been revoked since. The peer ignores the NAK then.
        let pd = match self.service {
            Service::Xrc => self.named_queue(packet).map(|srq| srq.pd()),
            _ => Some(self.config.pd),
        };
        let Some(pd) = pd else {
            ctx.counters.dropped_requests += 1;
            return;
        };
        let Ok(span) = self.remote_span(ctx, pd, rkey, va, len, AccessFlags::REMOTE_READ) else {
            ctx.counters.naks_sent += 1;
            if self.resp.replies.ack == AckDue::No {
                let nak = Syndrome::Nak(NakCode::RemoteAccessError);
                self.resp.replies.ack_now(AckDue::Refuse(seq, nak));
            }
            return;
        };
        let selective = self.selective;
        if let Some(Resource {
            work: Work::Read(read),
            pending,
            ..
        }) = self.resp.replies.find(seq)
        {
            if selective && *pending {
                // Other parts of the READ are still being sent.
                read.span = span;
                let part = (offset as u32, offset as u32 + reth.dma_len);
                ctx.counters.duplicate_parts += u64::from(read.add(part));
                return;
            }
            let again = offset as u32;
            let silence = ctx.now.saturating_since(read.sent);
            let arrived = again.saturating_sub(read.begin) as usize;
            let lost = read.offset.saturating_sub(again) as usize;
            if !selective {
                ctx.window.on_response_loss(ctx.now, silence, arrived, lost);
            }
            read.more.clear();
            read.span = span;
            read.begin = again;
            read.offset = again;
            read.end = offset as u32 + reth.dma_len;
            read.opens = true;
        }
        self.resp.replies.replay(seq);
    }

    /// Refuses a request: with an RNR NAK if only the receive work request is missing, else fatally. `packet` is `None` for a READ
    /// that fails while its data is sent.
    pub(crate) fn refuse(&mut self, ctx: &mut Ctx<'_>, seq: Seq, refusal: Refusal, packet: Option<&Packet<'_>>) {
        if refusal == Refusal::NoReceive {
            ctx.counters.send_rnr_err += 1;
            self.resp.reported = true;
            let timer: RnrTimer = self.attr.min_rnr_timer.unwrap_or_default();
            self.resp.replies.ack_now(AckDue::Refuse(seq, Syndrome::Rnr(timer)));
            return;
        }
        self.note_refusal(ctx, refusal, packet);
        let row = refusal_row(refusal);
        self.resp.inbound = Inbound::Idle;
        // What is being received when a READ's data can't be sent is a later request's, and is flushed.
        match packet.and_then(|_| self.resp.receive.take()) {
            Some(receive) => self.complete_receive_error(ctx, receive.wqe.wr_id, row.status),
            None => ctx.events.push_back((row.event)(self.config.qpn)),
        }
        self.resp.closing = true;
        let last = match row.nak {
            Some(code) => {
                ctx.counters.naks_sent += 1;
                AckDue::Refuse(seq, Syndrome::Nak(code))
            }
            None => {
                self.resp.expected = seq.plus(1);
                self.resp.msn = self.resp.msn.next();
                self.resp.replies.executed = (self.resp.expected, self.resp.msn);
                AckDue::Ack
            }
        };
        self.resp.replies.ack_now(last);
        self.enter_error(ctx);
    }

    pub(crate) fn complete_receive_error(&mut self, ctx: &mut Ctx<'_>, wr_id: u64, status: WcStatus) {
        let completion = Completion {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qpn: self.config.qpn,
            ..Completion::default()
        };
        self.push_recv(ctx, completion);
    }

    /// Completes the current and all posted receive work requests with a flush error.
    pub(crate) fn flush_receives(&mut self, ctx: &mut Ctx<'_>) {
        self.resp.inbound = Inbound::Idle;
        if let Some(receive) = self.resp.receive.take() {
            self.complete_receive_error(ctx, receive.wqe.wr_id, WcStatus::FlushError);
        }
        let mut rq = self.rq.follow(QpState::Err);
        while let Some(wqe) = rq.pop() {
            self.complete_receive_error(ctx, wqe.wr_id, WcStatus::FlushError);
        }
    }
}

fn atomic_refusal(e: AtomicError) -> Refusal {
    match e {
        AtomicError::Access(_) => Refusal::RKey,
        AtomicError::Misaligned => Refusal::Misaligned,
    }
}

/// Returns the access flags that a FLUSH needs. `None`: its placement is empty or a field has a reserved value.
pub(crate) fn flush_rights(packet: &Packet<'_>) -> Option<AccessFlags> {
    let feth = packet.header.feth()?;
    let known = Placement::GLOBAL_VISIBILITY.union(Placement::PERSISTENT);
    if feth.placement == Placement::default() || !known.contains(feth.placement) {
        return None;
    }
    let mut need = AccessFlags::empty();
    need.set(
        AccessFlags::FLUSH_GLOBAL,
        feth.placement.contains(Placement::GLOBAL_VISIBILITY),
    );
    need.set(
        AccessFlags::FLUSH_PERSISTENT,
        feth.placement.contains(Placement::PERSISTENT),
    );
    (!matches!(feth.selectivity, Selectivity::Reserved(_))).then_some(need)
}
