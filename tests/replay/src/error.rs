//! Errors of captures and their manifest.

/// Error of a capture that can't be read or made, or of the manifest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Capture that can't be read.
    #[error(transparent)]
    Capture(#[from] roce_pcap::Error),
    /// Capture that can't be made, or a wrong manifest.
    #[error("{0}")]
    Unsuitable(String),
}
