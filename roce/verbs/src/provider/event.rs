//! Events of a provider besides completions.

use super::{
    connect::{NoAnswer, RejectReason},
    ids::{CmRef, DeviceIx, QpId},
};
use crate::event::AsyncEvent;

/// An event.
#[derive(Clone, Debug)]
pub enum Event {
    /// Event of a connection or a listener.
    Cm {
        /// Which one.
        id: CmRef,
        /// Kind of event.
        kind: CmKind,
    },
    /// Every work request of the queue pair has completed after [`Provider::drain`](super::Provider::drain), and nothing touches
    /// their memory any more.
    Drained(QpId),
    /// Event of a device.
    Async(DeviceIx, AsyncEvent),
    /// A device is gone or going. What it has is unusable; its objects are still to be given back.
    DeviceRemoved(DeviceIx),
}

/// Event of a connection (`enum rdma_cm_event_type`).
#[derive(Clone, Debug)]
pub enum CmKind {
    /// The way to the peer is known, and the device that it leads through: a queue pair may be made.
    Resolved {
        /// The device.
        device: DeviceIx,
    },
    /// Somebody wants to connect to a listener; the connection is new. Accept or reject it.
    ConnectRequest {
        /// The listener.
        listener: CmRef,
        /// The device that the request came in by.
        device: DeviceIx,
        /// The peer's private data, without the RDMA_CM header (its bytes up to 56).
        private_data: Vec<u8>,
        /// READs and atomics that the peer will answer at a time.
        initiator_depth: u8,
        /// READs and atomics that the peer will send at a time.
        responder_resources: u8,
    },
    /// The connection stands.
    Established {
        /// Private data of the accept, on the active side.
        private_data: Vec<u8>,
    },
    /// The peer refused.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// Its private data, as it came.
        private_data: Vec<u8>,
    },
    /// No route, or no answer.
    Unreachable(NoAnswer),
    /// Local error; the text names it.
    ConnectError(String),
    /// The connection is over; the queue pair is in error and flushes.
    Disconnected,
    /// The queue pair's number may be reused.
    TimewaitExit,
    /// The connection's own address is not its device's any more.
    AddressChange,
}
