//! Execution of requests: memory, completions, acknowledgements.

use std::collections::VecDeque;

use roce_bth::{Class, ExtHeader, Opcode, Packet, Reth};
use roce_mem::{AtomicError, Span};
use roce_verbs::{AccessFlags, Completion, WcFlags, WcOpcode, WcStatus};

use super::{Gap, Inbound, Responder};
use crate::{
    context::QpContext,
    ctx::Ctx,
    refusal::Refusal,
    replies::{ReadReply, Replies, Resource, Work},
    sendq::packets_for,
    seq::{MAX_OUTSTANDING, Seq},
};

/// Length of the memory of an atomic operation, bytes.
const WORD: u32 = 8;

impl Responder {
    /// EXECUTE: copies the payload and advances the responder to the next packet.
    pub(super) fn execute(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let mut packets = 1;
        match info.class {
            Class::Send => self.execute_send(qp, ctx, packet)?,
            Class::Write => self.execute_write(packet)?,
            Class::ReadRequest => packets = self.execute_read(qp, replies, ctx, seq, packet)?,
            Class::Atomic => self.execute_atomic(qp, replies, ctx, seq, packet)?,
            Class::AtomicWrite => self.execute_atomic_write(qp, replies, ctx, seq, packet)?,
            // `start_flush` has executed it.
            Class::Flush => self.add_resource(replies, ctx, seq, 1, Work::Done),
            _ => return Err(Refusal::Operation),
        }
        self.expected = seq.plus(u64::from(packets));
        if info.position.ends() {
            // A READ counts when accepted (IBA C9-148), other messages when executed.
            self.msn = self.msn.next();
            self.inbound = match (info.class, core::mem::replace(&mut self.inbound, Inbound::Idle)) {
                // COMPLETE still needs the length.
                (Class::Send | Class::Write, inbound) if self.receive.is_some() => inbound,
                _ => Inbound::Idle,
            };
        }
        if info.class != Class::ReadRequest {
            replies.set_executed(self.expected, self.msn);
        }
        Ok(())
    }

    fn execute_send(&mut self, qp: &QpContext, ctx: &Ctx<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let before = if let Inbound::Send(n) = self.inbound { n } else { 0 };
        let receive = self.receive.as_ref().ok_or(Refusal::NoReceive)?;
        let written = receive.list.write_at(before, packet.payload);
        written.map_err(|_| Refusal::LocalProtection)?;
        if let Some(key) = packet.header.ieth() {
            let done = ctx.mem.invalidate(self.key_domain(qp), qp.qpn(), key);
            done.map_err(|_| Refusal::Invalidate)?;
        }
        self.inbound = Inbound::Send(before + packet.payload.len());
        Ok(())
    }

    fn execute_write(&mut self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let Inbound::Write { span, received, .. } = &mut self.inbound else {
            return Err(Refusal::MissingFirst);
        };
        if let Some(span) = span {
            let written = span.write(*received as usize, packet.payload);
            written.map_err(|_| Refusal::RKey)?;
        }
        *received += packet.payload.len() as u32;
        Ok(())
    }

    fn execute_read(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) -> Result<u32, Refusal> {
        let reth = packet.header.reth().unwrap_or_default();
        let packets = packets_for(reth.dma_len, qp.mtu());
        if u64::from(packets) > MAX_OUTSTANDING {
            return Err(Refusal::Length);
        }
        let span = self.remote_span(qp, ctx, self.key_domain(qp), &reth, AccessFlags::REMOTE_READ)?;
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
        self.add_resource(replies, ctx, seq, packets, work);
        Ok(packets)
    }

    fn execute_atomic(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let eth = packet.header.atomic_eth().unwrap_or_default();
        let word = Reth {
            va: eth.va,
            rkey: eth.rkey,
            dma_len: WORD,
        };
        let span = self.remote_word(qp, ctx, &word, AccessFlags::REMOTE_ATOMIC)?;
        let swap = matches!(packet.header.bth.opcode, Opcode::RcCompareSwap | Opcode::XrcCompareSwap);
        let done = match swap {
            true => span.compare_swap(eth.compare, eth.swap_add),
            false => span.fetch_add(eth.swap_add),
        };
        self.add_resource(replies, ctx, seq, 1, Work::Atomic(done.map_err(atomic_refusal)?));
        Ok(())
    }

    /// Writes 8 bytes atomically (IBA Annex A19). A duplicate only gets the response again.
    fn execute_atomic_write(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let reth = packet.header.reth().unwrap_or_default();
        let word = Reth { dma_len: WORD, ..reth };
        let span = self.remote_word(qp, ctx, &word, AccessFlags::REMOTE_WRITE)?;
        let bytes = packet.payload.try_into().map_err(|_| Refusal::Length)?;
        span.store(bytes).map_err(atomic_refusal)?;
        self.add_resource(replies, ctx, seq, 1, Work::Done);
        Ok(())
    }

    /// Resolves the aligned word that an atomic operation names.
    fn remote_word(&mut self, qp: &QpContext, ctx: &Ctx<'_>, word: &Reth, need: AccessFlags) -> Result<Span, Refusal> {
        // An invalid request takes precedence over a forbidden one (IBA 9.7.4.1).
        if !word.va.is_multiple_of(u64::from(WORD)) {
            return Err(Refusal::Misaligned);
        }
        let span = self.remote_span(qp, ctx, self.key_domain(qp), word, need)?;
        span.ok_or(Refusal::RKey)
    }

    fn add_resource(&mut self, replies: &mut Replies, ctx: &mut Ctx<'_>, first: Seq, packets: u32, work: Work) {
        replies.ack_implied(ctx);
        replies.push(Resource {
            first,
            packets,
            msn: self.msn.next(),
            work,
            pending: true,
            replay: false,
        });
    }

    /// COMPLETE: completes the receive work request at the end of a message.
    pub(super) fn complete(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        let info = packet.header.bth.opcode.info();
        if !info.position.ends() {
            return;
        }
        let Some(receive) = self.receive.take() else {
            return;
        };
        let (opcode, byte_len) = match core::mem::replace(&mut self.inbound, Inbound::Idle) {
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
            qpn: qp.qpn(),
            src_qp: qp.peer(),
            flags,
            solicited: packet.header.bth.solicited,
            ..Completion::default()
        };
        qp.push_recv(ctx, self.srq.as_ref(), completion);
    }

    /// ACKNOWLEDGE: acknowledges a SEND or WRITE on request, or when the peer resumes after a report.
    ///
    /// rdma_rxe decrements its retry count for every NAK and restores it only for acknowledgements (`rxe_comp.c`:
    /// `check_ack`). Without the second case, a long message fails on a lossy path although it makes progress.
    pub(super) fn acknowledge(&mut self, replies: &mut Replies, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        let class = packet.header.bth.opcode.info().class;
        let needed = packet.header.bth.ack_req || self.gap == Gap::Closed;
        if matches!(class, Class::Send | Class::Write) && needed {
            // After a reported gap the requester waits for the acknowledgement before it sends more.
            replies.ack_requested(ctx, self.gap == Gap::Closed);
        }
    }
}

fn atomic_refusal(e: AtomicError) -> Refusal {
    match e {
        AtomicError::Access(_) => Refusal::RKey,
        AtomicError::Misaligned => Refusal::Misaligned,
    }
}
