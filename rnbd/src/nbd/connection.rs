//! One client: a thread that reads requests and starts them, and one that writes replies.

use std::{
    io,
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    NbdExport,
    handshake::{negotiate, transmission_flags},
    input::{Input, Wait},
    outbox::Outbox,
    proto::{self, Request, cmd, cmd_flag, tx},
    request::Pending,
};
use crate::{
    block::{BlockDevice, BlockRequest, Geometry, IoBuffer},
    errno::Errno,
};

/// A client has to finish its negotiation in this time.
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
/// Requests of one connection that may be in flight.
const MAX_REQUESTS: usize = 1024;
/// Bytes of one connection that may be in flight.
const MAX_BYTES: u64 = 64 << 20;
/// A client that stops in the middle of a write for so long does not keep the device's buffer meanwhile.
const PATIENCE: Duration = Duration::from_millis(100);

/// Serves one client until it leaves.
pub(crate) fn serve<D: BlockDevice>(stream: &UnixStream, exports: &[NbdExport<D>]) -> io::Result<()> {
    let mut input = Input::new(stream);
    // A client that does not read its answers can't hold the negotiation up either.
    stream.set_write_timeout(Some(HANDSHAKE_TIME))?;
    let wait = Wait::Until(Instant::now() + HANDSHAKE_TIME);
    let Some(device) = negotiate(stream, &mut input, exports, wait)? else {
        return Ok(());
    };
    stream.set_write_timeout(None)?;
    let geometry = device.geometry();
    let share = u64::from(geometry.queue_depth / 2) * u64::from(geometry.max_transfer);
    let outbox = Arc::new(Outbox::new(MAX_REQUESTS, share.clamp(1, MAX_BYTES)));
    let writer = {
        let (outbox, stream) = (outbox.clone(), stream.try_clone()?);
        thread::Builder::new()
            .name("nbd-writer".into())
            .spawn(move || outbox.write_all(&stream))?
    };
    let allowed = transmission_flags(&geometry);
    let r = Reader {
        input,
        device,
        geometry,
        allowed,
        outbox: outbox.clone(),
    }
    .run();
    outbox.end_of_input();
    let _ = writer.join();
    r
}

struct Reader<'a, D: BlockDevice> {
    input: Input<'a>,
    device: Arc<D>,
    geometry: Geometry,
    /// Transmission flags that the client was told.
    allowed: u16,
    outbox: Arc<Outbox<D::Buffer>>,
}

impl<D: BlockDevice> Reader<'_, D> {
    fn run(&mut self) -> io::Result<()> {
        let mut head = [0; Request::LEN];
        while self.input.read_exact_or_end(&mut head, Wait::Forever)? {
            let Some(request) = Request::parse(&head) else {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "request without its magic number",
                ));
            };
            if request.command == cmd::DISC {
                return Ok(());
            }
            self.start(&request)?;
        }
        Ok(())
    }

    fn start(&mut self, q: &Request) -> io::Result<()> {
        let payload = matches!(q.command, cmd::READ | cmd::WRITE);
        if q.command == cmd::WRITE && q.len > proto::MAX_PAYLOAD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("write of {} bytes", q.len),
            ));
        }
        let checked = self.check(q);
        let charge = if payload && checked.is_ok() {
            u64::from(q.len)
        } else {
            0
        };
        if !self.outbox.admit(charge) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let pending = Pending::new(&self.outbox, q.cookie, charge);
        let mut result = Ok(());
        match checked {
            Ok(()) => result = self.submit(q, &pending),
            Err(e) => {
                pending.fail(e);
                if q.command == cmd::WRITE {
                    result = self.input.skip(u64::from(q.len), Wait::Forever);
                }
            }
        }
        pending.submitted();
        result
    }

    /// What the protocol asks a server to refuse, with the errors that it names.
    fn check(&self, q: &Request) -> Result<(), Errno> {
        let known = match q.command {
            cmd::WRITE_ZEROES => cmd_flag::FUA | cmd_flag::NO_HOLE,
            _ => cmd_flag::FUA,
        };
        let fua_unknown = q.flags & cmd_flag::FUA != 0 && self.allowed & (tx::SEND_FUA | tx::READ_ONLY) == 0;
        if q.flags & !known != 0 || fua_unknown {
            return Err(Errno::EINVAL);
        }
        let changes = matches!(q.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        if changes && self.geometry.read_only {
            return Err(Errno::EPERM);
        }
        let (offset, len) = (q.offset, u64::from(q.len));
        match q.command {
            cmd::FLUSH => return Ok(()),
            cmd::READ if q.len > proto::MAX_PAYLOAD => return Err(Errno::EINVAL),
            cmd::TRIM if self.allowed & tx::SEND_TRIM == 0 => return Err(Errno::EINVAL),
            cmd::READ | cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES => {}
            _ => return Err(Errno::EINVAL),
        }
        if !self.geometry.contains(offset, len) {
            let full = matches!(q.command, cmd::WRITE | cmd::WRITE_ZEROES);
            return Err(if full { Errno::ENOSPC } else { Errno::EINVAL });
        }
        if self.geometry.aligned(offset, len) {
            Ok(())
        } else {
            Err(Errno::EINVAL)
        }
    }

    fn submit(&mut self, q: &Request, pending: &Arc<Pending<D::Buffer>>) -> io::Result<()> {
        let (offset, len) = (q.offset, u64::from(q.len));
        let fua = q.flags & cmd_flag::FUA != 0;
        match q.command {
            cmd::READ => self.read(q, pending),
            cmd::WRITE => return self.write(q, fua, pending),
            cmd::FLUSH => self.device.submit(BlockRequest::Flush, pending.part()),
            cmd::WRITE_ZEROES if len > 0 => {
                let may_unmap = q.flags & cmd_flag::NO_HOLE == 0;
                let zeroes = BlockRequest::WriteZeroes {
                    offset,
                    len,
                    fua,
                    may_unmap,
                };
                self.device.submit(zeroes, pending.part());
            }
            cmd::TRIM if len > 0 => self.trim(offset, len, fua, pending),
            _ => {}
        }
        Ok(())
    }

    fn trim(&self, offset: u64, len: u64, fua: bool, pending: &Arc<Pending<D::Buffer>>) {
        let discard = BlockRequest::Discard { offset, len };
        if !fua {
            self.device.submit(discard, pending.part());
            return;
        }
        // Rare. The flush must come after the discard, and can't be submitted from its completion.
        let (over, wait) = crossbeam_channel::bounded(1);
        self.device.submit(
            discard,
            Box::new(move |r, _| {
                let _ = over.send(r);
            }),
        );
        match wait.recv().unwrap_or(Err(Errno::EIO)) {
            Ok(()) => self.device.submit(BlockRequest::Flush, pending.part()),
            Err(e) => pending.fail(e),
        }
    }

    /// Splits a range: index, start within the range, and length of each part.
    fn parts(&self, len: usize) -> impl Iterator<Item = (usize, usize, usize)> + use<D> {
        let step = (self.geometry.max_transfer as usize).max(1);
        (0..len.div_ceil(step)).map(move |i| (i, i * step, step.min(len - i * step)))
    }

    fn read(&self, q: &Request, pending: &Arc<Pending<D::Buffer>>) {
        let len = q.len as usize;
        match self.take_all(len) {
            Ok(Some(buffers)) => {
                pending.expect_buffers(buffers.len());
                for ((i, at, _), buffer) in self.parts(len).zip(buffers) {
                    let read = BlockRequest::Read {
                        offset: q.offset + at as u64,
                        buffer,
                    };
                    self.device.submit(read, pending.read_part(i, at));
                }
            }
            Ok(None) => self.read_staged(q.offset, len, pending),
            Err(e) => pending.fail(e),
        }
    }

    /// Buffers for the whole of a read at once, so that it can be answered without a copy. One part may wait for its
    /// buffer; several must not, since two clients would each hold what the other waits for: `None`.
    fn take_all(&self, len: usize) -> Result<Option<Vec<D::Buffer>>, Errno> {
        let n = self.parts(len).count();
        if n > (self.geometry.queue_depth as usize / 4).max(1) {
            return Ok(None);
        }
        let mut buffers = Vec::with_capacity(n);
        for (_, _, part) in self.parts(len) {
            let b = if n == 1 {
                Some(self.device.buffer(part)?)
            } else {
                self.device.try_buffer(part)?
            };
            match b {
                Some(b) => buffers.push(b),
                None => return Ok(None),
            }
        }
        Ok(Some(buffers))
    }

    fn read_staged(&self, offset: u64, len: usize, pending: &Arc<Pending<D::Buffer>>) {
        if let Err(e) = pending.expect_staged(len) {
            return pending.fail(e);
        }
        for (i, at, part) in self.parts(len) {
            if pending.failed() {
                return;
            }
            match self.device.buffer(part) {
                Ok(buffer) => {
                    let read = BlockRequest::Read {
                        offset: offset + at as u64,
                        buffer,
                    };
                    self.device.submit(read, pending.read_part(i, at));
                }
                Err(e) => return pending.fail(e),
            }
        }
    }

    fn write(&mut self, q: &Request, fua: bool, pending: &Arc<Pending<D::Buffer>>) -> io::Result<()> {
        for (_, at, part) in self.parts(q.len as usize) {
            if pending.failed() {
                self.input.skip(part as u64, Wait::Forever)?;
                continue;
            }
            match self.device.buffer(part) {
                Ok(buffer) => match self.fill(buffer).inspect_err(|_| pending.fail(Errno::EIO))? {
                    Ok(buffer) => {
                        let write = BlockRequest::Write {
                            offset: q.offset + at as u64,
                            buffer,
                            fua,
                        };
                        self.device.submit(write, pending.part());
                    }
                    Err(e) => pending.fail(e),
                },
                Err(e) => {
                    pending.fail(e);
                    self.input.skip(part as u64, Wait::Forever)?;
                }
            }
        }
        Ok(())
    }

    /// Receives a whole part into a buffer. If the client pauses, the buffer goes back and what has come waits in the
    /// heap for the rest.
    fn fill(&mut self, buffer: D::Buffer) -> io::Result<Result<D::Buffer, Errno>> {
        let len = buffer.len();
        let mut done = 0;
        while done < len {
            // SAFETY: the rest of the buffer.
            let n = unsafe {
                self.input
                    .read_raw(buffer.as_ptr().add(done), len - done, Some(PATIENCE))?
            };
            if n == 0 {
                return self.fill_staged(buffer, done);
            }
            done += n;
        }
        Ok(Ok(buffer))
    }

    fn fill_staged(&mut self, buffer: D::Buffer, mut done: usize) -> io::Result<Result<D::Buffer, Errno>> {
        let len = buffer.len();
        let mut heap = vec![0u8; len];
        // SAFETY: `done` bytes at the start of both.
        unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), heap.as_mut_ptr(), done) };
        drop(buffer);
        while done < len {
            // SAFETY: the rest of the vector.
            done += unsafe { self.input.read_raw(heap.as_mut_ptr().add(done), len - done, None)? };
        }
        Ok(self.device.buffer(len).inspect(|b| {
            // SAFETY: a buffer of `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(heap.as_ptr(), b.as_ptr(), len) };
        }))
    }
}
