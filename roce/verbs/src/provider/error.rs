//! Errors of verbs.

use crate::wr::PostError;

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// An attribute is missing, not allowed, or out of range.
    #[error("invalid argument: {0}")]
    Invalid(String),
    /// A device limit or a queue is full.
    #[error("limit reached: {0}")]
    Limit(&'static str),
    /// The object is still in use by another.
    #[error("still in use: {0}")]
    Busy(&'static str),
    /// The address is taken, or not ours, or there is no way to the peer.
    #[error("{0}")]
    Address(String),
    /// This provider can't do it.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// The object's state forbids it.
    #[error("wrong state: {0}")]
    State(String),
    /// Posting failed.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The operating system refused.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed.
        context: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The device has stopped.
    #[error("the device is closed")]
    Closed,
}

/// Offsets outside a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{len} bytes at {offset} are outside a region of {size} bytes")]
pub struct RangeError {
    /// Offset of the first byte.
    pub offset: usize,
    /// Length, bytes.
    pub len: usize,
    /// Size of the region, bytes.
    pub size: usize,
}
