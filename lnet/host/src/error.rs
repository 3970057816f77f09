//! Errors of operations.

use std::io;

use lnet::Failure;
use thiserror::Error;

/// Why an operation has come to nothing.
#[derive(Debug, Error)]
pub enum Error {
    /// The operation, or the connection that it needs, has failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The node has ended.
    #[error("the node has ended: {0}")]
    Ended(#[from] io::Error),
}
