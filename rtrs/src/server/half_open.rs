//! Paths of which nobody knows yet whether there is a client behind them.

use core::net::SocketAddr;

use roce_verbs::{
    QpCaps,
    provider::{CmRef, CqId, DeviceIx, PdId, VerbsError},
};

use crate::{
    admission::ConnectRequest,
    cx::Cx,
    server::{
        conn::Conn,
        path_id::{Ask, PathId},
    },
};

/// Source of a request to connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Guest {
    /// A connection request that came here.
    Here(CmRef),
    /// One that came to another share.
    There(usize, Ask),
}

/// A connection request that home decides about, another share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) cm: CmRef,
    pub(crate) device: DeviceIx,
    pub(crate) cid: u16,
    pub(crate) home: usize,
}

/// A connection request, as far as it is understood.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) guest: Guest,
    pub(crate) request: ConnectRequest,
    pub(crate) peer: SocketAddr,
    pub(crate) device: DeviceIx,
}

/// All that the connection request of a path gets before the client has proved its address.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    pub(crate) id: PathId,
    /// Protection domain of its session, which may be still to come.
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) caps: QpCaps,
    /// Number 0, without receives.
    pub(crate) conn: Conn,
    /// Requests for further connections that came before connection 0 was known to stand.
    pub(crate) held: Vec<Arrival>,
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
