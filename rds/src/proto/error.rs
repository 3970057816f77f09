//! Errors of parsing and emission.

/// Error in a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtoError {
    /// Fewer bytes than the message needs.
    #[error("{what}: {len} bytes, needs {need}")]
    Short {
        /// The message.
        what: &'static str,
        /// Bytes there.
        len: usize,
        /// Bytes needed.
        need: usize,
    },
    /// The header's checksum is wrong.
    #[error("header checksum {found:#06x} instead of {expected:#06x}")]
    Checksum {
        /// Checksum in the header.
        found: u16,
        /// Checksum of the header's bytes.
        expected: u16,
    },
    /// The message is longer than messages may be.
    #[error("message of {len} bytes, at most {max}")]
    TooLong {
        /// Length in the header.
        len: u32,
        /// Longest message.
        max: u32,
    },
    /// A fragment has another length than its position in the message demands.
    #[error("fragment {index} of a message of {message} bytes has {len} bytes, expected {expected}")]
    Fragment {
        /// Number of the fragment, from 0.
        index: u32,
        /// Length of the whole message.
        message: u32,
        /// Bytes of data there.
        len: usize,
        /// Bytes of data that belong there.
        expected: usize,
    },
    /// A fragment's header contradicts that of the message's first.
    #[error("{field} of fragment {index} differs from the first fragment's")]
    Mismatch {
        /// The header's field.
        field: &'static str,
        /// Number of the fragment, from 0.
        index: u32,
    },
    /// Extension headers that take more than the 16 bytes of a header.
    #[error("extension headers of {need} bytes, a header has {have}")]
    ExtensionSpace {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// An extension header that this crate can't emit.
    #[error("extension header type {0} has no defined length")]
    ExtensionType(u8),
}
