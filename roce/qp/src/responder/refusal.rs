//! Refused requests: what the peer, the receive work request and the program get to know.

use roce_bth::{Class, Packet, RnrTimer, Syndrome};

use super::{Gap, Inbound, Responder};
use crate::{
    context::QpContext,
    ctx::Ctx,
    failure::{Detail, NamedMemory},
    refusal::{Refusal, refusal_row},
    replies::{AckDue, Replies},
    rights::needed_rights,
    seq::Seq,
};

impl Responder {
    /// Refuses a request: with an RNR NAK if only the receive work request is missing, else fatally. `packet` is `None` for a READ
    /// that fails while its data is sent.
    pub(crate) fn refuse(
        &mut self,
        qp: &mut QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        refusal: Refusal,
        packet: Option<&Packet<'_>>,
    ) {
        if refusal == Refusal::NoReceive {
            ctx.counters.send_rnr_err += 1;
            self.gap = Gap::Nak;
            let timer: RnrTimer = qp.attr().min_rnr_timer.unwrap_or_default();
            replies.ack_now(AckDue::Refuse(seq, Syndrome::Rnr(timer)));
            return;
        }
        self.note_refusal(qp, ctx, refusal, packet);
        let row = refusal_row(refusal);
        self.inbound = Inbound::Idle;
        // What is being received when a READ's data can't be sent is a later request's, and is flushed.
        match packet.and_then(|_| self.receive.take()) {
            Some(receive) => self.complete_receive_error(qp, ctx, receive.wqe.wr_id, row.status),
            None => ctx.events.push_back((row.event)(qp.qpn())),
        }
        replies.close();
        let last = match row.nak {
            Some(code) => {
                ctx.counters.naks_sent += 1;
                AckDue::Refuse(seq, Syndrome::Nak(code))
            }
            None => {
                self.expected = seq.plus(1);
                self.msn = self.msn.next();
                replies.set_executed(self.expected, self.msn);
                AckDue::Ack
            }
        };
        replies.ack_now(last);
        qp.fail();
    }

    /// Records why a request is refused. `packet` is `None` if the request was executed in part before.
    pub(super) fn note_refusal(
        &self,
        qp: &mut QpContext,
        ctx: &Ctx<'_>,
        refusal: Refusal,
        packet: Option<&Packet<'_>>,
    ) {
        let class = packet.map_or(Class::ReadRequest, |packet| packet.header.bth.opcode.info().class);
        let detail = packet.map_or(Detail::None, |packet| self.detail(qp, ctx, refusal, packet));
        qp.note_refusal(class, refusal, detail);
    }

    /// Returns the facts that explain a refusal.
    fn detail(&self, qp: &QpContext, ctx: &Ctx<'_>, refusal: Refusal, packet: &Packet<'_>) -> Detail {
        let need = needed_rights(packet);
        let header = packet.header;
        match refusal {
            Refusal::RKey => {
                let named = header.reth().map(|reth| (reth.rkey, reth.va, reth.dma_len));
                let named = named.or_else(|| header.atomic_eth().map(|eth| (eth.rkey, eth.va, 8)));
                let Some((rkey, addr, len)) = named else {
                    return Detail::None;
                };
                let pd = self.key_domain(qp);
                let found = ctx.mem.resolve_remote(pd, qp.qpn(), rkey, addr, len, need);
                Detail::Memory(NamedMemory {
                    key: rkey.0,
                    addr,
                    len: len.into(),
                    error: found.err(),
                    open: ctx.mem.open_range(rkey.0),
                    need,
                })
            }
            Refusal::Operation if !qp.access().contains(need) => Detail::Rights {
                have: qp.access(),
                need,
            },
            Refusal::ReceiveTooShort | Refusal::LocalProtection => {
                let Some(receive) = &self.receive else {
                    return Detail::None;
                };
                Detail::Receive {
                    message: self.inbound.received() + packet.payload.len(),
                    room: receive.list.len(),
                    wr_id: receive.wqe.wr_id,
                }
            }
            Refusal::Misaligned => {
                let atomic = header.atomic_eth().map(|eth| eth.va);
                Detail::Address(atomic.or(header.reth().map(|reth| reth.va)).unwrap_or_default())
            }
            Refusal::TooManyRdAtomic => Detail::Limit(qp.max_reads()),
            _ => Detail::None,
        }
    }
}
