//! Work requests.

use bitflags::bitflags;
use roce_bth::{LKey, Placement, QKey, Qpn, RKey, Selectivity, Srqn};

use crate::{
    attr::{AccessFlags, AddressVector, QpState},
    numbered::numbered,
};

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

/// Source of a send's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload<'a> {
    /// Registered memory; at most `max_send_sge` elements. READ and atomics write into it.
    Sges(&'a [Sge]),
    /// Copied at once, `IBV_SEND_INLINE`; at most `max_inline_data` bytes.
    Inline(&'a [u8]),
}

/// Operation of a send work request.
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
    /// Binds a memory window to a range of a region (`IBV_WR_BIND_MW`; `ibv_bind_mw` for type 1).
    BindWindow(BindWindow),
    /// Writes the payload's 8 bytes to the peer's word at once: nobody sees a part of it (`IBV_WR_ATOMIC_WRITE`).
    AtomicWrite(RemoteAddr),
    /// Completes when what was written before it through this queue pair is where it is asked to be (`IBV_WR_FLUSH`).
    Flush(Flush),
}

numbered! {
    /// A send work request's operation alone (`ibv_wr_opcode`; same numbers).
    pub enum WrOpcode {
        RdmaWrite = 0,
        RdmaWriteWithImm = 1,
        Send = 2,
        SendWithImm = 3,
        RdmaRead = 4,
        CompareSwap = 5,
        FetchAdd = 6,
        LocalInvalidate = 7,
        BindWindow = 8,
        SendWithInv = 9,
        Flush = 14,
        AtomicWrite = 15,
        /// Fast registration (`IB_WR_REG_MR`, which userspace verbs don't have).
        FastRegister = 32,
    }
}

impl SendOp {
    /// Which operation it is.
    pub const fn code(&self) -> WrOpcode {
        match self {
            Self::Send => WrOpcode::Send,
            Self::SendWithImm(_) => WrOpcode::SendWithImm,
            Self::SendWithInv(_) => WrOpcode::SendWithInv,
            Self::Write(_) => WrOpcode::RdmaWrite,
            Self::WriteWithImm(..) => WrOpcode::RdmaWriteWithImm,
            Self::Read(_) => WrOpcode::RdmaRead,
            Self::CompareSwap { .. } => WrOpcode::CompareSwap,
            Self::FetchAdd { .. } => WrOpcode::FetchAdd,
            Self::LocalInvalidate(_) => WrOpcode::LocalInvalidate,
            Self::FastRegister(_) => WrOpcode::FastRegister,
            Self::BindWindow(_) => WrOpcode::BindWindow,
            Self::AtomicWrite(_) => WrOpcode::AtomicWrite,
            Self::Flush(_) => WrOpcode::Flush,
        }
    }
}

/// Arguments of a FLUSH (IBTA Annex A19).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// Start of the range, and the region that it is in.
    pub remote: RemoteAddr,
    /// Bytes of the range; of no account when the whole region is flushed.
    pub length: u32,
    /// Visible, persistent, or both.
    pub placement: Placement,
    /// The range or the whole region.
    pub selectivity: Selectivity,
}

/// Destination of a work request: the peer of a connection, a datagram's receiver, or a shared receive queue of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Target {
    /// The queue pair's peer (RC and UC; operations without a packet on any).
    #[default]
    Peer,
    /// A queue pair anywhere (UD and GSI).
    Datagram(Datagram),
    /// A shared receive queue behind the queue pair's peer (XRC initiator): the number that its owner tells.
    Srq(Srqn),
}

/// The receiver of a datagram (`ibv_send_wr.wr.ud`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram {
    /// The path to it (what an address handle holds); the remote address may be a multicast group.
    pub av: AddressVector,
    /// Its queue pair; [`Qpn::MULTICAST`] with a multicast group.
    pub qpn: Qpn,
    /// The key that it must have. With the top bit set the sending queue pair's own is used (IBA 10.2.5).
    pub qkey: QKey,
}

/// A send work request with its target. [`SendWr`] alone is one to the connection's peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRequest<'a> {
    /// Work request.
    pub wr: SendWr<'a>,
    /// Destination.
    pub target: Target,
}

impl<'a> From<SendWr<'a>> for SendRequest<'a> {
    fn from(wr: SendWr<'a>) -> Self {
        let target = Target::Peer;
        Self { wr, target }
    }
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
    /// Rights of peers.
    pub access: AccessFlags,
}

/// Arguments of a window bind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BindWindow {
    /// The window's key with the key byte that it shall have.
    pub key: RKey,
    /// The region to bind to; needs [`AccessFlags::MW_BIND`].
    pub lkey: LKey,
    /// Start, in the region's addresses (and in the peer's, unless zero-based: then those start at 0).
    pub addr: u64,
    /// Bytes; 0 unbinds a type-1 window.
    pub length: u64,
    /// Rights of peers.
    pub access: AccessFlags,
}

/// A send work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendWr<'a> {
    /// The program's own mark, returned in the completion.
    pub wr_id: u64,
    /// Operation.
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
    /// Destination of a SEND's bytes; at most `max_recv_sge` elements.
    pub sges: &'a [Sge],
}

/// Why a work request was not accepted. Nothing was queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PostError {
    /// The queue pair's state does not allow it.
    #[error("the queue pair is in state {0:?}")]
    State(QpState),
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
    /// More than 2^31 bytes.
    #[error("a message of {0} bytes is not possible with this operation")]
    Length(u64),
    /// The operation can't have this kind of payload, or this queue pair can't do it.
    #[error("{0}")]
    Invalid(&'static str),
    /// No such queue pair (destroyed meanwhile).
    #[error("no such queue pair")]
    NoQueuePair,
}
