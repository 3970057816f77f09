//! FLUSH to persistence (IBTA Annex A19).
//!
//! Making memory persistent may take long (`msync`). So the driver runs it as a [`PersistJob`] without holding a lock.
//! Later requests wait for it.

use std::sync::Arc;

use core::cmp::Ordering;

use roce_bth::{Packet, Placement, Selectivity};
use roce_verbs::mem::FlushError;

use super::{
    Responder,
    checks::needed_rights,
    job::{Flush, Flushing, PersistJob},
};
use crate::{context::Call, refusal::Refusal, reorder::BufferedPacket, seq::Seq};

impl Responder {
    /// Takes the pending job. Call [`Responder::persisted`] with its result to resume.
    pub(crate) fn take_persist_job(&mut self) -> Option<PersistJob> {
        match &mut self.flush {
            Flush::Running(flushing) => flushing.job.take(),
            Flush::None | Flush::Finished(_) => None,
        }
    }

    /// Resumes after a job. Ignores a job that the queue pair no longer waits for.
    pub(crate) fn persisted(&mut self, call: &mut Call<'_>, job: &PersistJob, result: Result<(), FlushError>) {
        let flushing = match core::mem::replace(&mut self.flush, Flush::None) {
            Flush::Running(flushing) if Arc::ptr_eq(&flushing.ticket, &job.ticket) => flushing,
            other => {
                self.flush = other;
                return;
            }
        };
        if !call.qp.takes_requests() {
            return;
        }
        self.flush = Flush::Finished(result);
        let seq = self.expected;
        self.run_request(call, seq, &flushing.packet.packet(), flushing.last);
        if matches!(self.flush, Flush::Finished(_)) {
            self.flush = Flush::None;
        }
    }

    /// Executes a FLUSH or starts its job. Returns true if later requests must wait for the job.
    ///
    /// Earlier requests are already in memory. The FLUSH ensures their visibility and persistence.
    pub(super) fn start_flush(&mut self, call: &Call<'_>, seq: Seq, packet: &Packet<'_>) -> Result<bool, Refusal> {
        let failed = |e| match e {
            FlushError::Access(_) => Refusal::RKey,
            FlushError::Failed => Refusal::Persist,
        };
        if let Flush::Finished(result) = self.flush {
            self.flush = Flush::None;
            return result.map(|()| false).map_err(failed);
        }
        let (Some(reth), Some(feth)) = (packet.header.reth(), packet.header.feth()) else {
            return Err(Refusal::Operation);
        };
        let need = needed_rights(packet).ok_or(Refusal::Operation)?;
        let span = match feth.selectivity {
            Selectivity::Region => {
                let (pd, qpn) = (self.key_domain(call.qp), call.qp.qpn());
                let span = call.mem.resolve_whole(pd, qpn, reth.rkey, need);
                Some(span.map_err(|_| Refusal::RKey)?)
            }
            _ => self.remote_span(call, self.key_domain(call.qp), &reth, need)?,
        };
        let Some(span) = span else { return Ok(false) };
        if !feth.placement.contains(Placement::PERSISTENT) {
            return span.flush(false).map(|()| false).map_err(failed);
        }
        let ticket = Arc::new(());
        self.flush = Flush::Running(Box::new(Flushing {
            ticket: ticket.clone(),
            job: Some(PersistJob { span, ticket }),
            packet: BufferedPacket::of(packet),
            last: seq,
        }));
        Ok(true)
    }

    /// Buffers a request received during a FLUSH. Without room for it, the peer retransmits it.
    pub(super) fn wait_for_flush(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) {
        let expected = self.expected;
        let seq = expected.nearest(packet.header.bth.psn);
        match seq.cmp(&expected) {
            Ordering::Less => self.answer_duplicate(call, seq, packet),
            Ordering::Equal => call.counters.duplicate_request += 1,
            Ordering::Greater => {
                let mtu = call.qp.mtu();
                if let Flush::Running(flushing) = &mut self.flush {
                    flushing.last = seq;
                }
                let buffer = self.reorder.as_mut();
                if !buffer.is_some_and(|buffer| buffer.insert(expected, seq, packet, mtu)) {
                    call.counters.dropped_requests += 1;
                }
            }
        }
    }
}
