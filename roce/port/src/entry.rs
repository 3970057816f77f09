//! Queue pairs of a port, each with the port's own state of it.

use crate::cm::ConnId;
use roce_bth::{Psn, RnrTimer};
use roce_qp::QueuePair;
use roce_verbs::Instant;
use roce_verbs::mem::PdHandle;

use crate::{batch::Receiver, peer::QpPath};

/// Connection of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Binding {
    /// None, or the application modifies the queue pair itself.
    Free,
    /// A connection waits for the peer's answer to move the queue pair to RTS.
    Offered {
        /// First PSN that the queue pair expects.
        rq_psn: Psn,
        min_rnr_timer: RnrTimer,
    },
    /// The connection waits for the RTU, or for any packet of the peer instead.
    HalfOpen(ConnId),
    /// The queue pair has a connection.
    Bound,
}

/// Queue pair with the port's own state of it.
pub(crate) struct QpEntry {
    pub(crate) qp: QueuePair,
    /// Place in the order of creation, from 1.
    pub(crate) serial: u32,
    pub(crate) pd: PdHandle,
    pub(crate) path: Option<QpPath>,
    /// Receiver of the last datagram.
    pub(crate) receiver: Option<Receiver>,
    /// In the ready list.
    pub(crate) queued: bool,
    /// In its peer's list of queue pairs that wait for the window.
    pub(crate) blocked: bool,
    /// Time of the queue pair's earliest entry in the timer heap.
    pub(crate) armed: Option<Instant>,
    /// Connection of the queue pair.
    pub(crate) binding: Binding,
    /// UDP source port of a connected queue pair.
    pub(crate) source: Option<SourcePort>,
    /// Congestion notifications to the peer.
    pub(crate) notifies: Notified,
}

/// UDP source port of a connected queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourcePort {
    pub(crate) port: u16,
    /// A REQ or REP has named the port: the peer drops packets from any other.
    pub(crate) promised: bool,
}

/// Congestion notifications of a queue pair to its peer.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Notified {
    pub(crate) last: Option<Instant>,
    /// PSN of the marked packet to notify the peer of.
    pub(crate) due: Option<Psn>,
}
