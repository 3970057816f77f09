//! Numbers and headers of the NBD protocol. Everything is big-endian.

use crate::errno::Errno;

/// "NBDMAGIC", first of the server's greeting.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", second of the greeting and first of each option.
pub const OPT_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First of each option reply.
pub const OPT_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First of each simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flag, server and client: fixed newstyle.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
/// Handshake flag, server and client: no 124 zeroes after the export data.
pub const FLAG_NO_ZEROES: u16 = 2;

/// Options that a client may send.
pub mod opt {
    #![allow(missing_docs)]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub mod rep {
    #![allow(missing_docs)]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
}

/// Pieces of information in an INFO reply.
pub mod info {
    #![allow(missing_docs)]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what the export can do.
pub mod tx {
    #![allow(missing_docs)]
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Commands.
pub mod cmd {
    #![allow(missing_docs)]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
}

/// Command flags.
pub mod cmd_flag {
    #![allow(missing_docs)]
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
}

/// Largest read or write that is accepted, bytes: what clients may assume without asking.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Longest export name, bytes.
pub const MAX_NAME: usize = 4096;

/// A request without its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Bits of [`cmd_flag`].
    pub flags: u16,
    /// One of [`cmd`].
    pub command: u16,
    /// The client's own mark for the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

impl Request {
    /// Bytes of the header.
    pub const LEN: usize = 28;

    /// Parses a header; `None` when the magic number is wrong, after which nothing can be in step.
    pub fn parse(b: &[u8; Self::LEN]) -> Option<Self> {
        let be = |r: std::ops::Range<usize>| b[r].iter().fold(0u64, |n, x| n << 8 | u64::from(*x));
        (be(0..4) == u64::from(REQUEST_MAGIC)).then(|| Self {
            flags: be(4..6) as u16,
            command: be(6..8) as u16,
            cookie: be(8..16),
            offset: be(16..24),
            len: be(24..28) as u32,
        })
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        b[4..6].copy_from_slice(&self.flags.to_be_bytes());
        b[6..8].copy_from_slice(&self.command.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b[16..24].copy_from_slice(&self.offset.to_be_bytes());
        b[24..].copy_from_slice(&self.len.to_be_bytes());
        b
    }
}

/// Header of a simple reply.
pub fn simple_reply(cookie: u64, error: u32) -> [u8; 16] {
    let mut b = [0; 16];
    b[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    b[4..8].copy_from_slice(&error.to_be_bytes());
    b[8..].copy_from_slice(&cookie.to_be_bytes());
    b
}

/// The NBD error for a system error: the protocol knows few.
pub fn error_code(e: Errno) -> u32 {
    // Linux numbers that `Errno` has no names for.
    const EFBIG: i32 = 27;
    const EOVERFLOW: i32 = 75;
    const EDQUOT: i32 = 122;
    match e {
        Errno::EPERM | Errno::EACCES | Errno::EROFS => 1,
        Errno::ENOMEM => 12,
        Errno::EINVAL => 22,
        Errno::ENOSPC => 28,
        Errno::EOPNOTSUPP => 95,
        Errno::ESHUTDOWN => 108,
        e => match e.raw() {
            EFBIG | EDQUOT => 28,
            EOVERFLOW => 75,
            _ => 5,
        },
    }
}
