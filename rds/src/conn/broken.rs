//! Reasons for which a connection ends.

use core::fmt;

use roce_verbs::{
    WcStatus,
    provider::{NoAnswer, RejectReason, VerbsError},
};
use thiserror::Error;

use crate::proto::{ProtoError, Version};

/// Reason for which a connection, or an attempt to connect, ended.
#[derive(Debug, Error)]
pub enum Broken {
    /// A message of the peer that can't be.
    #[error(transparent)]
    Message(#[from] ProtoError),
    /// A SEND longer than any fragment.
    #[error("a SEND of {0} bytes")]
    Length(usize),
    /// Registered memory can't be read any more.
    #[error("memory of the connection is gone")]
    Memory,
    /// A work request failed.
    #[error("{0}")]
    Completion(WcStatus),
    /// The peer refused the connection.
    #[error("the peer refused: {0}")]
    Rejected(RejectReason),
    /// The peer did not answer.
    #[error("{0}")]
    Unreachable(NoAnswer),
    /// The peer ended the connection.
    #[error("the peer disconnected")]
    Disconnected,
    /// The peer has connected again.
    #[error("the peer has connected again")]
    Replaced,
    /// The peer's version is none of ours.
    #[error("version {0} of the peer is not supported")]
    Version(Version),
    /// The local device failed or refused.
    #[error("{0}")]
    Local(String),
}

impl From<VerbsError> for Broken {
    fn from(error: VerbsError) -> Self {
        Self::Local(error.to_string())
    }
}

/// Why a connect request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Both connect at once, and the peer's address is the smaller one.
    Race,
    /// The private data is cut off.
    Short,
    /// The private data has other addresses than the packet.
    Addresses,
    /// Version is none of ours.
    Version,
    /// The node has as many connections as it may have.
    Limit,
    /// The node ends.
    Stopping,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Race => "both connect at once",
            Self::Short => "the private data is cut off",
            Self::Addresses => "the private data names other addresses than the packet has",
            Self::Version => "the version is not supported",
            Self::Limit => "too many connections",
            Self::Stopping => "the node ends",
        })
    }
}
