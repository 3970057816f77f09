//! An operation as a row of system calls: what is checked before it, what follows of each result, and what is left to do. The loop, the
//! ring or a thread makes the calls; meanwhile the operation owns its file and its memory.

use std::{
    mem,
    sync::{Arc, atomic::AtomicBool, atomic::Ordering::Relaxed},
};

use rnbd::{
    Errno,
    block::BlockOp,
    proto::status,
    server::{
        disk::{DiskOp, Op},
        sync::Covered,
    },
};
use roce_verbs::mem::Pages;

use crate::{
    extents::Walk,
    geometry::Alignment,
    image::{Image, Look},
    probe::Way,
    sys,
};

/// An operation of a disk.
pub(crate) type Io = Box<Op<Part>>;

/// The disk's part of an operation.
#[derive(Debug)]
pub struct Part {
    pub(crate) way: Way,
    /// It is among the store's writes in flight.
    pub(crate) entered: bool,
    /// Its calls, from its turn to its end.
    pub(crate) task: Option<Task>,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            way: Way::Pool,
            entered: false,
            task: None,
        }
    }
}

/// A system call, to be made at once or given to io_uring.
#[derive(Debug)]
pub(crate) enum Call {
    /// Reads at an offset.
    Read { offset: u64, to: *mut u8, len: usize },
    /// Writes at an offset; `dsync`: durable when it returns.
    Write {
        offset: u64,
        from: *const u8,
        len: usize,
        dsync: bool,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate`.
    Allocate { mode: i32, offset: u64, len: u64 },
    /// A request of block devices that takes a range; io_uring has none of them.
    Range { request: u64, offset: u64, len: u64 },
    /// `lseek`, which io_uring has not: it returns a position.
    Seek { offset: u64, whence: i32 },
}

impl Call {
    /// Returns the cost for its caller, in bytes that are copied meanwhile.
    pub(crate) fn cost(&self) -> u64 {
        match self {
            Self::Read { len, .. } | Self::Write { len, .. } => *len as u64,
            Self::Sync | Self::Seek { .. } => 0,
            // Pages that are given back cost about a thirtieth of pages that are copied.
            Self::Allocate { len, .. } | Self::Range { len, .. } => *len >> 5,
        }
    }
}

/// Zeroes for where neither file system nor device can make them, aligned for direct I/O.
#[repr(align(4096))]
struct Zeroes([u8; 256 * 1024]);

static ZEROES: Zeroes = Zeroes([0; 256 * 1024]);

/// Bytes of one read or write call at most; `io_uring` counts them in 32 bits.
const MAX_TRANSFER: u64 = 1 << 30;
/// Bytes that one `fallocate` gives back or makes zero: a call that is short enough to be made in the loop.
const MAX_ALLOCATE: u64 = 32 << 20;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// The bytes that are wanted.
    Read,
    /// The blocks around the bytes that are to be written.
    Fetch,
    Write {
        dsync: bool,
    },
    Sync,
    Allocate {
        mode: i32,
    },
    Range {
        request: u64,
    },
    /// Zeroes are written.
    Zero,
    /// Data and holes are looked for.
    Seek,
}

/// Range in memory and on the device.
#[derive(Clone, Debug)]
struct Span {
    memory: Arc<Pages>,
    /// First byte in the memory.
    at: usize,
    /// First byte on the device.
    offset: u64,
    /// Bytes in both; of an answer, which lies in memory only, those there.
    len: u64,
}

impl Span {
    fn ptr(&self, done: u64) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.at).wrapping_add(done as usize)
    }

    /// Copies the bytes that both have.
    fn copy_to(&self, other: &Self) -> Result<(), Errno> {
        let begin = self.offset.max(other.offset);
        let end = (self.offset + self.len).min(other.offset + other.len);
        let mut bytes = vec![0; end.saturating_sub(begin) as usize];
        let from = self.at + (begin - self.offset) as usize;
        let to = other.at + (begin - other.offset) as usize;
        let read = self.memory.read(from, &mut bytes);
        read.and_then(|()| other.memory.write(to, &bytes))
            .map_err(|_| Errno::EINVAL)
    }
}

/// An operation that is under way. It keeps its memory alive.
#[derive(Debug)]
pub(crate) struct Task {
    /// The file that its calls are made on.
    pub(crate) image: Arc<Image>,
    op: BlockOp,
    offset: u64,
    len: u64,
    /// The data of a read or write, or where an answer goes.
    data: Option<Span>,
    /// Blocks in memory of our own, for data that is not aligned to go straight to the device.
    bounce: Option<Span>,
    /// Extents found for a block status.
    walk: Option<Walk>,
    step: Step,
    /// Bytes of this step that are done.
    done: u64,
    /// The system has said "try again" once.
    insists: bool,
    /// A change whose end the image's [`SyncState`](rnbd::server::sync::SyncState) does not know of yet.
    changing: bool,
    /// Changes that the sync covers.
    covers: Covered,
}

/// Returns the memory of a read or write, or of an answer.
fn data_of(op: &DiskOp, memory: Option<&Arc<Pages>>) -> Result<Option<Span>, Errno> {
    let Some(len) = op.data_len() else { return Ok(None) };
    let memory = memory.ok_or(Errno::EINVAL)?;
    let bytes = usize::try_from(len).map_err(|_| Errno::EINVAL)?;
    let end = op.data.checked_add(bytes).ok_or(Errno::EINVAL)?;
    if end > memory.len() {
        return Err(Errno::EINVAL);
    }
    Ok(Some(Span {
        memory: memory.clone(),
        at: op.data,
        offset: op.offset,
        len,
    }))
}

/// Returns the walk of a block status.
fn walk_of(op: &DiskOp, image: &Image) -> Option<Walk> {
    let unit = image.geometry().logical_block_size.into();
    match op.op {
        BlockOp::BlockStatus { most } => Some(Walk::new(op.offset, op.len, unit, most)),
        _ => None,
    }
}

/// Aligned memory for the blocks that the data lies in.
fn bounce_of(data: &Span, alignment: Alignment) -> Result<Span, Errno> {
    let block = u64::from(alignment.offset);
    let begin = data.offset / block * block;
    let len = (data.offset + data.len).next_multiple_of(block) - begin;
    let memory = Pages::allocate(len as usize).map_err(|_| Errno::ENOMEM)?;
    Ok(Span {
        memory,
        at: 0,
        offset: begin,
        len,
    })
}

impl Task {
    /// Checks an operation. `None`: there is nothing to do.
    ///
    /// # Errors
    /// EINVAL when the data is outside the memory; EIO beyond the end of the device or of a file that was truncated
    /// meanwhile, and for what needs a sync once a sync has failed; EROFS; EOPNOTSUPP for discards that the device can't
    /// do; ENOMEM.
    pub(crate) fn new(
        image: &Arc<Image>,
        op: &DiskOp,
        memory: Option<&Arc<Pages>>,
        look: &mut Look,
    ) -> Result<Option<Self>, Errno> {
        let data = data_of(op, memory)?;
        match op.op {
            BlockOp::Read | BlockOp::BlockStatus { .. } => image.check_range(op.offset, op.len, look)?,
            BlockOp::Flush if image.geometry().read_only => return Ok(None),
            BlockOp::Flush => {}
            BlockOp::Write { .. } | BlockOp::Discard | BlockOp::WriteZeroes { .. } => {
                image.check_change(op.offset, op.len, look)?;
            }
        }
        image.sync().check(op.op)?;
        if op.op == BlockOp::Discard && image.geometry().max_discard == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if op.len == 0 && op.op != BlockOp::Flush {
            return Ok(None);
        }
        let misfit = image.direct().zip(data.as_ref().filter(|_| op.op.has_data()));
        let misfit = misfit.filter(|(a, data)| !a.fits(data.offset, data.len, data.ptr(0) as usize));
        let bounce = misfit.map(|(a, data)| bounce_of(data, a)).transpose()?;
        let mut task = Self {
            op: op.op,
            offset: op.offset,
            len: op.len,
            data,
            bounce,
            walk: walk_of(op, image),
            step: Step::Sync,
            done: 0,
            insists: false,
            changing: op.op.writes(),
            covers: image.sync().sync_begins(),
            image: Arc::clone(image),
        };
        task.step = task.first_step()?;
        if task.changing {
            image.sync().change_begins();
        }
        Ok(Some(task))
    }

    fn first_step(&self) -> Result<Step, Errno> {
        Ok(match self.op {
            BlockOp::Read => Step::Read,
            BlockOp::Write { .. } if self.is_patch() => Step::Fetch,
            BlockOp::Write { .. } => {
                self.fill_bounce()?;
                self.write_step()
            }
            BlockOp::Flush => Step::Sync,
            BlockOp::Discard if self.image.is_block() => Step::Range {
                request: sys::BLKDISCARD,
            },
            BlockOp::Discard => Step::Allocate { mode: PUNCH },
            BlockOp::WriteZeroes { .. } => self.zero_step(),
            BlockOp::BlockStatus { .. } => Step::Seek,
        })
    }

    /// Whether it writes parts of blocks, and so has to be alone with its device.
    pub(crate) fn is_patch(&self) -> bool {
        match (self.op, &self.bounce, &self.data) {
            (BlockOp::Write { .. }, Some(bounce), Some(data)) => bounce.len != data.len,
            _ => false,
        }
    }

    /// The session's memory, and the range of it that the next call reads or writes; `None`: memory of ours, or none.
    pub(crate) fn memory(&self) -> Option<&Arc<Pages>> {
        match (self.step, &self.bounce) {
            (Step::Read | Step::Write { .. }, None) => self.data.as_ref().map(|d| &d.memory),
            _ => None,
        }
    }

    /// Whether the system has said "try again": it is to wait by itself the next time.
    pub(crate) fn insists(&self) -> bool {
        self.insists
    }

    fn fua(&self) -> bool {
        matches!(
            self.op,
            BlockOp::Write { fua: true } | BlockOp::WriteZeroes { fua: true, .. }
        )
    }

    fn write_step(&self) -> Step {
        Step::Write {
            dsync: self.fua() && !self.image.missing.dsync.load(Relaxed),
        }
    }

    /// The best way to zeroes that is left, with a hole where one is allowed.
    fn zero_step(&self) -> Step {
        if self.image.is_block() {
            return Step::Range {
                request: sys::BLKZEROOUT,
            };
        }
        let may_unmap = matches!(self.op, BlockOp::WriteZeroes { may_unmap: true, .. });
        if may_unmap && !self.image.missing.punch.load(Relaxed) {
            Step::Allocate { mode: PUNCH }
        } else if !self.image.missing.zero_range.load(Relaxed) {
            Step::Allocate { mode: ZERO }
        } else {
            Step::Zero
        }
    }

    /// Returns this step's range.
    fn span(&self) -> (*mut u8, u64, u64) {
        match self.bounce.as_ref().or(self.data.as_ref()) {
            Some(span) => (span.ptr(self.done), span.offset + self.done, span.len - self.done),
            None => (std::ptr::null_mut(), self.offset + self.done, self.len - self.done),
        }
    }

    /// The call to make next. Its memory stays as long as the task.
    pub(crate) fn call(&self) -> Call {
        let (ptr, offset, left) = self.span();
        match self.step {
            Step::Read | Step::Fetch => Call::Read {
                offset,
                to: ptr,
                len: left.min(MAX_TRANSFER) as usize,
            },
            Step::Write { dsync } => Call::Write {
                offset,
                from: ptr,
                len: left.min(MAX_TRANSFER) as usize,
                dsync,
            },
            Step::Sync => Call::Sync,
            Step::Allocate { mode } => Call::Allocate {
                mode,
                offset,
                len: left.min(MAX_ALLOCATE),
            },
            Step::Range { request } => Call::Range {
                request,
                offset,
                len: left,
            },
            Step::Zero => Call::Write {
                offset,
                from: ZEROES.0.as_ptr(),
                len: left.min(ZEROES.0.len() as u64) as usize,
                dsync: false,
            },
            Step::Seek => {
                let (offset, whence) = self.walk.as_ref().map_or((0, libc::SEEK_CUR), Walk::next);
                Call::Seek { offset, whence }
            }
        }
    }

    /// Makes the next call here, and takes its result. Waits for the disk. `None`: there is another call to make.
    pub(crate) fn advance(&mut self) -> Option<Result<(), Errno>> {
        let fd = self.image.fd();
        let result = match self.call() {
            // SAFETY: `new` has seen that the range is inside the memory, which the task keeps alive.
            Call::Read { offset, to, len } => unsafe { sys::read(fd, to, len, offset) },
            Call::Write {
                offset,
                from,
                len,
                dsync,
            } => {
                // SAFETY: as above; zeroes are a static.
                unsafe { sys::write(fd, from, len, offset, dsync) }
            }
            Call::Sync => sys::sync(fd).map(|()| 0),
            Call::Allocate { mode, offset, len } => sys::allocate(fd, mode, offset, len).map(|()| 0),
            Call::Range { request, offset, len } => sys::range_ioctl(fd, request, offset, len).map(|()| 0),
            Call::Seek { offset, whence } => sys::seek(fd, offset, whence),
        };
        self.returned(result)
    }

    /// Makes the calls that are left. Waits for the disk.
    pub(crate) fn run(&mut self) -> Result<(), Errno> {
        loop {
            if let Some(over) = self.advance() {
                return over;
            }
        }
    }

    /// Reads what is in memory, without waiting. `None`: something is left to read, or is to be found out in another way.
    pub(crate) fn read_now(&mut self) -> Option<Result<(), Errno>> {
        let Call::Read { offset, to, len } = self.call() else {
            return None;
        };
        // SAFETY: as in `advance`.
        match unsafe { sys::read_now(self.image.fd(), to, len, offset) } {
            // Some kernels say 0 for "not now".
            Ok(0) | Err(_) => None,
            read => self.returned(read),
        }
    }

    /// Takes a call's result. `None`: there is another call to make.
    pub(crate) fn returned(&mut self, result: Result<usize, Errno>) -> Option<Result<(), Errno>> {
        match result {
            Err(Errno::EINTR) => return None,
            Err(Errno::EAGAIN) if !self.insists => {
                self.insists = true;
                return None;
            }
            _ => {}
        }
        let over = match self.step {
            Step::Read | Step::Fetch => self.has_read(result),
            Step::Write { dsync } => self.has_written(result, dsync),
            Step::Zero => self.has_zeroed(result),
            Step::Allocate { mode } => self.has_allocated(result, mode),
            Step::Range { request } => self.has_done_range(result, request),
            Step::Sync => self.has_synced(result),
            Step::Seek => self.has_sought(result),
        };
        if over != Ok(false) {
            self.change_ends();
        }
        match over {
            Ok(false) => None,
            Ok(true) => Some(self.image.sync().check(self.op)),
            Err(e) => Some(Err(e)),
        }
    }

    /// Reports the end of a change, successful or not, so that later syncs cover it.
    fn change_ends(&mut self) {
        if mem::take(&mut self.changing) {
            self.image.sync().change_ends();
        }
    }

    /// Adds up the bytes of a transfer. True: all are there. `None`: no more come.
    fn count(&mut self, n: usize) -> Option<bool> {
        let (.., left) = self.span();
        let n = (n as u64).min(left);
        // After an odd count direct I/O can't go on; it is the end of the file.
        let odd = self.image.direct().is_some_and(|a| n % u64::from(a.offset) != 0);
        if n == 0 || (odd && n < left) {
            return None;
        }
        self.done += n;
        Some(n == left)
    }

    fn has_read(&mut self, result: Result<usize, Errno>) -> Result<bool, Errno> {
        let n = result.inspect_err(|e| self.image.complain("read failed", self.offset, self.len, *e))?;
        let all = self.count(n);
        if !all.ok_or_else(|| self.image.truncated(self.offset, self.len))? {
            return Ok(false);
        }
        if self.step == Step::Fetch {
            self.fill_bounce()?;
            (self.step, self.done) = (self.write_step(), 0);
            return Ok(false);
        }
        if let (Some(bounce), Some(data)) = (&self.bounce, &self.data) {
            bounce.copy_to(data)?;
        }
        Ok(true)
    }

    /// Puts the data to be written where the device can take it from.
    fn fill_bounce(&self) -> Result<(), Errno> {
        match (&self.bounce, &self.data) {
            (Some(bounce), Some(data)) => data.copy_to(bounce),
            _ => Ok(()),
        }
    }

    fn has_written(&mut self, result: Result<usize, Errno>, dsync: bool) -> Result<bool, Errno> {
        match result {
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) if dsync => {
                self.image.missing.dsync.store(true, Relaxed);
                self.step = Step::Write { dsync: false };
                return Ok(false);
            }
            Err(e) if dsync => self.image.sync().durable_write_failed(e),
            _ => {}
        }
        let written = result.and_then(|n| self.count(n).ok_or(Errno::EIO));
        let all = written.inspect_err(|e| self.image.complain("write failed", self.offset, self.len, *e))?;
        if all && dsync && mem::take(&mut self.changing) {
            self.image.sync().change_is_durable();
        }
        Ok(all && (dsync || self.is_durable()))
    }

    /// After the last change. False: a sync comes next.
    fn is_durable(&mut self) -> bool {
        if self.fua() {
            self.change_ends();
            self.covers = self.image.sync().sync_begins();
            self.step = Step::Sync;
        }
        !self.fua()
    }

    fn has_zeroed(&mut self, result: Result<usize, Errno>) -> Result<bool, Errno> {
        let written = result.and_then(|n| self.count(n).ok_or(Errno::EIO));
        let all = written.inspect_err(|e| self.zeroing_failed(*e))?;
        Ok(all && self.is_durable())
    }

    fn zeroing_failed(&self, e: Errno) {
        self.image.complain("writing zeroes failed", self.offset, self.len, e);
    }

    fn has_allocated(&mut self, result: Result<usize, Errno>, mode: i32) -> Result<bool, Errno> {
        match result {
            Ok(_) => {
                let (.., left) = self.span();
                self.done += left.min(MAX_ALLOCATE);
                Ok(left <= MAX_ALLOCATE && self.is_durable())
            }
            Err(e) if self.op == BlockOp::Discard => {
                self.image.complain("discard failed", self.offset, self.len, e);
                Err(e)
            }
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => {
                self.lacks(mode).store(true, Relaxed);
                self.step = self.zero_step();
                Ok(false)
            }
            Err(e) => {
                self.zeroing_failed(e);
                Err(e)
            }
        }
    }

    fn lacks(&self, mode: i32) -> &AtomicBool {
        match mode {
            PUNCH => &self.image.missing.punch,
            _ => &self.image.missing.zero_range,
        }
    }

    fn has_done_range(&mut self, result: Result<usize, Errno>, request: u64) -> Result<bool, Errno> {
        match result {
            Ok(_) => Ok(self.is_durable()),
            Err(Errno::EOPNOTSUPP | Errno::EINVAL) if request == sys::BLKZEROOUT => {
                self.step = Step::Zero;
                Ok(false)
            }
            Err(e) => {
                match request {
                    sys::BLKZEROOUT => self.zeroing_failed(e),
                    _ => self.image.complain("discard failed", self.offset, self.len, e),
                }
                Err(e)
            }
        }
    }

    fn has_sought(&mut self, result: Result<usize, Errno>) -> Result<bool, Errno> {
        let (BlockOp::BlockStatus { most }, Some(walk), Some(data)) = (self.op, &mut self.walk, &self.data) else {
            return Err(Errno::EINVAL);
        };
        // What is not known is told as data.
        if let Err(e) = result
            && !matches!(e, Errno::ENXIO | Errno::EINVAL | Errno::EOPNOTSUPP)
        {
            self.image
                .complain("looking for holes failed", self.offset, self.len, e);
        }
        // The holes of a block device's node say nothing about it.
        let result = if self.image.is_block() {
            Err(Errno::EINVAL)
        } else {
            result
        };
        if !walk.returned(result) {
            return Ok(false);
        }
        let answer = status::answer(walk.extents(), most);
        data.memory.write(data.at, &answer).map_err(|_| Errno::EINVAL)?;
        Ok(true)
    }

    fn has_synced(&self, result: Result<usize, Errno>) -> Result<bool, Errno> {
        result.inspect_err(|e| self.image.sync_has_failed(*e))?;
        self.image.sync().sync_ends(self.covers);
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
