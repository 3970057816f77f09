//! What is with RTRS, or on its way there.

use rtrs::client::request::SessionId;

use super::output::DeviceKey;
use crate::proto::IoOp;

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
    /// Part of an operation, of `bytes` on the device.
    Part { operation: u64, op: IoOp, bytes: u32 },
}

impl Flight {
    /// RTRS has it.
    pub(super) fn mark_sent(&mut self) {
        if let Self::Message { sent, .. } = self {
            *sent = true;
        }
    }
}
