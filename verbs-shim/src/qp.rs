//! Queue pairs as objects.

use std::{cell::UnsafeCell, sync::Arc};

use crate::{
    abi::{c_enum, ibv_ah_attr, ibv_qp, ibv_qp_ex, ibv_qp_init_attr},
    batch::Builder,
    core::Core,
    cq::Cq,
    events::Acks,
    live::{self, Object as _},
    pd::Users,
};

/// A queue pair; always the extended structure, whichever call made it.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) abi: UnsafeCell<ibv_qp_ex>,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Qp,
    pub(crate) init: ibv_qp_init_attr,
    /// Made with `send_ops_flags`, so that `ibv_wr_*` may be called.
    pub(crate) extended: bool,
    pub(crate) builder: Builder,
    pub(crate) acks: Arc<Acks>,
    /// The path as the program gave it, for queries.
    pub(crate) path: parking_lot::Mutex<Option<ibv_ah_attr>>,
    /// Its protection domain and queues.
    pub(crate) _uses: Vec<Users>,
}

live::object!(Qp, "QP", ibv_qp, |qp| (*qp).context, (*qp).handle);

impl Qp {
    /// Returns the `ibv_qp_type`.
    pub(crate) fn kind(&self) -> c_enum {
        self.init.qp_type
    }

    pub(crate) fn max_send_sge(&self) -> usize {
        self.init.cap.max_send_sge as usize
    }

    pub(crate) fn max_recv_sge(&self) -> usize {
        self.init.cap.max_recv_sge as usize
    }

    pub(crate) fn max_inline(&self) -> u64 {
        self.init.cap.max_inline_data.into()
    }

    /// Discards its completions: after RESET they would be taken for those of new work requests.
    pub(crate) fn forget_completions(&self) {
        for cq in [self.init.send_cq, self.init.recv_cq] {
            // SAFETY: the queues outlive the queue pair: they can't be destroyed before.
            if let Some(cq) = unsafe { Cq::any(cq) } {
                cq.inner.forget(self.inner.qpn());
            }
        }
    }
}
