//! The block device that front ends (the NBD server) are written against.

use crate::errno::Errno;

/// What a block device is like. All counts in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size, a multiple of 512.
    pub size: u64,
    /// Requests start and end at multiples of this: a power of two, at least 512.
    pub logical_block_size: u32,
    /// What the device likes best.
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
    /// Zeroes can be written faster than by writing them.
    pub fast_zeroes: bool,
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

/// Memory that one read or write goes through; registered with the transport where there is one.
///
/// # Safety
/// `as_ptr` is valid for reads and writes of `len` bytes from any thread until the value is dropped, also when it is
/// moved. Others (a peer) may change the bytes at any time, so nobody makes a reference to them.
pub unsafe trait IoBuffer: Send + 'static {
    /// First byte.
    fn as_ptr(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A request to a block device. Offsets and lengths in bytes.
#[derive(Debug)]
pub enum BlockRequest<B> {
    /// Fill the buffer.
    Read {
        /// First byte.
        offset: u64,
        /// Where to.
        buffer: B,
    },
    /// Write the buffer.
    Write {
        /// First byte.
        offset: u64,
        /// Where from.
        buffer: B,
        /// Durable before completion.
        fua: bool,
    },
    /// Make all completed writes durable.
    Flush,
    /// The bytes are no longer needed; reading them later may give anything.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The bytes become zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Durable before completion.
        fua: bool,
        /// Space may be given back (a hole).
        may_unmap: bool,
    },
}

/// Called once when a request is over, from any thread; must not block. Reads and writes give their buffer back,
/// also when they failed, unless it was lost with the session.
pub type Done<B> = Box<dyn FnOnce(Result<(), Errno>, Option<B>) + Send>;

/// A block device with requests in flight. There is no order between requests in flight; a flush covers the writes that
/// were completed before it was submitted.
pub trait BlockDevice: Send + Sync + 'static {
    /// Memory for data.
    type Buffer: IoBuffer;

    /// Size, limits, abilities.
    fn geometry(&self) -> Geometry;

    /// Memory for a read or write of `len` bytes, 1 to `max_transfer`. When all is in use this waits; not to be called
    /// from a completion.
    ///
    /// # Errors
    /// EINVAL for a wrong length, another when the device is gone.
    fn buffer(&self, len: usize) -> Result<Self::Buffer, Errno>;

    /// Like [`buffer`](Self::buffer), but `None` instead of waiting.
    ///
    /// # Errors
    /// As there.
    fn try_buffer(&self, len: usize) -> Result<Option<Self::Buffer>, Errno>;

    /// Starts a request. May wait for a slot, so not to be called from a completion. `done` is called in every case,
    /// possibly before this returns.
    fn submit(&self, request: BlockRequest<Self::Buffer>, done: Done<Self::Buffer>);
}
