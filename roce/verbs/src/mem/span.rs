//! Mappings, and checked ranges of them: the only place where registered memory is touched.

use std::{
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
};

use crate::provider::{Foreign, Memory, RangeError};
use memmap2::{MmapMut, MmapRaw};

use crate::mem::{
    error::{AccessError, AtomicError, FlushError, MemError},
    fault::{self, Fault},
};

/// Error of a range outside of a mapping: a bug of the caller's, answered like memory that is gone.
const OUTSIDE: AccessError = AccessError::Revoked;

/// Makes lent memory survive the loss of power: `msync` of a file mapping, or the cache flushes of persistent
/// memory.
pub trait Persist: core::fmt::Debug + Send + Sync {
    /// Makes `len` bytes from `offset` on (counted from the first byte that was registered) persistent. `false`, or a panic: it
    /// failed. It may take long: no lock is held, and only the connection that wanted it waits.
    fn persist(&self, offset: usize, len: usize) -> bool;
}

/// Alignment of allocated memory, bytes.
const PAGE: usize = 4096;
/// Allocations of this many bytes or more are mapped. From the heap, which may give out memory that was in use before, they would be
/// filled with zeros at once; and freeing them would have glibc keep as much more in each arena (mallopt(3), `M_MMAP_THRESHOLD`).
/// Smaller ones are made for single requests, too, which have no time for system calls.
const LARGE: usize = 128 << 10;

/// Owner of a mapping's memory.
#[derive(Debug)]
enum Owner {
    /// Nobody else: it was mapped here, and is unmapped with the last reference.
    Table { _map: MmapRaw },
    /// Nobody else: a small part of the heap.
    Heap { _bytes: Vec<u8> },
    /// The program, which may take it back; with how it survives the loss of power.
    Program(Option<Arc<dyn Persist>>),
    /// Others as well; kept alive by this.
    Shared { _memory: Arc<dyn Memory> },
    /// The mapping that this one is a part of: its end is ours as well.
    View(Arc<Mapping>),
    /// The mappings that this one consists of, in order. It has no memory of its own.
    Pieces(Box<[Extent]>),
    /// Another process. The mapping may be a part of another one, whose end is ours as well.
    Foreign {
        memory: Arc<dyn Memory>,
        origin: Option<Arc<Mapping>>,
    },
}

/// Place of some bytes.
enum Place<'a> {
    /// Memory of this process.
    Here(*mut u8),
    /// Address in another process.
    Foreign(&'a Foreign, usize),
}

/// Memory that was opened at one moment, and can be closed for good.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// First byte.
    ptr: NonNull<u8>,
    len: usize,
    revoked: AtomicBool,
    owner: Owner,
}

// SAFETY: the pointer is only used for raw copies and atomics within bounds that are proven first; the other fields are safe to share.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A piece of a scattered mapping.
#[derive(Debug)]
struct Extent {
    /// First byte of it in the scattered mapping.
    at: usize,
    /// The same bytes in a mapping of their own.
    mapping: Arc<Mapping>,
}

impl Mapping {
    /// Allocates zeroed memory on a page boundary.
    pub(crate) fn allocate(len: usize) -> Result<Arc<Self>, MemError> {
        let none = MemError::OutOfMemory(len);
        if len < LARGE {
            let mut bytes = vec![0u8; len + PAGE];
            let start = bytes.as_mut_ptr();
            let ptr = NonNull::new(start.wrapping_add(start.align_offset(PAGE))).ok_or(none)?;
            return Ok(Self::new(ptr, len, Owner::Heap { _bytes: bytes }));
        }
        let map = MmapRaw::from(MmapMut::map_anon(len.max(1)).map_err(|_| none)?);
        let ptr = NonNull::new(map.as_mut_ptr()).ok_or(none)?;
        Ok(Self::new(ptr, len, Owner::Table { _map: map }))
    }

    /// Memory that lives as long as the mapping; `None` when the range is outside.
    pub(crate) fn share(memory: &Arc<dyn Memory>, offset: usize, len: usize) -> Option<Arc<Self>> {
        if offset > memory.len() || len > memory.len() - offset {
            return None;
        }
        let ptr = NonNull::new(memory.as_ptr().wrapping_add(offset))?;
        let owner = match memory.foreign() {
            Some(_) => Owner::Foreign {
                memory: memory.clone(),
                origin: None,
            },
            None => {
                fault::install();
                Owner::Shared {
                    _memory: memory.clone(),
                }
            }
        };
        Some(Self::new(ptr, len, owner))
    }

    /// Memory of the program.
    ///
    /// # Safety
    /// Until the mapping is revoked and no access is under way, `len` bytes from `ptr` on hold no Rust object. They need not be there.
    pub(crate) unsafe fn borrow(ptr: *mut u8, len: usize, persist: Option<Arc<dyn Persist>>) -> Arc<Self> {
        fault::install();
        let ptr = NonNull::new(ptr).unwrap_or(NonNull::dangling());
        Self::new(ptr, len, Owner::Program(persist))
    }

    fn new(ptr: NonNull<u8>, len: usize, owner: Owner) -> Arc<Self> {
        Arc::new(Self {
            ptr,
            len,
            revoked: AtomicBool::new(false),
            owner,
        })
    }

    /// Mappings that are not scattered themselves, as one; `None` when their bytes can't be counted. It ends with the first of them.
    pub(crate) fn scattered(mappings: impl IntoIterator<Item = Arc<Self>>) -> Option<Arc<Self>> {
        let mut len = 0usize;
        let mut pieces = Vec::new();
        for mapping in mappings.into_iter().filter(|m| m.len > 0) {
            debug_assert!(!matches!(mapping.owner, Owner::Pieces(_)));
            let at = len;
            len = len.checked_add(mapping.len)?;
            pieces.push(Extent { at, mapping });
        }
        Some(Self::new(NonNull::dangling(), len, Owner::Pieces(pieces.into())))
    }

    /// A part of this mapping with an end of its own; `None` when the range is outside, or the mapping scattered.
    pub(crate) fn derive(self: &Arc<Self>, offset: usize, len: usize) -> Option<Arc<Self>> {
        if !self.holds(offset, len) || matches!(self.owner, Owner::Pieces(_)) {
            return None;
        }
        let ptr = NonNull::new(self.as_ptr().wrapping_add(offset))?;
        let owner = match &self.owner {
            Owner::Foreign { memory, .. } => Owner::Foreign {
                memory: memory.clone(),
                origin: Some(self.clone()),
            },
            _ => Owner::View(self.clone()),
        };
        Some(Self::new(ptr, len, owner))
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
        matches!(
            self.owner,
            Owner::View(_) | Owner::Pieces(_) | Owner::Foreign { origin: Some(_), .. }
        )
    }

    #[inline(never)]
    fn is_origin_revoked(&self) -> bool {
        match &self.owner {
            Owner::View(origin)
            | Owner::Foreign {
                origin: Some(origin), ..
            } => origin.is_revoked(),
            Owner::Pieces(pieces) => pieces.iter().any(|piece| piece.mapping.is_revoked()),
            _ => false,
        }
    }

    /// Whether the memory is the program's, and may be gone since the mapping was revoked.
    fn is_returned(&self) -> bool {
        matches!(self.owner, Owner::Program(_)) && self.len > 0 && self.is_revoked()
    }

    /// How the memory survives the loss of power, and the first byte of it that was registered.
    fn persist(&self) -> Option<(&dyn Persist, *mut u8)> {
        match &self.owner {
            Owner::Program(persist) => Some((persist.as_deref()?, self.as_ptr())),
            Owner::View(origin) => origin.persist(),
            _ => None,
        }
    }

    pub(crate) fn is_persistent(&self) -> bool {
        self.persist().is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Whether a range lies within the mapping.
    #[inline]
    fn holds(&self, offset: usize, len: usize) -> bool {
        offset <= self.len && len <= self.len - offset
    }

    /// Memory of another process that it is, if so.
    pub(crate) fn foreign(&self) -> Option<&Foreign> {
        match &self.owner {
            Owner::Foreign { memory, .. } => memory.foreign(),
            _ => None,
        }
    }

    /// Calls `f` for the pieces of a range, in order: with the place of each, and which bytes of the range it holds.
    ///
    /// # Errors
    /// When the range is outside, and those of `f`.
    #[inline]
    fn for_pieces(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(Place<'_>, Range<usize>) -> Result<(), Fault>,
    ) -> Result<(), AccessError> {
        if !self.holds(offset, len) {
            return Err(OUTSIDE);
        }
        match &self.owner {
            Owner::Pieces(_) | Owner::Foreign { .. } => self.for_remote(offset, len, f),
            _ => Ok(f(Place::Here(self.as_ptr().wrapping_add(offset)), 0..len)?),
        }
    }

    /// [`for_pieces`](Self::for_pieces) of memory that is not in one piece here.
    // Not inlined, for the sake of the registers of what is.
    #[inline(never)]
    fn for_remote(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(Place<'_>, Range<usize>) -> Result<(), Fault>,
    ) -> Result<(), AccessError> {
        let Owner::Pieces(pieces) = &self.owner else {
            return Ok(f(self.place(offset), 0..len)?);
        };
        let first = pieces.partition_point(|piece| piece.at <= offset).saturating_sub(1);
        let mut done = 0;
        for piece in &pieces[first..] {
            let within = offset + done - piece.at;
            let n = (piece.mapping.len - within).min(len - done);
            f(piece.mapping.place(within), done..done + n)?;
            done += n;
            if done == len {
                break;
            }
        }
        Ok(())
    }

    /// Place of a range, if all of it is in one piece.
    fn in_one_piece(&self, offset: usize, len: usize) -> Option<Place<'_>> {
        let (mapping, within) = match &self.owner {
            Owner::Pieces(pieces) => {
                let piece = pieces.iter().rfind(|piece| piece.at <= offset)?;
                (&*piece.mapping, offset - piece.at)
            }
            _ => (self, offset),
        };
        mapping.holds(within, len).then(|| mapping.place(within))
    }

    /// Place of a byte of a mapping that is not scattered.
    fn place(&self, offset: usize) -> Place<'_> {
        let at = self.as_ptr().wrapping_add(offset);
        match self.foreign() {
            Some(foreign) => Place::Foreign(foreign, at as usize),
            None => Place::Here(at),
        }
    }

    /// Copies out, whether revoked or not: the caller knows that no Rust object is in the place of the memory.
    ///
    /// # Errors
    /// When the range is outside, or the memory missing. Some bytes may have been copied.
    #[inline]
    fn copy_out(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        self.for_pieces(offset, out.len(), |place, part| match place {
            // SAFETY: bytes of the mapping, whose memory lives as long as `self` or is the program's.
            Place::Here(at) => unsafe { fault::read(at, &mut out[part]) },
            Place::Foreign(memory, at) => fault_unless(memory.read(at, &mut out[part])),
        })
    }

    /// Copies in, as [`Mapping::copy_out`]. The last byte comes after all others: although no order is promised (IBA 9.5),
    /// HCAs write from the front, and programs wait for the last byte of what a peer WRITEs. In other processes the order is the kernel's.
    ///
    /// # Errors
    /// As [`Mapping::copy_out`].
    #[inline]
    fn copy_in(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        self.for_pieces(offset, data.len(), |place, part| match place {
            // SAFETY: as in `copy_out`.
            Place::Here(at) => unsafe { fault::write(at, &data[part]) },
            Place::Foreign(memory, at) => fault_unless(memory.write(at, &data[part])),
        })
    }

    fn range_error(&self, offset: usize, len: usize) -> RangeError {
        RangeError {
            offset,
            len,
            size: self.len,
        }
    }

    /// Copies out for the owner, also after the end of a registration unless the memory is the program's.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        match !self.is_returned() && self.copy_out(offset, out).is_ok() {
            true => Ok(()),
            false => Err(self.range_error(offset, out.len())),
        }
    }

    /// Copies in, as [`Mapping::read`].
    pub(crate) fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        match !self.is_returned() && self.copy_in(offset, data).is_ok() {
            true => Ok(()),
            false => Err(self.range_error(offset, data.len())),
        }
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
        match mapping.holds(offset, len) {
            true => Some(Self { mapping, offset, len }),
            false => None,
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
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

    /// Place of the aligned word that the span is.
    fn word(&self) -> Result<Place<'_>, AtomicError> {
        if self.len != 8 {
            return Err(AtomicError::Misaligned);
        }
        let at = self.check(0, 8)?;
        let word = self.mapping.in_one_piece(at, 8).ok_or(OUTSIDE)?;
        let address = match word {
            Place::Here(at) => at as usize,
            Place::Foreign(_, at) => at,
        };
        match address.is_multiple_of(8) {
            true => Ok(word),
            false => Err(AtomicError::Misaligned),
        }
    }

    /// Stores all of the 8-byte word that the span is at once, given as its bytes in memory order.
    ///
    /// # Errors
    /// When the span is not one aligned word, or the memory was taken back or is missing.
    pub fn store(&self, bytes: [u8; 8]) -> Result<(), AtomicError> {
        let new = u64::from_ne_bytes(bytes);
        let done = match self.word()? {
            // SAFETY: 8 bytes of the mapping, on an aligned address, as in `Mapping::copy_out`.
            Place::Here(word) => unsafe { fault::store(word.cast(), new) },
            Place::Foreign(memory, at) => fault_unless(memory.update(at, |_| Some(new)).is_some()),
        };
        Ok(done.map_err(AccessError::from)?)
    }

    /// Makes what was written to the span before visible to everybody, and if asked persistent (FLUSH).
    ///
    /// # Errors
    /// When the memory was taken back, or can't be made persistent.
    pub fn flush(&self, persistent: bool) -> Result<(), FlushError> {
        let at = self.check(0, self.len)?;
        fence(Ordering::SeqCst);
        if persistent {
            let (persist, first) = self.mapping.persist().ok_or(FlushError::Failed)?;
            let start = self.mapping.as_ptr() as usize - first as usize;
            if !persist.persist(start + at, self.len) {
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
        let former = match self.word()? {
            // SAFETY: as in `store`.
            Place::Here(word) => unsafe { fault::fetch_add(word.cast(), add) },
            Place::Foreign(memory, at) => memory.update(at, |former| Some(former.wrapping_add(add))).ok_or(Fault),
        };
        Ok(former.map_err(AccessError::from)?)
    }

    /// Stores `swap` if the word equals `compare`, and returns the former value either way.
    ///
    /// # Errors
    /// When the span is not one aligned word, or the memory was taken back or is missing.
    pub fn compare_swap(&self, compare: u64, swap: u64) -> Result<u64, AtomicError> {
        let former = match self.word()? {
            // SAFETY: as in `store`.
            Place::Here(word) => unsafe { fault::compare_swap(word.cast(), compare, swap) },
            Place::Foreign(memory, at) => {
                let new = |former| (former == compare).then_some(swap);
                memory.update(at, new).ok_or(Fault)
            }
        };
        Ok(former.map_err(AccessError::from)?)
    }
}

fn fault_unless(done: bool) -> Result<(), Fault> {
    match done {
        true => Ok(()),
        false => Err(Fault),
    }
}
