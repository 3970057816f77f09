//! Receive queues: what waits in any of them, and the one that a queue pair has for itself.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use roce_verbs::mem::SgList;
use roce_verbs::{QpCaps, QpState, RecvWr, Sge, wr::PostError};
use smallvec::SmallVec;

use crate::slots::KEEP_CAPACITY;

/// A receive work request in the queue.
#[derive(Debug)]
pub(crate) struct RecvWqe {
    pub(crate) wr_id: u64,
    pub(crate) sges: SmallVec<[Sge; 1]>,
}

/// A receive work request that a message has taken.
#[derive(Debug)]
pub(crate) struct ActiveRecv {
    pub(crate) wqe: RecvWqe,
    /// Destination of a SEND's bytes; empty for an RDMA WRITE with immediate.
    pub(crate) list: SgList,
}

/// Receive work requests, oldest first.
#[derive(Debug, Default)]
pub(crate) struct RecvQueue {
    wqes: VecDeque<RecvWqe>,
}

impl RecvQueue {
    pub(crate) fn len(&self) -> usize {
        self.wqes.len()
    }

    pub(crate) fn push(&mut self, wr: &RecvWr<'_>) {
        self.wqes.push_back(RecvWqe {
            wr_id: wr.wr_id,
            sges: SmallVec::from_slice(wr.sges),
        });
    }

    pub(crate) fn pop(&mut self) -> Option<RecvWqe> {
        let wqe = self.wqes.pop_front();
        if self.wqes.is_empty() && self.wqes.capacity() > KEEP_CAPACITY {
            self.wqes.shrink_to(KEEP_CAPACITY);
        }
        wqe
    }

    /// Puts back what a message has taken in vain.
    pub(crate) fn push_front(&mut self, wqe: RecvWqe) {
        self.wqes.push_front(wqe);
    }
}

/// Decision about a receive work request that is posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gate {
    /// Refused: the queue pair is in RESET.
    Shut,
    Open,
    /// The queue pair completes it at once, in error.
    Flushed,
}

#[derive(Debug)]
struct Inner {
    wqes: RecvQueue,
    gate: Gate,
}

/// The receive queue of one queue pair. Any thread may post to it, without the port's lock; its queue pair takes from it. Nothing is
/// called under the lock in it.
#[derive(Debug)]
pub struct ReceiveQueue {
    max_wr: usize,
    max_sge: usize,
    inner: Mutex<Inner>,
}

impl ReceiveQueue {
    /// One of a queue pair in RESET.
    pub(crate) fn new(caps: &QpCaps) -> Arc<Self> {
        Arc::new(Self {
            max_wr: caps.max_recv_wr as usize,
            max_sge: caps.max_recv_sge as usize,
            inner: Mutex::new(Inner {
                wqes: RecvQueue::default(),
                gate: Gate::Shut,
            }),
        })
    }

    /// Queues receive work requests in order, and returns how many: those from the first one on that it did not take are the queue
    /// pair's to flush ([`QueuePair::post_recv`](crate::QueuePair::post_recv)).
    ///
    /// # Errors
    /// The first refusal, with the number of requests queued before it.
    pub fn post(&self, wrs: &[RecvWr<'_>]) -> Result<usize, (usize, PostError)> {
        let mut inner = self.inner.lock();
        for (i, wr) in wrs.iter().enumerate() {
            if inner.gate == Gate::Shut {
                return Err((i, PostError::State(QpState::Reset)));
            }
            let (given, max) = (wr.sges.len(), self.max_sge);
            if given > max {
                return Err((i, PostError::TooManySges { given, max }));
            }
            if inner.wqes.len() >= self.max_wr {
                return Err((i, PostError::QueueFull));
            }
            if inner.gate == Gate::Flushed {
                return Ok(i);
            }
            inner.wqes.push(wr);
        }
        Ok(wrs.len())
    }

    /// Follows its queue pair to another state. What it held is returned when that is one in which nothing waits.
    pub(crate) fn follow(&self, state: QpState) -> RecvQueue {
        let mut inner = self.inner.lock();
        inner.gate = match state {
            QpState::Reset => Gate::Shut,
            QpState::Err => Gate::Flushed,
            _ => Gate::Open,
        };
        match inner.gate {
            Gate::Open => RecvQueue::default(),
            Gate::Shut | Gate::Flushed => core::mem::take(&mut inner.wqes),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.inner.lock().wqes.len()
    }

    pub(crate) fn pop(&self) -> Option<RecvWqe> {
        self.inner.lock().wqes.pop()
    }

    /// Puts back what a message has taken in vain.
    pub(crate) fn push_front(&self, wqe: RecvWqe) {
        self.inner.lock().wqes.push_front(wqe);
    }
}
