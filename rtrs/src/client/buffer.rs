//! Registered memory for the data of requests.
//!
//! Buffers come in powers of two from 4 KiB up, cut from slabs that are registered when first needed and kept until the
//! session goes. Data read from a socket straight into a buffer goes from there onto the wire without another copy.

use core::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use roce_verbs::{
    AccessFlags, Sge,
    provider::{MemoryRegion, Provider, RangeError},
};

use crate::Error;

/// Smallest buffer.
const MIN_BYTES: usize = 4096;
/// Slabs are this large, or one buffer if that is larger.
const SLAB_BYTES: usize = 256 << 10;

struct Piece<P: Provider> {
    slab: Arc<P::Mr>,
    offset: usize,
}

struct State<P: Provider> {
    /// Free pieces per class: `MIN_BYTES << class`.
    free: Vec<Vec<Piece<P>>>,
    /// Registered bytes.
    total: usize,
}

/// The pool of a session.
pub(crate) struct Pool<P: Provider> {
    provider: P,
    pd: P::Pd,
    access: AccessFlags,
    limit: usize,
    state: Mutex<State<P>>,
}

impl<P: Provider> Pool<P> {
    pub(crate) fn new(provider: P, pd: P::Pd, access: AccessFlags, limit: usize) -> Arc<Self> {
        Arc::new(Self {
            provider,
            pd,
            access,
            limit,
            state: Mutex::new(State {
                free: Vec::new(),
                total: 0,
            }),
        })
    }

    /// Bytes that `count` buffers of `len` bytes take, in whole slabs, with a slab for each smaller size on top.
    pub(crate) fn bytes_for(len: usize, count: usize) -> usize {
        let size = len.max(MIN_BYTES).next_power_of_two();
        let slabs = (size * count).next_multiple_of(SLAB_BYTES.max(size));
        slabs + (size / MIN_BYTES).trailing_zeros() as usize * SLAB_BYTES
    }

    pub(crate) fn alloc(self: &Arc<Self>, len: usize) -> Result<IoBuffer<P>, Error> {
        let no_buffer = || Error::NoBuffer { len, limit: self.limit };
        let size = len
            .max(MIN_BYTES)
            .checked_next_power_of_two()
            .filter(|s| *s <= self.limit.max(MIN_BYTES));
        let size = size.ok_or_else(no_buffer)?;
        let class = (size / MIN_BYTES).trailing_zeros() as usize;
        let mut state = self.state.lock();
        if state.free.len() <= class {
            state.free.resize_with(class + 1, Vec::new);
        }
        let piece = match state.free[class].pop() {
            Some(piece) => piece,
            None => {
                let bytes = size.max(SLAB_BYTES);
                if state.total.saturating_add(bytes) > self.limit.max(bytes) {
                    return Err(no_buffer());
                }
                let slab = Arc::new(self.provider.alloc_mr(&self.pd, bytes, self.access)?);
                state.total += bytes;
                let pieces = (1..bytes / size).map(|i| Piece {
                    slab: slab.clone(),
                    offset: i * size,
                });
                state.free[class].extend(pieces);
                Piece { slab, offset: 0 }
            }
        };
        drop(state);
        Ok(IoBuffer {
            pool: self.clone(),
            piece: Some(piece),
            class,
            len,
        })
    }
}

/// A piece of registered memory, its content left over from earlier use. It goes back to the session's pool when
/// dropped, and outlives the session if it must.
pub struct IoBuffer<P: Provider> {
    pool: Arc<Pool<P>>,
    /// Always there until drop.
    piece: Option<Piece<P>>,
    class: usize,
    len: usize,
}

impl<P: Provider> IoBuffer<P> {
    fn piece(&self) -> &Piece<P> {
        self.piece.as_ref().expect("a buffer has its piece until it is dropped")
    }

    /// Bytes that a request with this buffer moves.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that [`IoBuffer::set_len`] can make of it.
    pub fn capacity(&self) -> usize {
        MIN_BYTES << self.class
    }

    /// Changes the length, at most to the capacity; more is cut.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity());
    }

    fn check(&self, offset: usize, len: usize) -> Result<(), RangeError> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(RangeError {
                offset,
                len,
                size: self.len,
            });
        }
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside the buffer.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, out.len())?;
        self.piece().slab.read(self.piece().offset + offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside the buffer.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.check(offset, data.len())?;
        self.piece().slab.write(self.piece().offset + offset, data)
    }

    /// First byte, for system calls that fill or send the memory: valid for [`IoBuffer::capacity`] bytes while the
    /// buffer lives. The server may write into it at any time: never make a reference from it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.piece().slab.as_ptr().wrapping_add(self.piece().offset)
    }

    pub(crate) fn sge(&self) -> Sge {
        let piece = self.piece();
        Sge {
            addr: piece.slab.addr() + piece.offset as u64,
            length: u32::try_from(self.len).unwrap_or(u32::MAX),
            lkey: piece.slab.lkey(),
        }
    }

    pub(crate) fn region(&self) -> (&P::Mr, usize) {
        (&self.piece().slab, self.piece().offset)
    }
}

impl<P: Provider> Drop for IoBuffer<P> {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take()
            && let Some(free) = self.pool.state.lock().free.get_mut(self.class)
        {
            free.push(piece);
        }
    }
}

impl<P: Provider> fmt::Debug for IoBuffer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoBuffer")
            .field("len", &self.len)
            .field("capacity", &self.capacity())
            .finish()
    }
}
