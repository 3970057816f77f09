//! One request in flight: the parts that it was split into, and the reply when the last of them is over.

use std::sync::{
    Arc,
    atomic::{AtomicI32, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::{
    outbox::{Data, Outbox, Reply},
    proto,
};
use crate::{
    block::{Done, IoBuffer},
    errno::Errno,
};

/// Memory of a read that is too large for the device's buffers at once.
struct Staging {
    bytes: Vec<u8>,
}

/// Where the parts of a read put their data.
enum Landing<B> {
    /// Not a read.
    Nowhere,
    /// Buffers in order; they are sent as they are.
    Buffers(Vec<Option<B>>),
    /// Copied as parts complete.
    Staged(Staging),
}

/// A request whose reply is still to come.
pub(crate) struct Pending<B: IoBuffer> {
    outbox: Arc<Outbox<B>>,
    cookie: u64,
    charge: u64,
    /// Parts in flight, and one for the thread that still submits.
    parts: AtomicUsize,
    /// The first error; 0 for none.
    error: AtomicI32,
    landing: Mutex<Landing<B>>,
}

impl<B: IoBuffer> Pending<B> {
    /// For an admitted request that counts for `charge` bytes. Call [`submitted`](Self::submitted) in the end.
    pub(crate) fn new(outbox: &Arc<Outbox<B>>, cookie: u64, charge: u64) -> Arc<Self> {
        Arc::new(Self {
            outbox: outbox.clone(),
            cookie,
            charge,
            parts: AtomicUsize::new(1),
            error: AtomicI32::new(0),
            landing: Mutex::new(Landing::Nowhere),
        })
    }

    /// A read of `n` parts whose buffers are sent as they are.
    pub(crate) fn expect_buffers(&self, n: usize) {
        *self.landing.lock() = Landing::Buffers((0..n).map(|_| None).collect());
    }

    /// A read of `len` bytes that are collected in one piece.
    pub(crate) fn expect_staged(&self, len: usize) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| Errno::ENOMEM)?;
        bytes.resize(len, 0);
        *self.landing.lock() = Landing::Staged(Staging { bytes });
        Ok(())
    }

    /// Records an error; the first one is the reply's.
    pub(crate) fn fail(&self, e: Errno) {
        let _ = self.error.compare_exchange(0, e.raw(), Relaxed, Relaxed);
    }

    pub(crate) fn failed(&self) -> bool {
        self.error.load(Relaxed) != 0
    }

    /// Completion of a part that brings no data.
    pub(crate) fn part(self: &Arc<Self>) -> Done<B> {
        self.parts.fetch_add(1, Relaxed);
        let me = self.clone();
        Box::new(move |r, buffer| {
            drop(buffer);
            if let Err(e) = r {
                me.fail(e);
            }
            me.release();
        })
    }

    /// Completion of part `index` of a read, which starts `at` bytes into it.
    pub(crate) fn read_part(self: &Arc<Self>, index: usize, at: usize) -> Done<B> {
        self.parts.fetch_add(1, Relaxed);
        let me = self.clone();
        Box::new(move |r, buffer| {
            match (r, buffer) {
                (Ok(()), Some(b)) => me.land(index, at, b),
                (Ok(()), None) => me.fail(Errno::EIO),
                (Err(e), _) => me.fail(e),
            }
            me.release();
        })
    }

    fn land(&self, index: usize, at: usize, buffer: B) {
        match &mut *self.landing.lock() {
            Landing::Buffers(b) => match b.get_mut(index) {
                Some(slot) => *slot = Some(buffer),
                None => self.fail(Errno::EIO),
            },
            Landing::Staged(s) => match s.bytes.get_mut(at..at + buffer.len()) {
                // SAFETY: the buffer is as long as the slice, and is not part of it.
                Some(to) => unsafe {
                    std::ptr::copy_nonoverlapping(buffer.as_ptr(), to.as_mut_ptr(), to.len());
                },
                None => self.fail(Errno::EIO),
            },
            Landing::Nowhere => {}
        }
    }

    /// All parts are submitted.
    pub(crate) fn submitted(self: Arc<Self>) {
        self.release();
    }

    fn release(&self) {
        if self.parts.fetch_sub(1, AcqRel) != 1 {
            return;
        }
        let mut data = Vec::new();
        let landing = std::mem::replace(&mut *self.landing.lock(), Landing::Nowhere);
        if self.error.load(Acquire) == 0 {
            match landing {
                Landing::Nowhere => {}
                Landing::Buffers(b) => data.extend(b.into_iter().flatten().map(Data::Device)),
                Landing::Staged(s) => data.push(Data::Heap(s.bytes)),
            }
        }
        let error = match self.error.load(Acquire) {
            0 => 0,
            e => proto::error_code(Errno::from_wire(e)),
        };
        let header = proto::simple_reply(self.cookie, error);
        self.outbox.push(Reply {
            header,
            data,
            charge: self.charge,
        });
    }
}
