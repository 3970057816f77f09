//! Reports of a node to its user.

use core::net::IpAddr;

use roce_verbs::{
    WcStatus,
    provider::{NoAnswer, VerbsError},
};
use thiserror::Error;

use crate::{
    credits::CreditError,
    handshake::{BadAnswer, Refusal, Rejected},
    info::Negotiated,
    proto::{Handle, Nid, ProtoError},
};

/// Number of an operation that the user has begun.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobId(pub(crate) u64);

/// Number of an entry of a portal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EntryId(pub(crate) u64);

/// Operation of a peer on an entry of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Served {
    /// The entry.
    pub entry: EntryId,
    /// The peer.
    pub from: Nid,
    /// It is a PUT; else a GET.
    pub is_put: bool,
    /// Match bits that it named.
    pub match_bits: u64,
    /// Header data of a PUT.
    pub hdr_data: u64,
    /// First byte of the entry's memory that it is about.
    pub offset: usize,
    /// Handle and process of the acknowledgement that the peer wants.
    pub(crate) ack: Option<(Handle, u32)>,
}

/// Owner of a transfer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    /// Operation of the user.
    Job(JobId),
    /// Operation of a peer.
    Served(Box<Served>),
    /// None that anybody is told of.
    Nobody,
}

/// Report of a node to its user.
#[derive(Clone, Debug)]
pub enum Output {
    /// An operation has ended, with so many bytes: of a GET those that have come, of a PUT those that left, or of which the peer says that
    /// it took them.
    Done(JobId, Result<u32, Failure>),
    /// A peer's operation has ended, with so many bytes.
    Served(Served, Result<u32, Failure>),
    /// A peer has asked what this node is, and is answered.
    Pinged(Nid),
    /// A peer has sent what it is itself (discovery), which was acknowledged and forgotten.
    Pushed(Nid),
    /// An entry is gone, and nobody uses its memory any more.
    Unlinked(EntryId),
    /// A connection stands.
    Up(Nid, Negotiated),
    /// A connection, or an attempt to connect, has ended.
    Down(Nid, Failure),
    /// A connect request was refused.
    Refused(IpAddr, Refusal),
}

/// Why an operation, or a connection, has come to nothing.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Failure {
    /// The peer refused the connection.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The peer did not answer.
    #[error("{0}")]
    Unreachable(NoAnswer),
    /// The peer has accepted the connection in a way that can't be.
    #[error("answer to the request: {0}")]
    Answer(#[from] BadAnswer),
    /// A message of the peer that can't be.
    #[error(transparent)]
    Message(#[from] ProtoError),
    /// The peer's credits are not ours.
    #[error(transparent)]
    Credits(#[from] CreditError),
    /// A message of the peer that does not belong to this connection.
    #[error("{0}")]
    Peer(&'static str),
    /// Work request that failed.
    #[error("{0}")]
    Completion(WcStatus),
    /// The peer did not answer in time, or took nothing.
    #[error("no answer in time")]
    Timeout,
    /// The connection has ended.
    #[error("the connection has ended")]
    Disconnected,
    /// The peer has started again.
    #[error("the peer has started again")]
    Restarted,
    /// The peer reports this error (`errno`, negative).
    #[error("the peer reports error {0}")]
    Status(i32),
    /// The memory is too short for what the peer has sent.
    #[error("more data than there is room for")]
    TooLong,
    /// As many messages wait for the peer as may.
    #[error("too many messages wait for the peer")]
    Full,
    /// The node ends.
    #[error("the node ends")]
    Stopping,
    /// The local device failed or refused.
    #[error("{0}")]
    Local(String),
}

impl From<VerbsError> for Failure {
    fn from(error: VerbsError) -> Self {
        Self::Local(error.to_string())
    }
}
