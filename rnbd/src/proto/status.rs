//! Block status: which parts of a range have data. An extension of RNBD between a client and a server of ours;
//! `docs/reference/block-status.md` has its bytes.
//!
//! A server that has it says so with [`STATUS_MAGIC`] in bytes of its [answer to an open request](super::MsgOpenRsp) that the kernel
//! reserves. Only such a server is asked ([`IoOp::BlockStatus`]). The kernel's server does not clear those bytes, so that there the
//! magic can be left over from something else, and it takes operations that it does not know for reads: therefore a request is in
//! order as a read, too, of as many bytes as the client has room for, and an answer begins with the magic.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32},
};

use super::{IoOp, MsgIo, Rw, SECTOR, STATUS_MAGIC};
use crate::block::{self, Extent};

/// Bytes that a client has for an answer, if its device's blocks are no larger.
pub const ROOM: u32 = 4096;
/// Extents of an answer at most: those that fill [`ROOM`].
pub const MAX_EXTENTS: u32 = (ROOM as usize - size_of::<Head>()) as u32 / size_of::<Entry>() as u32;
/// Longest range of a request, bytes.
pub const MAX_RANGE: u64 = u32::MAX as u64 * SECTOR;

/// Flag of an extent: nothing is allocated there.
const HOLE: u32 = 1;
/// Flag of an extent: it reads as zeroes.
const ZERO: u32 = 1 << 1;

/// Beginning of an answer, 16 bytes; `count` entries follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 8],
    count: U32,
    reserved: U32,
}

/// An extent, 8 bytes. The first begins where the range does, each other where the one before ends.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Entry {
    sectors: U32,
    flags: U32,
}

const _: () = assert!(size_of::<Head>() == 16 && size_of::<Entry>() == 8 && MAX_EXTENTS == 510);

/// The request for the state of `len` bytes from `offset` on, in at most `most` extents, with room for an answer of `room` bytes.
/// Of more than [`MAX_RANGE`] only the beginning is asked about.
pub fn request(device_id: u32, offset: u64, len: u64, room: u32, most: u32) -> MsgIo {
    let rw = Rw {
        sync: true,
        ..Rw::new(IoOp::BlockStatus)
    };
    MsgIo {
        status_extents: U16::new(u16::try_from(most).unwrap_or(0)),
        status_sectors: U32::new((len.min(MAX_RANGE) / SECTOR) as u32),
        ..MsgIo::new(device_id, rw, offset / SECTOR, room)
    }
}

impl MsgIo {
    /// Extents that the answer to a [`IoOp::BlockStatus`] may have at most; 0: there is no room for any.
    pub fn most_extents(&self) -> u32 {
        let room = (self.bi_size.get() as usize).saturating_sub(size_of::<Head>()) / size_of::<Entry>();
        let fit = (room as u32).min(MAX_EXTENTS);
        match self.status_extents.get() {
            0 => fit,
            wanted => fit.min(wanted.into()),
        }
    }
}

/// Bytes of an answer with so many extents.
pub const fn answer_len(extents: u32) -> usize {
    size_of::<Head>() + extents as usize * size_of::<Entry>()
}

/// The answer with the first `most` of these extents, which are whole sectors, and zeroes behind them as if it had so many.
pub fn answer(extents: &[Extent], most: u32) -> Vec<u8> {
    let extents = &extents[..extents.len().min(most as usize)];
    let head = Head {
        magic: STATUS_MAGIC,
        count: U32::new(extents.len() as u32),
        reserved: U32::ZERO,
    };
    let mut bytes = head.as_bytes().to_vec();
    for extent in extents {
        let flags = [(extent.hole, HOLE), (extent.zero, ZERO)];
        let set = flags.iter().filter(|(is_set, _)| *is_set);
        let entry = Entry {
            // A range has no more.
            sectors: U32::new(u32::try_from(extent.len / SECTOR).unwrap_or(u32::MAX)),
            flags: U32::new(set.fold(0, |all, (_, flag)| all | flag)),
        };
        bytes.extend_from_slice(entry.as_bytes());
    }
    bytes.resize(answer_len(most), 0);
    bytes
}

/// Why something is no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StatusError {
    /// It does not begin as one: the server has taken the request for something else.
    #[error("something else")]
    Foreign,
    /// No extent, or more of them than there is room for, or than were asked for.
    #[error("{count} extents where there can be 1 to {most}")]
    Count {
        /// Extents in the answer.
        count: u32,
        /// Largest possible number.
        most: u32,
    },
    /// An extent of nothing.
    #[error("extent {0} is empty")]
    Empty(usize),
    /// An extent that ends within a block.
    #[error("extent {0} ends within a block")]
    Torn(usize),
    /// Extents go beyond the end of the range.
    #[error("extent {0} ends beyond the range")]
    Beyond(usize),
}

/// Reads an answer about a range of `len` bytes, which was asked for in at most `most` extents, of a device with such blocks. The
/// extents begin where the range does, and may end before it; no two neighbours are alike. Flags that are not known are ignored.
///
/// # Errors
/// When it is none.
pub fn parse(bytes: &[u8], len: u64, most: u32, block: u64) -> Result<Vec<Extent>, StatusError> {
    let (head, rest) = Head::read_from_prefix(bytes).map_err(|_| StatusError::Foreign)?;
    if head.magic != STATUS_MAGIC {
        return Err(StatusError::Foreign);
    }
    let (count, fit) = (head.count.get(), (rest.len() / size_of::<Entry>()) as u32);
    let most = most.min(fit);
    if count == 0 || count > most {
        return Err(StatusError::Count { count, most });
    }
    let mut extents = Vec::new();
    let mut left = len;
    for (index, entry) in rest.chunks_exact(size_of::<Entry>()).take(count as usize).enumerate() {
        let entry = Entry::read_from_bytes(entry).map_err(|_| StatusError::Foreign)?;
        let len = u64::from(entry.sectors.get()) * SECTOR;
        if len == 0 {
            return Err(StatusError::Empty(index));
        }
        if !len.is_multiple_of(block.max(1)) {
            return Err(StatusError::Torn(index));
        }
        left = left.checked_sub(len).ok_or(StatusError::Beyond(index))?;
        let flags = entry.flags.get();
        let extent = Extent {
            len,
            hole: flags & HOLE != 0,
            zero: flags & ZERO != 0,
        };
        block::append(&mut extents, extent);
    }
    Ok(extents)
}
