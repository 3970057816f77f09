//! Attributes of queue pairs.

use std::mem;

use rdma_sys::ibv_qp_attr;
use roce_verbs::{AccessFlags, QpAttrMask, QpState, provider::ConnParams};

/// READs and atomics at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Reads {
    /// Number that is answered (`responder_resources`).
    pub(crate) answered: u8,
    /// Number that is sent (`initiator_depth`).
    pub(crate) sent: u8,
}

impl Reads {
    pub(crate) fn min(self, other: Self) -> Self {
        Self {
            answered: self.answered.min(other.answered),
            sent: self.sent.min(other.sent),
        }
    }

    pub(crate) fn of(params: &ConnParams) -> Self {
        Self {
            answered: params.responder_resources,
            sent: params.initiator_depth,
        }
    }
}

/// Attributes for a queue pair's next state.
pub(super) struct Attributes {
    pub(super) raw: ibv_qp_attr,
    pub(super) mask: i32,
}

impl Attributes {
    /// None but the state.
    pub(super) fn of(state: QpState) -> Self {
        // SAFETY: plain data.
        let mut raw: ibv_qp_attr = unsafe { mem::zeroed() };
        raw.qp_state = state as u32;
        let mut this = Self { raw, mask: 0 };
        this.set(QpAttrMask::STATE);
        this
    }

    pub(super) fn set(&mut self, what: QpAttrMask) {
        self.mask |= what.bits() as i32;
    }

    pub(super) fn set_access(&mut self, access: AccessFlags) {
        self.raw.qp_access_flags = access.bits();
        self.set(QpAttrMask::ACCESS_FLAGS);
    }

    pub(super) fn has(&self, what: QpAttrMask) -> bool {
        self.mask & what.bits() as i32 != 0
    }

    pub(super) fn limit_reads(&mut self, reads: Reads) {
        self.raw.max_dest_rd_atomic = self.raw.max_dest_rd_atomic.min(reads.answered);
        self.raw.max_rd_atomic = self.raw.max_rd_atomic.min(reads.sent);
    }
}
