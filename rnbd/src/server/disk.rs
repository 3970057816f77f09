//! Disks of a server, and the operations that it asks them for.

use core::ops::Range;
use std::{fmt, sync::Arc};

use roce_verbs::mem::Pages;
use rtrs::server::request::{RequestKey, SessionKey};

use crate::{block::BlockOp, errno::Errno, proto::status};

/// An open device, by the number that the disks gave it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StoreId(pub u32);

/// Operation on a device. The data of reads and writes lies in the memory of the session, and so does the answer of a block status, which
/// is [as long as](crate::proto::status::answer_len) it can have extents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskOp {
    /// The device.
    pub store: StoreId,
    /// Operation.
    pub op: BlockOp,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// First byte in the session's memory, of reads, writes and block status.
    pub data: usize,
}

impl DiskOp {
    /// A flush of a device.
    pub fn flush(store: StoreId) -> Self {
        Self {
            store,
            op: BlockOp::Flush,
            offset: 0,
            len: 0,
            data: 0,
        }
    }

    /// Bytes in the session's memory; `None`: it needs none there.
    pub fn data_len(&self) -> Option<u64> {
        match self.op {
            BlockOp::Read | BlockOp::Write { .. } => Some(self.len),
            BlockOp::BlockStatus { most } => Some(status::answer_len(most) as u64),
            BlockOp::Flush | BlockOp::Discard | BlockOp::WriteZeroes { .. } => None,
        }
    }
}

/// A block request in progress: it moves from the server through the queues and calls of the disks back to the server.
#[derive(Debug)]
pub struct Op<P> {
    /// Names the request.
    pub id: RequestKey,
    /// Operation to execute.
    pub disk: DiskOp,
    /// The session's memory.
    pub memory: Option<Arc<Pages>>,
    /// Result, once it has ended.
    pub result: Result<(), Errno>,
    /// The disks' part.
    pub part: P,
    /// The server's key of the device.
    pub(super) device: u64,
    /// Operation that follows a flush.
    pub(super) next: Option<DiskOp>,
    /// Bytes of the client's room behind what it reads.
    pub(super) tail: Range<usize>,
}

impl<P: Default> Op<P> {
    /// An operation for a request.
    pub fn new(id: RequestKey, disk: DiskOp, memory: Option<Arc<Pages>>) -> Self {
        Self {
            id,
            disk,
            memory,
            result: Ok(()),
            part: P::default(),
            device: 0,
            next: None,
            tail: 0..0,
        }
    }
}

/// Disks of a server. They own each operation from [`submit`](Self::submit) until [`poll`](Self::poll) returns it.
pub trait Disks {
    /// The disks' part of an operation.
    type Part: Default + fmt::Debug;

    /// Starts an operation. A read-only device is not asked to change. The range may lie beyond the device's end, but not beyond that of
    /// the numbers: the disks know the size best.
    fn submit(&mut self, op: Box<Op<Self::Part>>);

    /// Returns an operation that has ended, with its result. What was read is in the session's memory.
    fn poll(&mut self) -> Option<Box<Op<Self::Part>>>;

    /// Returns a device whose size in bytes has changed.
    fn poll_resized(&mut self) -> Option<(StoreId, u64)> {
        None
    }

    /// Releases what is kept of a session, whose operations have all ended.
    fn forget(&mut self, _session: SessionKey) {}
}
