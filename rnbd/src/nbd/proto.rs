//! Numbers and headers of the NBD protocol. Everything is big-endian.

use crate::{block::Geometry, errno::Errno};

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

    /// Bytes that it moves between the device and memory. Of a range to be cached the beginning will do.
    pub(crate) fn moved(&self) -> u32 {
        match self.command {
            cmd::READ | cmd::WRITE | cmd::CACHE => self.len.min(MAX_PAYLOAD.into()) as u32,
            _ => 0,
        }
    }

    /// Checks it against the protocol, and names the error. `told` are the transmission flags that the client
    /// knows, `framing` is what it has asked for, `allocation` whether it may ask what is allocated; the device may have become
    /// another one since.
    pub(crate) fn check(&self, told: u16, framing: Framing, allocation: bool, g: &Geometry) -> Result<(), Errno> {
        let known = match self.command {
            cmd::WRITE_ZEROES => cmd_flag::FUA | cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
            cmd::READ if told & tx::SEND_DF != 0 => cmd_flag::FUA | cmd_flag::DF,
            cmd::WRITE if framing == Framing::Extended => cmd_flag::FUA | cmd_flag::PAYLOAD_LEN,
            cmd::BLOCK_STATUS => cmd_flag::FUA | cmd_flag::REQ_ONE,
            _ => cmd_flag::FUA,
        };
        let fua_unknown = self.flags & cmd_flag::FUA != 0 && told & (tx::SEND_FUA | tx::READ_ONLY) == 0;
        if self.flags & !known != 0 || fua_unknown {
            return Err(Errno::EINVAL);
        }
        let changes = matches!(self.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        if changes && g.read_only {
            return Err(Errno::EPERM);
        }
        let (offset, len) = (self.offset, self.len);
        match self.command {
            cmd::FLUSH => return Ok(()),
            cmd::READ if self.len > MAX_PAYLOAD.into() => return Err(Errno::EINVAL),
            cmd::BLOCK_STATUS if !allocation || len == 0 => return Err(Errno::EINVAL),
            cmd::WRITE_ZEROES if self.flags & cmd_flag::FAST_ZERO != 0 && g.max_write_zeroes == 0 => {
                return Err(Errno::EOPNOTSUPP);
            }
            cmd::TRIM if told & tx::SEND_TRIM == 0 => return Err(Errno::EINVAL),
            cmd::TRIM if g.max_discard == 0 => return Err(Errno::EOPNOTSUPP),
            cmd::READ | cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES | cmd::CACHE | cmd::BLOCK_STATUS => {}
            _ => return Err(Errno::EINVAL),
        }
        if !g.contains(offset, len) {
            let full = matches!(self.command, cmd::WRITE | cmd::WRITE_ZEROES);
            return Err(if full { Errno::ENOSPC } else { Errno::EINVAL });
        }
        if g.aligned(offset, len) {
            Ok(())
        } else {
            Err(Errno::EINVAL)
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

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;
    const GEOMETRY: Geometry = Geometry {
        size: SIZE,
        logical_block_size: 512,
        physical_block_size: 4096,
        max_transfer: 128 << 10,
        max_discard: 1 << 20,
        discard_granularity: 4096,
        read_only: false,
        write_cache: true,
        fua: true,
        max_write_zeroes: 0,
        queue_depth: 8,
    };
    const TOLD: u16 = tx::HAS_FLAGS | tx::SEND_FLUSH | tx::SEND_FUA | tx::SEND_TRIM | tx::SEND_WRITE_ZEROES;

    fn request(command: u16, flags: u16, offset: u64, len: u64) -> Request {
        Request {
            flags,
            command,
            cookie: 7,
            offset,
            len,
        }
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_error_that_the_protocol_names() {
        let refused = |command, flags, offset, len| {
            let q = request(command, flags, offset, len);
            q.check(TOLD, Framing::Structured, true, &GEOMETRY).err()
        };
        let (fua, no_hole) = (cmd_flag::FUA, cmd_flag::NO_HOLE);
        for (command, flags, offset, len, error) in [
            (cmd::READ, 0, 0, 512, None),
            (cmd::READ, fua, SIZE - 512, 512, None),
            (cmd::READ, 0, SIZE, 512, Some(Errno::EINVAL)),
            (cmd::READ, 0, u64::MAX - 511, 512, Some(Errno::EINVAL)),
            (cmd::READ, 0, SIZE - 512, 1024, Some(Errno::EINVAL)),
            (cmd::READ, 0, 1, 512, Some(Errno::EINVAL)),
            (cmd::READ, 0, 0, 100, Some(Errno::EINVAL)),
            (cmd::READ, 0, 0, u64::from(MAX_PAYLOAD) + 512, Some(Errno::EINVAL)),
            (cmd::READ, cmd_flag::DF, 0, 512, Some(Errno::EINVAL)),
            (cmd::CACHE, 0, 0, SIZE, None),
            (cmd::CACHE, 0, 512, SIZE, Some(Errno::EINVAL)),
            (cmd::BLOCK_STATUS, cmd_flag::REQ_ONE, 0, SIZE, None),
            (cmd::BLOCK_STATUS, 0, 0, 0, Some(Errno::EINVAL)),
            (cmd::WRITE_ZEROES, cmd_flag::FAST_ZERO, 0, 512, Some(Errno::EOPNOTSUPP)),
            (cmd::READ, no_hole, 0, 512, Some(Errno::EINVAL)),
            (cmd::WRITE, fua, 0, 512, None),
            (cmd::WRITE, 1 << 4, 0, 512, Some(Errno::EINVAL)),
            (cmd::WRITE, cmd_flag::PAYLOAD_LEN, 0, 512, Some(Errno::EINVAL)),
            (cmd::WRITE, 0, SIZE, 512, Some(Errno::ENOSPC)),
            (cmd::WRITE, 0, 100, 512, Some(Errno::EINVAL)),
            (cmd::WRITE_ZEROES, fua | no_hole, 0, 512, None),
            (cmd::WRITE_ZEROES, 0, SIZE, 512, Some(Errno::ENOSPC)),
            (cmd::TRIM, fua, 0, 512, None),
            (cmd::TRIM, 0, SIZE, 512, Some(Errno::EINVAL)),
            // Where, and how much, does not matter.
            (cmd::FLUSH, 0, u64::MAX, 3, None),
            (cmd::FLUSH, no_hole, 0, 0, Some(Errno::EINVAL)),
            (8, 0, 0, 0, Some(Errno::EINVAL)),
            (99, 0, 0, 512, Some(Errno::EINVAL)),
        ] {
            assert_eq!(
                refused(command, flags, offset, len),
                error,
                "{command} {flags} {offset} {len}"
            );
        }
        for command in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
            assert_eq!(refused(command, 0, SIZE, 0), None, "nothing at the end");
        }
    }

    #[test]
    fn what_counts_is_what_the_client_was_told_and_what_the_device_is() {
        let error = |q: Request, told, g: &Geometry| q.check(told, Framing::Structured, false, g).err();
        let read_only = Geometry {
            read_only: true,
            ..GEOMETRY
        };
        for command in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
            let q = request(command, 0, 0, 512);
            assert_eq!(error(q, TOLD, &read_only), Some(Errno::EPERM), "{command}");
        }
        let told = tx::HAS_FLAGS | tx::READ_ONLY;
        // Harmless, and some clients do it.
        assert_eq!(error(request(cmd::READ, cmd_flag::FUA, 0, 512), told, &read_only), None);
        let write = request(cmd::WRITE, cmd_flag::FUA, 0, 512);
        assert_eq!(error(write, TOLD & !tx::SEND_FUA, &GEOMETRY), Some(Errno::EINVAL));
        let trim = request(cmd::TRIM, 0, 0, 512);
        assert_eq!(error(trim, TOLD & !tx::SEND_TRIM, &GEOMETRY), Some(Errno::EINVAL));
        let cannot = Geometry {
            max_discard: 0,
            ..GEOMETRY
        };
        assert_eq!(error(trim, TOLD, &cannot), Some(Errno::EOPNOTSUPP));
        let fast = Geometry {
            max_write_zeroes: 1 << 20,
            ..GEOMETRY
        };
        let zero = request(cmd::WRITE_ZEROES, cmd_flag::FAST_ZERO | cmd_flag::NO_HOLE, 0, 512);
        assert_eq!(error(zero, TOLD, &fast), None);
        let read = request(cmd::READ, cmd_flag::DF, 0, 512);
        assert_eq!(error(read, TOLD | tx::SEND_DF, &GEOMETRY), None);
        let status = request(cmd::BLOCK_STATUS, 0, 0, 512);
        assert_eq!(error(status, TOLD, &GEOMETRY), Some(Errno::EINVAL));
        let smaller = Geometry { size: 4096, ..GEOMETRY };
        assert_eq!(
            error(request(cmd::READ, 0, 8192, 512), TOLD, &smaller),
            Some(Errno::EINVAL)
        );
    }
}
