//! Answers to duplicate requests (IBA 9.7.5.1.2).

use core::time::Duration;

use roce_bth::{Class, Packet, Reth, Service};
use roce_verbs::AccessFlags;

use super::Responder;
use crate::{
    context::QpContext,
    ctx::Ctx,
    replies::{Replies, Resource, Work},
    seq::Seq,
};

/// Age up to which a duplicate SEND or WRITE is acknowledged, PSNs. A peer has far fewer outstanding.
const RECENT: u64 = 1 << 14;

impl Responder {
    /// Answers a duplicate request (IBA 9.7.5.1.2).
    ///
    /// Acknowledges a SEND or WRITE again, repeats a READ, and replays the saved result of an atomic.
    pub(super) fn answer_duplicate(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) {
        ctx.counters.duplicate_request += 1;
        match packet.header.bth.opcode.info().class {
            // Too old: the peer can't be waiting for this acknowledgement.
            Class::Send | Class::Write if self.expected.since(seq) > RECENT => ctx.counters.dropped_requests += 1,
            Class::Send | Class::Write if qp.is_selective() => replies.ack_due(ctx, Duration::ZERO),
            Class::Send | Class::Write => replies.ack_duplicate(ctx, seq),
            Class::ReadRequest => self.duplicate_read(qp, replies, ctx, seq, packet),
            class @ (Class::Atomic | Class::AtomicWrite | Class::Flush) => {
                let saved = replies.find(seq);
                match (class, saved.map(|r| &r.work)) {
                    (Class::Atomic, Some(Work::Atomic(_))) | (Class::AtomicWrite | Class::Flush, Some(Work::Done)) => {
                        replies.replay(seq);
                    }
                    _ => ctx.counters.dropped_requests += 1,
                }
            }
            _ => ctx.counters.dropped_opcode += 1,
        }
    }

    /// Answers a duplicate READ request, which must be all or part of the original.
    fn duplicate_read(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        seq: Seq,
        packet: &Packet<'_>,
    ) {
        let mtu = qp.mtu() as u64;
        let reth = packet.header.reth().unwrap_or_default();
        let Some((first, va, rkey, len)) = replies.find(seq).and_then(|r| match &r.work {
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
        let pd = match qp.service() {
            Service::Xrc => self.named_queue(qp, packet).map(|srq| srq.pd()),
            _ => Some(qp.config().pd),
        };
        let Some(pd) = pd else {
            ctx.counters.dropped_requests += 1;
            return;
        };
        let whole = Reth { va, rkey, dma_len: len };
        let Ok(span) = self.remote_span(qp, ctx, pd, &whole, AccessFlags::REMOTE_READ) else {
            replies.refuse_replay(ctx, seq);
            return;
        };
        let selective = qp.is_selective();
        if let Some(Resource {
            work: Work::Read(read),
            pending,
            ..
        }) = replies.find(seq)
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
        replies.replay(seq);
    }
}
