//! Operations of the user.

use roce_verbs::Instant;

use crate::{
    buffer::Buffer,
    event::Failure,
    proto::{MAX_PAYLOAD, Nid},
};

/// PUT to a peer.
#[derive(Clone, Debug)]
pub struct Put {
    /// The peer.
    pub peer: Nid,
    /// Its portal.
    pub portal: u32,
    /// Match bits.
    pub match_bits: u64,
    /// Eight bytes for the peer's event.
    pub hdr_data: u64,
    /// First byte of the peer's memory, if it leaves that to us.
    pub offset: u32,
    /// The data: at most 1 MiB.
    pub source: Buffer,
    /// Ask the peer how much it has taken. Without that nobody knows whether anything matched.
    pub ack: bool,
}

/// GET from a peer.
#[derive(Clone, Debug)]
pub struct Get {
    /// The peer.
    pub peer: Nid,
    /// Its portal.
    pub portal: u32,
    /// Match bits.
    pub match_bits: u64,
    /// First byte of the peer's memory, if it leaves that to us.
    pub offset: u32,
    /// Memory for the data: at most 1 MiB. **Kernels lose the end of what they send if it is longer than what there is**, and say that all is
    /// there; up to 3976 bytes they don't.
    pub sink: Buffer,
}

/// State of an operation.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) peer: Nid,
    pub(crate) deadline: Instant,
    /// A message or memory of it is with a connection, which says when that ends.
    pub(crate) is_moving: bool,
    pub(crate) kind: JobKind,
}

/// Kind of an operation, with what is known of its end.
#[derive(Debug)]
pub(crate) enum JobKind {
    /// PUT; the bytes that have left, and those that the peer says that it took, if it was asked.
    Put {
        left: Option<u32>,
        took: Option<u32>,
        ack: bool,
    },
    /// GET, for whose answer there is this memory.
    Get(Buffer),
}

/// Returns the bytes of an operation's memory.
///
/// # Errors
/// More than a message can have.
pub(crate) fn checked_len(buffer: &Buffer) -> Result<u32, Failure> {
    let len = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
    match len <= MAX_PAYLOAD {
        true => Ok(len),
        false => Err(Failure::TooLong),
    }
}
