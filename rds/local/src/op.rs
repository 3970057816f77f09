//! Operations of a message on memory (`RDS_CMSG_RDMA_*`, `RDS_CMSG_ATOMIC_*`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::ProtocolError;

/// Most pieces of local memory of an operation (`UIO_MAXIOV`).
pub const MAX_LOCAL: usize = 1024;

const NONE: u32 = 0;
const DEST: u32 = 1;
const RDMA: u32 = 2;
const ATOMIC: u32 = 3;

/// Operation that goes with a message.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Op {
    /// None.
    #[default]
    None,
    /// The receiver is told this cookie of memory of the sender (`RDS_CMSG_RDMA_DEST`; `RDS_CMSG_RDMA_MAP` once
    /// [`Request::Map`](crate::Request::Map) has registered it).
    Dest(u64),
    /// Memory is written to the peer, or read from it.
    Rdma(RdmaOp),
    /// An atomic operation.
    Atomic(AtomicOp),
}

/// `RDS_CMSG_RDMA_ARGS`. Its `flags` are those of the kernel's structure.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RdmaOp {
    /// Memory that [`local`](Self::local) is in, by the number that [`Request::Memory`](crate::Request::Memory) gave.
    pub memory: u64,
    /// Cookie of the peer's memory.
    pub cookie: u64,
    /// Offset in it.
    pub remote_addr: u64,
    /// Bytes of it.
    pub remote_len: u64,
    /// Flags, such as `RDS_RDMA_READWRITE`.
    pub flags: u64,
    /// Value that the notification has.
    pub token: u64,
    /// Memory of the program: address and length of each piece.
    pub local: Vec<(u64, u64)>,
}

/// Kind of an atomic operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicKind {
    /// `RDS_CMSG_ATOMIC_FADD`: values are what is added.
    FetchAdd,
    /// `RDS_CMSG_ATOMIC_CSWP`: values are compared and swapped in.
    CompareSwap,
    /// `RDS_CMSG_MASKED_ATOMIC_FADD`: what is added, and the mask of carries that are dropped.
    MaskedFetchAdd,
    /// `RDS_CMSG_MASKED_ATOMIC_CSWP`: compared, swapped in, mask of each.
    MaskedCompareSwap,
}

/// `struct rds_atomic_args`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AtomicOp {
    /// Its kind.
    pub kind: AtomicKind,
    /// Memory that [`local_addr`](Self::local_addr) is in, as of [`RdmaOp::memory`].
    pub memory: u64,
    /// Cookie of the peer's memory.
    pub cookie: u64,
    /// Address of the eight bytes of the program that get the former value.
    pub local_addr: u64,
    /// Offset in the peer's memory.
    pub remote_addr: u64,
    /// The union of the kernel's structure.
    pub values: [u64; 4],
    /// Flags.
    pub flags: u64,
    /// Value that the notification has.
    pub token: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRdma {
    memory: u64,
    cookie: u64,
    remote_addr: u64,
    remote_len: u64,
    flags: u64,
    token: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawAtomic {
    kind: u64,
    memory: u64,
    cookie: u64,
    local_addr: u64,
    remote_addr: u64,
    values: [u64; 4],
    flags: u64,
    token: u64,
}

impl Op {
    /// Number of its kind in the header.
    pub(crate) fn kind(&self) -> u32 {
        match self {
            Self::None => NONE,
            Self::Dest(_) => DEST,
            Self::Rdma(_) => RDMA,
            Self::Atomic(_) => ATOMIC,
        }
    }

    /// Its bytes, which follow the header.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::None => Vec::new(),
            Self::Dest(cookie) => cookie.to_ne_bytes().to_vec(),
            Self::Rdma(op) => {
                let head = RawRdma {
                    memory: op.memory,
                    cookie: op.cookie,
                    remote_addr: op.remote_addr,
                    remote_len: op.remote_len,
                    flags: op.flags,
                    token: op.token,
                };
                let pieces = op.local.iter().flat_map(|(addr, len)| [*addr, *len]);
                let mut out = head.as_bytes().to_vec();
                out.extend(pieces.flat_map(u64::to_ne_bytes));
                out
            }
            Self::Atomic(op) => RawAtomic {
                kind: op.kind as u64,
                memory: op.memory,
                cookie: op.cookie,
                local_addr: op.local_addr,
                remote_addr: op.remote_addr,
                values: op.values,
                flags: op.flags,
                token: op.token,
            }
            .as_bytes()
            .to_vec(),
        }
    }

    /// Parses the bytes of an operation of this kind.
    pub(crate) fn parse(kind: u32, bytes: &[u8]) -> Result<Self, ProtocolError> {
        let length = ProtocolError::Length(bytes.len());
        match kind {
            NONE if bytes.is_empty() => Ok(Self::None),
            NONE => Err(length),
            DEST => u64::read_from_bytes(bytes).map(Self::Dest).map_err(|_| length),
            RDMA => {
                let (raw, rest) = RawRdma::read_from_prefix(bytes).map_err(|_| length)?;
                let (pieces, []) = rest.as_chunks::<16>() else {
                    return Err(length);
                };
                if !(1..=MAX_LOCAL).contains(&pieces.len()) {
                    return Err(ProtocolError::Value);
                }
                let word =
                    |piece: &[u8; 16], at: usize| u64::read_from_prefix(&piece[at..]).map_or(0, |(word, _)| word);
                Ok(Self::Rdma(RdmaOp {
                    memory: raw.memory,
                    cookie: raw.cookie,
                    remote_addr: raw.remote_addr,
                    remote_len: raw.remote_len,
                    flags: raw.flags,
                    token: raw.token,
                    local: pieces.iter().map(|piece| (word(piece, 0), word(piece, 8))).collect(),
                }))
            }
            ATOMIC => {
                let raw = RawAtomic::read_from_bytes(bytes).map_err(|_| length)?;
                Ok(Self::Atomic(AtomicOp {
                    kind: atomic_kind(raw.kind)?,
                    memory: raw.memory,
                    cookie: raw.cookie,
                    local_addr: raw.local_addr,
                    remote_addr: raw.remote_addr,
                    values: raw.values,
                    flags: raw.flags,
                    token: raw.token,
                }))
            }
            other => Err(ProtocolError::Kind(other)),
        }
    }
}

fn atomic_kind(number: u64) -> Result<AtomicKind, ProtocolError> {
    match number {
        0 => Ok(AtomicKind::FetchAdd),
        1 => Ok(AtomicKind::CompareSwap),
        2 => Ok(AtomicKind::MaskedFetchAdd),
        3 => Ok(AtomicKind::MaskedCompareSwap),
        _ => Err(ProtocolError::Value),
    }
}
