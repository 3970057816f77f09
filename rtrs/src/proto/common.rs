//! Parts that all messages share.

use core::fmt;

use bitflags::bitflags;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

/// First two bytes of connection messages (`RTRS_MAGIC`).
pub const MAGIC: u16 = 0x1bbd;
/// Major protocol version: other majors are refused.
pub const VERSION_MAJOR: u8 = 2;
/// Minor protocol version: not compared.
pub const VERSION_MINOR: u8 = 0;
/// Version field of connection messages.
pub const VERSION: u16 = (VERSION_MAJOR as u16) << 8 | VERSION_MINOR as u16;
/// TCP port space number that servers listen on.
pub const DEFAULT_PORT: u16 = 1234;
/// Receives that each side keeps on the service connection (`SERVICE_CON_QUEUE_DEPTH`).
pub const SERVICE_QUEUE_DEPTH: u32 = 512;
/// Paths of a session at most (`MAX_PATHS_NUM`).
pub const MAX_PATHS: usize = 128;
/// Connections of a path at most, the service connection included: the server's sanity check.
pub const MAX_CONNECTIONS: u16 = 4096;
/// Smallest chunk (`MIN_CHUNK_SIZE`), bytes.
pub const MIN_CHUNK_SIZE: u32 = 8192;
/// Largest queue depth (`MAX_SESS_QUEUE_DEPTH`).
pub const MAX_QUEUE_DEPTH: u32 = 65535;
/// Bytes of a chunk that are set aside for headers (the kernel's page size).
pub const MAX_HDR_SIZE: u32 = 4096;
/// Bytes of a session name with its terminating zero (`NAME_MAX`).
pub const NAME_MAX: usize = 255;

/// Direction of a request's data, seen from the client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the server's chunk into the client's buffer.
    Read,
    /// From the client's buffer into the server's chunk.
    Write,
}

/// Type of a message (`enum rtrs_msg_types`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum MsgType {
    InfoReq = 0,
    InfoRsp = 1,
    Write = 2,
    Read = 3,
    RkeyRsp = 4,
}

bitflags! {
    /// Flags of messages (`enum rtrs_msg_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct MsgFlags: u32 {
        /// In a read request: revoke the key of the destination when done.
        const NEED_INVAL = 1;
        /// In a connection response: every response brings a new key for its chunk.
        const NEW_RKEY = 1 << 1;
    }
}

/// Error in a message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
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
    /// Not RTRS.
    #[error("magic {0:#06x} instead of {MAGIC:#06x}")]
    Magic(u16),
    /// A major version that we don't speak.
    #[error("protocol version {}.{}, this side speaks {VERSION_MAJOR}.{VERSION_MINOR}", .0 >> 8, .0 & 0xff)]
    Version(u16),
    /// Another message than the one that belongs here.
    #[error("{what}: message type {got}")]
    Type {
        /// Expected message.
        what: &'static str,
        /// The type there.
        got: u16,
    },
    /// A field with a value that can't be.
    #[error("{field}: {value} is not possible ({why})")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The bound or rule.
        why: &'static str,
    },
    /// A session name with a slash, a dot, or without its end.
    #[error("session name: {0}")]
    Name(&'static str),
}

impl ProtoError {
    pub(crate) fn field(field: &'static str, value: impl Into<u64>, why: &'static str) -> Self {
        Self::Field {
            field,
            value: value.into(),
            why,
        }
    }
}

/// Splits a message of type `T` off the front.
pub(crate) fn take<'a, T: FromBytes + KnownLayout + Immutable + Unaligned>(
    what: &'static str,
    bytes: &'a [u8],
) -> Result<(&'a T, &'a [u8]), ProtoError> {
    T::ref_from_prefix(bytes).map_err(|_| ProtoError::Short {
        what,
        len: bytes.len(),
        need: size_of::<T>(),
    })
}

/// A piece of the peer's memory (`struct rtrs_sg_desc`): 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SgDesc {
    /// Address.
    pub addr: U64,
    /// Remote key.
    pub key: U32,
    /// Bytes.
    pub len: U32,
}

impl SgDesc {
    /// A descriptor of these values.
    pub fn new(addr: u64, key: u32, len: u32) -> Self {
        Self {
            addr: addr.into(),
            key: key.into(),
            len: len.into(),
        }
    }
}

/// Identifies a session (`paths_uuid`) or a path (`sess_uuid`): 16 bytes, random (version 4).
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(transparent)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// A new random one, of this rng.
    pub fn draw(random: &mut dyn FnMut(&mut [u8])) -> Self {
        let mut b = [0; 16];
        random(&mut b);
        b[6] = b[6] & 0x0f | 0x40;
        b[8] = b[8] & 0x3f | 0x80;
        Self(b)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, b) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{b:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uuid({self})")
    }
}
