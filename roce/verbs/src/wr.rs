//! Work requests.

use bitflags::bitflags;
use roce_bth::{LKey, RKey};

bitflags! {
    /// What a memory region, window or queue pair lets a peer do (`ibv_access_flags`; same bits).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct AccessFlags: u32 {
        /// The local device may write (receives, READ responses, atomic results).
        const LOCAL_WRITE = 1;
        /// A peer may RDMA WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may RDMA READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may use atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// A memory window may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses in the region start at zero.
        const ZERO_BASED = 1 << 5;
    }
}

bitflags! {
    /// Flags of a send work request (`ibv_send_flags`; same bits).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct SendFlags: u32 {
        /// Wait for earlier READs and atomics to complete first (IBA C10-94); before a local invalidation, for all work
        /// requests (the local invalidate fence, IBA 10.6.5.1).
        const FENCE = 1;
        /// Make a completion also on success.
        const SIGNALED = 1 << 1;
        /// Ask for a solicited event at the receiver.
        const SOLICITED = 1 << 2;
    }
}

/// One scatter/gather element.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sge {
    /// Start, in the region's addresses (its iova base, or an offset when zero-based).
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The region's local key.
    pub lkey: LKey,
}

/// A place in the peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RemoteAddr {
    /// Address as the peer gave it.
    pub addr: u64,
    /// The key that goes with it.
    pub rkey: RKey,
}

/// Where the bytes of a send come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload<'a> {
    /// Registered memory; at most `max_send_sge` elements. READ and atomics write into it.
    Sges(&'a [Sge]),
    /// Copied at once, `IBV_SEND_INLINE`; at most `max_inline_data` bytes.
    Inline(&'a [u8]),
}

/// What a send work request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// SEND.
    Send,
    /// SEND with immediate data.
    SendWithImm(u32),
    /// SEND that invalidates an rkey of the receiver.
    SendWithInv(RKey),
    /// RDMA WRITE.
    Write(RemoteAddr),
    /// RDMA WRITE with immediate data; consumes a receive work request of the peer.
    WriteWithImm(RemoteAddr, u32),
    /// RDMA READ into the payload's memory.
    Read(RemoteAddr),
    /// If the peer's word equals `compare` it becomes `swap`; its former value lands in the payload's memory.
    CompareSwap {
        /// The word: 8 bytes, naturally aligned.
        remote: RemoteAddr,
        /// Value to compare with.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds to the peer's word; its former value lands in the payload's memory.
    FetchAdd {
        /// The word: 8 bytes, naturally aligned.
        remote: RemoteAddr,
        /// Addend.
        add: u64,
    },
    /// Invalidates a local fast-registered region or type-2 window. Work requests before it that use the key locally
    /// and may have to be repeated fail then, unless it is fenced.
    LocalInvalidate(RKey),
    /// Registers a range of a local region under a revocable key (software form of `IB_WR_REG_MR`).
    FastRegister(FastRegister),
    /// Binds a type-2 memory window to a range of a region (`IBV_WR_BIND_MW`).
    BindWindow(BindWindow),
}

/// Arguments of a fast registration: the region named by `key` (allocated for fast registration) comes to map
/// `length` bytes of the region `lkey` from `addr` on, reachable from then on under `key` with addresses from `iova`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FastRegister {
    /// The fast region's key with the key byte that it shall have (lkey and rkey become this).
    pub key: RKey,
    /// The backing region.
    pub lkey: LKey,
    /// Start within the backing region, in its addresses.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// The address that peers use for the first byte.
    pub iova: u64,
    /// What they may do.
    pub access: AccessFlags,
}

/// Arguments of a window bind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BindWindow {
    /// The window's key with the key byte that it shall have.
    pub key: RKey,
    /// The region to bind to; needs [`AccessFlags::MW_BIND`].
    pub lkey: LKey,
    /// Start, in the region's addresses (and in the peer's, unless zero-based).
    pub addr: u64,
    /// Bytes; 0 unbinds a type-1 window.
    pub length: u64,
    /// What peers may do.
    pub access: AccessFlags,
}

/// A send work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendWr<'a> {
    /// The program's own mark, returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// Options.
    pub flags: SendFlags,
    /// Local bytes.
    pub payload: Payload<'a>,
}

/// A receive work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecvWr<'a> {
    /// The program's own mark, returned in the completion.
    pub wr_id: u64,
    /// Where a SEND's bytes land; at most `max_recv_sge` elements.
    pub sges: &'a [Sge],
}

/// Why a work request was not accepted. Nothing was queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PostError {
    /// The queue pair's state does not allow it.
    #[error("the queue pair is in state {0:?}")]
    State(super::QpState),
    /// The queue is full.
    #[error("the work queue is full")]
    QueueFull,
    /// More elements than the queue pair was made for.
    #[error("{given} scatter/gather elements, at most {max}")]
    TooManySges {
        /// Elements given.
        given: usize,
        /// Elements allowed.
        max: usize,
    },
    /// More inline bytes than the queue pair was made for.
    #[error("{given} bytes of inline data, at most {max}")]
    InlineTooLong {
        /// Bytes given.
        given: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// More than 2^31 bytes, or not 8 for an atomic.
    #[error("a message of {0} bytes is not possible with this operation")]
    Length(u64),
    /// The operation can't have this kind of payload, or this queue pair can't do it.
    #[error("{0}")]
    Invalid(&'static str),
    /// No such queue pair (destroyed meanwhile).
    #[error("no such queue pair")]
    NoQueuePair,
}
