//! One connection: a queue pair with its CM id, and the accounting of its send queue.
//!
//! Most sends are unsignalled. A slot of the send queue is free again only when a signalled send behind it completes,
//! so the gate counts slots, signals often enough, and keeps work that finds no room until there is some. Everything
//! that is posted to one send queue is posted under the gate's lock, so that chains of work requests stay together.

use core::fmt;
use std::collections::VecDeque;
use std::sync::OnceLock;

use parking_lot::Mutex;
use roce_verbs::{
    Completion, QpCaps, QpState,
    provider::{CmId, Provider, QpInit, QueuePair, VerbsError},
    wr::{PostError, RecvWr, SendFlags, Sge},
};
use smallvec::SmallVec;

use crate::proto::Imm;

/// What a completion belongs to; kept in its `wr_id` with connection number and an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum WrKind {
    /// A receive; the index is its buffer.
    Recv = 1,
    /// A send that only accounts for slots (or failed).
    Send = 2,
    /// The end of a key; the index is the chunk or request.
    Revoke = 3,
    /// The receive of the information message.
    InfoRecv = 4,
}

impl WrKind {
    fn name(self) -> &'static str {
        match self {
            Self::Recv => "receive",
            Self::Send => "send",
            Self::Revoke => "key revocation",
            Self::InfoRecv => "receive of session information",
        }
    }
}

/// The mark of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WrId {
    pub(crate) kind: WrKind,
    pub(crate) cid: u16,
    pub(crate) index: u32,
}

impl WrId {
    pub(crate) const fn new(kind: WrKind, cid: u16, index: u32) -> Self {
        Self { kind, cid, index }
    }

    pub(crate) fn encode(self) -> u64 {
        (self.kind as u64) << 48 | u64::from(self.cid) << 32 | u64::from(self.index)
    }

    pub(crate) fn decode(wr_id: u64) -> Option<Self> {
        let kind = match wr_id >> 48 {
            1 => WrKind::Recv,
            2 => WrKind::Send,
            3 => WrKind::Revoke,
            4 => WrKind::InfoRecv,
            _ => return None,
        };
        Some(Self::new(kind, (wr_id >> 32) as u16, wr_id as u32))
    }

    /// Mark and name of a completion, for the report of a failure.
    pub(crate) fn what(wc: &Completion) -> &'static str {
        Self::decode(wc.wr_id).map_or("work request", |id| id.kind.name())
    }
}

/// Slots that the renewal of a key may take: a provider may have to end the former key first.
pub(crate) const GRANT_SLOTS: u32 = 2;

/// Something to post: knows how many slots it takes at most.
pub(crate) trait Work {
    /// Slots of the send queue that it takes at most: 8, unless the queue is empty and large enough.
    fn cost(&self) -> u32;

    /// The heartbeat message, if it is one. The peer decides how many of them there are to answer.
    fn heartbeat(&self) -> Option<Imm>;
}

/// Posts work with a queue pair; the last work request gets these flags (and mark [`WrKind::Send`], unless it is
/// signalled for its own sake). Returns the slots that it took, and whether the last work request was signalled.
pub(crate) trait Poster<P: Provider, W> {
    fn post(&self, conn: &Conn<P, W>, work: &W, last: SendFlags) -> Result<Posted, PostError>;
}

/// What posting a piece of work did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    pub(crate) count: u32,
    pub(crate) signalled: bool,
}

struct Gate<W> {
    size: u32,
    free: u32,
    /// Posted since the last signalled one.
    open: u32,
    /// Slots that each signalled send gives back, oldest first.
    signalled: VecDeque<u32>,
    waiting: VecDeque<W>,
    closed: bool,
}

impl<W: Work> Gate<W> {
    fn new(size: u32) -> Self {
        Self {
            size,
            free: size,
            open: 0,
            signalled: VecDeque::new(),
            waiting: VecDeque::new(),
            closed: false,
        }
    }

    /// Keeps work until there is room. One heartbeat of a kind is enough: a peer that asks without end and acknowledges
    /// nothing must not fill the memory. All other work is bounded by the chunks.
    fn keep(&mut self, work: W) {
        let beat = work.heartbeat();
        if beat.is_none() || self.waiting.iter().all(|w| w.heartbeat() != beat) {
            self.waiting.push_back(work);
        }
    }
}

/// A connection of a path.
pub(crate) struct Conn<P: Provider, W> {
    pub(crate) cid: u16,
    pub(crate) qp: P::Qp,
    cm: OnceLock<P::CmId>,
    gate: Mutex<Gate<W>>,
}

impl<P: Provider, W> fmt::Debug for Conn<P, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn")
            .field("cid", &self.cid)
            .field("qpn", &self.qp.qpn())
            .finish_non_exhaustive()
    }
}

/// Smallest send queue that the gate can work with.
pub(crate) const MIN_SEND_WR: u32 = 32;

/// Queue sizes of a connection: `send` and `recv` work requests, cut to what the device can.
pub(crate) fn caps<P: Provider>(provider: &P, send: u32, recv: u32, sges: u32) -> QpCaps {
    let limit = provider.limits().max_qp_wr;
    QpCaps {
        max_send_wr: send.max(MIN_SEND_WR).min(limit),
        max_recv_wr: recv.min(limit),
        max_send_sge: sges,
        max_recv_sge: 1,
        max_inline_data: 16,
    }
}

impl<P: Provider, W: Work> Conn<P, W> {
    pub(crate) fn new(provider: &P, pd: &P::Pd, cq: &P::Cq, cid: u16, caps: QpCaps) -> Result<Self, VerbsError> {
        let qp = provider.create_qp(
            pd,
            &QpInit {
                send_cq: cq,
                recv_cq: cq,
                caps,
                signal_all: false,
            },
        )?;
        Ok(Self {
            cid,
            qp,
            cm: OnceLock::new(),
            gate: Mutex::new(Gate::new(caps.max_send_wr)),
        })
    }

    pub(crate) fn set_cm(&self, id: P::CmId) {
        // Each connection gets its id once, by the thread that made it.
        let _ = self.cm.set(id);
    }

    /// Posts `work`, or keeps it until the send queue has room.
    pub(crate) fn submit(&self, work: W, poster: &impl Poster<P, W>) -> Result<(), PostError> {
        let mut gate = self.gate.lock();
        if gate.closed {
            return Err(PostError::State(QpState::Err));
        }
        if !gate.waiting.is_empty() || gate.free < work.cost() {
            gate.keep(work);
            return Ok(());
        }
        self.post(&mut gate, &work, poster)
    }

    fn post(&self, gate: &mut Gate<W>, work: &W, poster: &impl Poster<P, W>) -> Result<(), PostError> {
        let signal = gate.open + work.cost() >= gate.size / 4;
        let flags = if signal {
            SendFlags::SIGNALED
        } else {
            SendFlags::empty()
        };
        let done = poster.post(self, work, flags)?;
        gate.free = gate.free.saturating_sub(done.count);
        gate.open += done.count;
        if done.signalled {
            gate.signalled.push_back(core::mem::take(&mut gate.open));
        }
        Ok(())
    }

    /// A signalled send is done: its slots are free, and waiting work is posted.
    pub(crate) fn reclaim(&self, poster: &impl Poster<P, W>) -> Result<(), PostError> {
        let mut gate = self.gate.lock();
        let slots = gate.signalled.pop_front().unwrap_or(0);
        gate.free = (gate.free + slots).min(gate.size);
        while !gate.closed && gate.waiting.front().is_some_and(|w| w.cost() <= gate.free) {
            let Some(work) = gate.waiting.pop_front() else { break };
            self.post(&mut gate, &work, poster)?;
        }
        Ok(())
    }

    /// Ends the connection and moves the queue pair to error. Waiting work is given back.
    pub(crate) fn disconnect(&self) -> VecDeque<W> {
        let waiting = {
            let mut gate = self.gate.lock();
            gate.closed = true;
            core::mem::take(&mut gate.waiting)
        };
        if let Some(cm) = self.cm.get()
            && let Err(e) = cm.disconnect()
        {
            tracing::debug!(cid = self.cid, error = %e, "disconnect");
        }
        waiting
    }

    /// Posts one receive per index; `sge` gives its buffer, `None` an empty one.
    pub(crate) fn post_recvs(
        &self,
        indices: impl IntoIterator<Item = u32>,
        sge: impl Fn(u32) -> Option<Sge>,
    ) -> Result<(), PostError> {
        let mut indices = indices.into_iter().peekable();
        while indices.peek().is_some() {
            let batch: SmallVec<[(u32, SmallVec<[Sge; 1]>); 32]> = indices
                .by_ref()
                .take(32)
                .map(|i| (i, sge(i).into_iter().collect()))
                .collect();
            let wrs: SmallVec<[RecvWr<'_>; 32]> = batch
                .iter()
                .map(|(i, sges)| RecvWr {
                    wr_id: WrId::new(WrKind::Recv, self.cid, *i).encode(),
                    sges,
                })
                .collect();
            self.qp.post_recv(&wrs).map_err(|(_, e)| e)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(PartialEq, Debug)]
    enum Thing {
        Beat(Imm),
        Answer,
    }

    impl Work for Thing {
        fn cost(&self) -> u32 {
            1
        }

        fn heartbeat(&self) -> Option<Imm> {
            match self {
                Self::Beat(imm) => Some(*imm),
                Self::Answer => None,
            }
        }
    }

    #[test]
    fn a_peer_that_asks_for_signs_of_life_without_end_makes_one_answer_wait() {
        let mut gate = Gate::new(MIN_SEND_WR);
        for _ in 0..1000 {
            gate.keep(Thing::Beat(Imm::HbAck));
        }
        gate.keep(Thing::Answer);
        gate.keep(Thing::Beat(Imm::HbMsg));
        gate.keep(Thing::Answer);
        gate.keep(Thing::Beat(Imm::HbAck));
        let (ask, ack) = (Thing::Beat(Imm::HbMsg), Thing::Beat(Imm::HbAck));
        assert_eq!(gate.waiting, [ack, Thing::Answer, ask, Thing::Answer]);
    }
}
