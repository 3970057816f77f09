//! Asynchronous events (`ibv_event_type`).

use roce_bth::Qpn;

/// Asynchronous event of an object, without a work request to report it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AsyncEvent {
    /// Error on a completion queue (overflow); the number is the queue's handle.
    CqError(u32),
    /// The queue pair failed in a way that no completion tells.
    QpFatal(Qpn),
    /// A request that the responder had to refuse as invalid.
    QpRequestError(Qpn),
    /// A request with a local access violation.
    QpAccessError(Qpn),
    /// First packet on a queue pair in RTR.
    CommunicationEstablished(Qpn),
    /// The send queue is drained after SQD was asked for.
    SqDrained(Qpn),
    /// The last receive of a queue pair with a shared receive queue is used up.
    LastWqeReached(Qpn),
    /// The path of the queue pair migrated. RoCE has no path migration; only providers on hardware tell this.
    PathMigrated(Qpn),
    /// A path migration failed.
    PathMigrationError(Qpn),
    /// A shared receive queue failed; the number is the queue's handle.
    SrqError(u32),
    /// A shared receive queue fell below its limit; the number is the queue's handle.
    SrqLimitReached(u32),
    /// The device can't go on.
    DeviceFatal,
    /// The table of partition keys changed.
    PkeyChange,
    /// The port became usable.
    PortActive,
    /// The port went down.
    PortError,
    /// The table of GIDs changed.
    GidChange,
}

/// Object of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EventSource {
    /// A completion queue, by handle.
    Cq(u32),
    /// A queue pair.
    Qp(Qpn),
    /// A shared receive queue, by handle.
    Srq(u32),
    /// The port.
    Port,
    /// The device.
    Device,
}

impl AsyncEvent {
    /// The number that it has in `ibv_event_type`, and what it is about.
    pub const fn describe(&self) -> (u32, EventSource) {
        use EventSource::{Cq, Device, Port, Qp, Srq};
        match *self {
            Self::CqError(cq) => (0, Cq(cq)),
            Self::QpFatal(qpn) => (1, Qp(qpn)),
            Self::QpRequestError(qpn) => (2, Qp(qpn)),
            Self::QpAccessError(qpn) => (3, Qp(qpn)),
            Self::CommunicationEstablished(qpn) => (4, Qp(qpn)),
            Self::SqDrained(qpn) => (5, Qp(qpn)),
            Self::PathMigrated(qpn) => (6, Qp(qpn)),
            Self::PathMigrationError(qpn) => (7, Qp(qpn)),
            Self::DeviceFatal => (8, Device),
            Self::PortActive => (9, Port),
            Self::PortError => (10, Port),
            Self::PkeyChange => (12, Port),
            Self::SrqError(srq) => (14, Srq(srq)),
            Self::SrqLimitReached(srq) => (15, Srq(srq)),
            Self::LastWqeReached(qpn) => (16, Qp(qpn)),
            Self::GidChange => (18, Port),
        }
    }
}
