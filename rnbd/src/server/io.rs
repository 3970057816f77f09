//! Block requests.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use roce_verbs::provider::Provider;
use rtrs::{Direction, server::Request};

use super::{Shared, session::OpenDevice};
use crate::{
    backend::Image,
    errno::Errno,
    proto::{IoOp, MsgIo, Rw, SECTOR},
};

/// A checked request.
#[derive(Clone, Copy)]
struct Io {
    rw: Rw,
    /// First byte.
    offset: u64,
    /// Bytes on the device.
    len: u64,
}

/// Checks a request and hands it to the pool.
pub(super) fn start<P: Provider>(shared: &Arc<Shared>, device: Arc<OpenDevice<P>>, m: &MsgIo, request: Request<P>) {
    let io = match check(m, &request) {
        Ok(io) => io,
        Err(e) => {
            shared.counters.malformed.fetch_add(1, Relaxed);
            finish(shared, None, Err(e), request);
            return;
        }
    };
    let s = shared.clone();
    shared.pool.run(move || {
        let r = execute(device.export().image(), io, &request);
        finish(&s, Some(io), r, request);
        // The last one after a close closes the file: after the answer, which need not wait for it.
        drop(device);
    });
}

fn check<P: Provider>(m: &MsgIo, request: &Request<P>) -> Result<Io, Errno> {
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
    let data = match (rw.op, request.direction()) {
        (IoOp::Read, Direction::Read) | (IoOp::Write, Direction::Write) => len,
        // A flush may bring data to be written after it (`REQ_PREFLUSH`); the kernel's client sends it as a read of 0.
        (IoOp::Flush, Direction::Write) => len,
        (IoOp::Flush, Direction::Read) if len == 0 => 0,
        (IoOp::Discard, _) => 0,
        (IoOp::SecureErase | IoOp::WriteSame, _) => return Err(Errno::EOPNOTSUPP),
        _ => return Err(Errno::EINVAL),
    };
    if data > request.data_len() as u64 {
        return Err(Errno::EINVAL);
    }
    Ok(Io { rw, offset, len })
}

fn execute<P: Provider>(image: &Image, io: Io, request: &Request<P>) -> Result<(), Errno> {
    let (ptr, len) = (request.data_ptr(), io.len as usize);
    match io.rw.op {
        IoOp::Read => {
            // SAFETY: `check` saw that the chunk has `len` bytes; it stays until the request is completed.
            unsafe { image.read(io.offset, ptr, len)? };
            // All of the client's room is sent: nothing of earlier requests shall be.
            let rest = request.data_len() - len;
            if rest > 0 {
                request.write_data(len, &vec![0; rest]).map_err(|_| Errno::EINVAL)?;
            }
            Ok(())
        }
        // SAFETY: as above.
        IoOp::Write => unsafe { image.write(io.offset, ptr, len, io.rw.fua) },
        IoOp::Flush => {
            image.flush()?;
            if len == 0 {
                return Ok(());
            }
            // SAFETY: as above.
            unsafe { image.write(io.offset, ptr, len, io.rw.fua) }
        }
        IoOp::Discard => image.discard(io.offset, io.len),
        IoOp::SecureErase | IoOp::WriteSame => Err(Errno::EOPNOTSUPP),
    }
}

fn finish<P: Provider>(shared: &Shared, io: Option<Io>, r: Result<(), Errno>, request: Request<P>) {
    let c = &shared.counters;
    c.requests.fetch_add(1, Relaxed);
    match (r, io) {
        (Err(_), _) => c.failed.fetch_add(1, Relaxed),
        (
            Ok(()),
            Some(Io {
                rw: Rw { op: IoOp::Read, .. },
                len,
                ..
            }),
        ) => c.read_bytes.fetch_add(len, Relaxed),
        (
            Ok(()),
            Some(Io {
                rw: Rw { op: IoOp::Write, .. },
                len,
                ..
            }),
        ) => c.written_bytes.fetch_add(len, Relaxed),
        _ => 0,
    };
    request.complete(r.map_or_else(Errno::raw, |()| 0));
}
