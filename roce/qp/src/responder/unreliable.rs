//! Responder of the services without acknowledgements: drops without a report what it can't process.

use core::cmp::Ordering;

use roce_bth::{Class, ExtHeader, Packet};
use roce_verbs::{Completion, WcFlags, WcOpcode, WcStatus};

use super::{Inbound, Responder};
use crate::{
    context::QpContext,
    ctx::Ctx,
    datagram::{DatagramSource, GRH_LEN},
    refusal::Refusal,
    replies::Replies,
    seq::Seq,
};

impl Responder {
    /// Processes a packet of an unreliable connection (IBA 9.8.2).
    ///
    /// Aborts a message whose packets are not consecutive. The next message starts with a first or only packet of any PSN.
    pub(crate) fn handle_unacknowledged(
        &mut self,
        qp: &mut QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        packet: &Packet<'_>,
    ) {
        if !self.may_receive(qp, ctx) {
            return;
        }
        if self.expects(qp, packet.header.bth.psn) {
            qp.note_established(ctx);
        }
        let seq = self.expected.nearest(packet.header.bth.psn);
        let info = packet.header.bth.opcode.info();
        let continues = match (&self.inbound, info.class) {
            (Inbound::Send(_), Class::Send) | (Inbound::Write { .. }, Class::Write) => {
                !info.position.starts() && seq == self.expected
            }
            _ => false,
        };
        self.note_gap(ctx, seq);
        self.expected = seq.plus(1);
        if !continues {
            self.abort(qp, ctx, WcStatus::RemoteInvalidRequestError);
            if !info.position.starts() {
                ctx.counters.dropped_requests += 1;
                return;
            }
        }
        if let Err(refusal) = self.take_unacknowledged(qp, replies, ctx, seq, packet) {
            self.refuse_silently(qp, ctx, refusal, packet);
        }
        qp.fail_on_overflow(ctx);
    }

    fn note_gap(&mut self, ctx: &mut Ctx<'_>, seq: Seq) {
        match seq.cmp(&self.expected) {
            Ordering::Equal => {}
            Ordering::Greater => ctx.counters.out_of_seq_request += 1,
            Ordering::Less => ctx.counters.duplicate_request += 1,
        }
    }

    /// Takes a packet through the stages of the responder, in another order: a receive work request is taken last, because
    /// none can be put back into a shared queue.
    fn take_unacknowledged(
        &mut self,
        qp: &mut QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        self.chk_op_valid(qp, packet)?;
        if info.class == Class::Send && info.position.starts() {
            self.take_receive(qp, ctx, true)?;
        }
        self.chk_length(qp, packet)?;
        self.chk_rkey(qp, ctx, packet)?;
        if info.class == Class::Write && info.has(ExtHeader::Imm) {
            self.take_receive(qp, ctx, false)?;
        }
        self.execute(qp, replies, ctx, seq, packet)?;
        self.complete(qp, ctx, packet);
        Ok(())
    }

    /// Processes a refusal that is not reported to the sender (IBA 9.9.3, classes A, D and E).
    fn refuse_silently(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, refusal: Refusal, packet: &Packet<'_>) {
        self.inbound = Inbound::Idle;
        match refusal {
            Refusal::NoReceive => {
                ctx.counters.dropped_no_receive += 1;
                self.abort(qp, ctx, WcStatus::RemoteInvalidRequestError);
            }
            Refusal::LocalProtection => {
                self.note_refusal(qp, ctx, refusal, Some(packet));
                self.fail_receive(qp, ctx);
            }
            Refusal::RKey => {
                ctx.counters.dropped_messages += 1;
                self.abort(qp, ctx, WcStatus::LocalAccessError);
            }
            Refusal::ReceiveTooShort => {
                ctx.counters.dropped_length += 1;
                self.abort(qp, ctx, WcStatus::LocalLengthError);
            }
            _ => {
                ctx.counters.dropped_messages += 1;
                self.abort(qp, ctx, WcStatus::RemoteInvalidRequestError);
            }
        }
    }

    /// Fails the queue pair with its receive work request, whose memory is invalid (class A).
    fn fail_receive(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>) {
        if let Some(receive) = self.receive.take() {
            self.complete_receive_error(qp, ctx, receive.wqe.wr_id, WcStatus::LocalProtectionError);
        }
        qp.fail();
    }

    /// Aborts the current message. The next message gets its receive work request (class D). One from a shared queue
    /// completes with `status`, or the program might never see it again (class E, `rxe_resp.c`).
    fn abort(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, status: WcStatus) {
        if !matches!(self.inbound, Inbound::Idle) {
            ctx.counters.dropped_messages += 1;
            self.inbound = Inbound::Idle;
        }
        let Some(receive) = self.receive.take() else {
            return;
        };
        match qp.config().srq {
            Some(_) => self.complete_receive_error(qp, ctx, receive.wqe.wr_id, status),
            None => self.receives.push_front(receive.wqe),
        }
    }

    /// Processes a datagram.
    pub(crate) fn handle_datagram(
        &mut self,
        qp: &mut QpContext,
        ctx: &mut Ctx<'_>,
        packet: &Packet<'_>,
        source: &DatagramSource,
    ) {
        let info = packet.header.bth.opcode.info();
        let deth = packet.header.deth().filter(|_| qp.config().qp_type.is_datagram());
        let Some(deth) = deth.filter(|_| info.class == Class::Send) else {
            ctx.counters.dropped_opcode += 1;
            return;
        };
        if !self.may_receive(qp, ctx) {
            return;
        }
        if deth.qkey != qp.qkey() {
            ctx.counters.qkey_violations += 1;
            return;
        }
        let header = source.header(packet);
        let (Some(header), true) = (header, packet.payload.len() <= qp.mtu()) else {
            ctx.counters.dropped_length += 1;
            return;
        };
        match self.take_datagram(qp, ctx, packet, &header) {
            Ok(byte_len) => {
                let mut flags = WcFlags::GRH;
                flags.set(WcFlags::WITH_IMM, info.has(ExtHeader::Imm));
                let completion = Completion {
                    opcode: WcOpcode::Recv,
                    byte_len,
                    imm: packet.header.imm().unwrap_or(0),
                    qpn: qp.qpn(),
                    src_qp: deth.src_qp,
                    sl: source.packet_type(),
                    flags,
                    solicited: packet.header.bth.solicited,
                    ..Completion::default()
                };
                self.complete_datagram(qp, ctx, completion);
            }
            Err(refusal) => self.refuse_silently(qp, ctx, refusal, packet),
        }
        qp.fail_on_overflow(ctx);
    }

    /// Writes network header and data into the next receive work request. Returns their length, bytes.
    fn take_datagram(
        &mut self,
        qp: &QpContext,
        ctx: &mut Ctx<'_>,
        packet: &Packet<'_>,
        header: &[u8; GRH_LEN],
    ) -> Result<u32, Refusal> {
        self.take_receive(qp, ctx, true)?;
        let receive = self.receive.as_ref().ok_or(Refusal::NoReceive)?;
        let len = GRH_LEN + packet.payload.len();
        if receive.list.len() < len {
            return Err(Refusal::ReceiveTooShort);
        }
        let head = receive.list.write_at(0, header);
        let data = head.and_then(|()| receive.list.write_at(GRH_LEN, packet.payload));
        data.map_err(|_| Refusal::LocalProtection)?;
        Ok(len as u32)
    }

    fn complete_datagram(&mut self, qp: &mut QpContext, ctx: &mut Ctx<'_>, completion: Completion) {
        if let Some(receive) = self.receive.take() {
            ctx.counters.rdma_recvs += 1;
            let wr_id = receive.wqe.wr_id;
            qp.push_recv(ctx, self.srq.as_ref(), Completion { wr_id, ..completion });
        }
    }
}
