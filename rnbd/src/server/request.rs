//! Block requests of clients, checked.

use rtrs::{Direction, server::request::Request};

use crate::{
    block::{BlockOp, Geometry},
    errno::Errno,
    proto::{IoOp, MsgIo, Rw, SECTOR, status},
};

/// A block request that makes sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Io {
    /// Operation and flags.
    pub(super) rw: Rw,
    /// First byte on the device.
    pub(super) offset: u64,
    /// Bytes on the device.
    pub(super) len: u64,
    /// First byte of the data in the session's memory.
    pub(super) data: usize,
    /// Bytes of data that the client is sent.
    pub(super) read: usize,
    /// Bytes that it has room for beyond these.
    pub(super) tail: usize,
    /// Extents that it wants to be told of at most.
    extents: u32,
}

impl Io {
    /// Checks what does not depend on the device.
    ///
    /// # Errors
    /// What the client is answered.
    pub(super) fn check(m: &MsgIo, request: &Request) -> Result<Self, Errno> {
        let rw = Rw::from_wire(m.rw.get()).ok_or(Errno::EINVAL)?;
        let asks = rw.op == IoOp::BlockStatus;
        let moved = u64::from(m.bi_size.get());
        let len = match asks {
            true => u64::from(m.status_sectors.get()) * SECTOR,
            false => moved,
        };
        let extents = if asks { m.most_extents() } else { 0 };
        // The kernel's client sends a flush with sector -1, its block layer's "no position".
        let offset = match rw.op {
            IoOp::Flush if len == 0 => 0,
            _ => m.sector.get().checked_mul(SECTOR).ok_or(Errno::EIO)?,
        };
        if !moved.is_multiple_of(SECTOR) || asks && (len == 0 || extents == 0) {
            return Err(Errno::EINVAL);
        }
        let data = match (rw.op, request.direction) {
            (IoOp::Read | IoOp::BlockStatus, Direction::Read) | (IoOp::Write, Direction::Write) => moved,
            // A flush may bring data to be written after it (`REQ_PREFLUSH`); the kernel's client sends it as a read of 0.
            (IoOp::Flush, Direction::Write) => len,
            (IoOp::Flush, Direction::Read) if len == 0 => 0,
            (IoOp::Discard, _) => 0,
            (IoOp::WriteZeroes, Direction::Write) if request.data_len == 0 => 0,
            (IoOp::SecureErase, _) | (IoOp::WriteZeroes, Direction::Write) => return Err(Errno::EOPNOTSUPP),
            _ => return Err(Errno::EINVAL),
        };
        let room = u64::from(request.data_len);
        if data > room {
            return Err(Errno::EINVAL);
        }
        offset.checked_add(len).ok_or(Errno::EIO)?;
        let read = match rw.op {
            IoOp::Read => len,
            IoOp::BlockStatus => status::answer_len(extents) as u64,
            _ => 0,
        };
        let tail = if read > 0 || rw.op == IoOp::Read {
            room - read
        } else {
            0
        };
        Ok(Self {
            rw,
            offset,
            len,
            data: request.data_offset,
            read: read as usize,
            tail: tail as usize,
            extents,
        })
    }

    /// Checks what depends on the device, all but its size.
    ///
    /// # Errors
    /// What the client is answered.
    pub(super) fn permitted(&self, geometry: &Geometry) -> Result<(), Errno> {
        if self.operation().writes() && geometry.read_only {
            return Err(Errno::EROFS);
        }
        // Zeroes that are written would keep the disk busy as long as a client likes.
        if self.rw.op == IoOp::WriteZeroes && self.len > geometry.max_write_zeroes {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(())
    }

    /// A flush comes first, and the operation only if that succeeds.
    pub(super) fn flush_first(&self) -> bool {
        match self.rw.op {
            IoOp::Flush => self.len > 0,
            _ => self.rw.preflush,
        }
    }

    /// Returns the operation for the disk, after the flush if one comes first.
    pub(super) fn operation(&self) -> BlockOp {
        let fua = self.rw.fua;
        match self.rw.op {
            IoOp::Read => BlockOp::Read,
            IoOp::Flush if self.len == 0 => BlockOp::Flush,
            IoOp::Write | IoOp::Flush => BlockOp::Write { fua },
            // A secure erase is refused by `check`.
            IoOp::Discard | IoOp::SecureErase => BlockOp::Discard,
            IoOp::WriteZeroes => BlockOp::WriteZeroes {
                fua,
                may_unmap: !self.rw.no_unmap,
            },
            IoOp::BlockStatus => BlockOp::BlockStatus { most: self.extents },
        }
    }
}
