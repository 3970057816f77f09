//! Answers to duplicate requests (IBA 9.7.5.1.2).

use core::time::Duration;

use roce_bth::{Class, Packet, Reth, Service};
use roce_verbs::AccessFlags;

use super::Responder;
use crate::{
    context::Call,
    replies::{Resource, Work},
    seq::Seq,
};

/// Age up to which a duplicate SEND or WRITE is acknowledged, PSNs. A peer has far fewer outstanding.
const RECENT: u64 = 1 << 14;

impl Responder {
    /// Answers a duplicate request (IBA 9.7.5.1.2).
    ///
    /// Acknowledges a SEND or WRITE again, repeats a READ, and replays the saved result of an atomic.
    pub(super) fn answer_duplicate(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) {
        call.counters.duplicate_request += 1;
        match packet.header.bth.opcode.info().class {
            // Too old: the peer can't be waiting for this acknowledgement.
            Class::Send | Class::Write if self.expected.since(seq) > RECENT => call.counters.dropped_requests += 1,
            Class::Send | Class::Write if call.qp.is_selective() => self.replies.ack_due(call, Duration::ZERO),
            Class::Send | Class::Write => self.replies.ack_duplicate(call, seq),
            Class::ReadRequest => self.duplicate_read(call, seq, packet),
            class @ (Class::Atomic | Class::AtomicWrite | Class::Flush) => {
                let saved = self.replies.find(seq);
                match (class, saved.map(|r| &r.work)) {
                    (Class::Atomic, Some(Work::Atomic(_))) | (Class::AtomicWrite | Class::Flush, Some(Work::Done)) => {
                        self.replies.replay(seq);
                    }
                    _ => call.counters.dropped_requests += 1,
                }
            }
            _ => call.counters.dropped_opcode += 1,
        }
    }

    /// Answers a duplicate READ request, which must be all or part of the original.
    fn duplicate_read(&mut self, call: &mut Call<'_>, seq: Seq, packet: &Packet<'_>) {
        let mtu = call.qp.mtu() as u64;
        let reth = packet.header.reth().unwrap_or_default();
        let Some((first, va, rkey, len)) = self.replies.find(seq).and_then(|r| match &r.work {
            Work::Read(read) => Some((r.first, read.va, read.rkey, read.len)),
            Work::Atomic(_) | Work::Done => None,
        }) else {
            call.counters.dropped_requests += 1;
            return;
        };
        let offset = seq.since(first) * mtu;
        let fits = reth.rkey == rkey
            && reth.va == va.wrapping_add(offset)
            && offset + u64::from(reth.dma_len) <= u64::from(len);
        if !fits {
            call.counters.dropped_requests += 1;
            return;
        }
        // Check access again, but don't fail the queue pair: this may be a late copy of a completed READ whose key has
        // been revoked since. The peer ignores the NAK then.
        let pd = match call.qp.service() {
            Service::Xrc => self.named_queue(call.qp, packet).map(|srq| srq.pd()),
            _ => Some(call.qp.config().pd),
        };
        let Some(pd) = pd else {
            call.counters.dropped_requests += 1;
            return;
        };
        let whole = Reth { va, rkey, dma_len: len };
        let Ok(span) = self.remote_span(call, pd, &whole, AccessFlags::REMOTE_READ) else {
            self.replies.refuse_replay(call, seq);
            return;
        };
        let selective = call.qp.is_selective();
        if let Some(Resource {
            work: Work::Read(read),
            pending,
            ..
        }) = self.replies.find(seq)
        {
            read.span = span;
            let part = (offset as u32, offset as u32 + reth.dma_len);
            if selective && *pending {
                // Other parts of the READ are still being sent.
                call.counters.duplicate_parts += u64::from(read.add(part));
                return;
            }
            let again = part.0;
            let silence = call.now.saturating_since(read.sent);
            let arrived = again.saturating_sub(read.begin) as usize;
            let lost = read.offset.saturating_sub(again) as usize;
            if !selective {
                call.window.on_response_loss(call.now, silence, arrived, lost);
            }
            read.more.clear();
            read.start(part);
        }
        self.replies.replay(seq);
    }
}
