//! Context of calls, settings of queue pairs, and errors.

use std::{collections::VecDeque, sync::Arc};

use roce_verbs::mem::{MemoryTable, PdHandle};
use roce_verbs::{AsyncEvent, Instant, Mtu, QpAttrMask, QpCaps, QpState, QpType, Qpn};

use crate::{
    counters::Counters,
    cq::CompletionQueue,
    pace::FreePaces,
    srq::{SharedReceiveQueue, XrcDomain},
    window::Window,
};

/// Context of a call: the time, and state that the queue pair shares with others.
#[derive(Debug)]
pub struct Ctx<'a> {
    /// Current time.
    pub now: Instant,
    /// Keys and memory.
    pub mem: &'a MemoryTable,
    /// Bytes in flight towards the queue pair's peer.
    pub window: &'a mut Window,
    /// Pacing of UC and UD, by destination.
    pub paces: &'a mut FreePaces,
    /// Queue of asynchronous events.
    pub events: &'a mut VecDeque<AsyncEvent>,
    /// Counters of the transport.
    pub counters: &'a mut Counters,
}

/// Configuration of a new queue pair.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// Queue pair number.
    pub qpn: Qpn,
    /// Protection domain.
    pub pd: PdHandle,
    /// Transport service.
    pub qp_type: QpType,
    /// Completion queue of sends.
    pub send_cq: Arc<CompletionQueue>,
    /// Completion queue of receives.
    pub recv_cq: Arc<CompletionQueue>,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send work request generates a completion (`sq_sig_all`).
    pub signal_all: bool,
    /// Largest message, bytes; at most 2^31.
    pub max_msg_size: u32,
    /// Largest datagram on any path of the port.
    pub port_mtu: Mtu,
    /// Shared receive queue, instead of a receive queue of its own.
    pub srq: Option<Arc<SharedReceiveQueue>>,
    /// XRC domain with the shared receive queues that messages name. XRC targets only.
    pub xrcd: Option<Arc<XrcDomain>>,
}

/// Error of [`QueuePair::new`](crate::QueuePair::new).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CreateError {
    /// The type has no receive queue to share, or the shared receive queue is for XRC.
    #[error("queue pairs of type {0:?} don't take receives from this shared queue")]
    SharedReceiveQueue(QpType),
    /// An XRC target without a domain, or another queue pair with one.
    #[error("an XRC domain is required for an XRC target, and only there")]
    XrcDomain,
}

/// Error of [`QueuePair::modify`](crate::QueuePair::modify). Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ModifyError {
    /// There is no such transition.
    #[error("a queue pair can't go from {from:?} to {to:?}")]
    Transition {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
    },
    /// The assumed state (`cur_state`) is not the current one.
    #[error("the queue pair is in state {0:?}, not in the one assumed")]
    CurrentState(QpState),
    /// Required attributes are missing.
    #[error("attributes are missing: {0:?}")]
    Missing(QpAttrMask),
    /// The transition does not take these attributes.
    #[error("attributes not allowed here: {0:?}")]
    NotAllowed(QpAttrMask),
    /// An attribute's value is out of range.
    #[error("the value of {0:?} is out of range")]
    Value(QpAttrMask),
}

/// Reason why the requester is not sending, for diagnosis and tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitReason {
    /// It sends when polled.
    Ready,
    /// The state does not permit sending.
    State(QpState),
    /// No work request is left to send; nothing is outstanding.
    Empty,
    /// Everything is sent; acknowledgements are outstanding.
    Acks,
    /// A fenced work request waits for READs and atomics before it.
    Fence,
    /// `max_rd_atomic` READs and atomics are outstanding.
    RdAtomic,
    /// The peer had no receive work request: waiting for its RNR time.
    Rnr,
    /// The limit of outstanding PSNs is reached.
    Psn,
    /// The window towards the peer is full.
    Window,
    /// Pacing of UC and UD, or DCQCN after congestion notifications.
    Pace,
    /// A fenced local invalidation waits for all work requests before it, or a work request failed here and waits for its
    /// turn to complete.
    Local,
    /// The send queue drains.
    Draining,
}
