//! What a server asks of its disks.

use crate::block::BlockOp;

/// A device that was opened, as whoever does the I/O names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StoreId(pub u32);

/// Names an operation until it is over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct IoTicket(pub u64);

/// An operation. The data of reads and writes lies in the memory of the session that asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskOp {
    /// Which device.
    pub store: StoreId,
    /// What.
    pub op: BlockOp,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// First byte in the session's memory, of reads and writes.
    pub data: usize,
}
