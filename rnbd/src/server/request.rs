//! Block requests of clients, checked.

use rtrs::{Direction, server::request::Request};

use crate::{
    block::{BlockOp, Geometry},
    errno::Errno,
    proto::{IoOp, MsgIo, Rw, SECTOR},
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
    /// Bytes that the client has room for beyond those that it reads.
    pub(super) tail: usize,
}

impl Io {
    /// Checks what does not depend on the device.
    ///
    /// # Errors
    /// What the client is answered.
    pub(super) fn check(m: &MsgIo, request: &Request) -> Result<Self, Errno> {
        let rw = Rw::from_wire(m.rw.get()).ok_or(Errno::EINVAL)?;
        let len = u64::from(m.bi_size.get());
        // The kernel's client sends a flush with sector -1, its block layer's "no position".
        let offset = match rw.op {
            IoOp::Flush if len == 0 => 0,
            _ => m.sector.get().checked_mul(SECTOR).ok_or(Errno::EIO)?,
        };
        if !len.is_multiple_of(SECTOR) {
            return Err(Errno::EINVAL);
        }
        let data = match (rw.op, request.direction) {
            (IoOp::Read, Direction::Read) | (IoOp::Write, Direction::Write) => len,
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
        let tail = if rw.op == IoOp::Read { room - data } else { 0 };
        Ok(Self {
            rw,
            offset,
            len,
            data: request.data_offset,
            tail: tail as usize,
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

    /// What is asked of the disk, after the flush if one comes first.
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
        }
    }
}
