//! Half-open paths: a connection request gets no more than a queue pair until the client has proved that it receives what is sent to
//! its address.

use core::net::{IpAddr, SocketAddr};
use std::collections::BTreeMap;

use roce_verbs::{
    Instant, QpCaps,
    provider::{CmRef, CqId, DeviceIx, PdId, VerbsError},
};

use crate::{
    Cx,
    admission::{Admission, ConnectRequest, PathKey, shared::SharedAdmission},
    proto::Uuid,
    server::conn::Conn,
    throttle::{INTERVAL, Throttle},
};

/// Identity of a path, known from its first connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathId {
    pub(crate) key: PathKey,
    /// The session that it claims to belong to.
    pub(crate) session: Uuid,
    /// The client's UUID of the path.
    pub(crate) uuid: Uuid,
    /// Our address on it.
    pub(crate) local: IpAddr,
    /// Our device on it.
    pub(crate) device: DeviceIx,
    /// The client's address on it.
    pub(crate) peer: SocketAddr,
    /// Connections that it will have.
    pub(crate) connections: u16,
}

/// A well-formed connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incoming {
    pub(crate) cm: CmRef,
    pub(crate) request: ConnectRequest,
    pub(crate) peer: SocketAddr,
    pub(crate) device: DeviceIx,
}

/// Resources of a path before the client has proved its address.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    pub(crate) id: PathId,
    /// Protection domain of its session, which may not exist yet.
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) caps: QpCaps,
    /// Number 0, without receives.
    pub(crate) conn: Conn,
    /// Requests for further connections that came before connection 0 was established.
    pub(crate) held: Vec<Incoming>,
}

impl HalfOpen {
    /// Makes the objects.
    ///
    /// # Errors
    /// At the device's limits; nothing is left then.
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

    /// Releases the objects, but for the connection: nothing has been posted.
    pub(crate) fn destroy_objects(&self, cx: &mut Cx<'_>) {
        cx.provider.destroy_qp(self.conn.qp);
        cx.provider.destroy_cq(self.cq);
    }
}

/// A connection before its path is established.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pending {
    /// Connection 0.
    First(PathKey),
    /// A request for a further connection.
    Held(PathKey),
}

/// State of the accept path.
#[derive(Debug)]
pub(crate) struct Accept {
    admission: SharedAdmission,
    /// Index of the server's loop.
    pub(crate) at: usize,
    /// Earliest deadline of a handshake on this loop.
    pub(crate) deadline: Option<Instant>,
    pub(crate) half_open: BTreeMap<PathKey, HalfOpen>,
    pub(crate) cms: BTreeMap<CmRef, Pending>,
    /// Log lines that anybody can cause.
    pub(crate) refused: Throttle,
    pub(crate) evicted: Throttle,
    pub(crate) timed_out: Throttle,
    pub(crate) no_room: Throttle,
}

impl Accept {
    /// Without half-open paths, on this loop.
    pub(crate) fn new(admission: SharedAdmission, at: usize) -> Self {
        Self {
            admission,
            at,
            deadline: None,
            half_open: BTreeMap::new(),
            cms: BTreeMap::new(),
            refused: Throttle::new(INTERVAL),
            evicted: Throttle::new(INTERVAL),
            timed_out: Throttle::new(INTERVAL),
            no_room: Throttle::new(INTERVAL),
        }
    }

    /// Calls the admission, which may change the loop's next deadline.
    pub(crate) fn admission<R>(&mut self, call: impl FnOnce(&mut Admission) -> R) -> R {
        let at = self.at;
        let (result, deadline) = self.admission.with(|admission| {
            let result = call(admission);
            (result, admission.next_deadline(at))
        });
        self.deadline = deadline;
        result
    }
}
