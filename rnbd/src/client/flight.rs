//! RNBD's part of a request, which lies in RTRS's table of requests in flight, and what becomes of it.

use rtrs::{
    Direction,
    client::{buffers::Buffer, request::SessionId},
};
use smallvec::SmallVec;

use super::{
    operation::{Operation, Part},
    output::DeviceKey,
};
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

/// RNBD's part of a request of RTRS: its tag. `F` is the front end's part.
#[derive(Debug)]
pub struct Request<F>(pub(super) Kind<F>);

/// The whole of a [`Request`].
#[derive(Debug)]
pub(super) enum Kind<F> {
    /// A message, by its number.
    Message(u64, Message),
    /// The only request of an operation.
    Whole(Box<Operation<F>>, Sent),
    /// One of several requests of the operation of this number.
    Part(u64, Sent),
}

/// Part of an operation, on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) op: IoOp,
    pub(super) part: Part,
    /// How often its device had been opened.
    pub(super) opened: u32,
    /// Acknowledged writes that a flush covers.
    pub(super) covers: u64,
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

/// A request for a part of an operation.
pub(super) struct Prepared {
    pub(super) sent: Sent,
    pub(super) direction: Direction,
    pub(super) header: SmallVec<[u8; 64]>,
    pub(super) data: Option<Buffer>,
}
