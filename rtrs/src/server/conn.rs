//! A connection of a path: its queue pair, its place with the connection manager, and what it is to post.

use roce_verbs::{
    DeviceLimits, QpCaps, RecvWr,
    provider::{CmRef, CqId, DeviceCaps, DeviceIx, PdId, QpId, QpSpec, VerbsError},
    wr::PostError,
};
use smallvec::SmallVec;

use crate::{
    Cx,
    mark::{Mark, MarkKind},
    proto::SERVICE_QUEUE_DEPTH,
    sendq::MIN_SEND_WR,
    server::{config::ServerConfig, post::Outgoing},
};

/// Receives that are posted at a time.
const RECVS: u32 = 32;
/// Entries of a completion queue beside those of its work requests.
const SPARE_CQE: usize = 16;

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

/// Queue sizes of a service connection.
pub(crate) fn service_caps(limits: &DeviceLimits, config: &ServerConfig) -> QpCaps {
    caps(limits, config.service_send_wr(), SERVICE_QUEUE_DEPTH + 1)
}

/// Entries of a completion queue for so many connections of these sizes, cut to what the device can: a peer that keeps to the
/// queue depth never fills so many.
pub(crate) fn cq_entries(limits: &DeviceLimits, caps: &QpCaps, connections: usize) -> u32 {
    let each = caps.max_send_wr as usize + caps.max_recv_wr as usize;
    let entries = each.saturating_mul(connections).saturating_add(SPARE_CQE);
    u32::try_from(entries).unwrap_or(u32::MAX).min(limits.max_cqe)
}

/// Abilities of a device that the caller knows.
///
/// # Errors
/// When there is no such device.
pub(crate) fn device_caps<'a>(cx: &'a Cx<'_>, device: DeviceIx) -> Result<&'a DeviceCaps, VerbsError> {
    let caps = cx.provider.devices().get(usize::from(device.0));
    caps.ok_or_else(|| VerbsError::Invalid("no such device".into()))
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
    /// It is on the list of connections for the end of the turn.
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

    /// Posts the receives that were used. The connection is not on the list of the turn any more.
    ///
    /// # Errors
    /// When the provider refuses.
    pub(crate) fn give_back(&mut self, cx: &mut Cx<'_>) -> Result<(), PostError> {
        self.listed = false;
        let used = core::mem::take(&mut self.used);
        self.post_recvs(cx, used)
    }

    /// Puts it on the list of connections for the end of the turn. False: it is there already.
    pub(crate) fn list(&mut self) -> bool {
        !core::mem::replace(&mut self.listed, true)
    }
}
