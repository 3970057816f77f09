//! RDMA and atomic operations of sockets.

use core::{fmt, ops::Range};
use std::sync::Arc;

use bitflags::bitflags;
use roce_verbs::provider::Memory;

use crate::{
    error::Error,
    proto::{MAX_MESSAGE, RdmaCookie},
};

/// Pieces of local memory that an operation may have (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;

bitflags! {
    /// Flags of an operation (`RDS_RDMA_*`; same bits).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct OperationFlags: u32 {
        /// The message leaves when the operation is done. READs and atomics always have it: what releases the peer's memory must not
        /// come before they are repeated because of a lost packet.
        const FENCE = 1 << 1;
        /// Report success as well, by [`Received::Rdma`](crate::Received::Rdma).
        const NOTIFY = 1 << 5;
        /// Without data no message follows.
        const SILENT = 1 << 6;
    }
}

/// Kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OperationKind {
    /// Local memory to the peer's.
    Write,
    /// The peer's memory to local memory.
    Read,
    /// Adds to the peer's 8-byte word, whose former value comes to local memory. The kernel's regions do not allow it.
    FetchAdd {
        /// Addend.
        add: u64,
    },
    /// If the peer's 8-byte word equals `compare` it becomes `swap`; its former value comes to local memory. The kernel's regions do not
    /// allow it.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// New value.
        swap: u64,
    },
}

impl OperationKind {
    /// Returns whether it writes local memory.
    pub(crate) const fn fetches(self) -> bool {
        !matches!(self, Self::Write)
    }

    /// Returns whether its memory is a word.
    pub(crate) const fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }
}

/// RDMA or atomic operation, which is done before the message that it is sent with arrives.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Kind.
    pub kind: OperationKind,
    /// The peer's memory, as a message of the peer has told ([`Message::cookie`](crate::Message::cookie)).
    pub cookie: RdmaCookie,
    /// First byte behind that of the cookie.
    pub remote: u64,
    /// Local memory.
    pub memory: Arc<dyn Memory>,
    /// Ranges of the local memory, in order: 1024 at most, none of them empty.
    pub pieces: Vec<Range<usize>>,
    /// Flags.
    pub flags: OperationFlags,
    /// Number in the report.
    pub token: u64,
}

impl Operation {
    /// Bytes that it moves.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }

    /// Checks the local memory.
    ///
    /// # Errors
    /// [`Error::TooLong`] above 1024 pieces or 1 MiB; [`Error::Fault`] for a range outside the memory; [`Error::Invalid`] for empty ranges
    /// and for an atomic operation without 8 bytes.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.pieces.len() > MAX_PIECES {
            return Err(Error::TooLong);
        }
        if self.pieces.is_empty() || self.pieces.iter().any(Range::is_empty) {
            return Err(Error::Invalid);
        }
        if self.pieces.iter().any(|piece| piece.end > self.memory.len()) {
            return Err(Error::Fault);
        }
        let most = MAX_MESSAGE as usize;
        let bytes = self.pieces.iter().try_fold(0, |sum, piece| {
            let sum: usize = sum + piece.len().min(most + 1);
            (sum <= most).then_some(sum)
        });
        match (bytes, self.kind.is_atomic()) {
            (None, _) => Err(Error::TooLong),
            (Some(8), true) if self.pieces.len() == 1 => Ok(()),
            (Some(_), true) => Err(Error::Invalid),
            (Some(_), false) => Ok(()),
        }
    }

    /// Smallest range that has all pieces.
    pub(crate) fn hull(&self) -> Range<usize> {
        let first = self.pieces.iter().map(|piece| piece.start).min();
        let end = self.pieces.iter().map(|piece| piece.end).max();
        first.unwrap_or(0)..end.unwrap_or(0)
    }
}

/// Companion of a message, besides its data.
#[derive(Clone, Debug, Default)]
pub enum Attachment {
    /// Nothing.
    #[default]
    Nothing,
    /// Memory of ours that the receiver may use (`RDS_CMSG_RDMA_DEST`, `RDS_CMSG_RDMA_MAP`).
    Cookie(RdmaCookie),
    /// Operation that comes first (`RDS_CMSG_RDMA_ARGS`, `RDS_CMSG_ATOMIC_*`).
    Operation(Box<Operation>),
}

/// Result of an operation (`RDS_RDMA_*` of `struct rds_rdma_notify`; same numbers).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
pub enum RdmaStatus {
    /// Done, and the message that it was sent with has left.
    Success = 0,
    /// The peer refused the key, the address or the kind of access. The connection ended.
    RemoteError = 1,
    /// Canceled. It may or may not have been done.
    Canceled = 2,
    /// The connection ended. It may or may not have been done, and is not repeated, nor is its message.
    Dropped = 3,
    /// Local memory could not be used, or the network is gone.
    OtherError = 4,
}

impl fmt::Display for RdmaStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "done",
            Self::RemoteError => "the peer refused access to its memory",
            Self::Canceled => "canceled",
            Self::Dropped => "the connection ended",
            Self::OtherError => "local memory or the network failed",
        })
    }
}

/// Report of an operation (`RDS_CMSG_RDMA_STATUS`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RdmaNotice {
    /// The operation's [`token`](Operation::token).
    pub token: u64,
    /// Result.
    pub status: RdmaStatus,
}

/// Rights of peers on a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionRights {
    /// Peers may also write it, and do atomics on it (`RDS_RDMA_READWRITE`).
    pub writable: bool,
    /// The first message that comes with an operation on it frees it (`RDS_RDMA_USE_ONCE`).
    pub use_once: bool,
}
