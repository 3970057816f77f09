//! Errors of memory.

use thiserror::Error;

use crate::mem::fault::Fault;

/// Why a memory object could not be made or released.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MemError {
    /// A device limit is reached.
    #[error("limit reached: {0}")]
    Limit(&'static str),
    /// Other objects still use it.
    #[error("still in use: {0}")]
    Busy(&'static str),
    /// No such object (released already, or of another table).
    #[error("no such object")]
    NotFound,
    /// The combination of rights is not allowed: remote write or atomic needs local write (IBA C10-55).
    #[error("remote write and atomic rights need the local write right")]
    Access,
    /// The range wraps around the address space or is longer than the device allows.
    #[error("{0} bytes can't be registered there")]
    Range(u64),
    /// A right to FLUSH to persistence, for memory that does not survive the loss of power.
    #[error("the memory is not persistent")]
    NotPersistent,
    /// The system has no memory left.
    #[error("{0} bytes could not be allocated")]
    OutOfMemory(usize),
}

/// Why a key and a range don't name accessible memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum KeyError {
    /// The key names nothing.
    #[error("unknown key")]
    Unknown,
    /// The object belongs to another protection domain.
    #[error("the key belongs to another protection domain")]
    WrongPd,
    /// The type-2 window is bound to another queue pair.
    #[error("the window belongs to another queue pair")]
    WrongQp,
    /// Nothing is registered or bound under the key at the moment.
    #[error("nothing is open under the key")]
    Closed,
    /// The object's state forbids it: already open, still bound to, or of another kind.
    #[error("the object's state forbids it")]
    State,
    /// The range leaves the object.
    #[error("the range leaves the object")]
    Range,
    /// The object does not give this right.
    #[error("the object does not give this right")]
    Access,
}

/// Why an access to memory failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AccessError {
    /// The memory was taken back: its region was deregistered, its fast registration or window invalidated.
    #[error("the memory has been taken back")]
    Revoked,
    /// The program has unmapped or protected the memory, or its file is too short.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Why a FLUSH was not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FlushError {
    /// The memory can't be accessed.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The system could not make the bytes persistent.
    #[error("the memory could not be made persistent")]
    Failed,
}

/// Why an atomic operation was not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AtomicError {
    /// The memory can't be accessed.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The word is not 8 bytes on a naturally aligned address (IBA C9-113).
    #[error("the word is not 8 aligned bytes")]
    Misaligned,
}
