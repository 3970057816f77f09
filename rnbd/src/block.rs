//! Block devices: geometry, requests and their completions.

use rtrs::client::buffers::Buffer;

use crate::errno::Errno;

/// Size, limits and abilities of a block device. All counts in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size, a multiple of 512.
    pub size: u64,
    /// Requests start and end at multiples of this: a power of two, at least 512.
    pub logical_block_size: u32,
    /// Preferred block size.
    pub physical_block_size: u32,
    /// Largest buffer of one read or write, a multiple of the logical block size.
    pub max_transfer: u32,
    /// Largest discard that the device itself takes; 0: it does none. Longer ones are split.
    pub max_discard: u64,
    /// Unit of discards.
    pub discard_granularity: u32,
    /// No writes.
    pub read_only: bool,
    /// A volatile write cache: writes are durable only after a flush or with FUA.
    pub write_cache: bool,
    /// Forced unit access works.
    pub fua: bool,
    /// Longest range that can be made zero faster than by writing zeroes; 0: none can. Longer ones are split.
    pub max_write_zeroes: u64,
    /// Reads and writes that may be in flight together without waiting for each other's buffers.
    pub queue_depth: u32,
}

impl Geometry {
    /// Whether a request of `len` bytes at `offset` is inside the device.
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.size)
    }

    /// Whether a request starts and ends at block boundaries.
    pub fn aligned(&self, offset: u64, len: u64) -> bool {
        (offset | len) & (u64::from(self.logical_block_size.max(1)) - 1) == 0
    }
}

/// Operation on a range of a block device; the data of reads and writes is a separate argument.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockOp {
    /// Bytes are wanted.
    Read,
    /// Bytes are written.
    Write {
        /// Durable before the answer.
        fua: bool,
    },
    /// All completed writes become durable; the range does not matter.
    Flush,
    /// The bytes are no longer needed; reading them later may give anything.
    Discard,
    /// The bytes become zero.
    WriteZeroes {
        /// Durable before the answer.
        fua: bool,
        /// Space may be given back (a hole).
        may_unmap: bool,
    },
    /// Ask for the parts of the range that have data.
    BlockStatus {
        /// At most so many parts, from the beginning of the range.
        most: u32,
    },
}

/// Request to a block device. `U` is its owner's part, which comes back with the [`Completion`].
#[derive(Debug)]
pub struct BlockRequest<U> {
    /// The owner's part.
    pub user: U,
    /// Operation.
    pub op: BlockOp,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The data of a write, or the buffer of a read; as long as the request.
    pub data: Option<Buffer>,
    /// This flush stands for the FUA of a write.
    pub forces: bool,
    /// Requests with equal hints (a CPU or queue number) take the same connection.
    pub hint: usize,
}

impl<U> BlockRequest<U> {
    /// A request without data.
    pub fn new(user: U, op: BlockOp, offset: u64, len: u64) -> Self {
        Self {
            user,
            op,
            offset,
            len,
            data: None,
            forces: false,
            hint: 0,
        }
    }

    /// A flush.
    pub fn flush(user: U) -> Self {
        Self::new(user, BlockOp::Flush, 0, 0)
    }

    /// The same request with data.
    #[must_use]
    pub fn with_data(self, data: Option<Buffer>) -> Self {
        Self { data, ..self }
    }

    /// The same request of another owner.
    pub fn owned_by<V>(self, owner: impl FnOnce(U) -> V) -> BlockRequest<V> {
        BlockRequest {
            user: owner(self.user),
            op: self.op,
            offset: self.offset,
            len: self.len,
            data: self.data,
            forces: self.forces,
            hint: self.hint,
        }
    }
}

/// End of a request. Nothing touches its buffer any more.
#[derive(Debug)]
pub struct Completion {
    /// Result.
    pub result: Result<(), Errno>,
    /// The request's buffer.
    pub data: Option<Buffer>,
    /// Of a block status: extents of the range from its beginning on, at least one, no two neighbours alike. They may end before the
    /// range does.
    pub extents: Vec<Extent>,
    /// How often the device had [lost](crate::client::output::Output::WritesLost) writes by then, for
    /// [`Parts`](crate::client::Parts).
    pub losses: u64,
}

impl Completion {
    /// A completion that carries no extents.
    pub fn new(result: Result<(), Errno>, data: Option<Buffer>) -> Self {
        Self {
            result,
            data,
            extents: Vec::new(),
            losses: 0,
        }
    }
}

/// A part of a range, and what is known of it. Without either flag it may have any data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// Nothing is allocated for it.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

impl Extent {
    /// One that may have any data.
    pub const fn data(len: u64) -> Self {
        Self {
            len,
            hole: false,
            zero: false,
        }
    }

    /// One that has none, and so reads as zeroes.
    pub const fn hole(len: u64) -> Self {
        Self {
            len,
            hole: true,
            zero: true,
        }
    }

    /// Whether the same is known of both.
    pub fn is_like(&self, other: &Self) -> bool {
        (self.hole, self.zero) == (other.hole, other.zero)
    }
}

/// Adds an extent behind others, as a part of the last one if that is like it.
pub fn append(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last) if last.is_like(&next) => last.len = last.len.saturating_add(next.len),
        _ => extents.push(next),
    }
}

impl BlockOp {
    /// Whether it changes the device.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::Flush | Self::BlockStatus { .. })
    }

    /// Whether it moves data of the device that is named beside it.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }

    /// Whether data is durable when it ends.
    pub const fn makes_durable(self) -> bool {
        matches!(
            self,
            Self::Flush | Self::Write { fua: true } | Self::WriteZeroes { fua: true, .. }
        )
    }
}
