//! Extension headers: type byte and data of fixed length, one behind the other, in 16 bytes of the header.

use super::{cookie::RdmaCookie, error::ProtoError};

/// Bytes of a header for extensions.
pub const EXT_LEN: usize = 16;
/// Types from this one on end the list (`__RDS_EXTHDR_MAX`).
const MAX_TYPE: u8 = 16;

const VERSION: u8 = 1;
const RDMA: u8 = 2;
const RDMA_DEST: u8 = 3;
const RDMA_BYTES: u8 = 4;
const NPATHS: u8 = 5;
const GENERATION: u8 = 6;
const SPORT_IDX: u8 = 8;

/// Direction of an RDMA operation that came with a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RdmaDirection {
    /// RDMA WRITE into the receiver's memory.
    Write,
    /// RDMA READ of the receiver's memory.
    Read,
    /// An undefined number, kept as it came.
    Other(u8),
}

impl RdmaDirection {
    /// Reads the number.
    pub const fn from_wire(n: u8) -> Self {
        match n {
            1 => Self::Write,
            2 => Self::Read,
            other => Self::Other(other),
        }
    }

    /// Returns the number.
    pub const fn to_wire(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::Read => 2,
            Self::Other(n) => n,
        }
    }
}

/// Extension header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Extension {
    /// Version of the header.
    Version(u32),
    /// An RDMA operation with this key came before the message: the receiver may release the key.
    Rdma {
        /// Key of the receiver's memory.
        rkey: u32,
    },
    /// Memory of the sender that the receiver may use.
    RdmaDest(RdmaCookie),
    /// Bytes of the RDMA operation, behind [`Rdma`](Self::Rdma) (Linux 7.3).
    RdmaBytes {
        /// Bytes.
        bytes: u32,
        /// Direction.
        direction: RdmaDirection,
    },
    /// Paths of the sender (RDS over TCP).
    Paths(u16),
    /// Generation of the sender, new with each start (RDS over TCP).
    Generation(u32),
    /// Index of the sender's source port (RDS over TCP, Linux 7.3).
    SportIndex(u8),
    /// Undefined type below 16, which the kernel takes for one without data.
    Unknown(u8),
}

impl Extension {
    /// Type byte.
    pub const fn type_number(&self) -> u8 {
        match self {
            Self::Version(_) => VERSION,
            Self::Rdma { .. } => RDMA,
            Self::RdmaDest(_) => RDMA_DEST,
            Self::RdmaBytes { .. } => RDMA_BYTES,
            Self::Paths(_) => NPATHS,
            Self::Generation(_) => GENERATION,
            Self::SportIndex(_) => SPORT_IDX,
            Self::Unknown(n) => *n,
        }
    }

    /// Bytes with the type byte.
    pub const fn wire_len(&self) -> usize {
        1 + data_len(self.type_number())
    }

    fn read(number: u8, data: &[u8]) -> Self {
        let word = |at: usize| u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
        match number {
            VERSION => Self::Version(word(0)),
            RDMA => Self::Rdma { rkey: word(0) },
            RDMA_DEST => Self::RdmaDest(RdmaCookie::new(word(0), word(4))),
            RDMA_BYTES => Self::RdmaBytes {
                bytes: word(0),
                direction: RdmaDirection::from_wire(data[4]),
            },
            NPATHS => Self::Paths(u16::from_be_bytes([data[0], data[1]])),
            GENERATION => Self::Generation(word(0)),
            SPORT_IDX => Self::SportIndex(data[0]),
            other => Self::Unknown(other),
        }
    }

    fn write(&self, out: &mut [u8]) {
        out[0] = self.type_number();
        let data = &mut out[1..];
        match *self {
            Self::Version(n) | Self::Rdma { rkey: n } | Self::Generation(n) => data.copy_from_slice(&n.to_be_bytes()),
            Self::RdmaDest(cookie) => {
                data[..4].copy_from_slice(&cookie.rkey().to_be_bytes());
                data[4..].copy_from_slice(&cookie.offset().to_be_bytes());
            }
            Self::RdmaBytes { bytes, direction } => {
                data[..4].copy_from_slice(&bytes.to_be_bytes());
                data[4] = direction.to_wire();
            }
            Self::Paths(n) => data.copy_from_slice(&n.to_be_bytes()),
            Self::SportIndex(n) => data[0] = n,
            Self::Unknown(_) => {}
        }
    }
}

/// Returns the bytes behind a type byte.
const fn data_len(number: u8) -> usize {
    match number {
        VERSION | RDMA | GENERATION => 4,
        RDMA_DEST | RDMA_BYTES => 8,
        NPATHS => 2,
        SPORT_IDX => 1,
        _ => 0,
    }
}

/// Iterator over the extension headers of a header. Ends at type 0, at a type of 16 or more, and at data that is cut off.
#[derive(Clone, Debug)]
pub struct Extensions<'a> {
    rest: &'a [u8],
}

impl<'a> Extensions<'a> {
    pub(super) fn new(bytes: &'a [u8; EXT_LEN]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes that were not read: after the last extension padding and whatever ended the list.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

impl Iterator for Extensions<'_> {
    type Item = Extension;

    fn next(&mut self) -> Option<Extension> {
        let (&number, behind) = self.rest.split_first()?;
        if number == 0 || number >= MAX_TYPE {
            return None;
        }
        let (data, rest) = behind.split_at_checked(data_len(number))?;
        self.rest = rest;
        Some(Extension::read(number, data))
    }
}

/// Returns the bytes of extension headers for [`Header::set_extensions`](super::Header::set_extensions).
///
/// # Errors
/// When they take more than 16 bytes, or one has no defined length.
pub fn pack(extensions: &[Extension]) -> Result<[u8; EXT_LEN], ProtoError> {
    let mut bytes = [0; EXT_LEN];
    let need = extensions.iter().map(Extension::wire_len).sum();
    if need > EXT_LEN {
        return Err(ProtoError::ExtensionSpace { need, have: EXT_LEN });
    }
    let mut at = 0;
    for extension in extensions {
        if let Extension::Unknown(number) = extension {
            return Err(ProtoError::ExtensionType(*number));
        }
        let end = at + extension.wire_len();
        extension.write(&mut bytes[at..end]);
        at = end;
    }
    Ok(bytes)
}
