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
    /// The magic is of no byte order.
    #[error("{what}: magic {found:#010x}")]
    Magic {
        /// The message.
        what: &'static str,
        /// The magic, read little-endian.
        found: u32,
    },
    /// Version 1, which this crate recognizes and does not speak.
    #[error("version 1 (0x11) of o2iblnd, this side speaks version 2 (0x12)")]
    Version1,
    /// An unknown version.
    #[error("version {0:#x} of o2iblnd, this side speaks version 2 (0x12)")]
    Version(u16),
    /// An unknown message type.
    #[error("{what} type {found:#x} is not defined")]
    Type {
        /// The message.
        what: &'static str,
        /// The type.
        found: u32,
    },
    /// A field with an impossible value.
    #[error("{field} {value}: {why}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The rule.
        why: &'static str,
    },
}
