//! Responses still to be sent: READ data, atomic results and at most one acknowledgement.

use core::time::Duration;
use std::collections::VecDeque;

use roce_bth::{Aeth, Bth, Credits, HeaderWriter, Msn, NakCode, Opcode, Syndrome};
use roce_verbs::mem::Span;
use roce_verbs::{Instant, RKey};

use crate::{
    ack_policy::AckPolicy,
    context::{Call, QpContext, in_service},
    refusal::Refusal,
    reorder::ReorderBuffer,
    sendq::PACKET_OVERHEAD,
    seq::Seq,
    tx::{Step, TxKind, TxSink},
};

/// Bytes of the expected PSN in a selective acknowledgement.
pub(crate) const EXPECTED_LEN: usize = 4;
/// BTH, AETH and the expected PSN: the shortest selective acknowledgement, bytes.
const SELECTIVE_ACK_LEN: usize = 12 + 4 + EXPECTED_LEN;
/// Longest acknowledgement that is padded to the length of the request that follows it, bytes.
const LONGEST_PADDED_ACK: usize = 256;
/// Largest number of executed packets whose acknowledgement may be delayed.
const HELD_PACKETS: u64 = 8;

/// READ request with the progress of its responses.
#[derive(Clone, Debug)]
pub(crate) struct ReadReply {
    /// Virtual address, key and length (bytes) in the first request's RETH.
    pub(crate) va: u64,
    pub(crate) rkey: RKey,
    pub(crate) len: u32,
    /// Memory read; `None` for 0 bytes.
    pub(crate) span: Option<Span>,
    /// Start of the part requested last, bytes from the start of the message.
    pub(crate) begin: u32,
    /// Start of the next response's payload, bytes from the start of the message.
    pub(crate) offset: u32,
    /// End of the part requested last, bytes from the start of the message.
    pub(crate) end: u32,
    /// Time when the last response was sent.
    pub(crate) sent: Instant,
    /// The next response is the first of the part (`First` or `Only`).
    pub(crate) opens: bool,
    /// Start and end of further parts requested again, bytes from the start of the message.
    pub(crate) more: VecDeque<(u32, u32)>,
}

/// Largest number of parts of a READ queued to be sent again. Requests beyond it are dropped.
const MAX_PARTS: usize = 256;

impl ReadReply {
    /// Returns whether the current part has been sent.
    fn is_sent(&self) -> bool {
        !self.opens && self.offset >= self.end
    }

    /// Queues a part to be sent again after the current one.
    ///
    /// Returns false if the current part still covers it, or if [`MAX_PARTS`] are queued.
    pub(crate) fn add(&mut self, part: (u32, u32)) -> bool {
        let covered = part.0 >= self.offset && part.1 <= self.end;
        if covered || self.more.len() >= MAX_PARTS {
            return false;
        }
        self.more.push_back(part);
        true
    }

    /// Makes a part the current one.
    pub(crate) fn start(&mut self, (begin, end): (u32, u32)) {
        (self.begin, self.offset, self.end, self.opens) = (begin, begin, end, true);
    }

    /// Makes the next queued part the current one. Returns false if none is queued.
    fn next_part(&mut self) -> bool {
        let next = self.more.pop_front();
        next.inspect(|part| self.start(*part)).is_some()
    }
}

/// Result of a request, from which its response is built.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Read(ReadReply),
    /// Value before the atomic.
    Atomic(u64),
    /// FLUSH or ATOMIC WRITE that has been executed.
    Done,
}

/// Responder resource of an accepted READ or atomic. It outlives the response, to answer duplicates (IBA 9.7.5.1.2).
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    pub(crate) first: Seq,
    pub(crate) packets: u32,
    pub(crate) msn: Msn,
    pub(crate) work: Work,
    /// The response must be sent, or sent again.
    pub(crate) pending: bool,
    /// The response was sent before.
    pub(crate) replay: bool,
}

/// Acknowledgement to send after the responses to all requests before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AckDue {
    No,
    /// Acknowledge all executed requests.
    Ack,
    /// Acknowledge a duplicate and all packets before it.
    ///
    /// The specification also permits acknowledging everything executed. But rdma_rxe hangs if the last acknowledgement
    /// goes beyond what it has resent (`rxe_comp.c`: nothing to retry while `req.psn` is not after `comp.psn`).
    Duplicate(Seq),
    /// Refuse the request with this PSN.
    Refuse(Seq, Syndrome),
}

/// Acknowledgement that may be due, with the responder's state that it reports.
#[derive(Debug)]
pub(crate) struct Acknowledgement<'a> {
    pub(crate) replies: &'a mut Replies,
    /// PSN expected next.
    pub(crate) expected: Seq,
    /// Messages completed.
    pub(crate) msn: Msn,
    /// Packets buffered beyond a gap.
    pub(crate) buffered: Option<&'a ReorderBuffer>,
}

/// Responses and acknowledgements still to be sent.
#[derive(Debug)]
pub(crate) struct Replies {
    resources: VecDeque<Resource>,
    /// Index before which no resource is pending.
    first_pending: usize,
    ack: AckDue,
    /// Time until which the acknowledgement is delayed, to be sent with a request.
    held_until: Option<Instant>,
    policy: AckPolicy,
    /// One past the PSN acknowledged last.
    acked: Seq,
    /// Time before which no READ response is sent: they are paced by the peer's window.
    paced_until: Option<Instant>,
    /// First PSN of the peer's requests.
    first: Seq,
    /// One past the last PSN of the last SEND, WRITE or atomic executed, and the MSN for its acknowledgement.
    executed: (Seq, Msn),
    /// The queue pair is in error, and only the acknowledgement that is due may still be sent.
    closing: bool,
}

impl Replies {
    pub(crate) fn new(first: Seq) -> Self {
        Self {
            resources: VecDeque::new(),
            first_pending: 0,
            ack: AckDue::No,
            held_until: None,
            policy: AckPolicy::default(),
            acked: first,
            paced_until: None,
            first,
            executed: (first, Msn::new(0)),
            closing: false,
        }
    }

    /// Returns the acknowledgement that is due.
    pub(crate) fn ack(&self) -> AckDue {
        self.ack
    }

    /// Returns whether an acknowledgement is due, perhaps after a delay.
    pub(crate) fn is_due(&self) -> bool {
        self.ack != AckDue::No
    }

    /// Returns whether a NAK or RNR NAK is due.
    pub(crate) fn is_refusing(&self) -> bool {
        matches!(self.ack, AckDue::Refuse(..))
    }

    /// Returns one past the last PSN of the last SEND, WRITE or atomic executed.
    pub(crate) fn executed(&self) -> Seq {
        self.executed.0
    }

    /// Records the execution of all requests before `end`, `msn` messages.
    pub(crate) fn set_executed(&mut self, end: Seq, msn: Msn) {
        self.executed = (end, msn);
    }

    /// Records a request that the program posts.
    pub(crate) fn on_posted(&mut self, now: Instant) {
        self.policy.on_posted(now);
    }

    /// Schedules an acknowledgement that the peer requests. `at_once`: without the delay that the policy permits.
    pub(crate) fn ack_requested(&mut self, call: &mut Call<'_>, at_once: bool) {
        let hold = self.policy.on_received(call.now);
        self.ack_due(call, if at_once { Duration::ZERO } else { hold });
    }

    /// Sends only the acknowledgement that is due, the last one before the queue pair fails.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Enters the error state: drops everything but a last acknowledgement.
    pub(crate) fn stop(&mut self) {
        if !self.closing {
            self.clear();
        }
    }

    /// Ends the delay of the acknowledgement: a request has been sent, and both form one train.
    pub(crate) fn release(&mut self) {
        self.held_until = None;
    }

    /// Returns the time when [`Replies::handle_timeout`] must be called next.
    pub(crate) fn next_timeout(&self, qp: &QpContext) -> Option<Instant> {
        let at = [self.paced_until, self.held_until].into_iter().flatten().min();
        at.filter(|_| self.may_reply(qp))
    }

    /// Ends the waits that are over.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.paced_until.is_some_and(|at| at <= now) {
            self.paced_until = None;
        }
        if self.held_until.is_some_and(|at| at <= now) {
            self.held_until = None;
        }
    }

    /// Returns one past the PSN acknowledged last.
    pub(crate) fn acked(&self) -> Seq {
        self.acked
    }

    /// Evicts old resources until another one fits. Returns false if the oldest of `max` has not been answered yet.
    pub(crate) fn make_room(&mut self, max: usize) -> bool {
        while self.resources.len() >= max {
            match self.resources.front() {
                // The peer exceeds the negotiated limit: it can't have the response to this one.
                Some(r) if r.pending && !r.replay => return false,
                None => return false,
                Some(_) => {
                    self.resources.pop_front();
                    self.first_pending = self.first_pending.saturating_sub(1);
                }
            }
        }
        true
    }

    pub(crate) fn push(&mut self, resource: Resource) {
        self.first_pending = self.first_pending.min(self.resources.len());
        // The response acknowledges everything before it.
        self.acked = self.acked.max(resource.first);
        self.resources.push_back(resource);
    }

    pub(crate) fn find(&mut self, seq: Seq) -> Option<&mut Resource> {
        let index = self.index_of(seq)?;
        self.resources.get_mut(index)
    }

    fn index_of(&self, seq: Seq) -> Option<usize> {
        self.resources
            .iter()
            .position(|r| r.first <= seq && seq.since(r.first) < u64::from(r.packets))
    }

    /// Marks the resource with this PSN as pending again.
    pub(crate) fn replay(&mut self, seq: Seq) {
        if let Some(index) = self.index_of(seq)
            && let Some(resource) = self.resources.get_mut(index)
        {
            resource.pending = true;
            resource.replay = true;
            self.first_pending = self.first_pending.min(index);
        }
    }

    /// Returns the oldest pending resource.
    fn next_pending(&mut self) -> Option<&mut Resource> {
        while !self.resources.get(self.first_pending)?.pending {
            self.first_pending += 1;
        }
        self.resources.get_mut(self.first_pending)
    }

    /// Schedules an acknowledgement of everything executed, delayed by at most `hold`.
    pub(crate) fn ack_due(&mut self, call: &mut Call<'_>, hold: Duration) {
        let first = self.ack == AckDue::No;
        if !first {
            call.counters.ack_deferred += 1;
        }
        self.ack = AckDue::Ack;
        if hold.is_zero() || self.executed.0.since(self.acked) >= HELD_PACKETS {
            self.held_until = None;
        } else if first {
            self.held_until = Some(call.now + hold);
        }
    }

    /// Schedules `ack` without delay, in place of the acknowledgement due before.
    pub(crate) fn ack_now(&mut self, ack: AckDue) {
        self.ack = ack;
        self.held_until = None;
    }

    /// Returns whether nothing is due now.
    pub(crate) fn is_idle(&self) -> bool {
        let pending = self.resources.iter().skip(self.first_pending).any(|r| r.pending);
        !self.ack_waits() && !pending
    }

    /// Returns whether an acknowledgement is due that is not delayed.
    pub(crate) fn ack_waits(&self) -> bool {
        self.is_due() && !self.is_held()
    }

    /// Returns whether the acknowledgement is delayed.
    fn is_held(&self) -> bool {
        self.held_until.is_some() && self.ack == AckDue::Ack
    }

    /// Schedules the acknowledgement of a duplicate. Any other acknowledgement that is due covers it.
    pub(crate) fn ack_duplicate(&mut self, call: &mut Call<'_>, seq: Seq) {
        self.ack = match self.ack {
            AckDue::No => AckDue::Duplicate(seq),
            AckDue::Duplicate(before) => {
                call.counters.ack_deferred += 1;
                AckDue::Duplicate(before.max(seq))
            }
            due => due,
        };
    }

    /// Cancels the acknowledgement, because a READ response or atomic result will acknowledge everything before it.
    pub(crate) fn ack_implied(&mut self, call: &mut Call<'_>) {
        if self.ack != AckDue::No {
            call.counters.ack_deferred += 1;
            self.ack = AckDue::No;
            self.held_until = None;
        }
    }

    /// Drops all responses and acknowledgements to be sent.
    pub(crate) fn clear(&mut self) {
        self.resources = VecDeque::new();
        self.first_pending = 0;
        self.ack = AckDue::No;
        self.held_until = None;
        self.closing = false;
    }

    /// Returns PSN, syndrome and MSN of the acknowledgement that is due. `None` if responses must be sent before it.
    fn ack_ready(&mut self) -> Option<(Seq, Syndrome, Msn)> {
        let (before, packet) = match self.ack {
            AckDue::No => return None,
            AckDue::Ack => {
                let (end, msn) = self.executed;
                (end, (end.prev(), Syndrome::Ack(Credits::INVALID), msn))
            }
            AckDue::Duplicate(seq) => (seq.plus(1), (seq, Syndrome::Ack(Credits::INVALID), self.executed.1)),
            AckDue::Refuse(seq, syndrome) => (seq, (seq, syndrome, self.executed.1)),
        };
        match self.next_pending() {
            Some(r) if r.first < before => None,
            _ => Some(packet),
        }
    }
}

/// Returns the opcode of a READ response that is the first (`opens`) or last (`closes`) of its part.
const fn read_opcode(opens: bool, closes: bool) -> Opcode {
    match (opens, closes) {
        (true, true) => Opcode::RcReadResponseOnly,
        (true, false) => Opcode::RcReadResponseFirst,
        (false, false) => Opcode::RcReadResponseMiddle,
        (false, true) => Opcode::RcReadResponseLast,
    }
}

impl Replies {
    /// Returns whether the responder may send. In the error state it may until a pending NAK is sent.
    pub(crate) fn may_reply(&self, qp: &QpContext) -> bool {
        use roce_verbs::QpState::{Err, Rtr, Rts, Sqd, Sqe};
        matches!(qp.state(), Rtr | Rts | Sqd | Sqe) || (qp.state() == Err && self.closing)
    }

    /// Sends one READ response or atomic result.
    ///
    /// # Errors
    /// PSN and reason if the memory was revoked during the READ. Then nothing after this point is answered.
    pub(crate) fn transmit_reply(&mut self, call: &mut Call<'_>, tx: &mut impl TxSink) -> Result<Step, (Seq, Refusal)> {
        if !self.may_reply(call.qp) {
            return Ok(Step::Idle);
        }
        let Some(resource) = self.next_pending() else {
            return Ok(Step::Idle);
        };
        let kind = if resource.replay {
            TxKind::Repetition
        } else {
            TxKind::Response
        };
        let (opcode, value) = match resource.work {
            Work::Read(_) => return self.transmit_read(call, kind, tx),
            Work::Atomic(value) => (Opcode::RcAtomicAcknowledge, Some(value)),
            // FLUSH and ATOMIC WRITE are answered by a READ response without data (IBA Annex A19).
            Work::Done => (Opcode::RcReadResponseOnly, None),
        };
        let bth = Bth::new(call.qp.wire(opcode), call.qp.peer(), resource.first.psn());
        if !emit_head(&bth, ack_header(resource.msn), value, kind, tx) {
            return Ok(Step::Full);
        }
        resource.pending = false;
        call.counters.retransmits += u64::from(kind == TxKind::Repetition);
        Ok(Step::Sent)
    }

    /// Sends one READ response of the oldest pending resource.
    fn transmit_read(
        &mut self,
        call: &mut Call<'_>,
        kind: TxKind,
        tx: &mut impl TxSink,
    ) -> Result<Step, (Seq, Refusal)> {
        if let Err(at) = call.window.may_respond(call.now) {
            self.paced_until = Some(at);
            return Ok(Step::Idle);
        }
        let Some(resource) = self.next_pending() else {
            return Ok(Step::Idle);
        };
        let Work::Read(read) = &mut resource.work else {
            return Ok(Step::Idle);
        };
        let mtu = call.qp.mtu() as u32;
        let seq = resource.first.plus(u64::from(read.offset / mtu));
        let sent_bytes = read.end.saturating_sub(read.offset).min(mtu) as usize;
        let bth = Bth::new(call.qp.wire(Opcode::RcReadResponseOnly), call.qp.peer(), seq.psn());
        match emit_read(read, bth, resource.msn, mtu, kind, tx) {
            Ok(Step::Sent) => {
                let more = read.is_sent() && read.next_part();
                resource.replay |= more;
                resource.pending = more || !read.opens && read.offset < read.end;
                if !resource.pending {
                    // Don't keep the memory alive: a duplicate looks it up again.
                    read.span = None;
                }
                read.sent = call.now;
                call.window.on_responded(sent_bytes + PACKET_OVERHEAD);
                call.qp.note_sent(sent_bytes + PACKET_OVERHEAD);
            }
            Ok(other) => return Ok(other),
            Err(_) if resource.replay => {
                // The peer may have had the data before the key was revoked, as in `duplicate_read`.
                resource.pending = false;
                self.refuse_replay(call, seq);
            }
            Err(refusal) => {
                self.clear();
                return Err((seq, refusal));
            }
        }
        call.counters.retransmits += u64::from(kind == TxKind::Repetition);
        Ok(Step::Sent)
    }

    /// Refuses a repeated READ whose memory is no longer accessible, without failing the queue pair.
    pub(crate) fn refuse_replay(&mut self, call: &mut Call<'_>, seq: Seq) {
        call.counters.naks_sent += 1;
        if self.ack == AckDue::No {
            self.ack_now(AckDue::Refuse(seq, Syndrome::Nak(NakCode::RemoteAccessError)));
        }
    }
}

impl Acknowledgement<'_> {
    /// Sends the acknowledgement that is due, unless it is delayed. Returns false if `tx` is full.
    ///
    /// A selective ACK is padded to `len` bytes without ICRC; other peers accept no padding.
    pub(crate) fn transmit(&mut self, qp: &QpContext, len: usize, tx: &mut impl TxSink) -> bool {
        let replies = &mut *self.replies;
        if !replies.ack_waits() || !replies.may_reply(qp) {
            return true;
        }
        let Some((seq, syndrome, msn)) = replies.ack_ready() else {
            return true;
        };
        // A NAK carries the MSN without the refused message.
        let msn = if matches!(syndrome, Syndrome::Ack(_)) {
            msn
        } else {
            self.msn
        };
        let aeth = Aeth { syndrome, msn };
        let buffered = self.buffered.filter(|_| qp.is_selective());
        let sent = match (syndrome, buffered) {
            (Syndrome::Ack(_), Some(buffer)) if !buffer.is_empty() || len >= SELECTIVE_ACK_LEN => {
                emit_selective(qp, self.expected, buffer, (seq, aeth, len), tx)
            }
            // There is nothing to acknowledge yet, and the gap that was to be reported is closed. The PSN before the first request's
            // acknowledges nothing that was ever sent.
            (Syndrome::Ack(_), _) if replies.ack == AckDue::Ack && seq < replies.first => true,
            _ => {
                let bth = Bth::new(qp.wire(Opcode::RcAcknowledge), qp.peer(), seq.psn());
                emit_head(&bth, aeth, None, TxKind::Ack, tx)
            }
        };
        if sent {
            replies.ack = AckDue::No;
            replies.held_until = None;
            replies.acked = replies.executed.0;
            if replies.closing {
                replies.clear();
            }
        }
        sent
    }

    /// Sends the acknowledgement that is due ahead of a request of `len` bytes without ICRC.
    ///
    /// Programs take an answer as proof that the request it answers has completed. Returns `Some` if the request must
    /// wait. A request that does not complete a receive (`completes`) may be sent ahead of a delayed acknowledgement.
    pub(crate) fn transmit_before(
        &mut self,
        qp: &QpContext,
        (completes, len): (bool, usize),
        tx: &mut impl TxSink,
    ) -> Option<Step> {
        if self.replies.ack == AckDue::No || (self.replies.is_held() && !completes) {
            return None;
        }
        self.replies.held_until = None;
        // Only packets of one length form a GSO train.
        let len = if len <= LONGEST_PADDED_ACK { len } else { 0 };
        match self.transmit(qp, len, tx) {
            false => Some(Step::Full),
            // Responses must be sent before the acknowledgement.
            true => (self.replies.ack != AckDue::No).then_some(Step::Idle),
        }
    }
}

/// Writes a response without payload. `value`: the result of an atomic. Returns false if `tx` is full.
fn emit_head(bth: &Bth, aeth: Aeth, value: Option<u64>, kind: TxKind, tx: &mut impl TxSink) -> bool {
    let Some(out) = tx.reserve(kind, bth.opcode.info().header_len) else {
        return false;
    };
    let mut header = HeaderWriter::new(bth, out);
    header.aeth(aeth);
    if let Some(value) = value {
        header.atomic_ack(value);
    }
    tx.commit();
    true
}

/// Writes an [`Opcode::SelectiveAck`] with a bitmap of the packets buffered beyond the gap at `expected`, `len` bytes or
/// longer. Returns false if `tx` is full.
fn emit_selective(
    qp: &QpContext,
    expected: Seq,
    buffer: &ReorderBuffer,
    (seq, aeth, len): (Seq, Aeth, usize),
    tx: &mut impl TxSink,
) -> bool {
    let words = buffer.bitmap(expected, qp.mtu() - EXPECTED_LEN);
    let bth = Bth::new(Opcode::SelectiveAck, qp.peer(), seq.psn());
    let head = bth.opcode.info().header_len;
    let len = len.max(head + EXPECTED_LEN + words.len() * size_of::<u64>());
    let Some(out) = tx.reserve(TxKind::Ack, len) else {
        return false;
    };
    HeaderWriter::new(&bth, out).aeth(aeth);
    out[head..].fill(0);
    out[head..head + EXPECTED_LEN].copy_from_slice(&expected.psn().value().to_be_bytes());
    for (out, word) in out[head + EXPECTED_LEN..].chunks_exact_mut(size_of::<u64>()).zip(words) {
        out.copy_from_slice(&word.to_le_bytes());
    }
    tx.commit();
    true
}

fn ack_header(msn: Msn) -> Aeth {
    Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn,
    }
}

/// Writes one READ response with the current contents of memory.
fn emit_read(
    read: &mut ReadReply,
    mut bth: Bth,
    msn: Msn,
    mtu: u32,
    kind: TxKind,
    tx: &mut impl TxSink,
) -> Result<Step, Refusal> {
    let len = read.end.saturating_sub(read.offset).min(mtu);
    let closes = read.offset + len >= read.end;
    bth.opcode = in_service(read_opcode(read.opens, closes), bth.opcode.info().service);
    let n = len as usize;
    let pad = n.wrapping_neg() & 3;
    bth.pad = pad as u8;
    let head = bth.opcode.info().header_len;
    let Some(out) = tx.reserve(kind, head + n + pad) else {
        return Ok(Step::Full);
    };
    HeaderWriter::new(&bth, out).aeth(ack_header(msn));
    if n > 0 {
        let span = read.span.as_ref().ok_or(Refusal::RKey)?;
        span.read(read.offset as usize, &mut out[head..head + n])
            .map_err(|_| Refusal::RKey)?;
        out[head + n..].fill(0);
    }
    tx.commit();
    read.offset += len;
    read.opens = false;
    Ok(Step::Sent)
}
