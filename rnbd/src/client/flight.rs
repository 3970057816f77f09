//! In-flight requests, and messages that wait to be sent.

use rtrs::client::request::SessionId;

use super::{operation::Part, output::DeviceKey};
use crate::{errno::Errno, proto::IoOp};

/// A message that is no block request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Message {
    /// Version exchange.
    Version(SessionId),
    /// Open a device.
    Open(DeviceKey),
    /// Close one.
    Close(DeviceKey),
}

/// A request; its number is its tag.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flight {
    /// A message.
    Message {
        message: Message,
        /// RTRS has it.
        sent: bool,
    },
    /// Part of an operation.
    Part(FlightPart),
}

/// Part of an operation, on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlightPart {
    pub(super) operation: u64,
    pub(super) op: IoOp,
    pub(super) part: Part,
    /// How often its device had been opened.
    pub(super) opened: u32,
    /// Acknowledged writes that a flush covers.
    pub(super) covers: u64,
}

impl Flight {
    /// RTRS has it.
    pub(super) fn mark_sent(&mut self) {
        if let Self::Message { sent, .. } = self {
            *sent = true;
        }
    }
}

/// Whether an operation may go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Admission {
    /// On the server's device of this number.
    Now(u32),
    /// It waits for the device.
    Later,
    /// It fails.
    Never(Errno),
}

/// Next step of a part that has come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Over(Result<(), Errno>),
    /// It was too long, and is done in smaller parts.
    Smaller,
    /// It was lost, and waits for its device.
    Again,
    /// The same, because the server has closed the device.
    Closed,
}
