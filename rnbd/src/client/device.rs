//! A mapped device.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed},
    },
};

use parking_lot::{Condvar, Mutex};
use roce_verbs::provider::Provider;
use rtrs::{
    Direction, IoError,
    client::{ConType, IoBuffer, Outcome},
};
use zerocopy::IntoBytes;

use super::{Shared, buffer::DeviceBuffer};
use crate::{
    block::{BlockDevice, BlockRequest, Done, Geometry, IoBuffer as _},
    errno::Errno,
    proto::{AccessMode, CACHE_FUA, CACHE_WRITEBACK, IoOp, MsgIo, MsgOpenRsp, Rw, SECTOR},
};

/// Most bytes that one request without data can cover: its length field has 32 bits, sectors have 512 bytes.
const MAX_LENGTH: u64 = (u32::MAX as u64) / SECTOR * SECTOR;

/// Requests of a device, counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceCounters {
    /// Requests answered, whatever the answer.
    pub completed: u64,
    /// Of these, with an error.
    pub failed: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

#[derive(Default)]
struct Counters {
    completed: AtomicU64,
    failed: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// Whether requests are taken, and how many are under way.
struct Activity {
    mapped: bool,
    in_flight: usize,
}

/// What completions need of a device; they may outlive its handle.
struct Core<P: Provider> {
    shared: Arc<Shared<P>>,
    name: String,
    mode: AccessMode,
    id: u32,
    geometry: Geometry,
    writeback: bool,
    fua: bool,
    activity: Mutex<Activity>,
    idle: Condvar,
    counters: Counters,
}

/// A device of the server. Dropping it unmaps it; [`unmap`](Self::unmap) tells whether that worked.
pub struct Device<P: Provider>(Arc<Core<P>>);

impl<P: Provider> fmt::Debug for Device<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.0.name)
            .field("id", &self.0.id)
            .field("mode", &self.0.mode)
            .field("geometry", &self.0.geometry)
            .finish_non_exhaustive()
    }
}

fn geometry_of(rsp: &MsgOpenRsp, mode: AccessMode, max_io: u32, depth: usize) -> Geometry {
    let block = u32::from(rsp.logical_block_size.get());
    let unit = if max_io >= 4096 { block.max(4096) } else { block };
    Geometry {
        size: rsp.nsectors.get() * SECTOR,
        logical_block_size: block,
        physical_block_size: u32::from(rsp.physical_block_size.get()).max(block),
        max_transfer: (max_io / unit * unit).max(block),
        max_discard: match mode.writable() {
            true => {
                (u64::from(rsp.max_discard_sectors.get()) * SECTOR).min(MAX_LENGTH) / u64::from(block)
                    * u64::from(block)
            }
            false => 0,
        },
        discard_granularity: rsp.discard_granularity.get(),
        read_only: !mode.writable(),
        write_cache: rsp.cache_policy & CACHE_WRITEBACK != 0,
        fua: rsp.cache_policy & CACHE_FUA != 0,
        // RNBD 2.0 has no operation for it.
        fast_zeroes: false,
        queue_depth: u32::try_from(depth).unwrap_or(u32::MAX),
    }
}

impl<P: Provider> Device<P> {
    pub(super) fn new(shared: Arc<Shared<P>>, name: String, mode: AccessMode, rsp: &MsgOpenRsp) -> Self {
        let geometry = geometry_of(rsp, mode, shared.session.info().max_io_size, shared.buffers.limit());
        Self(Arc::new(Core {
            shared,
            name,
            mode,
            id: rsp.device_id.get(),
            geometry,
            writeback: geometry.write_cache,
            fua: geometry.fua,
            activity: Mutex::new(Activity {
                mapped: true,
                in_flight: 0,
            }),
            idle: Condvar::new(),
            counters: Counters::default(),
        }))
    }

    /// The name it was mapped by.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How it was opened.
    pub fn mode(&self) -> AccessMode {
        self.0.mode
    }

    /// Requests so far.
    pub fn counters(&self) -> DeviceCounters {
        let c = &self.0.counters;
        DeviceCounters {
            completed: c.completed.load(Relaxed),
            failed: c.failed.load(Relaxed),
            read_bytes: c.read_bytes.load(Relaxed),
            written_bytes: c.written_bytes.load(Relaxed),
        }
    }

    /// Waits for the requests in flight, then closes the device on the server. Requests that come later fail with
    /// ESHUTDOWN. A second call does nothing.
    ///
    /// # Errors
    /// When the session is lost; the server closes the device then as well.
    pub fn unmap(&self) -> Result<(), IoError> {
        self.0.unmap()
    }
}

impl<P: Provider> Drop for Device<P> {
    fn drop(&mut self) {
        if let Err(e) = self.0.unmap() {
            tracing::debug!(device = self.0.name, "unmapping: {e}");
        }
    }
}

impl<P: Provider> Core<P> {
    fn unmap(&self) -> Result<(), IoError> {
        let mut a = self.activity.lock();
        if !std::mem::replace(&mut a.mapped, false) {
            return Ok(());
        }
        while a.in_flight > 0 {
            self.idle.wait(&mut a);
        }
        drop(a);
        let r = self.shared.close(self.id);
        self.shared.mapped.lock().remove(&self.name);
        r
    }

    fn enter(&self) -> Result<(), Errno> {
        let mut a = self.activity.lock();
        if !a.mapped {
            return Err(Errno::ESHUTDOWN);
        }
        a.in_flight += 1;
        Ok(())
    }

    fn leave(&self) {
        let mut a = self.activity.lock();
        a.in_flight -= 1;
        if a.in_flight == 0 {
            self.idle.notify_all();
        }
    }

    fn check(&self, offset: u64, len: u64, change: bool) -> Result<(), Errno> {
        let g = &self.geometry;
        if !g.contains(offset, len) {
            return Err(Errno::EIO);
        }
        if !g.aligned(offset, len) {
            return Err(Errno::EINVAL);
        }
        if change && g.read_only {
            Err(Errno::EROFS)
        } else {
            Ok(())
        }
    }

    /// Sends one request; the caller has entered. `bytes` is its length on the device.
    fn send(
        self: &Arc<Self>,
        rw: Rw,
        offset: u64,
        bytes: u32,
        data: Option<IoBuffer<P>>,
        done: impl FnOnce(Result<(), Errno>, Option<IoBuffer<P>>) + Send + 'static,
    ) {
        // The kernel's client sends a flush as a read without data.
        let direction = match rw.op {
            IoOp::Read | IoOp::Flush => Direction::Read,
            _ => Direction::Write,
        };
        let message = MsgIo::new(self.id, rw, offset / SECTOR, bytes);
        let me = self.clone();
        let complete = move |outcome: Outcome<P>| {
            let result = outcome.result.map_err(|e| Errno::from_wire(e.errno()));
            me.count(rw.op, bytes, result);
            done(result, outcome.data);
            me.leave();
        };
        match self.shared.session.permit() {
            Ok(permit) => {
                let con = ConType::Io(current_cpu());
                self.shared
                    .session
                    .request(permit, con, direction, message.as_bytes(), data, complete);
            }
            Err(_) => {
                self.count(rw.op, bytes, Err(Errno::ECONNABORTED));
                done_without_session(complete, data);
            }
        }
    }

    fn count(&self, op: IoOp, bytes: u32, result: Result<(), Errno>) {
        let c = &self.counters;
        c.completed.fetch_add(1, Relaxed);
        match (result, op) {
            (Err(_), _) => c.failed.fetch_add(1, Relaxed),
            (Ok(()), IoOp::Read) => c.read_bytes.fetch_add(bytes.into(), Relaxed),
            (Ok(()), IoOp::Write) => c.written_bytes.fetch_add(bytes.into(), Relaxed),
            _ => 0,
        };
    }

    fn transfer(self: &Arc<Self>, rw: Rw, offset: u64, buffer: DeviceBuffer<P>, done: Done<DeviceBuffer<P>>) {
        let bytes = buffer.len() as u32;
        let (data, lent) = buffer.take_apart();
        self.send(rw, offset, bytes, Some(data), move |r, data| {
            done(r, data.map(|d| DeviceBuffer::put_together(d, lent)));
        });
    }

    /// Splits a range over requests of at most `step` bytes; `done` is called after the last.
    fn split(
        self: &Arc<Self>,
        offset: u64,
        len: u64,
        step: u64,
        done: Done<DeviceBuffer<P>>,
        send: impl Fn(&Arc<Self>, u64, u32, Done<DeviceBuffer<P>>) -> Result<(), Errno>,
    ) {
        let join = Join::new(done);
        let mut at = 0;
        while at < len && !join.failed() {
            let n = step.min(len - at);
            if let Err(e) = self
                .enter()
                .and_then(|()| send(self, offset + at, n as u32, join.part()))
            {
                join.fail(e);
            }
            at += n;
        }
        join.release();
    }

    /// RNBD 2.0 has no operation for zeroes, so they are sent.
    fn write_zeroes(self: &Arc<Self>, offset: u64, len: u64, fua: bool, done: Done<DeviceBuffer<P>>) {
        let step = u64::from(self.geometry.max_transfer);
        self.split(offset, len, step, done, move |me, at, n, part| {
            let buffer = me
                .shared
                .buffers
                .lend(n as usize, true)
                .and_then(|b| b.ok_or(Errno::EAGAIN));
            let buffer = buffer.inspect_err(|_| me.leave())?;
            // SAFETY: the buffer's own `n` bytes.
            unsafe { std::ptr::write_bytes(buffer.as_ptr(), 0, n as usize) };
            me.transfer(me.write_flags(fua), at, buffer, part);
            Ok(())
        });
    }

    fn write_flags(&self, fua: bool) -> Rw {
        // Without a write cache every write is as good as forced.
        let fua = fua && self.writeback;
        Rw {
            op: IoOp::Write,
            sync: fua,
            fua,
        }
    }

    fn start(self: &Arc<Self>, request: BlockRequest<DeviceBuffer<P>>, done: Done<DeviceBuffer<P>>) {
        match request {
            BlockRequest::Read { offset, buffer } => {
                self.transfer(
                    Rw {
                        op: IoOp::Read,
                        sync: true,
                        fua: false,
                    },
                    offset,
                    buffer,
                    done,
                );
            }
            BlockRequest::Write { offset, buffer, fua } => {
                self.transfer(self.write_flags(fua), offset, buffer, done);
            }
            BlockRequest::Flush => {
                // As the kernel's client marks it.
                let rw = Rw {
                    op: IoOp::Flush,
                    sync: true,
                    fua: true,
                };
                self.send(rw, 0, 0, None, move |r, _| done(r, None));
            }
            BlockRequest::Discard { offset, len } => {
                let step = self.geometry.max_discard;
                self.split(offset, len, step, done, |me, at, n, part| {
                    me.send(Rw::new(IoOp::Discard), at, n, None, move |r, _| part(r, None));
                    Ok(())
                });
                self.leave();
            }
            BlockRequest::WriteZeroes { offset, len, fua, .. } => {
                self.write_zeroes(offset, len, fua, done);
                self.leave();
            }
        }
    }

    fn checked(&self, request: &BlockRequest<DeviceBuffer<P>>) -> Result<(), Errno> {
        let no_fua = self.writeback && !self.fua;
        match request {
            BlockRequest::Read { offset, buffer } => self.check(*offset, buffer.len() as u64, false),
            BlockRequest::Write { fua: true, .. } | BlockRequest::WriteZeroes { fua: true, .. } if no_fua => {
                Err(Errno::EOPNOTSUPP)
            }
            BlockRequest::Write { offset, buffer, .. } => self.check(*offset, buffer.len() as u64, true),
            BlockRequest::Flush => Ok(()),
            BlockRequest::Discard { offset, len } => {
                self.check(*offset, *len, true)?;
                if self.geometry.max_discard == 0 {
                    Err(Errno::EOPNOTSUPP)
                } else {
                    Ok(())
                }
            }
            BlockRequest::WriteZeroes { offset, len, .. } => self.check(*offset, *len, true),
        }
    }
}

/// Ends a request for which there was no permit as the session would.
fn done_without_session<P: Provider>(complete: impl FnOnce(Outcome<P>), data: Option<IoBuffer<P>>) {
    complete(Outcome {
        result: Err(IoError::Path(rtrs::PathError::Closed)),
        data,
    });
}

impl<P: Provider> BlockDevice for Device<P> {
    type Buffer = DeviceBuffer<P>;

    fn geometry(&self) -> Geometry {
        self.0.geometry
    }

    fn buffer(&self, len: usize) -> Result<DeviceBuffer<P>, Errno> {
        self.0.shared.buffers.lend(len, true)?.ok_or(Errno::EAGAIN)
    }

    fn try_buffer(&self, len: usize) -> Result<Option<DeviceBuffer<P>>, Errno> {
        self.0.shared.buffers.lend(len, false)
    }

    fn submit(&self, request: BlockRequest<DeviceBuffer<P>>, done: Done<DeviceBuffer<P>>) {
        if let Err(e) = self.0.checked(&request).and_then(|()| self.0.enter()) {
            let buffer = match request {
                BlockRequest::Read { buffer, .. } | BlockRequest::Write { buffer, .. } => Some(buffer),
                _ => None,
            };
            return done(Err(e), buffer);
        }
        self.0.start(request, done);
    }
}

/// Equal numbers give the same connection: requests of a CPU keep to one.
fn current_cpu() -> usize {
    // SAFETY: a plain call.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Several requests with one completion.
struct Join<B> {
    parts: AtomicUsize,
    error: AtomicI32,
    done: Mutex<Option<Done<B>>>,
}

impl<B: 'static> Join<B> {
    fn new(done: Done<B>) -> Arc<Self> {
        Arc::new(Self {
            parts: AtomicUsize::new(1),
            error: AtomicI32::new(0),
            done: Mutex::new(Some(done)),
        })
    }

    fn failed(&self) -> bool {
        self.error.load(Relaxed) != 0
    }

    fn fail(&self, e: Errno) {
        let _ = self.error.compare_exchange(0, e.raw(), Relaxed, Relaxed);
    }

    /// The completion of one part. Dropped uncalled, it does not count.
    fn part(self: &Arc<Self>) -> Done<B> {
        self.parts.fetch_add(1, Relaxed);
        let guard = Part(self.clone());
        Box::new(move |r, _| {
            if let Err(e) = r {
                guard.0.fail(e);
            }
            drop(guard);
        })
    }

    fn release(&self) {
        if self.parts.fetch_sub(1, AcqRel) != 1 {
            return;
        }
        let result = match self.error.load(Acquire) {
            0 => Ok(()),
            e => Err(Errno::from_wire(e)),
        };
        if let Some(done) = self.done.lock().take() {
            done(result, None);
        }
    }
}

struct Part<B: 'static>(Arc<Join<B>>);

impl<B: 'static> Drop for Part<B> {
    fn drop(&mut self) {
        self.0.release();
    }
}
