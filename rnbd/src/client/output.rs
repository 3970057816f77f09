//! Outputs of a client for its user.

use std::fmt;

use rtrs::IoError;

pub use super::state::DeviceKey;
use super::{error::MapError, operation::Request, state::DeviceState};
use crate::block::{Completion, Geometry};

/// Why acknowledged writes count as lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LossCause {
    /// The server names another [instance](crate::proto::instance) than before: its machine has restarted, another machine or file has
    /// taken the place, or a sync has failed.
    AnotherInstance,
    /// The server names none, as the kernel's does, so that nobody knows whether its machine has restarted.
    Unknown,
}

impl LossCause {
    /// For programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::AnotherInstance => "another_instance",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AnotherInstance => {
                "the server's machine has restarted, another machine or file has taken the place, or a sync there has failed"
            }
            Self::Unknown => "the server had closed the device, and does not say whether its machine has restarted",
        })
    }
}

/// Output of a client for its user. `F` is a front end's part of an operation.
#[derive(Debug)]
pub enum Output<F = u64> {
    /// Report of RTRS about a session or a path: anything but the end of a request. Devices can be mapped once their session is
    /// open, and are opened again when it has a path again.
    Rtrs(rtrs::client::Output<Request<F>>),
    /// The device is mapped: operations are taken.
    Mapped(DeviceKey, Geometry),
    /// The device could not be opened. If it had never been mapped it is gone; else it stays
    /// [`MappedDisconnected`](DeviceState::MappedDisconnected), and [`remap`](super::Client::remap) tries again.
    MapFailed(DeviceKey, MapError),
    /// A request has ended.
    Done {
        /// The device.
        device: DeviceKey,
        /// The front end's part of the request.
        user: F,
        /// Its end. The buffer belongs to the device's session.
        completion: Completion,
    },
    /// The device was opened again, and the server may have lost writes that it had acknowledged: as many as this, of which
    /// no flush that succeeded covers any. The next flush of each [`Opener`](super::Opener) fails with EIO, and so does
    /// its next write with FUA.
    WritesLost {
        /// The device.
        device: DeviceKey,
        /// Requests that wrote.
        writes: u64,
        /// How that is known.
        cause: LossCause,
    },
    /// The device was opened again and is not what it was. Its [state](Output::State) follows.
    Geometry(DeviceKey, Geometry),
    /// A device that was mapped has lost its session, or has been opened again.
    State(DeviceKey, DeviceState),
    /// The device is unmapped, and gone. An error says that the session was lost; the server closes the device then as well.
    Unmapped(DeviceKey, Result<(), IoError>),
}
