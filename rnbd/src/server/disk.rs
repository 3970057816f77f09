//! Operations that a server asks its disks for.

use crate::{block::BlockOp, proto::status};

/// A device that was opened, as whoever does the I/O names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StoreId(pub u32);

/// Names an operation until it is over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct IoTicket(pub u64);

/// An operation. The data of reads and writes lies in the memory of the session that asks, and the answer of a block status, which is
/// [as long as](crate::proto::status::answer_len) it can have extents.
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
    /// Bytes in the session's memory; `None`: it needs none there.
    pub fn data_len(&self) -> Option<u64> {
        match self.op {
            BlockOp::Read | BlockOp::Write { .. } => Some(self.len),
            BlockOp::BlockStatus { most } => Some(status::answer_len(most) as u64),
            BlockOp::Flush | BlockOp::Discard | BlockOp::WriteZeroes { .. } => None,
        }
    }
}
