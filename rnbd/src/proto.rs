//! RNBD protocol 2.0 messages (`drivers/block/rnbd/rnbd-proto.h`): little-endian, natural alignment of the kernel's
//! structs written out as reserved fields. Reserved bytes are sent as zero and not looked at: the kernel's client
//! leaves stack bytes in them, its server what the chunk held before. Some of them belong to [`status`] and [`instance`], extensions
//! between a client and a server of ours, and count only where these say so.

use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::errno::Errno;
use instance::Instance;

pub mod instance;
pub mod status;

/// Major protocol version; what goes into the one-byte version fields.
pub const VERSION_MAJOR: u8 = 2;
/// Minor protocol version; never on the wire.
pub const VERSION_MINOR: u8 = 0;
/// Bytes of a sector in every count and position of the protocol.
pub const SECTOR: u64 = 512;
/// Bytes of the device name field (`NAME_MAX`); a name has at most one byte less, for its terminator.
pub const NAME_MAX: usize = 255;

/// Message types (`enum rnbd_msg_type`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum MsgType {
    /// Version exchange, client to server.
    SessInfo = 0,
    /// Its answer.
    SessInfoRsp = 1,
    /// Open a device.
    Open = 2,
    /// Its answer.
    OpenRsp = 3,
    /// Block request.
    Io = 4,
    /// Close a device.
    Close = 5,
}

impl MsgType {
    /// The type with this number.
    pub fn from_wire(n: u16) -> Option<Self> {
        [
            Self::SessInfo,
            Self::SessInfoRsp,
            Self::Open,
            Self::OpenRsp,
            Self::Io,
            Self::Close,
        ]
        .into_iter()
        .find(|t| *t as u16 == n)
    }
}

/// How a device is opened (`enum rnbd_access_mode`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum AccessMode {
    /// Read-only; any number of times.
    ReadOnly = 0,
    /// Read and write; once.
    ReadWrite = 1,
    /// Read and write; a second writer beside the first, for moving a virtual machine.
    Migration = 2,
}

impl AccessMode {
    /// The mode with this number.
    pub fn from_wire(n: u8) -> Option<Self> {
        [Self::ReadOnly, Self::ReadWrite, Self::Migration]
            .into_iter()
            .find(|m| *m as u8 == n)
    }

    /// Whether the device may be written to.
    pub fn writable(self) -> bool {
        self != Self::ReadOnly
    }
}

impl std::fmt::Display for AccessMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ReadOnly => "ro",
            Self::ReadWrite => "rw",
            Self::Migration => "migration",
        })
    }
}

impl std::str::FromStr for AccessMode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "ro" => Ok(Self::ReadOnly),
            "rw" => Ok(Self::ReadWrite),
            "migration" => Ok(Self::Migration),
            _ => Err(format!("access mode {s:?} is none of ro, rw, migration")),
        }
    }
}

/// Operations (`enum rnbd_io_flags`, low 8 bits of `rw`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum IoOp {
    /// Read sectors.
    Read = 0,
    /// Write sectors.
    Write = 1,
    /// Flush the volatile write cache.
    Flush = 2,
    /// Discard sectors.
    Discard = 3,
    /// Securely erase sectors.
    SecureErase = 4,
    /// Write zeroes, without data: RNBD 2.2. With data it is "write same", which no kernel has sent since 5.18.
    WriteZeroes = 5,
    /// Tell which parts of a range have data, of an [extension](status) of ours. RNBD counts its operations up from 0, and Linux's
    /// `REQ_OP_…`, which they are named after, end below 40: a new one of either is far from this. It is even, as those of Linux are
    /// that bring the client data.
    BlockStatus = 0xba,
}

impl IoOp {
    /// All operations.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::SecureErase,
        Self::WriteZeroes,
        Self::BlockStatus,
    ];
}

/// Flag bits of `rw`: the request is synchronous (somebody waits for it).
pub const F_SYNC: u32 = 1 << 8;
/// Flag bits of `rw`: forced unit access. The kernel's client also sets it on every flush.
pub const F_FUA: u32 = 1 << 9;
/// Flag bits of `rw`: a flush first. Since RNBD 2.1; the kernel's client then sets it on every flush too.
pub const F_PREFLUSH: u32 = 1 << 10;
/// Flag bits of `rw`: zeroes without holes. Since RNBD 2.2.
pub const F_NO_UNMAP: u32 = 1 << 11;
const OP_MASK: u32 = 0xff;

/// `cache_policy` bit: the device does forced unit access.
pub const CACHE_FUA: u8 = 1;
/// `cache_policy` bit: the device has a volatile write cache, so flushes matter.
pub const CACHE_WRITEBACK: u8 = 1 << 1;

/// Last bytes of the [answer to an open request](MsgOpenRsp) from a server that has [block status](status), and first of each answer
/// to that; chosen at random.
pub const STATUS_MAGIC: [u8; 8] = [0x13, 0x9a, 0xbb, 0xf1, 0x03, 0xed, 0x7e, 0xa4];

/// Operation and flags of a request, the decoded `rw` field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rw {
    /// Operation.
    pub op: IoOp,
    /// Somebody waits.
    pub sync: bool,
    /// On stable storage before the answer.
    pub fua: bool,
    /// Writes before this one are on stable storage first.
    pub preflush: bool,
    /// Zeroed space stays allocated.
    pub no_unmap: bool,
}

impl Rw {
    /// An operation without flags.
    pub const fn new(op: IoOp) -> Self {
        Self {
            op,
            sync: false,
            fua: false,
            preflush: false,
            no_unmap: false,
        }
    }

    /// Decodes; `None` when the operation is unknown. Unknown flags are ignored, as by the kernel: newer clients set some.
    pub fn from_wire(rw: u32) -> Option<Self> {
        let op = IoOp::ALL.into_iter().find(|o| *o as u32 == rw & OP_MASK)?;
        Some(Self {
            op,
            sync: rw & F_SYNC != 0,
            fua: rw & F_FUA != 0,
            preflush: rw & F_PREFLUSH != 0,
            no_unmap: rw & F_NO_UNMAP != 0,
        })
    }

    /// Encodes.
    pub fn to_wire(self) -> u32 {
        let flags = [
            (self.sync, F_SYNC),
            (self.fua, F_FUA),
            (self.preflush, F_PREFLUSH),
            (self.no_unmap, F_NO_UNMAP),
        ];
        let set = flags.iter().filter(|(is_set, _)| *is_set);
        set.fold(self.op as u32, |rw, (_, flag)| rw | flag)
    }
}

/// Message header (`struct rnbd_msg_hdr`), 4 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MsgHdr {
    /// A [`MsgType`].
    pub msg_type: U16,
    reserved: U16,
}

impl MsgHdr {
    fn new(t: MsgType) -> Self {
        Self {
            msg_type: U16::new(t as u16),
            reserved: U16::ZERO,
        }
    }
}

/// Version exchange (`struct rnbd_msg_sess_info` and `_rsp`), 36 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MsgSessInfo {
    /// [`MsgType::SessInfo`] or [`MsgType::SessInfoRsp`].
    pub hdr: MsgHdr,
    /// Highest major version that the sender knows; in the answer, the one to use.
    pub ver: u8,
    reserved: [u8; 31],
}

impl MsgSessInfo {
    /// Client's message.
    pub fn request(ver: u8) -> Self {
        Self {
            hdr: MsgHdr::new(MsgType::SessInfo),
            ver,
            reserved: [0; 31],
        }
    }

    /// Server's answer.
    pub fn response(ver: u8) -> Self {
        Self {
            hdr: MsgHdr::new(MsgType::SessInfoRsp),
            ver,
            reserved: [0; 31],
        }
    }
}

/// Open request (`struct rnbd_msg_open`), 264 bytes.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MsgOpen {
    /// [`MsgType::Open`].
    pub hdr: MsgHdr,
    /// An [`AccessMode`].
    pub access_mode: u8,
    resv1: u8,
    dev_name: [u8; NAME_MAX],
    reserved: [u8; 3],
}

impl MsgOpen {
    /// Client's message.
    ///
    /// # Errors
    /// EINVAL for an empty name or one with a NUL, ENAMETOOLONG above 254 bytes.
    pub fn new(name: &[u8], mode: AccessMode) -> Result<Self, Errno> {
        if name.is_empty() || name.contains(&0) {
            return Err(Errno::EINVAL);
        }
        if name.len() >= NAME_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        let mut m = Self {
            hdr: MsgHdr::new(MsgType::Open),
            access_mode: mode as u8,
            resv1: 0,
            dev_name: [0; NAME_MAX],
            reserved: [0; 3],
        };
        m.dev_name[..name.len()].copy_from_slice(name);
        Ok(m)
    }

    /// The name up to its terminator; `None` when that is missing or the name is empty.
    pub fn name(&self) -> Option<&[u8]> {
        let end = self.dev_name.iter().position(|b| *b == 0)?;
        (end > 0).then(|| &self.dev_name[..end])
    }
}

impl std::fmt::Debug for MsgOpen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MsgOpen")
            .field("access_mode", &self.access_mode)
            .field("name", &self.name().map(String::from_utf8_lossy))
            .finish_non_exhaustive()
    }
}

/// Close request (`struct rnbd_msg_close`), 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MsgClose {
    /// [`MsgType::Close`].
    pub hdr: MsgHdr,
    /// From the open response.
    pub device_id: U32,
}

impl MsgClose {
    /// Client's message.
    pub fn new(device_id: u32) -> Self {
        Self {
            hdr: MsgHdr::new(MsgType::Close),
            device_id: U32::new(device_id),
        }
    }
}

/// Answer to an open request (`struct rnbd_msg_open_rsp`), 56 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MsgOpenRsp {
    /// [`MsgType::OpenRsp`].
    pub hdr: MsgHdr,
    /// Names the device in requests.
    pub device_id: U32,
    /// Size, sectors of 512 bytes.
    pub nsectors: U64,
    /// Largest request of the hardware, sectors.
    pub max_hw_sectors: U32,
    /// Longest range of zeroes, sectors, for clients of RNBD 2.2; zero: none. It was for "write same"; the client of Linux
    /// 6.1 ignores it.
    pub max_write_zeroes_sectors: U32,
    /// Largest discard, sectors; zero: no discard.
    pub max_discard_sectors: U32,
    /// Unit of discards, bytes.
    pub discard_granularity: U32,
    /// Offset of the first discard unit, bytes.
    pub discard_alignment: U32,
    /// Physical block size, bytes.
    pub physical_block_size: U16,
    /// Logical block size, bytes: requests are multiples of it.
    pub logical_block_size: U16,
    /// Segments of a request that the hardware takes.
    pub max_segments: U16,
    /// Nonzero: secure erase works.
    pub secure_discard: U16,
    obsolete_rotational: u8,
    /// [`CACHE_FUA`] and [`CACHE_WRITEBACK`].
    pub cache_policy: u8,
    /// Upper half of the [instance](Instance) of a server of ours; the lower one is in the header's reserved bytes.
    instance_high: U16,
    /// [`STATUS_MAGIC`] of a server of ours; whatever it may be of others.
    extension: [u8; 8],
}

impl MsgOpenRsp {
    /// All zero but the type.
    pub fn new() -> Self {
        Self {
            hdr: MsgHdr::new(MsgType::OpenRsp),
            ..Self::new_zeroed()
        }
    }

    /// Says that the server answers [`IoOp::BlockStatus`].
    pub fn offer_block_status(&mut self) {
        self.extension = STATUS_MAGIC;
    }

    /// Whether the server says so. A kernel's may have the bytes lying there by accident.
    pub fn offers_block_status(&self) -> bool {
        self.extension == STATUS_MAGIC
    }

    /// Names the device's instance, which a client believes together with the [offer](Self::offer_block_status).
    pub fn set_instance(&mut self, instance: Option<Instance>) {
        let number = instance.map_or(0, Instance::to_wire);
        self.hdr.reserved.set(number as u16);
        self.instance_high.set((number >> 16) as u16);
    }

    /// The device's instance. `None`: the server does not know it, is an older one of ours, or not ours.
    pub fn instance(&self) -> Option<Instance> {
        let number = u32::from(self.instance_high.get()) << 16 | u32::from(self.hdr.reserved.get());
        Instance::from_wire(number).filter(|_| self.offers_block_status())
    }
}

impl Default for MsgOpenRsp {
    fn default() -> Self {
        Self::new()
    }
}

/// Block request (`struct rnbd_msg_io`), 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MsgIo {
    /// [`MsgType::Io`].
    pub hdr: MsgHdr,
    /// From the open response.
    pub device_id: U32,
    /// First sector.
    pub sector: U64,
    /// Operation and flags, see [`Rw`].
    pub rw: U32,
    /// Bytes to read, write or discard.
    pub bi_size: U32,
    /// I/O priority, since protocol 2.
    pub prio: U16,
    /// Most extents that [`IoOp::BlockStatus`] wants; 0: as many as there is room for.
    pub status_extents: U16,
    /// Sectors of the range of [`IoOp::BlockStatus`].
    pub status_sectors: U32,
}

impl MsgIo {
    /// Bytes of the message before protocol 2 gave it a priority.
    pub const LEN_V1: usize = 24;

    /// A request without priority.
    pub fn new(device_id: u32, rw: Rw, sector: u64, bytes: u32) -> Self {
        Self {
            hdr: MsgHdr::new(MsgType::Io),
            device_id: U32::new(device_id),
            sector: U64::new(sector),
            rw: U32::new(rw.to_wire()),
            bi_size: U32::new(bytes),
            prio: U16::ZERO,
            status_extents: U16::ZERO,
            status_sectors: U32::ZERO,
        }
    }
}

const _: () = assert!(
    size_of::<MsgHdr>() == 4
        && size_of::<MsgSessInfo>() == 36
        && size_of::<MsgOpen>() == 264
        && size_of::<MsgClose>() == 8
        && size_of::<MsgOpenRsp>() == 56
        && size_of::<MsgIo>() == 32
);

/// A message that a client sends, as it lies before a request's end in a chunk.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum ClientMsg {
    /// Version exchange.
    SessInfo(MsgSessInfo),
    /// Open a device.
    Open(MsgOpen),
    /// Block request.
    Io(MsgIo),
    /// Close a device.
    Close(MsgClose),
}

/// Why a message is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtoError {
    /// Fewer bytes than the message has.
    #[error("message of {len} bytes is shorter than the {need} of its type {kind}")]
    Short {
        /// Message type.
        kind: u16,
        /// Bytes given.
        len: usize,
        /// Bytes needed.
        need: usize,
    },
    /// No message that a client may send.
    #[error("unexpected message type {0}")]
    Type(u16),
}

fn prefix<T: FromBytes + KnownLayout + Immutable + Unaligned>(kind: u16, bytes: &[u8]) -> Result<T, ProtoError> {
    T::read_from_prefix(bytes)
        .map(|(t, _)| t)
        .map_err(|_| ProtoError::Short {
            kind,
            len: bytes.len(),
            need: size_of::<T>(),
        })
}

impl ClientMsg {
    /// Parses a copy of the user header of a request. Longer messages than known are accepted, as by the kernel.
    ///
    /// # Errors
    /// When it is too short for its type, or the type is none that a client sends.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtoError> {
        let kind = match bytes {
            [a, b, _, _, ..] => u16::from_le_bytes([*a, *b]),
            _ => {
                return Err(ProtoError::Short {
                    kind: 0,
                    len: bytes.len(),
                    need: size_of::<MsgHdr>(),
                });
            }
        };
        Ok(match MsgType::from_wire(kind) {
            Some(MsgType::SessInfo) => Self::SessInfo(prefix(kind, bytes)?),
            Some(MsgType::Open) => Self::Open(prefix(kind, bytes)?),
            Some(MsgType::Close) => Self::Close(prefix(kind, bytes)?),
            Some(MsgType::Io) => Self::Io(parse_io(kind, bytes)?),
            _ => return Err(ProtoError::Type(kind)),
        })
    }
}

fn parse_io(kind: u16, bytes: &[u8]) -> Result<MsgIo, ProtoError> {
    if let Ok((m, _)) = MsgIo::read_from_prefix(bytes) {
        return Ok(m);
    }
    let Some(v1) = bytes.get(..MsgIo::LEN_V1) else {
        return Err(ProtoError::Short {
            kind,
            len: bytes.len(),
            need: MsgIo::LEN_V1,
        });
    };
    let mut m = MsgIo::new_zeroed();
    m.as_mut_bytes()[..MsgIo::LEN_V1].copy_from_slice(v1);
    Ok(m)
}

/// Checks and reads the answer to a version exchange.
///
/// # Errors
/// EINVAL when it is none.
pub fn parse_sess_info_rsp(bytes: &[u8]) -> Result<MsgSessInfo, Errno> {
    let (m, _) = MsgSessInfo::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
    (m.hdr.msg_type.get() == MsgType::SessInfoRsp as u16)
        .then_some(m)
        .ok_or(Errno::EINVAL)
}

/// Checks and reads the answer to an open request: a block size of at least a sector and a power of two, and a size
/// that fits 63 bits of bytes.
///
/// # Errors
/// EINVAL when it is none or makes no sense.
pub fn parse_open_rsp(bytes: &[u8]) -> Result<MsgOpenRsp, Errno> {
    let (m, _) = MsgOpenRsp::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
    let block = u64::from(m.logical_block_size.get());
    let ok = m.hdr.msg_type.get() == MsgType::OpenRsp as u16
        && block >= SECTOR
        && block.is_power_of_two()
        && m.nsectors.get() <= i64::MAX as u64 / SECTOR;
    ok.then_some(m).ok_or(Errno::EINVAL)
}
