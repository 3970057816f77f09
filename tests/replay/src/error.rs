//! Errors of a replay.

/// Error that ends a replay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Capture that can't be read.
    #[error(transparent)]
    Capture(#[from] roce_pcap::Error),
    /// Capture that is not one side's view of a connection, or a wrong manifest.
    #[error("{0}")]
    Unsuitable(String),
}
