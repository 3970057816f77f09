//! Send work requests on their way from C's form to the transport's.

use std::{cell::UnsafeCell, ops::Range, slice};

use parking_lot::{RawMutex, lock_api::RawMutex as _};
use roce::{
    LKey, PostError, SendFlags, SendOp, SendWr, Sge,
    verbs::{Payload, SendRequest, Target},
};
use smallvec::SmallVec;

use crate::{
    abi::{ibv_mw, ibv_sge},
    errno::Errno,
};

/// Work requests gathered for one call.
#[derive(Default)]
pub(crate) struct Batch {
    parts: SmallVec<[Part; 2]>,
    sges: SmallVec<[Sge; 8]>,
    inline: SmallVec<[u8; 256]>,
    bound: Vec<Bound>,
}

/// A window that a work request binds, and its key from then on.
struct Bound {
    part: usize,
    window: *mut ibv_mw,
    rkey: u32,
}

struct Part {
    wr_id: u64,
    op: SendOp,
    flags: SendFlags,
    target: Target,
    data: Data,
}

enum Data {
    Sges(Range<usize>),
    Inline(Range<usize>),
}

/// A list of C's elements, in the transport's form. Programs have such lists in packed structures too (libiscsi's iSER
/// descriptors), where they are not aligned.
///
/// # Safety
/// `count` elements at `list`, when there are any, are readable.
pub(crate) unsafe fn sge_list(list: *const ibv_sge, count: usize) -> SmallVec<[Sge; 8]> {
    let elements = (0..count).map(|n| {
        // SAFETY: the caller's promise.
        let ibv_sge { addr, length, lkey } = unsafe { list.add(n).read_unaligned() };
        let lkey = LKey(lkey);
        Sge { addr, length, lkey }
    });
    elements.collect()
}

/// Work requests between start and complete.
pub(crate) struct Builder {
    /// Held from start to complete or abort: threads that share a queue pair take turns.
    pub(crate) lock: RawMutex,
    pub(crate) work: UnsafeCell<Work>,
}

#[derive(Default)]
pub(crate) struct Work {
    pub(crate) batch: Batch,
    /// Error of the first bad call; complete returns it and posts nothing.
    pub(crate) error: Option<Errno>,
}

// SAFETY: the work is only touched between start and complete, under the lock.
unsafe impl Sync for Builder {}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            lock: RawMutex::INIT,
            work: UnsafeCell::default(),
        }
    }
}

impl Batch {
    pub(crate) fn clear(&mut self) {
        self.parts.clear();
        self.sges.clear();
        self.inline.clear();
        self.bound.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    /// Begins a work request without data.
    pub(crate) fn begin(&mut self, wr_id: u64, op: SendOp, flags: SendFlags) {
        let none = self.sges.len()..self.sges.len();
        self.parts.push(Part {
            wr_id,
            op,
            flags,
            target: Target::Peer,
            data: Data::Sges(none),
        });
    }

    /// Notes the window that the last request binds. Once it is posted, the window has its new key, as with irdma.
    ///
    /// # Safety
    /// The window lives until the batch is posted or cleared.
    pub(crate) unsafe fn binds(&mut self, window: *mut ibv_mw, op: &SendOp) {
        if let SendOp::BindWindow(how) = op {
            self.bound.push(Bound {
                part: self.parts.len().saturating_sub(1),
                window,
                rkey: how.key.0,
            });
        }
    }

    /// Writes the keys of the windows that the first work requests bind.
    fn tell_keys(&self, posted: usize) {
        for bound in self.bound.iter().filter(|b| b.part < posted) {
            // SAFETY: `binds` was promised that the window lives.
            unsafe { (*bound.window).rkey = bound.rkey };
        }
    }

    /// Sets the destination of the last request.
    pub(crate) fn target(&mut self, target: Target) {
        if let Some(part) = self.parts.last_mut() {
            part.target = target;
        }
    }

    /// Sets the registered memory of the last request.
    pub(crate) fn sges(&mut self, list: &[Sge]) {
        let start = self.sges.len();
        self.sges.extend_from_slice(list);
        let end = self.sges.len();
        if let Some(part) = self.parts.last_mut() {
            part.data = Data::Sges(start..end);
        }
    }

    /// Copies the inline data of the last request.
    ///
    /// # Safety
    /// Each pair of address and length is readable memory of the program.
    pub(crate) unsafe fn inline(&mut self, buffers: impl Iterator<Item = (*const u8, usize)>) {
        let start = self.inline.len();
        for (addr, len) in buffers.filter(|b| b.1 > 0) {
            // SAFETY: the caller's promise; nobody writes to it during the call, as the verb demands.
            self.inline
                .extend_from_slice(unsafe { slice::from_raw_parts(addr, len) });
        }
        let end = self.inline.len();
        if let Some(part) = self.parts.last_mut() {
            part.data = Data::Inline(start..end);
        }
    }

    /// Posts what was gathered.
    ///
    /// # Errors
    /// With the number of work requests that were accepted before.
    pub(crate) fn submit(&self, qp: &roce::Qp) -> Result<(), (usize, PostError)> {
        let done = qp.post_requests(&self.requests());
        self.tell_keys(done.as_ref().map_or_else(|(posted, _)| *posted, |()| self.len()));
        done
    }

    /// Posts what was gathered, or nothing of it.
    ///
    /// # Errors
    /// The error of the first bad one.
    pub(crate) fn submit_all(&self, qp: &roce::Qp) -> Result<(), Errno> {
        qp.post_batch(&self.requests()).map_err(|(_, e)| e)?;
        self.tell_keys(self.len());
        Ok(())
    }

    fn requests(&self) -> SmallVec<[SendRequest<'_>; 2]> {
        self.parts.iter().map(|part| self.request(part)).collect()
    }

    fn request(&self, part: &Part) -> SendRequest<'_> {
        let payload = match &part.data {
            Data::Sges(range) => Payload::Sges(&self.sges[range.clone()]),
            Data::Inline(range) => Payload::Inline(&self.inline[range.clone()]),
        };
        SendRequest {
            wr: SendWr {
                wr_id: part.wr_id,
                op: part.op,
                flags: part.flags,
                payload,
            },
            target: part.target,
        }
    }
}
