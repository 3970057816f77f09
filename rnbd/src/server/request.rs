//! Block requests of clients, checked.

use rtrs::{Direction, server::request::Request};

use crate::{
    block::{BlockOp, Geometry},
    errno::Errno,
    proto::{IoOp, MsgIo, Rw, SECTOR, status},
    server::disk::{DiskOp, Op, StoreId},
};

impl<P> Op<P> {
    /// Fills in a client's request, and the flush that comes before it: the operation then follows only if that succeeds. Checks what
    /// does not depend on the device.
    ///
    /// # Errors
    /// What the client is answered.
    pub(super) fn fill(&mut self, m: &MsgIo, request: &Request, store: StoreId) -> Result<(), Errno> {
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
        let tail = if read > 0 || rw.op == IoOp::Read { room } else { read };
        let in_memory = |at: u64| request.data_offset + at as usize;
        self.tail = in_memory(read)..in_memory(tail);
        self.id = request.key;
        self.disk = DiskOp {
            store,
            op: operation(rw, len, extents),
            offset,
            len,
            data: request.data_offset,
        };
        self.next = None;
        if rw.preflush && rw.op != IoOp::Flush || rw.op == IoOp::Flush && len > 0 {
            self.next = Some(core::mem::replace(&mut self.disk, DiskOp::flush(store)));
        }
        Ok(())
    }

    /// Checks what depends on the device, all but its size.
    ///
    /// # Errors
    /// What the client is answered.
    pub(super) fn check(&self, geometry: &Geometry) -> Result<(), Errno> {
        let disk = self.next.as_ref().unwrap_or(&self.disk);
        if disk.op.writes() && geometry.read_only {
            return Err(Errno::EROFS);
        }
        // Zeroes that are written would keep the disk busy as long as a client likes.
        let zeroes = matches!(disk.op, BlockOp::WriteZeroes { .. });
        if zeroes && disk.len > geometry.max_write_zeroes {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(())
    }
}

fn operation(rw: Rw, len: u64, extents: u32) -> BlockOp {
    let fua = rw.fua;
    match rw.op {
        IoOp::Read => BlockOp::Read,
        IoOp::Flush if len == 0 => BlockOp::Flush,
        IoOp::Write | IoOp::Flush => BlockOp::Write { fua },
        // A secure erase is refused before.
        IoOp::Discard | IoOp::SecureErase => BlockOp::Discard,
        IoOp::WriteZeroes => BlockOp::WriteZeroes {
            fua,
            may_unmap: !rw.no_unmap,
        },
        IoOp::BlockStatus => BlockOp::BlockStatus { most: extents },
    }
}
