//! Execution of requests: memory, completions, acknowledgements.

use std::collections::VecDeque;

use roce_bth::{Class, ExtHeader, Opcode, Packet, Reth};
use roce_verbs::mem::{AtomicError, Span};
use roce_verbs::{AccessFlags, Completion, WcFlags, WcOpcode};

use super::{Gap, Inbound, Responder};
use crate::{
    context::Call,
    refusal::Refusal,
    replies::{ReadReply, Resource, Work},
    sendq::packets_for,
    seq::{MAX_OUTSTANDING, Seq},
};

/// Length of the memory of an atomic operation, bytes.
pub(super) const WORD: u32 = 8;

impl Responder {
    /// EXECUTE: copies the payload and advances the responder to the next packet.
    #[inline]
    pub(super) fn execute(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let mut packets = 1;
        match info.class {
            Class::Send => self.execute_send(call, packet)?,
            Class::Write => self.execute_write(packet)?,
            Class::ReadRequest => packets = self.execute_read(call, seq, packet)?,
            Class::Atomic => self.execute_atomic(call, seq, packet)?,
            Class::AtomicWrite => self.execute_atomic_write(call, seq, packet)?,
            // `start_flush` has executed it.
            Class::Flush => self.add_resource(call, seq, 1, Work::Done),
            _ => return Err(Refusal::Operation),
        }
        self.expected = seq.plus(u64::from(packets));
        if info.position.ends() {
            // A READ counts when accepted (IBA C9-148), other messages when executed.
            self.msn = self.msn.next();
            // COMPLETE still needs the length.
            if self.receive.is_none() || !matches!(info.class, Class::Send | Class::Write) {
                self.inbound = Inbound::Idle;
            }
        }
        if info.class != Class::ReadRequest {
            self.replies.set_executed(self.expected, self.msn);
        }
        Ok(())
    }

    fn execute_send(&mut self, call: &Call<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let before = if let Inbound::Send(n) = self.inbound { n } else { 0 };
        let receive = self.receive.as_ref().ok_or(Refusal::NoReceive)?;
        let written = receive.list.write_at(before, packet.payload);
        written.map_err(|_| Refusal::LocalProtection)?;
        if let Some(key) = packet.header.ieth() {
            let done = call.mem.invalidate(self.key_domain(call.qp), call.qp.qpn(), key);
            done.map_err(|_| Refusal::Invalidate)?;
        }
        self.inbound = Inbound::Send(before + packet.payload.len());
        Ok(())
    }

    #[inline]
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

    fn execute_read(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) -> Result<u32, Refusal> {
        let reth = packet.header.reth().unwrap_or_default();
        let packets = packets_for(reth.dma_len, call.qp.mtu());
        if u64::from(packets) > MAX_OUTSTANDING {
            return Err(Refusal::Length);
        }
        let span = self.remote_span(call, self.key_domain(call.qp), &reth, AccessFlags::REMOTE_READ)?;
        let work = Work::Read(ReadReply {
            va: reth.va,
            rkey: reth.rkey,
            len: reth.dma_len,
            span,
            begin: 0,
            sent: call.now,
            offset: 0,
            end: reth.dma_len,
            opens: true,
            more: VecDeque::new(),
        });
        self.add_resource(call, seq, packets, work);
        Ok(packets)
    }

    fn execute_atomic(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) -> Result<(), Refusal> {
        let eth = packet.header.atomic_eth().unwrap_or_default();
        let word = Reth {
            va: eth.va,
            rkey: eth.rkey,
            dma_len: WORD,
        };
        let span = self.remote_word(call, &word, AccessFlags::REMOTE_ATOMIC)?;
        let swap = matches!(packet.header.bth.opcode, Opcode::RcCompareSwap | Opcode::XrcCompareSwap);
        let done = match swap {
            true => span.compare_swap(eth.compare, eth.swap_add),
            false => span.fetch_add(eth.swap_add),
        };
        self.add_resource(call, seq, 1, Work::Atomic(done.map_err(atomic_refusal)?));
        Ok(())
    }

    /// Writes 8 bytes atomically (IBA Annex A19). A duplicate only gets the response again.
    fn execute_atomic_write(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) -> Result<(), Refusal> {
        let reth = packet.header.reth().unwrap_or_default();
        let span = self.remote_word(call, &reth, AccessFlags::REMOTE_WRITE)?;
        let bytes = packet.payload.try_into().map_err(|_| Refusal::Length)?;
        span.store(bytes).map_err(atomic_refusal)?;
        self.add_resource(call, seq, 1, Work::Done);
        Ok(())
    }

    /// Resolves the aligned word that an atomic operation names.
    fn remote_word(&mut self, call: &Call<'_>, word: &Reth, need: AccessFlags) -> Result<Span, Refusal> {
        // An invalid request takes precedence over a forbidden one (IBA 9.7.4.1).
        if !word.va.is_multiple_of(u64::from(WORD)) {
            return Err(Refusal::Misaligned);
        }
        let span = self.remote_span(call, self.key_domain(call.qp), word, need)?;
        span.ok_or(Refusal::RKey)
    }

    fn add_resource(&mut self, call: &mut Call<'_>, first: Seq, packets: u32, work: Work) {
        self.replies.ack_implied(call);
        self.replies.push(Resource {
            first,
            packets,
            msn: self.msn.next(),
            work,
            pending: true,
            replay: false,
        });
    }

    /// COMPLETE: completes the receive work request at the end of a message.
    pub(super) fn complete(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        let info = packet.header.bth.opcode.info();
        if !info.position.ends() {
            return;
        }
        let (opcode, byte_len) = match core::mem::replace(&mut self.inbound, Inbound::Idle) {
            Inbound::Send(n) => (WcOpcode::Recv, n as u32),
            Inbound::Write { len, .. } => (WcOpcode::RecvRdmaWithImm, len),
            Inbound::Idle => (WcOpcode::Recv, 0),
        };
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::WITH_INV, info.has(ExtHeader::Ieth));
        let completion = Completion {
            opcode,
            byte_len,
            invalidated: packet.header.ieth().unwrap_or_default(),
            src_qp: call.qp.peer(),
            flags,
            ..Completion::default()
        };
        self.complete_receive(call, packet, completion);
    }

    /// Completes the receive work request that the message of a packet has taken. `completion` has the fields of its service.
    pub(super) fn complete_receive(&mut self, call: &mut Call<'_>, packet: &Packet<'_>, mut completion: Completion) {
        let Some(receive) = self.receive.take() else {
            return;
        };
        completion.wr_id = receive.wqe.wr_id;
        completion.qpn = call.qp.qpn();
        if let Some(imm) = packet.header.imm() {
            completion.imm = imm;
            completion.flags |= WcFlags::WITH_IMM;
        }
        completion.solicited = packet.header.bth.solicited;
        call.counters.rdma_recvs += 1;
        call.push_recv(self.srq.as_ref(), completion);
    }

    /// ACKNOWLEDGE: acknowledges a SEND or WRITE on request, or when the peer resumes after a report.
    ///
    /// rdma_rxe decrements its retry count for every NAK and restores it only for acknowledgements (`rxe_comp.c`:
    /// `check_ack`). Without the second case, a long message fails on a lossy path although it makes progress.
    #[inline]
    pub(super) fn acknowledge(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        let class = packet.header.bth.opcode.info().class;
        let needed = packet.header.bth.ack_req || self.gap == Gap::Closed;
        if matches!(class, Class::Send | Class::Write) && needed {
            // After a reported gap the requester waits for the acknowledgement before it sends more.
            self.replies.ack_requested(call, self.gap == Gap::Closed);
        }
    }
}

fn atomic_refusal(e: AtomicError) -> Refusal {
    match e {
        AtomicError::Access(_) => Refusal::RKey,
        AtomicError::Misaligned => Refusal::Misaligned,
    }
}
