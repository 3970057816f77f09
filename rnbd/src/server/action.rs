//! Actions that a server asks its loop for.

use rtrs::server::request::{RequestKey, SessionKey};
use smallvec::SmallVec;

use super::disk::{DiskOp, IoTicket, StoreId};
use crate::{
    block::Geometry,
    errno::Errno,
    proto::{AccessMode, instance::Instance},
};

/// Names a device that is being opened or closed, until the loop says how that went.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// Identity of an export, however its name is spelled. The bytes have a meaning only for the code that opens exports; two are equal
/// exactly if they stand for the same one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity(pub Vec<u8>);

/// A device that has been opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Its name in [`DiskOp`] and [`Action::Close`]. No other open device has it.
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

/// Action for the loop, in this order.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// The request is answered with this error number; 0 is success.
    Answer(RequestKey, i32),
    /// The message becomes the data of a read; then the request is answered with success. There is room for it.
    AnswerWith {
        /// The request.
        request: RequestKey,
        /// First byte in the session's memory.
        at: usize,
        /// The message.
        message: SmallVec<[u8; 64]>,
    },
    /// Bytes in the session's memory become zero; the request's answer follows.
    Zero {
        /// The request.
        request: RequestKey,
        /// First byte in the session's memory.
        from: usize,
        /// Bytes.
        len: usize,
    },
    /// A device is to be opened: ends with [`Server::opened`](super::Server::opened).
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
    /// A device is to be closed, after what was written is durable: ends with [`Server::closed`](super::Server::closed).
    /// Nothing is under way on it.
    Close {
        /// Names the end.
        ticket: Ticket,
        /// The device.
        store: StoreId,
    },
    /// Another share has opened a device, which this loop's disks are to have too, as they would have one that they open, and without
    /// the right to write it being asked for again: ends with [`Server::taken_over`](super::Server::taken_over).
    TakeOver {
        /// Names the end.
        ticket: Ticket,
        /// The share.
        home: usize,
        /// ID of the device at the disks.
        store: StoreId,
    },
    /// An operation on a device: ends with [`Server::io_done`](super::Server::io_done). A read-only device is not asked
    /// to change. The range may lie beyond the device's end, but not beyond that of the numbers: whoever knows the size best
    /// refuses it.
    Io(IoTicket, SessionKey, DiskOp),
}
