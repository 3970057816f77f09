//! FLUSH to persistence (IBTA Annex A19).
//!
//! Making memory persistent may take long (`msync`). So the driver runs it as a [`PersistJob`] without holding a lock.
//! Later requests wait for it.

use std::sync::Arc;

use core::cmp::Ordering;

use roce_bth::{Packet, Placement, Selectivity};
use roce_mem::{FlushError, Span};

use crate::{
    ctx::Ctx,
    qp::QueuePair,
    reorder::BufferedPacket,
    responder::{Refusal, flush_rights},
    seq::Seq,
};

/// Pending request to make memory persistent.
#[derive(Debug)]
pub struct PersistJob {
    span: Span,
    ticket: Arc<()>,
}

impl PersistJob {
    /// Makes the memory persistent.
    ///
    /// # Errors
    /// The memory was revoked, or can't be made persistent.
    pub fn run(&self) -> Result<(), FlushError> {
        self.span.flush(true)
    }
}

/// FLUSH whose job is in progress.
#[derive(Debug)]
pub(crate) struct Flushing {
    /// Identifies the job.
    ticket: Arc<()>,
    packet: BufferedPacket,
    /// The packet received last.
    last: Seq,
}

impl QueuePair {
    /// Takes the pending job. Call [`QueuePair::persisted`] with its result to resume the queue pair.
    pub fn take_persist_job(&mut self) -> Option<PersistJob> {
        self.resp.persist_job.take()
    }

    /// Resumes after a job. Ignores a job that the queue pair no longer waits for.
    pub fn persisted(&mut self, ctx: &mut Ctx<'_>, job: &PersistJob, result: Result<(), FlushError>) {
        let is_current = |f: &mut Box<Flushing>| Arc::ptr_eq(&f.ticket, &job.ticket);
        let Some(flushing) = self.resp.flushing.take_if(is_current) else {
            return;
        };
        if !self.takes_requests() {
            return;
        }
        self.resp.persisted = Some(result);
        let seq = self.resp.expected;
        self.run_request(ctx, seq, &flushing.packet.packet(), flushing.last);
        self.resp.persisted = None;
    }

    /// Executes a FLUSH or starts its job. Returns true if later requests must wait for the job.
    ///
    /// Earlier requests are already in memory. The FLUSH ensures their visibility and persistence.
    pub(crate) fn start_flush(&mut self, ctx: &Ctx<'_>, seq: Seq, packet: &Packet<'_>) -> Result<bool, Refusal> {
        let failed = |e| match e {
            FlushError::Access(_) => Refusal::RKey,
            FlushError::Failed => Refusal::Persist,
        };
        if let Some(result) = self.resp.persisted.take() {
            return result.map(|()| false).map_err(failed);
        }
        let (Some(reth), Some(feth)) = (packet.header.reth(), packet.header.feth()) else {
            return Err(Refusal::Operation);
        };
        let need = flush_rights(packet).ok_or(Refusal::Operation)?;
        let span = match feth.selectivity {
            Selectivity::Region => {
                let (pd, qpn) = (self.key_domain(), self.config.qpn);
                let span = ctx.mem.resolve_whole(pd, qpn, reth.rkey, need);
                Some(span.map_err(|_| Refusal::RKey)?)
            }
            _ => self.remote_span(ctx, self.key_domain(), reth.rkey, reth.va, reth.dma_len, need)?,
        };
        let Some(span) = span else { return Ok(false) };
        if !feth.placement.contains(Placement::PERSISTENT) {
            return span.flush(false).map(|()| false).map_err(failed);
        }
        let ticket = Arc::new(());
        self.resp.flushing = Some(Box::new(Flushing {
            ticket: ticket.clone(),
            packet: BufferedPacket::of(packet),
            last: seq,
        }));
        self.resp.persist_job = Some(PersistJob { span, ticket });
        Ok(true)
    }

    /// Buffers a request received during a FLUSH. Without room for it, the peer retransmits it.
    pub(crate) fn wait_for_flush(&mut self, ctx: &mut Ctx<'_>, packet: &Packet<'_>) {
        let expected = self.resp.expected;
        let seq = expected.nearest(packet.header.bth.psn);
        match seq.cmp(&expected) {
            Ordering::Less => self.answer_duplicate(ctx, seq, packet),
            Ordering::Equal => ctx.counters.duplicate_request += 1,
            Ordering::Greater => {
                let mtu = self.mtu;
                if let Some(flushing) = &mut self.resp.flushing {
                    flushing.last = seq;
                }
                let buffer = self.resp.reorder.as_mut();
                if !buffer.is_some_and(|buffer| buffer.insert(expected, seq, packet, mtu)) {
                    ctx.counters.dropped_requests += 1;
                }
            }
        }
    }
}
