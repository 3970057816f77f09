//! Errors of parsing.

use thiserror::Error;

/// Defect of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ProtocolError {
    /// It has fewer or more bytes than its kind has.
    #[error("{0} bytes are not the length of such a packet")]
    Length(usize),
    /// It does not begin with [`MAGIC`](crate::MAGIC): another version of ferroce, or no packet of ferroce.
    #[error("it begins with {0:#010x}: another version, or not a packet of ferroce")]
    Version(u32),
    /// No such kind.
    #[error("no kind {0}")]
    Kind(u32),
    /// The address family is neither 0, `AF_INET` nor `AF_INET6`.
    #[error("address family {0}")]
    Family(u16),
    /// An address is missing.
    #[error("an address is missing")]
    NoAddress,
    /// A field has a value that it can't have.
    #[error("a field is out of range")]
    Value,
}
