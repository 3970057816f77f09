//! Responder: takes each request through named stages until it is executed or refused.

mod checks;
mod duplicate;
mod execute;
mod flush;
mod job;
mod refusal;
mod unreliable;

use core::{cmp::Ordering, time::Duration};

use std::sync::Arc;

use roce_bth::{Class, ExtHeader, Msn, NakCode, Packet, Psn, Syndrome};
use roce_verbs::mem::{KeyCache, Span};
use roce_verbs::{Completion, QpState, WcOpcode, WcStatus};

use self::job::Flush;
pub use self::job::PersistJob;
use crate::{
    context::{Call, QpContext},
    recvq::{ActiveRecv, ReceiveQueue},
    refusal::Refusal,
    reorder::{BufferedPacket, PACKETS, ReorderBudget, ReorderBuffer},
    replies::{AckDue, Acknowledgement, Replies},
    seq::Seq,
    srq::SharedReceiveQueue,
    tx::{Step, TxSink},
};

/// Largest gap reported with a NAK, PSNs.
///
/// A forged packet further ahead would make the peer retransmit everything. If the request of a longer READ is lost,
/// the peer's timeout recovers it.
const MAX_GAP: u64 = PACKETS;

/// Distance from the expected PSN within which a packet may be the peer's: new packets behind a gap, and copies of recent
/// ones. A guessed PSN is within it once in 2^13 times.
const NEAR: i32 = 1024;

/// Message being received.
#[derive(Debug)]
enum Inbound {
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

impl Inbound {
    /// Returns the bytes of the message received so far.
    fn received(&self) -> usize {
        match self {
            Self::Idle => 0,
            Self::Send(received) => *received,
            Self::Write { received, .. } => *received as usize,
        }
    }
}

/// Gap before the packets that arrive, as far as a NAK reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gap {
    /// Packets arrive in order, or selective ACKs report the gap.
    None,
    /// A NAK or RNR NAK has requested the expected packet. It is not repeated until that packet arrives.
    Nak,
    /// The current packet is the one that a NAK has requested.
    Closed,
}

/// Responder: PSN state, the message being received, and packets beyond a gap.
#[derive(Debug)]
pub(crate) struct Responder {
    /// Keys used last, the peer's and those of receives.
    keys: KeyCache,
    /// Receive queue of the queue pair itself.
    receives: Arc<ReceiveQueue>,
    /// PSN expected next.
    expected: Seq,
    /// Messages completed.
    msn: Msn,
    inbound: Inbound,
    /// Receive work request of the current message.
    receive: Option<ActiveRecv>,
    /// Shared receive queue of the current or last XRC message.
    srq: Option<Arc<SharedReceiveQueue>>,
    gap: Gap,
    /// Packets beyond a gap, or behind a FLUSH in progress. `None`: they are dropped.
    reorder: Option<Box<ReorderBuffer>>,
    flush: Flush,
    replies: Replies,
    /// Receive work requests are hidden from the current packet: a fault on demand.
    hides_receives: bool,
}

/// Progress of a request packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Processed {
    Done,
    /// FLUSH in progress.
    Started,
}

impl Responder {
    pub(crate) fn new(receives: Arc<ReceiveQueue>, first: Seq) -> Self {
        Self {
            keys: KeyCache::default(),
            receives,
            expected: first,
            msn: Msn::new(0),
            inbound: Inbound::Idle,
            receive: None,
            srq: None,
            gap: Gap::None,
            reorder: None,
            flush: Flush::None,
            replies: Replies::new(first),
            hides_receives: false,
        }
    }

    /// Starts again at the PSN `first`, with the same receive queue.
    pub(crate) fn restart(&mut self, first: Seq) {
        *self = Self::new(self.receives.clone(), first);
    }

    /// Returns the receive queue of the queue pair itself.
    pub(crate) fn receives(&self) -> &Arc<ReceiveQueue> {
        &self.receives
    }

    /// Returns the PSN expected next.
    pub(crate) fn expected(&self) -> Seq {
        self.expected
    }

    /// Returns whether it buffers packets beyond a gap.
    pub(crate) fn has_reorder(&self) -> bool {
        self.reorder.is_some()
    }

    /// Buffers packets beyond a gap within `budget`. `None`: drops them.
    pub(crate) fn set_reorder(&mut self, budget: Option<&Arc<ReorderBudget>>) {
        self.reorder = budget.map(|budget| Box::new(ReorderBuffer::new(budget.clone())));
    }

    /// Returns the responses and acknowledgements still to be sent.
    pub(crate) fn replies(&self) -> &Replies {
        &self.replies
    }

    pub(crate) fn replies_mut(&mut self) -> &mut Replies {
        &mut self.replies
    }

    /// Returns the acknowledgement that may be due, with the state that it reports.
    pub(crate) fn acknowledgement(&mut self) -> Acknowledgement<'_> {
        Acknowledgement {
            replies: &mut self.replies,
            expected: self.expected,
            msn: self.msn,
            // During a FLUSH all packets behind it are buffered, although there may be no gap.
            buffered: self.reorder.as_deref().filter(|_| !self.flush.is_running()),
        }
    }

    /// Sends one READ response or atomic result.
    pub(crate) fn transmit_reply(&mut self, call: &mut Call<'_>, tx: &mut impl TxSink) -> Step {
        self.replies.transmit_reply(call, tx).unwrap_or_else(|(seq, refusal)| {
            // The memory was revoked during the READ.
            self.refuse(call, seq, refusal, None);
            Step::Sent
        })
    }

    /// Returns whether the PSN is that of a request expected here, or near it.
    pub(crate) fn expects(&self, qp: &QpContext, psn: Psn) -> bool {
        qp.takes_requests() && (-NEAR..NEAR).contains(&psn.diff(self.expected.psn()))
    }

    /// Enters the error state: drops buffered packets and completes the receive work requests with a flush error.
    pub(crate) fn stop(&mut self, call: &mut Call<'_>) {
        self.replies.stop();
        self.reorder = None;
        self.flush = Flush::None;
        self.inbound = Inbound::Idle;
        if let Some(receive) = self.receive.take() {
            self.complete_receive_error(call, receive.wqe.wr_id, WcStatus::FlushError);
        }
        let mut posted = self.receives.follow(QpState::Err);
        while let Some(wqe) = posted.pop() {
            self.complete_receive_error(call, wqe.wr_id, WcStatus::FlushError);
        }
    }

    /// GET_REQ: processes a request packet.
    #[inline]
    pub(crate) fn handle_request(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        if !self.may_receive(call) {
            return;
        }
        if self.flush.is_running() {
            self.wait_for_flush(call, packet);
            return;
        }
        let Some(seq) = self.chk_psn(call, packet) else {
            return;
        };
        call.note_established();
        self.run_request(call, seq, packet, seq);
    }

    /// Executes the expected packet and those buffered behind it. `arrived`: the packet received last.
    #[inline]
    pub(crate) fn run_request(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>, arrived: Seq) {
        match self.process(call, seq, packet) {
            Ok(Processed::Done) => self.process_buffered(call, arrived),
            Ok(Processed::Started) => {}
            Err(refusal) => self.refuse(call, seq, refusal, Some(packet)),
        }
        call.fail_on_overflow();
    }

    /// Takes the expected packet through the stages from CHK_OP_SEQ to ACKNOWLEDGE.
    fn process(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) -> Result<Processed, Refusal> {
        let info = packet.header.bth.opcode.info();
        let reliable = call.qp.is_reliable();
        let takes = info.class != Class::Write || info.has(ExtHeader::Imm);
        // A refused WRITE of an unreliable connection goes unreported, and a receive work request can't be put back into a shared
        // queue: it is taken last.
        let takes_last = takes && info.class == Class::Write && !reliable;
        self.chk_op_seq(packet)?;
        self.chk_shared_queue(call.qp, packet)?;
        self.chk_op_valid(call.qp, packet)?;
        if takes && !takes_last {
            self.chk_resource(call, packet)?;
        }
        self.chk_length(call.qp, packet)?;
        self.chk_rkey(call, packet)?;
        if takes_last {
            self.chk_resource(call, packet)?;
        }
        if info.class == Class::Flush && self.start_flush(call, seq, packet)? {
            return Ok(Processed::Started);
        }
        self.execute(call, seq, packet)?;
        if self.receive.is_some() {
            self.complete(call, packet);
        }
        if reliable {
            self.acknowledge(call, packet);
        }
        Ok(Processed::Done)
    }

    /// Executes buffered packets if the packet just executed closed the gap. `arrived`: the packet received last.
    #[inline]
    fn process_buffered(&mut self, call: &mut Call<'_>, arrived: Seq) {
        self.note_outstanding();
        if self.reorder.as_ref().is_none_or(|buffer| buffer.is_empty()) {
            return;
        }
        let refused = self.execute_buffered(call);
        self.note_outstanding();
        let expected = self.expected;
        let Some(buffer) = &mut self.reorder else { return };
        match refused {
            // The peer resends the packet, which is refused then.
            Some((Refusal::NoReceive, _)) if !call.qp.is_selective() => {}
            Some((refusal @ Refusal::NoReceive, packet)) => {
                buffer.put_back(expected, packet);
                self.refuse(call, expected, refusal, None);
            }
            Some((refusal, packet)) => self.refuse(call, expected, refusal, Some(&packet.packet())),
            None => {}
        }
        if let Some(buffer) = &mut self.reorder {
            buffer.advance(expected);
        }
        match (call.qp.is_selective(), self.replies.ack()) {
            (_, AckDue::Refuse(..)) => {}
            // The peer waits for a report that the gap is closed and where the next gap is.
            (true, _) => self.replies.ack_due(call, Duration::ZERO),
            // Acknowledge only what the peer has resent: rdma_rxe never completes a message that is acknowledged as a
            // whole before it has resent all of it (specs/kernel.md).
            (false, AckDue::Ack) if self.replies.executed() > arrived.plus(1) => {
                self.replies.ack_now(AckDue::Duplicate(arrived))
            }
            (false, _) => {}
        }
    }

    /// Updates the reorder buffer's record of PSNs that the peer had outstanding.
    fn note_outstanding(&mut self) {
        let outstanding = self.expected.since(self.replies.acked());
        if let Some(buffer) = &mut self.reorder {
            buffer.note_outstanding(outstanding);
        }
    }

    /// Executes buffered packets up to the next gap or refusal. Returns the refused packet.
    fn execute_buffered(&mut self, call: &mut Call<'_>) -> Option<(Refusal, BufferedPacket)> {
        while call.qp.takes_requests() && !self.flush.is_running() {
            let expected = self.expected;
            let buffered = self.reorder.as_mut()?.take(expected)?;
            if let Err(refusal) = self.process(call, expected, &buffered.packet()) {
                return Some((refusal, buffered));
            }
        }
        None
    }

    /// Buffers a packet beyond a gap. Returns true if a selective ACK reports the gap, so that it needs no NAK.
    fn buffer_ahead(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) -> bool {
        let (expected, mtu) = (self.expected, call.qp.mtu());
        // A response would implicitly acknowledge more than the peer has resent.
        let is_simple = matches!(packet.header.bth.opcode.info().class, Class::Send | Class::Write);
        let Some(buffer) = self.reorder.as_mut().filter(|_| call.qp.is_selective() || is_simple) else {
            return false;
        };
        if !call.qp.is_selective() {
            buffer.insert(expected, seq, packet, mtu);
            return false;
        }
        match buffer.insert(expected, seq, packet, mtu) {
            true => call.counters.out_of_seq_request += 1,
            false => call.counters.dropped_requests += 1,
        }
        // Don't replace a pending refusal: it reports that the expected packet was not executed.
        if !buffer.is_empty() && !self.replies.is_refusing() {
            self.replies.ack_now(AckDue::Ack);
        }
        true
    }

    /// Returns whether the state accepts requests; counts a dropped packet if not.
    pub(crate) fn may_receive(&self, call: &mut Call<'_>) -> bool {
        let may = call.qp.takes_requests();
        call.counters.dropped_state += u64::from(!may);
        may
    }

    /// CHK_PSN: passes only the expected packet, reports a gap once and answers duplicates.
    #[inline]
    fn chk_psn(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) -> Option<Seq> {
        let expected = self.expected;
        let seq = expected.nearest(packet.header.bth.psn);
        match seq.cmp(&expected) {
            Ordering::Equal => {
                self.gap = match self.gap {
                    Gap::Nak => Gap::Closed,
                    Gap::None | Gap::Closed => Gap::None,
                };
                // The gap closed before its NAK was sent. Send the acknowledgement that the NAK may have replaced.
                if self.replies.is_refusing() {
                    self.replies.ack_now(AckDue::Ack);
                }
                Some(seq)
            }
            Ordering::Greater if self.buffer_ahead(call, seq, packet) => None,
            Ordering::Greater => {
                if self.gap == Gap::Nak || seq.since(expected) > MAX_GAP {
                    call.counters.dropped_requests += 1;
                } else {
                    call.counters.out_of_seq_request += 1;
                    self.gap = Gap::Nak;
                    let nak = Syndrome::Nak(NakCode::PsnSequenceError);
                    self.replies.ack_now(AckDue::Refuse(expected, nak));
                }
                None
            }
            Ordering::Less => {
                self.answer_duplicate(call, seq, packet);
                None
            }
        }
    }

    /// Completes a receive work request with an error.
    pub(crate) fn complete_receive_error(&mut self, call: &mut Call<'_>, wr_id: u64, status: WcStatus) {
        let completion = Completion {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qpn: call.qp.qpn(),
            ..Completion::default()
        };
        call.push_recv(self.srq.as_ref(), completion);
    }
}
