//! Mappings, and checked ranges of them: the only place where registered memory is touched.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
};

use memmap2::{MmapMut, MmapRaw};
use roce_verbs::provider::Memory;

use crate::{
    error::{AccessError, AtomicError, FlushError, MemError},
    fault,
};

/// Alignment of allocated regions, bytes.
const PAGE: usize = 4096;
/// Allocations of this many bytes or more are mapped. From the heap, which may give out memory that was in use before, they would be
/// filled with zeros at once; and freeing them would have glibc keep as much more in each arena (mallopt(3), `M_MMAP_THRESHOLD`).
const LARGE: usize = 128 << 10;

/// Error of a range outside of a mapping: a bug of the caller's, answered like memory that is gone.
const OUTSIDE: AccessError = AccessError::Revoked;

/// Makes lent memory survive the loss of power: `msync` of a file mapping, or the cache flushes of persistent
/// memory.
pub trait Persist: core::fmt::Debug + Send + Sync {
    /// Makes `len` bytes from `offset` on (counted from the first byte that was registered) persistent. `false`, or a panic: it
    /// failed. It may take long: no lock is held, and only the connection that wanted it waits.
    fn persist(&self, offset: usize, len: usize) -> bool;
}

/// The memory itself: allocated here and freed with the last reference, lent by the program, or shared with it.
#[derive(Debug)]
struct Backing {
    ptr: NonNull<u8>,
    len: usize,
    /// The allocation, if it was allocated here.
    owned: Option<Owned>,
    persist: Option<Arc<dyn Persist>>,
    /// Keeps shared memory alive.
    shared: Option<Arc<dyn Memory>>,
}

/// Memory that was allocated here.
#[derive(Debug)]
enum Owned {
    Heap(Layout),
    /// Unmapped with it.
    Mapped {
        _map: MmapRaw,
    },
}

// SAFETY: the pointer is only used for raw copies and atomics within bounds that are proven first; the type has no
// interior state of its own.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Drop for Backing {
    fn drop(&mut self) {
        if let Some(Owned::Heap(layout)) = self.owned {
            // SAFETY: the pointer came from `alloc_zeroed` with this layout and is freed only here.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

/// A range of a backing that was opened at one moment, and can be closed for good; or several of them as one.
#[derive(Debug)]
pub(crate) struct Mapping {
    backing: Arc<Backing>,
    /// First byte within the backing.
    start: usize,
    len: usize,
    revoked: AtomicBool,
    /// The mapping that this one was derived from: its end is ours as well.
    parent: Option<Arc<Mapping>>,
    /// Of a scattered mapping, whose own backing is empty: what it consists of, in order.
    pieces: Box<[Extent]>,
}

/// A piece of a scattered mapping.
#[derive(Debug)]
struct Extent {
    /// First byte of it in the scattered mapping.
    at: usize,
    /// The same bytes in a mapping of their own.
    mapping: Arc<Mapping>,
}

impl Mapping {
    /// Zeroed memory on a page boundary.
    pub(crate) fn allocate(len: usize) -> Result<Arc<Self>, MemError> {
        let none = || MemError::OutOfMemory(len);
        if len == 0 {
            return Ok(Self::whole(Backing {
                ptr: NonNull::dangling(),
                len,
                owned: None,
                persist: None,
                shared: None,
            }));
        }
        let (ptr, owned) = if len < LARGE {
            let layout = Layout::from_size_align(len, PAGE).map_err(|_| none())?;
            // SAFETY: the layout has a size above zero.
            let ptr = unsafe { alloc_zeroed(layout) };
            (ptr, Owned::Heap(layout))
        } else {
            let map = MmapRaw::from(MmapMut::map_anon(len).map_err(|_| none())?);
            (map.as_mut_ptr(), Owned::Mapped { _map: map })
        };
        let ptr = NonNull::new(ptr).ok_or_else(none)?;
        Ok(Self::whole(Backing {
            ptr,
            len,
            owned: Some(owned),
            persist: None,
            shared: None,
        }))
    }

    /// Memory that lives as long as the mapping; `None` when the range is outside.
    pub(crate) fn share(memory: &Arc<dyn Memory>, offset: usize, len: usize) -> Option<Arc<Self>> {
        if offset > memory.len() || len > memory.len() - offset {
            return None;
        }
        let ptr = NonNull::new(memory.as_ptr().wrapping_add(offset))?;
        fault::install();
        Some(Self::whole(Backing {
            ptr,
            len,
            owned: None,
            persist: None,
            shared: Some(memory.clone()),
        }))
    }

    /// Memory of the program.
    ///
    /// # Safety
    /// Until the mapping is revoked and no access is under way, `len` bytes from `ptr` on hold no Rust object. They need not be there.
    pub(crate) unsafe fn borrow(ptr: *mut u8, len: usize, persist: Option<Arc<dyn Persist>>) -> Arc<Self> {
        let ptr = NonNull::new(ptr).unwrap_or(NonNull::dangling());
        fault::install();
        Self::whole(Backing {
            ptr,
            len,
            owned: None,
            persist,
            shared: None,
        })
    }

    fn whole(backing: Backing) -> Arc<Self> {
        let len = backing.len;
        Arc::new(Self {
            backing: Arc::new(backing),
            start: 0,
            len,
            revoked: AtomicBool::new(false),
            parent: None,
            pieces: Box::default(),
        })
    }

    /// Mappings that are not scattered themselves, as one; `None` when their bytes can't be counted. It ends with the first of them.
    pub(crate) fn scattered(mappings: Vec<Arc<Self>>) -> Option<Arc<Self>> {
        let mut len = 0usize;
        let mut pieces = Vec::with_capacity(mappings.len());
        for mapping in mappings.into_iter().filter(|m| m.len > 0) {
            debug_assert!(mapping.pieces.is_empty());
            let at = len;
            len = len.checked_add(mapping.len)?;
            pieces.push(Extent { at, mapping });
        }
        Some(Arc::new(Self {
            backing: Arc::new(Backing {
                ptr: NonNull::dangling(),
                len: 0,
                owned: None,
                persist: None,
                shared: None,
            }),
            start: 0,
            len,
            revoked: AtomicBool::new(false),
            parent: None,
            pieces: pieces.into(),
        }))
    }

    /// A part of this mapping with an end of its own; `None` when the range is outside, or the mapping scattered.
    pub(crate) fn derive(self: &Arc<Self>, offset: usize, len: usize) -> Option<Arc<Self>> {
        if !self.holds(offset, len) || !self.pieces.is_empty() {
            return None;
        }
        Some(Arc::new(Self {
            backing: self.backing.clone(),
            start: self.start + offset,
            len,
            revoked: AtomicBool::new(false),
            parent: Some(self.clone()),
            pieces: Box::default(),
        }))
    }

    pub(crate) fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire) || (self.is_view() && self.is_origin_revoked())
    }

    /// Returns whether the mapping was opened over others, and ends with them.
    #[inline]
    pub(crate) fn is_view(&self) -> bool {
        self.parent.is_some() || !self.pieces.is_empty()
    }

    #[inline(never)]
    fn is_origin_revoked(&self) -> bool {
        self.parent.as_ref().is_some_and(|p| p.is_revoked())
            || self.pieces.iter().any(|piece| piece.mapping.is_revoked())
    }

    /// Whether the memory was lent, and may be gone since the mapping was revoked.
    pub(crate) fn is_returned(&self) -> bool {
        let lent = self.backing.owned.is_none() && self.backing.shared.is_none();
        lent && self.len > 0 && self.is_revoked()
    }

    pub(crate) fn is_persistent(&self) -> bool {
        self.backing.persist.is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        // `start` is at most the backing's length: the pointer stays inside or one past the end.
        self.backing.ptr.as_ptr().wrapping_add(self.start)
    }

    /// Whether a range lies within the mapping.
    #[inline]
    fn holds(&self, offset: usize, len: usize) -> bool {
        offset <= self.len && len <= self.len - offset
    }

    /// The first byte of a range that must lie within the mapping, and within one piece of it if it is scattered.
    fn range(&self, offset: usize, len: usize) -> Option<*mut u8> {
        if !self.holds(offset, len) {
            return None;
        }
        if self.pieces.is_empty() {
            return Some(self.as_ptr().wrapping_add(offset));
        }
        let piece = &self.pieces[self.piece_of(offset)?];
        piece.mapping.range(offset - piece.at, len)
    }

    /// The piece of a scattered mapping that a byte lies in.
    fn piece_of(&self, offset: usize) -> Option<usize> {
        self.pieces.partition_point(|piece| piece.at <= offset).checked_sub(1)
    }

    /// Calls `f` for the pieces of a range of a scattered mapping, in order: with the piece's mapping, the offset in it, and which
    /// bytes of the range these are.
    ///
    /// # Errors
    /// When the range is outside, and those of `f`.
    fn for_pieces(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&Self, usize, core::ops::Range<usize>) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        if !self.holds(offset, len) {
            return Err(OUTSIDE);
        }
        let Some(first) = self.piece_of(offset).filter(|_| len > 0) else {
            return Ok(());
        };
        let mut done = 0;
        for piece in &self.pieces[first..] {
            let within = offset + done - piece.at;
            let n = (piece.mapping.len - within).min(len - done);
            f(&piece.mapping, within, done..done + n)?;
            done += n;
            if done == len {
                return Ok(());
            }
        }
        Err(OUTSIDE)
    }

    /// Copies out, whether revoked or not: the caller knows that no Rust object is in the place of the backing.
    ///
    /// # Errors
    /// When the range is outside, or the memory missing. Some bytes may have been copied.
    #[inline]
    pub(crate) fn copy_out(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        if !self.pieces.is_empty() {
            return self.copy_out_pieces(offset, out);
        }
        let src = self.range(offset, out.len()).ok_or(OUTSIDE)?;
        // SAFETY: `out.len()` bytes of the backing (checked by `range`), which lives as long as `self` or is the program's.
        Ok(unsafe { fault::read(src, out) }?)
    }

    // Not inlined, for the sake of the registers of what is.
    #[inline(never)]
    fn copy_out_pieces(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        self.for_pieces(offset, out.len(), |piece, at, part| piece.copy_out(at, &mut out[part]))
    }

    /// Copies in, as [`Mapping::copy_out`]. The last byte comes after all others: although no order is promised (IBA 9.5),
    /// HCAs write from the front, and programs wait for the last byte of what a peer WRITEs.
    ///
    /// # Errors
    /// As [`Mapping::copy_out`].
    #[inline]
    pub(crate) fn copy_in(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        if !self.pieces.is_empty() {
            return self.copy_in_pieces(offset, data);
        }
        let dst = self.range(offset, data.len()).ok_or(OUTSIDE)?;
        // SAFETY: as in `copy_out`.
        Ok(unsafe { fault::write(dst, data) }?)
    }

    #[inline(never)]
    fn copy_in_pieces(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        self.for_pieces(offset, data.len(), |piece, at, part| piece.copy_in(at, &data[part]))
    }
}

/// A checked range of registered memory. Clones share the mapping.
#[derive(Clone, Debug)]
pub struct Span {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl Span {
    /// The range, which must lie within the mapping.
    #[inline]
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize, len: usize) -> Option<Self> {
        mapping.holds(offset, len).then_some(Self { mapping, offset, len })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of the span; `None` when it reaches outside.
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        (offset <= self.len && len <= self.len - offset).then(|| Self {
            mapping: self.mapping.clone(),
            offset: self.offset + offset,
            len,
        })
    }

    /// Whether accesses fail.
    pub fn is_revoked(&self) -> bool {
        self.mapping.is_revoked()
    }

    #[inline]
    fn check(&self, offset: usize, len: usize) -> Result<usize, AccessError> {
        if offset > self.len || len > self.len - offset {
            return Err(OUTSIDE);
        }
        match self.mapping.is_revoked() {
            true => Err(AccessError::Revoked),
            false => Ok(self.offset + offset),
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the memory was taken back or is missing, or the range leaves the span. Some bytes may have been copied.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        let at = self.check(offset, out.len())?;
        self.mapping.copy_out(at, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the memory was taken back or is missing, or the range leaves the span. Some bytes may have been copied.
    #[inline]
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        let at = self.check(offset, data.len())?;
        self.mapping.copy_in(at, data)
    }

    /// Address of the aligned word that the span is.
    fn word(&self) -> Result<*mut u64, AtomicError> {
        if self.len != 8 {
            return Err(AtomicError::Misaligned);
        }
        let at = self.check(0, 8)?;
        let ptr = self.mapping.range(at, 8).ok_or(OUTSIDE)?.cast::<u64>();
        match ptr.is_aligned() {
            true => Ok(ptr),
            false => Err(AtomicError::Misaligned),
        }
    }

    /// Stores all of the 8-byte word that the span is at once, given as its bytes in memory order.
    ///
    /// # Errors
    /// When the span is not one aligned word, or the memory was taken back or is missing.
    pub fn store(&self, bytes: [u8; 8]) -> Result<(), AtomicError> {
        let word = self.word()?;
        // SAFETY: 8 bytes of the backing, on an aligned address, as in `Mapping::copy_out`.
        Ok(unsafe { fault::store(word, u64::from_ne_bytes(bytes)) }.map_err(AccessError::from)?)
    }

    /// Makes what was written to the span before visible to everybody, and if asked persistent (FLUSH).
    ///
    /// # Errors
    /// When the memory was taken back, or can't be made persistent.
    pub fn flush(&self, persistent: bool) -> Result<(), FlushError> {
        let at = self.check(0, self.len)?;
        fence(Ordering::SeqCst);
        if persistent {
            let backing = &self.mapping.backing;
            let persist = backing.persist.as_ref().ok_or(FlushError::Failed)?;
            if !persist.persist(self.mapping.start + at, self.len) {
                return Err(FlushError::Failed);
            }
        }
        Ok(())
    }

    /// Adds to the 8-byte word that the span is, in the host's byte order, and returns the former value.
    ///
    /// # Errors
    /// When the span is not one aligned word, or the memory was taken back or is missing.
    pub fn fetch_add(&self, add: u64) -> Result<u64, AtomicError> {
        let word = self.word()?;
        // SAFETY: as in `store`.
        Ok(unsafe { fault::fetch_add(word, add) }.map_err(AccessError::from)?)
    }

    /// Stores `swap` if the word equals `compare`, and returns the former value either way.
    ///
    /// # Errors
    /// When the span is not one aligned word, or the memory was taken back or is missing.
    pub fn compare_swap(&self, compare: u64, swap: u64) -> Result<u64, AtomicError> {
        let word = self.word()?;
        // SAFETY: as in `store`.
        Ok(unsafe { fault::compare_swap(word, compare, swap) }.map_err(AccessError::from)?)
    }
}
