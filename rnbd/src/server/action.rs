//! Outputs of a server to its host, and what the host returns.

use super::disk::StoreId;
use crate::{
    block::Geometry,
    errno::Errno,
    proto::{AccessMode, instance::Instance},
};

/// Names a device that is being opened or closed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// Identity of an export, however its name is spelled. The bytes have a meaning only for the code that opens exports; two are equal
/// exactly if they stand for the same one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity(pub Vec<u8>);

/// A device that has been opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Its number at the disks. No other open device has it.
    pub store: StoreId,
    /// Size, limits, abilities. `read_only` says whether it was opened for writing.
    pub geometry: Geometry,
    /// Identity of the export.
    pub identity: Identity,
    /// Location of its bytes, for messages.
    pub label: String,
    /// Cache in which acknowledged writes lie until a flush; `None`: unknown, so that clients have to take them for lost.
    pub instance: Option<Instance>,
}

/// Why a device was not opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenRefused {
    /// The reason that the client is given.
    pub errno: Errno,
    /// The export, if the name stands for one. When the session has it open already, the client is told that instead.
    pub identity: Option<Identity>,
}

impl From<Errno> for OpenRefused {
    /// Refused before it was known what the name stands for.
    fn from(errno: Errno) -> Self {
        Self { errno, identity: None }
    }
}

/// Report of a server to its host, or a job for it.
#[derive(Debug)]
pub enum Output {
    /// Report of RTRS: anything but a request.
    Rtrs(rtrs::server::request::Output),
    /// Open a device. Ends with [`Server::opened`](super::Server::opened).
    Open {
        /// Names the end.
        ticket: Ticket,
        /// The session's name, which may be part of a path.
        session_name: String,
        /// Requested name: bytes without NUL, at least one, otherwise unchecked.
        name: Vec<u8>,
        /// How it is to be opened.
        mode: AccessMode,
    },
    /// Close a device, after what was written is durable. Ends with [`Server::closed`](super::Server::closed). No operation on it is in
    /// flight.
    Close {
        /// Names the end.
        ticket: Ticket,
        /// The device.
        store: StoreId,
    },
}
