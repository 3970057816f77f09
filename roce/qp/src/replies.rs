//! What the responder still has to send: READ responses, atomic results, and one acknowledgement.

use core::time::Duration;
use std::collections::VecDeque;

use roce_bth::{Aeth, Bth, Credits, Header, Msn, NakCode, Opcode, Syndrome};
use roce_mem::Span;
use roce_verbs::{Instant, RKey};

use crate::{
    ack_policy::AckPolicy,
    ctx::Ctx,
    qp::{QueuePair, in_service},
    responder::Refusal,
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
/// Packets since the last acknowledgement: the next one that is asked for does not wait.
const HELD_PACKETS: u64 = 8;

/// A READ as it was asked for, and how far its answer has come.
#[derive(Clone, Debug)]
pub(crate) struct ReadReply {
    /// Where the message starts in our memory, in the peer's terms.
    pub(crate) va: u64,
    pub(crate) rkey: RKey,
    pub(crate) len: u32,
    /// The memory; `None` for 0 bytes.
    pub(crate) span: Option<Span>,
    /// Bytes from the message's start to where what was asked for last begins.
    pub(crate) begin: u32,
    /// Bytes from the message's start to the next response's payload.
    pub(crate) offset: u32,
    /// Bytes from the message's start to the end of what was asked for last.
    pub(crate) end: u32,
    /// When the last response was sent.
    pub(crate) sent: Instant,
    /// The next response opens the stream.
    pub(crate) opens: bool,
    /// Further parts that were asked for again meanwhile, as [`ReadReply::offset`] and [`ReadReply::end`] are.
    pub(crate) more: VecDeque<(u32, u32)>,
}

/// Parts of a READ that wait to be sent again, at most.
const PARTS: usize = 256;

impl ReadReply {
    /// What was asked for last has been sent.
    fn is_sent(&self) -> bool {
        !self.opens && self.offset >= self.end
    }

    /// Answers a part once more, when what is being sent has been. `false`: that brings it anyway, or there are too many.
    pub(crate) fn add(&mut self, part: (u32, u32)) -> bool {
        let coming = part.0 >= self.offset && part.1 <= self.end;
        if coming || self.more.len() >= PARTS {
            return false;
        }
        self.more.push_back(part);
        true
    }

    /// Goes on with a further part. `false`: there is none.
    fn next_part(&mut self) -> bool {
        let Some((begin, end)) = self.more.pop_front() else {
            return false;
        };
        (self.begin, self.offset, self.end, self.opens) = (begin, begin, end, true);
        true
    }
}

/// What a request left behind.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Read(ReadReply),
    /// The former value.
    Atomic(u64),
    /// FLUSH or ATOMIC WRITE: it is done.
    Done,
}

/// A READ or atomic that was accepted: kept after its answer, to answer duplicates (IBA 9.7.5.1.2).
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    pub(crate) first: Seq,
    pub(crate) packets: u32,
    pub(crate) msn: Msn,
    pub(crate) work: Work,
    /// The answer is still to be sent (again).
    pub(crate) pending: bool,
    /// It was answered before.
    pub(crate) replay: bool,
}

/// An acknowledgement to send when everything before it is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AckDue {
    No,
    /// Acknowledge what was executed.
    Ack,
    /// Acknowledge a duplicate, and what the peer sent before it. The specification would let it jump to all that was
    /// executed, but rdma_rxe, when it is acknowledged beyond what it has resent, waits for ever if that
    /// acknowledgement is the last (`rxe_comp.c`: nothing to retry while `req.psn` is not after `comp.psn`).
    Again(Seq),
    /// Refuse the request at this number.
    Refuse(Seq, Syndrome),
}

/// The responder's outgoing side.
#[derive(Debug)]
pub(crate) struct Replies {
    resources: VecDeque<Resource>,
    /// No resource before this index is pending.
    first_pending: usize,
    pub(crate) ack: AckDue,
    /// An acknowledgement that is due waits until then for a request to go with.
    pub(crate) held_until: Option<Instant>,
    pub(crate) policy: AckPolicy,
    /// One past what was acknowledged last.
    acked: Seq,
    /// READ responses wait for this: they are to go out at the peer's pace.
    pub(crate) paced_until: Option<Instant>,
    /// One past the last SEND, WRITE or atomic executed, and the MSN then: what an acknowledgement says.
    pub(crate) executed: (Seq, Msn),
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
            executed: (first, Msn::new(0)),
        }
    }

    /// One past the PSN that was acknowledged last.
    pub(crate) fn acked(&self) -> Seq {
        self.acked
    }

    /// Makes room for one more resource; `false` when `max` are being answered for the first time.
    pub(crate) fn make_room(&mut self, max: usize) -> bool {
        while self.resources.len() >= max {
            match self.resources.front() {
                // Its requester has not got the answer, so it must not ask for more.
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
        // Its answer acknowledges everything before it.
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

    /// Marks the resource at a number as to be answered again.
    pub(crate) fn replay(&mut self, seq: Seq) {
        if let Some(index) = self.index_of(seq)
            && let Some(resource) = self.resources.get_mut(index)
        {
            resource.pending = true;
            resource.replay = true;
            self.first_pending = self.first_pending.min(index);
        }
    }

    /// The oldest resource with something to send.
    fn next_pending(&mut self) -> Option<&mut Resource> {
        while !self.resources.get(self.first_pending)?.pending {
            self.first_pending += 1;
        }
        self.resources.get_mut(self.first_pending)
    }

    /// Asks for an acknowledgement, which may wait for so long; one stands for all before it.
    pub(crate) fn ack_due(&mut self, ctx: &mut Ctx<'_>, hold: Duration) {
        let first = self.ack == AckDue::No;
        if !first {
            ctx.counters.ack_deferred += 1;
        }
        self.ack = AckDue::Ack;
        if hold.is_zero() || self.executed.0.since(self.acked) >= HELD_PACKETS {
            self.held_until = None;
        } else if first {
            self.held_until = Some(ctx.now + hold);
        }
    }

    /// Asks for something that does not wait, in the place of what was due.
    pub(crate) fn say_at_once(&mut self, what: AckDue) {
        self.ack = what;
        self.held_until = None;
    }

    /// Whether nothing is to be sent now.
    pub(crate) fn is_idle(&self) -> bool {
        let pending = self.resources.iter().skip(self.first_pending).any(|r| r.pending);
        (self.ack == AckDue::No || self.is_held()) && !pending
    }

    /// Whether the acknowledgement that is due waits.
    pub(crate) fn is_held(&self) -> bool {
        self.held_until.is_some() && self.ack == AckDue::Ack
    }

    /// Asks for the acknowledgement of a duplicate. What is due already says the same and more.
    pub(crate) fn ack_again(&mut self, ctx: &mut Ctx<'_>, seq: Seq) {
        self.ack = match self.ack {
            AckDue::No => AckDue::Again(seq),
            AckDue::Again(before) => {
                ctx.counters.ack_deferred += 1;
                AckDue::Again(before.max(seq))
            }
            due => due,
        };
    }

    /// A READ response or atomic result is coming, which acknowledges everything before it.
    pub(crate) fn ack_implied(&mut self, ctx: &mut Ctx<'_>) {
        if self.ack != AckDue::No {
            ctx.counters.ack_deferred += 1;
            self.ack = AckDue::No;
            self.held_until = None;
        }
    }

    /// Drops what is waiting to be sent.
    pub(crate) fn clear(&mut self) {
        self.resources = VecDeque::new();
        self.first_pending = 0;
        self.ack = AckDue::No;
        self.held_until = None;
    }

    /// The acknowledgement to send now, if one is due and nothing goes before it.
    fn ack_ready(&mut self) -> Option<(Seq, Syndrome, Msn)> {
        let (before, packet) = match self.ack {
            AckDue::No => return None,
            AckDue::Ack => {
                let (end, msn) = self.executed;
                (end, (end.prev(), Syndrome::Ack(Credits::INVALID), msn))
            }
            AckDue::Again(seq) => (seq.plus(1), (seq, Syndrome::Ack(Credits::INVALID), self.executed.1)),
            AckDue::Refuse(seq, syndrome) => (seq, (seq, syndrome, self.executed.1)),
        };
        match self.next_pending() {
            Some(r) if r.first < before => None,
            _ => Some(packet),
        }
    }
}

/// The opcode of a READ response.
const fn read_opcode(opens: bool, closes: bool) -> Opcode {
    match (opens, closes) {
        (true, true) => Opcode::RcReadResponseOnly,
        (true, false) => Opcode::RcReadResponseFirst,
        (false, false) => Opcode::RcReadResponseMiddle,
        (false, true) => Opcode::RcReadResponseLast,
    }
}

impl QueuePair {
    /// Whether the responder may send: also a queue pair in error finishes what leads up to the refusal it owes.
    pub(crate) fn may_reply(&self) -> bool {
        use roce_verbs::QpState::{Err, Rtr, Rts, Sqd, Sqe};
        matches!(self.state, Rtr | Rts | Sqd | Sqe) || (self.state == Err && self.resp.closing)
    }

    /// Sends the acknowledgement that is due even if it waits: the queue pair is about to stop, and the peer is not to send again, and
    /// give up in the end, what has been completed here.
    pub fn acknowledge_at_last(&mut self, tx: &mut impl TxSink) {
        self.resp.replies.held_until = None;
        self.transmit_ack(tx);
    }

    /// Sends the acknowledgement that is due, unless it waits.
    pub(crate) fn transmit_ack(&mut self, tx: &mut impl TxSink) -> Step {
        self.transmit_padded_ack(0, tx)
    }

    /// The same, as a packet of `len` bytes without its ICRC if the peer takes one of that length.
    fn transmit_padded_ack(&mut self, len: usize, tx: &mut impl TxSink) -> Step {
        if self.resp.replies.ack == AckDue::No || self.resp.replies.is_held() || !self.may_reply() {
            return Step::Idle;
        }
        let Some((seq, syndrome, msn)) = self.resp.replies.ack_ready() else {
            return Step::Idle;
        };
        // A refusal comes before the message that it refuses is counted.
        let msn = if matches!(syndrome, Syndrome::Ack(_)) {
            msn
        } else {
            self.resp.msn
        };
        // Behind a FLUSH that is under way there may be no gap at all.
        let tells = self.selective && self.resp.flushing.is_none();
        let sent = match (syndrome, &self.resp.reorder) {
            (Syndrome::Ack(_), Some(buffer)) if tells && (!buffer.is_empty() || len >= SELECTIVE_ACK_LEN) => {
                self.emit_selective(seq, Aeth { syndrome, msn }, len, tx)
            }
            _ => self.emit_ack(seq, Aeth { syndrome, msn }, tx),
        };
        if !sent {
            return Step::Full;
        }
        self.resp.replies.ack = AckDue::No;
        self.resp.replies.held_until = None;
        self.resp.replies.acked = self.resp.replies.executed.0;
        if self.resp.closing {
            self.resp.closing = false;
            self.resp.replies.clear();
        }
        Step::Sent
    }

    /// Sends the acknowledgement that is due ahead of a request: programs take an answer as proof that what it answers is done. `Some`:
    /// the request must wait. A message that the peer's program does not see complete may go ahead of one that waits: both then leave as
    /// one GSO train.
    pub(crate) fn acknowledge_before(&mut self, index: usize, tx: &mut impl TxSink) -> Option<Step> {
        let completes = self.sq.wqes[index].completes_receive();
        let replies = &mut self.resp.replies;
        if replies.ack == AckDue::No || (replies.is_held() && !completes) {
            return None;
        }
        replies.held_until = None;
        // Packets of one length leave as one GSO train.
        let len = self.next_len().filter(|len| *len <= LONGEST_PADDED_ACK);
        match self.transmit_padded_ack(len.unwrap_or(0), tx) {
            Step::Full => Some(Step::Full),
            // Responses that go before it are still to be sent.
            _ if self.resp.replies.ack != AckDue::No => Some(Step::Idle),
            _ => None,
        }
    }

    /// `false`: there is no room.
    fn emit_ack(&self, seq: Seq, aeth: Aeth, tx: &mut impl TxSink) -> bool {
        let opcode = self.wire(Opcode::RcAcknowledge);
        let mut header = Header::new(Bth::new(opcode, self.peer, seq.psn()));
        header.aeth = Some(aeth);
        let Some(out) = tx.reserve(TxKind::Ack, header.wire_len()) else {
            return false;
        };
        header.emit(out);
        tx.commit();
        true
    }

    /// An acknowledgement that says what has arrived beyond a gap ([`Opcode::SelectiveAck`]). `false`: there is no room.
    fn emit_selective(&self, seq: Seq, aeth: Aeth, len: usize, tx: &mut impl TxSink) -> bool {
        let expected = self.resp.expected;
        let bits = self
            .resp
            .reorder
            .as_ref()
            .and_then(|buffer| buffer.bitmap(self.mtu - EXPECTED_LEN));
        let (_, words) = bits.unwrap_or((expected, &[]));
        let mut header = Header::new(Bth::new(Opcode::SelectiveAck, self.peer, seq.psn()));
        header.aeth = Some(aeth);
        let head = header.wire_len();
        let len = len.max(head + EXPECTED_LEN + size_of_val(words));
        let Some(out) = tx.reserve(TxKind::Ack, len) else {
            return false;
        };
        header.emit(out);
        out[head..].fill(0);
        out[head..head + EXPECTED_LEN].copy_from_slice(&expected.psn().value().to_be_bytes());
        for (out, word) in out[head + EXPECTED_LEN..].chunks_exact_mut(size_of::<u64>()).zip(words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        tx.commit();
        true
    }

    /// Sends one READ response or atomic result.
    pub(crate) fn transmit_reply(&mut self, ctx: &mut Ctx<'_>, tx: &mut impl TxSink) -> Step {
        if !self.may_reply() {
            return Step::Idle;
        }
        let (peer, mtu, service) = (self.peer, self.mtu as u32, self.service);
        let Some(resource) = self.resp.replies.next_pending() else {
            return Step::Idle;
        };
        let kind = if resource.replay {
            TxKind::Repetition
        } else {
            TxKind::Response
        };
        if matches!(resource.work, Work::Read(_))
            && let Err(at) = ctx.window.may_respond(ctx.now)
        {
            self.resp.replies.paced_until = Some(at);
            return Step::Idle;
        }
        let mut answered = 0;
        let sent = match &mut resource.work {
            Work::Atomic(_) | Work::Done => {
                let (opcode, value) = match resource.work {
                    Work::Atomic(value) => (Opcode::RcAtomicAcknowledge, Some(value)),
                    // An answer without data (IBA Annex A19).
                    _ => (Opcode::RcReadResponseOnly, None),
                };
                let opcode = in_service(opcode, service);
                let mut header = Header::new(Bth::new(opcode, peer, resource.first.psn()));
                header.aeth = Some(ack_header(resource.msn));
                header.atomic_ack = value;
                resource.pending = match tx.reserve(kind, header.wire_len()) {
                    None => return Step::Full,
                    Some(out) => {
                        header.emit(out);
                        tx.commit();
                        false
                    }
                };
                Ok(())
            }
            Work::Read(read) => {
                let seq = resource.first.plus(u64::from(read.offset / mtu));
                let sent_bytes = read.end.saturating_sub(read.offset).min(mtu) as usize;
                let bth = Bth::new(in_service(Opcode::RcReadResponseOnly, service), peer, seq.psn());
                match emit_read(read, bth, resource.msn, mtu, kind, tx) {
                    Ok(Step::Sent) => {
                        let more = read.is_sent() && read.next_part();
                        resource.replay |= more;
                        resource.pending = more || !read.opens && read.offset < read.end;
                        if !resource.pending {
                            // A duplicate looks its memory up anew; until then it may be freed.
                            read.span = None;
                        }
                        read.sent = ctx.now;
                        ctx.window.on_responded(sent_bytes + PACKET_OVERHEAD);
                        answered = sent_bytes + PACKET_OVERHEAD;
                        Ok(())
                    }
                    Ok(other) => return other,
                    Err(_) if resource.replay => {
                        // As in `duplicate_read`: perhaps the peer has long got it, and let us take the key back.
                        resource.pending = false;
                        if self.resp.replies.ack == AckDue::No {
                            ctx.counters.naks_sent += 1;
                            let nak = Syndrome::Nak(NakCode::RemoteAccessError);
                            self.resp.replies.say_at_once(AckDue::Refuse(seq, nak));
                        }
                        Ok(())
                    }
                    Err(refusal) => Err((seq, refusal)),
                }
            }
        };
        self.note_sent(answered);
        match sent {
            Ok(()) if kind == TxKind::Repetition => ctx.counters.retransmits += 1,
            Ok(()) => {}
            Err((seq, refusal)) => {
                // The memory went away while it was read: nothing after this point is answered.
                self.resp.replies.clear();
                self.refuse(ctx, seq, refusal);
            }
        }
        Step::Sent
    }
}

fn ack_header(msn: Msn) -> Aeth {
    Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn,
    }
}

/// Sends one READ response with bytes as they are in memory now.
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
    let mut header = Header::new(bth);
    header.aeth = Some(ack_header(msn));
    let head = header.wire_len();
    let Some(out) = tx.reserve(kind, head + n + pad) else {
        return Ok(Step::Full);
    };
    header.emit(out);
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
