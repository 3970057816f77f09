//! A connection of a path: its queue pair, its place with the connection manager, and what it is to post.

use roce_verbs::{
    DeviceLimits, QpCaps, RecvWr,
    provider::{CmRef, CqId, PdId, QpId, QpSpec, VerbsError},
    wr::PostError,
};
use smallvec::SmallVec;

use crate::{
    cx::Cx,
    mark::{Mark, MarkKind},
    sendq::MIN_SEND_WR,
    server::post::Outgoing,
};

/// Receives that are posted at a time.
const RECVS: u32 = 32;

/// Queue sizes of a connection: `send` and `recv` work requests, cut to what the device can.
pub(crate) fn caps(limits: &DeviceLimits, send: u32, recv: u32) -> QpCaps {
    QpCaps {
        max_send_wr: send.max(MIN_SEND_WR).min(limits.max_qp_wr),
        max_recv_wr: recv.min(limits.max_qp_wr),
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 16,
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) qp: QpId,
    pub(crate) cm: CmRef,
    pub(crate) out: Outgoing,
    /// None of its work requests is under way, and none will be.
    pub(crate) drained: bool,
    /// Receives that go back at the end of the turn.
    used: u32,
    /// It stands on the list of those that the end of the turn is to look after.
    listed: bool,
}

impl Conn {
    /// Makes the queue pair. It is the caller's to destroy.
    ///
    /// # Errors
    /// At the device's limits.
    pub(crate) fn make(cx: &mut Cx<'_>, pd: PdId, cq: CqId, caps: QpCaps, cm: CmRef) -> Result<Self, VerbsError> {
        let spec = QpSpec {
            pd,
            cq,
            caps,
            signal_all: false,
        };
        Ok(Self {
            qp: cx.provider.create_qp(&spec)?,
            cm,
            out: Outgoing::new(caps.max_send_wr),
            drained: false,
            used: 0,
            listed: false,
        })
    }

    /// Posts so many receives for messages without data.
    ///
    /// # Errors
    /// When the provider refuses.
    pub(crate) fn post_recvs(&self, cx: &mut Cx<'_>, count: u32) -> Result<(), PostError> {
        let recv = RecvWr {
            wr_id: Mark::new(MarkKind::Recv, 0).encode(),
            sges: &[],
        };
        let mut left = count;
        while left > 0 {
            let now = left.min(RECVS);
            let wrs: SmallVec<[RecvWr<'_>; RECVS as usize]> = (0..now).map(|_| recv).collect();
            cx.provider.post_recv(self.qp, &wrs).map_err(|(_, e)| e)?;
            left -= now;
        }
        Ok(())
    }

    /// A receive was used.
    pub(crate) fn use_recv(&mut self) {
        self.used += 1;
    }

    /// Posts the receives that were used.
    ///
    /// # Errors
    /// When the provider refuses.
    pub(crate) fn give_back(&mut self, cx: &mut Cx<'_>) -> Result<(), PostError> {
        let used = core::mem::take(&mut self.used);
        self.post_recvs(cx, used)
    }

    /// The end of the turn is to look after it: false if it knows already.
    pub(crate) fn list(&mut self) -> bool {
        !core::mem::replace(&mut self.listed, true)
    }

    /// The end of the turn looks after it.
    pub(crate) fn unlist(&mut self) {
        self.listed = false;
    }
}
