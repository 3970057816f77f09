//! Numbers and headers of the NBD protocol. Everything is big-endian.

use crate::errno::Errno;

/// "NBDMAGIC", first of the server's greeting.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", second of the greeting and first of each option.
pub const OPT_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First of each option reply.
pub const OPT_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First of each request with a compact header.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First of each request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First of each simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First of each chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First of each chunk of a reply with extended headers.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

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
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_POLICY: u32 = 0x8000_0002;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
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
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub mod cmd {
    #![allow(missing_docs)]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub mod cmd_flag {
    #![allow(missing_docs)]
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks of a reply.
pub mod chunk {
    #![allow(missing_docs)]
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// Flags of an extent in the context [`BASE_ALLOCATION`].
pub mod state {
    #![allow(missing_docs)]
    pub const HOLE: u32 = 1;
    pub const ZERO: u32 = 1 << 1;
}

/// Flag of a chunk: it is the reply's last.
pub const CHUNK_DONE: u16 = 1;
/// The metadata context that says what is allocated, and what reads as zeroes.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// How requests and replies are framed, as the client has asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum Framing {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests; replies to READ and BLOCK_STATUS come in chunks.
    Structured,
    /// Requests of 64-bit lengths; all replies come in chunks.
    Extended,
}

impl Framing {
    /// Bytes of a request's header.
    pub const fn request_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => Request::LEN,
            Self::Extended => Request::EXTENDED_LEN,
        }
    }
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
    /// Bytes; with a compact header at most `u32::MAX`.
    pub len: u64,
}

impl Request {
    /// Bytes of a compact header.
    pub const LEN: usize = 28;
    /// Bytes of an extended header.
    pub const EXTENDED_LEN: usize = 32;

    /// Parses the header at the front of `b`; `None` when it is not there whole, `Some(None)` when its magic number is wrong,
    /// after which nothing can be in step.
    pub fn parse(b: &[u8], framing: Framing) -> Option<Option<Self>> {
        let b = b.get(..framing.request_len())?;
        let be = |r: std::ops::Range<usize>| b[r].iter().fold(0u64, |n, x| n << 8 | u64::from(*x));
        let magic = match framing {
            Framing::Simple | Framing::Structured => REQUEST_MAGIC,
            Framing::Extended => EXTENDED_REQUEST_MAGIC,
        };
        let request = || Self {
            flags: be(4..6) as u16,
            command: be(6..8) as u16,
            cookie: be(8..16),
            offset: be(16..24),
            len: be(24..b.len()),
        };
        Some((be(0..4) == u64::from(magic)).then(request))
    }

    /// The compact header's bytes.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        self.put(REQUEST_MAGIC, &mut b);
        b[24..].copy_from_slice(&(self.len as u32).to_be_bytes());
        b
    }

    /// The extended header's bytes.
    pub fn to_extended_bytes(self) -> [u8; Self::EXTENDED_LEN] {
        let mut b = [0; Self::EXTENDED_LEN];
        self.put(EXTENDED_REQUEST_MAGIC, &mut b);
        b[24..].copy_from_slice(&self.len.to_be_bytes());
        b
    }

    fn put(self, magic: u32, b: &mut [u8]) {
        b[..4].copy_from_slice(&magic.to_be_bytes());
        b[4..6].copy_from_slice(&self.flags.to_be_bytes());
        b[6..8].copy_from_slice(&self.command.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b[16..24].copy_from_slice(&self.offset.to_be_bytes());
    }

    /// Bytes of payload that follow: with extended headers any command may announce some.
    pub fn payload(&self, framing: Framing) -> u64 {
        let announced = framing == Framing::Extended && self.flags & cmd_flag::PAYLOAD_LEN != 0;
        match self.command {
            cmd::WRITE => self.len,
            _ if announced => self.len,
            _ => 0,
        }
    }
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
