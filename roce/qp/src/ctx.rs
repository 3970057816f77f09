//! Context of calls, settings of queue pairs, and errors.

use std::sync::Arc;

use roce_mem::{MemoryTable, PdHandle};
use roce_verbs::{AsyncEvent, Instant, Mtu, QpAttrMask, QpCaps, QpState, QpType, Qpn};

use crate::{
    counters::Counters,
    cq::CompletionQueue,
    pace::FreePaces,
    srq::{SharedReceiveQueue, XrcDomain},
    window::Window,
};

/// The surroundings of a call: the time, and what the queue pair shares with others.
#[derive(Debug)]
pub struct Ctx<'a> {
    /// Now.
    pub now: Instant,
    /// Keys and memory.
    pub mem: &'a MemoryTable,
    /// Bytes in flight towards the queue pair's peer.
    pub window: &'a mut Window,
    /// How fast what nobody acknowledges goes to each destination.
    pub paces: &'a mut FreePaces,
    /// Asynchronous events.
    pub events: &'a mut Vec<AsyncEvent>,
    /// Counters.
    pub counters: &'a mut Counters,
}

/// Settings of a new queue pair.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// Its number.
    pub qpn: Qpn,
    /// Its protection domain.
    pub pd: PdHandle,
    /// Its transport service.
    pub qp_type: QpType,
    /// Queue for send completions.
    pub send_cq: Arc<CompletionQueue>,
    /// Queue for receive completions.
    pub recv_cq: Arc<CompletionQueue>,
    /// Sizes of its queues.
    pub caps: QpCaps,
    /// Complete every send work request, signalled or not.
    pub signal_all: bool,
    /// The longest message, bytes (at most 2^31).
    pub max_msg_size: u32,
    /// The longest datagram that any path of the port carries.
    pub port_mtu: Mtu,
    /// Source of its receives, instead of a queue of its own.
    pub srq: Option<Arc<SharedReceiveQueue>>,
    /// Domain in which an XRC target finds the shared receive queues that its messages name; nobody else has one.
    pub xrcd: Option<Arc<XrcDomain>>,
}

/// Why a queue pair could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CreateError {
    /// Its type has no receive queue that could be shared, or the queue is one for XRC.
    #[error("queue pairs of type {0:?} don't take receives from this shared queue")]
    SharedReceiveQueue(QpType),
    /// An XRC target without a domain, or another queue pair with one.
    #[error("an XRC target needs an XRC domain, and nobody else may have one")]
    XrcDomain,
}

/// Why an attribute change was refused. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ModifyError {
    /// There is no such transition.
    #[error("a queue pair can't go from {from:?} to {to:?}")]
    Transition {
        /// Current state.
        from: QpState,
        /// State asked for.
        to: QpState,
    },
    /// The state that the program assumed is not the current one.
    #[error("the queue pair is in state {0:?}, not in the one assumed")]
    CurrentState(QpState),
    /// Attributes that the transition needs are missing.
    #[error("attributes are missing: {0:?}")]
    Missing(QpAttrMask),
    /// Attributes that the transition does not take.
    #[error("attributes not allowed here: {0:?}")]
    NotAllowed(QpAttrMask),
    /// An attribute's value is out of range.
    #[error("the value of {0:?} is out of range")]
    Value(QpAttrMask),
}

/// Why the requester is not sending: for diagnosis and tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitReason {
    /// It would send if polled.
    Ready,
    /// The state does not let it send.
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
    /// As many PSNs as may be are outstanding.
    Psn,
    /// The window towards the peer is full.
    Window,
    /// It has sent as much as may go out at once of what nobody acknowledges, or after congestion notifications.
    Pace,
    /// A fenced local invalidation waits for all work requests before it, or a work request that failed here for its
    /// turn to be reported.
    Local,
    /// The send queue drains.
    Draining,
}
