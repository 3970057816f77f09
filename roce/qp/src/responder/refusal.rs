//! Refused requests: what the peer, the receive work request and the program get to know.

use roce_bth::{Class, Packet, RnrTimer, Syndrome};

use super::{Gap, Inbound, Responder, checks::needed_rights, execute::WORD};
use crate::{
    context::Call,
    failure::{NamedMemory, Rights},
    refusal::Refusal,
    replies::AckDue,
    seq::Seq,
};

impl Responder {
    /// Refuses a request: with an RNR NAK if only the receive work request is missing, else fatally. `packet` is `None` for a READ
    /// that fails while its data is sent.
    pub(crate) fn refuse(&mut self, call: &mut Call<'_>, seq: Seq, refusal: Refusal, packet: Option<&Packet<'_>>) {
        if refusal == Refusal::NoReceive {
            call.counters.send_rnr_err += 1;
            self.gap = Gap::Nak;
            let timer: RnrTimer = call.qp.attr().min_rnr_timer.unwrap_or_default();
            self.replies.ack_now(AckDue::Refuse(seq, Syndrome::Rnr(timer)));
            return;
        }
        self.note_refusal(call, refusal, packet);
        let row = refusal.row();
        self.inbound = Inbound::Idle;
        // What is being received when a READ's data can't be sent is a later request's, and is flushed.
        match packet.and_then(|_| self.receive.take()) {
            Some(receive) => self.complete_receive_error(call, receive.wqe.wr_id, row.status),
            None => call.events.push_back((row.event)(call.qp.qpn())),
        }
        self.replies.close();
        let last = match row.nak {
            Some(code) => {
                call.counters.naks_sent += 1;
                AckDue::Refuse(seq, Syndrome::Nak(code))
            }
            None => {
                self.expected = seq.plus(1);
                self.msn = self.msn.next();
                self.replies.set_executed(self.expected, self.msn);
                AckDue::Ack
            }
        };
        self.replies.ack_now(last);
        call.qp.fail();
    }

    /// Records why a request is refused. `packet` is `None` if the request was executed in part before.
    pub(super) fn note_refusal(&self, call: &mut Call<'_>, refusal: Refusal, packet: Option<&Packet<'_>>) {
        let class = packet.map_or(Class::ReadRequest, |packet| packet.header.bth.opcode.info().class);
        let reason = packet.and_then(|packet| self.reason(call, refusal, packet));
        let reason = reason.as_deref().unwrap_or(refusal.row().text);
        call.counters.qp_failures += 1;
        call.qp.note_refusal(class, refusal, reason);
    }

    /// Returns the reason for a refusal with the facts of the request.
    fn reason(&self, call: &Call<'_>, refusal: Refusal, packet: &Packet<'_>) -> Option<String> {
        let need = needed_rights(packet).unwrap_or_default();
        let atomic = packet.header.atomic_eth();
        let named = packet.header.reth().map(|reth| (reth.rkey, reth.va, reth.dma_len));
        let named = named.or_else(|| atomic.map(|eth| (eth.rkey, eth.va, WORD)));
        let receive = self.receive.as_ref().map(|r| (r.wqe.wr_id, r.list.len()));
        let have = call.qp.access();
        Some(match (refusal, named, receive) {
            (Refusal::RKey, Some((rkey, addr, len)), _) => {
                let pd = self.key_domain(call.qp);
                let found = call.mem.resolve_remote(pd, call.qp.qpn(), rkey, addr, len, need);
                let (key, len) = (rkey.0, len.into());
                NamedMemory { key, addr, len }.describe(call.mem, found.err(), need)
            }
            (Refusal::Operation, ..) if !have.contains(need) => {
                let [have, need] = [have, need].map(Rights);
                format!("the queue pair does not permit it: qp_access_flags {have}, needed {need}")
            }
            (Refusal::ReceiveTooShort, _, Some((wr_id, room))) => {
                let message = self.inbound.received() + packet.payload.len();
                let beyond = message - room;
                format!("{message} bytes or more are beyond the receive by {beyond} (wr_id {wr_id:#x}, {room} bytes)")
            }
            (Refusal::LocalProtection, _, Some((wr_id, _))) => format!(
                "the memory of the receive (wr_id {wr_id:#x}) has a wrong lkey or length, or is not there any more"
            ),
            (Refusal::Misaligned, Some((_, addr, _)), _) => format!("the address {addr:#x} is not a multiple of 8"),
            (Refusal::TooManyRdAtomic, ..) => {
                let max = call.qp.max_reads();
                format!("more READs and atomics at once than max_dest_rd_atomic, {max}, permits")
            }
            _ => return None,
        })
    }
}
