//! Responder of the services without acknowledgements: drops without a report what it can't process.

use core::cmp::Ordering;

use roce_bth::{Class, Packet};
use roce_verbs::{Completion, WcFlags, WcOpcode, WcStatus};

use super::{Inbound, Responder};
use crate::{
    context::Call,
    datagram::{DatagramSource, GRH_LEN},
    refusal::Refusal,
    seq::Seq,
};

impl Responder {
    /// Processes a packet of an unreliable connection (IBA 9.8.2).
    ///
    /// Aborts a message whose packets are not consecutive. The next message starts with a first or only packet of any PSN.
    pub(crate) fn handle_unacknowledged(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        if !self.may_receive(call) {
            return;
        }
        if self.expects(call.qp, packet.header.bth.psn) {
            call.note_established();
        }
        let seq = self.expected.nearest(packet.header.bth.psn);
        let info = packet.header.bth.opcode.info();
        let continues = match (&self.inbound, info.class) {
            (Inbound::Send(_), Class::Send) | (Inbound::Write { .. }, Class::Write) => {
                !info.position.starts() && seq == self.expected
            }
            _ => false,
        };
        self.note_gap(call, seq);
        self.expected = seq.plus(1);
        if !continues {
            self.abort(call, WcStatus::RemoteInvalidRequestError);
            if !info.position.starts() {
                call.counters.dropped_requests += 1;
                return;
            }
        }
        if let Err(refusal) = self.process(call, seq, packet) {
            self.refuse_silently(call, refusal, packet);
        }
        call.fail_on_overflow();
    }

    fn note_gap(&mut self, call: &mut Call<'_>, seq: Seq) {
        match seq.cmp(&self.expected) {
            Ordering::Equal => {}
            Ordering::Greater => call.counters.out_of_seq_request += 1,
            Ordering::Less => call.counters.duplicate_request += 1,
        }
    }

    /// Processes a refusal that is not reported to the sender (IBA 9.9.3, classes A, D and E).
    fn refuse_silently(&mut self, call: &mut Call<'_>, refusal: Refusal, packet: &Packet<'_>) {
        self.inbound = Inbound::Idle;
        let status = refusal.row().status;
        let counter = match refusal {
            // The queue pair fails with its receive work request, whose memory is invalid (class A).
            Refusal::LocalProtection => {
                self.note_refusal(call, refusal, Some(packet));
                if let Some(receive) = self.receive.take() {
                    self.complete_receive_error(call, receive.wqe.wr_id, status);
                }
                call.qp.fail();
                return;
            }
            Refusal::NoReceive => &mut call.counters.dropped_no_receive,
            Refusal::ReceiveTooShort => &mut call.counters.dropped_length,
            _ => &mut call.counters.dropped_messages,
        };
        *counter += 1;
        self.abort(call, status);
    }

    /// Aborts the current message. The next message gets its receive work request (class D). One from a shared queue
    /// completes with `status`, or the program might never see it again (class E, `rxe_resp.c`).
    fn abort(&mut self, call: &mut Call<'_>, status: WcStatus) {
        if !matches!(self.inbound, Inbound::Idle) {
            call.counters.dropped_messages += 1;
            self.inbound = Inbound::Idle;
        }
        let Some(receive) = self.receive.take() else {
            return;
        };
        match call.qp.config().srq {
            Some(_) => self.complete_receive_error(call, receive.wqe.wr_id, status),
            None => self.receives.push_front(receive.wqe),
        }
    }

    /// Processes a datagram.
    pub(crate) fn handle_datagram(&mut self, call: &mut Call<'_>, packet: &Packet<'_>, source: &DatagramSource) {
        let info = packet.header.bth.opcode.info();
        let deth = packet.header.deth().filter(|_| call.qp.config().qp_type.is_datagram());
        let Some(deth) = deth.filter(|_| info.class == Class::Send) else {
            call.counters.dropped_opcode += 1;
            return;
        };
        if !self.may_receive(call) {
            return;
        }
        if deth.qkey != call.qp.qkey() {
            call.counters.qkey_violations += 1;
            return;
        }
        let header = source.header(packet);
        let (Some(header), true) = (header, packet.payload.len() <= call.qp.mtu()) else {
            call.counters.dropped_length += 1;
            return;
        };
        match self.take_datagram(call, packet, &header) {
            Ok(byte_len) => {
                let completion = Completion {
                    opcode: WcOpcode::Recv,
                    byte_len,
                    src_qp: deth.src_qp,
                    sl: source.packet_type(),
                    flags: WcFlags::GRH,
                    ..Completion::default()
                };
                self.complete_receive(call, packet, completion);
            }
            Err(refusal) => self.refuse_silently(call, refusal, packet),
        }
        call.fail_on_overflow();
    }

    /// Writes network header and data into the next receive work request. Returns their length, bytes.
    fn take_datagram(
        &mut self,
        call: &mut Call<'_>,
        packet: &Packet<'_>,
        header: &[u8; GRH_LEN],
    ) -> Result<u32, Refusal> {
        self.take_receive(call, true)?;
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
}
