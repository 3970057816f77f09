//! Asynchronous events (`ibv_event_type`).

use roce_bth::Qpn;

/// Something that happened to an object without a work request to report it.
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
    /// A shared receive queue fell below its limit; the number is the queue's handle.
    SrqLimitReached(u32),
    /// The port became usable.
    PortActive,
    /// The port went down.
    PortError,
    /// The table of GIDs changed.
    GidChange,
}
