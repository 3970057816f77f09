//! The receive queue.

use std::collections::VecDeque;

use roce_mem::SgList;
use roce_verbs::{RecvWr, Sge};
use smallvec::SmallVec;

use crate::sendq::KEEP_CAPACITY;

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
    /// Where the bytes of a SEND go; empty for an RDMA WRITE with immediate.
    pub(crate) list: SgList,
}

/// The queue.
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

    pub(crate) fn clear(&mut self) {
        self.wqes = VecDeque::new();
    }
}
