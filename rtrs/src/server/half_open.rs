//! Paths of which nobody knows yet whether there is a client behind them.

use core::net::SocketAddr;

use roce_verbs::{
    QpCaps,
    provider::{CmRef, CqId, DeviceIx, PdId, VerbsError},
};

use crate::{admission::PathKey, cx::Cx, proto::Uuid, server::conn::Conn};

/// What is known of a path from its first connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathId {
    pub(crate) key: PathKey,
    /// The session that it says it is of.
    pub(crate) session: Uuid,
    /// The device that it leads through.
    pub(crate) device: DeviceIx,
    /// The client's address on it.
    pub(crate) peer: SocketAddr,
    /// Connections that it is to have.
    pub(crate) connections: u16,
}

/// A connection request that waits.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) cm: CmRef,
    pub(crate) device: DeviceIx,
    pub(crate) private_data: Vec<u8>,
}

/// All that the connection request of a path gets before the client has proved its address.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    pub(crate) id: PathId,
    /// Of its session, which may be still to come.
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) caps: QpCaps,
    /// Number 0, without receives.
    pub(crate) conn: Conn,
    /// Requests for further connections that came before connection 0 was known to stand.
    pub(crate) held: Vec<Held>,
}

impl HalfOpen {
    /// Makes the objects.
    ///
    /// # Errors
    /// At the device's limits.
    pub(crate) fn make(
        cx: &mut Cx<'_>,
        id: PathId,
        pd: PdId,
        caps: QpCaps,
        entries: u32,
        cm: CmRef,
    ) -> Result<Self, VerbsError> {
        let cq = cx.provider.create_cq(id.device, entries)?;
        let conn = Conn::make(cx, pd, cq, caps, cm).inspect_err(|_| cx.provider.destroy_cq(cq))?;
        Ok(Self {
            id,
            pd,
            cq,
            caps,
            conn,
            held: Vec::new(),
        })
    }

    /// Gives the objects back, but for the connection: nothing has been posted.
    pub(crate) fn destroy_objects(&self, cx: &mut Cx<'_>) {
        cx.provider.destroy_qp(self.conn.qp);
        cx.provider.destroy_cq(self.cq);
    }
}
