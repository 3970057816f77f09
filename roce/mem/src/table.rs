//! The table of keys.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    sync::{Arc, atomic::AtomicU32, atomic::Ordering},
};

use parking_lot::{Mutex, RwLock};
use rand_chacha::{
    ChaCha12Rng,
    rand_core::{RngCore, SeedableRng},
};
use roce_bth::{LKey, Qpn, RKey};
use roce_verbs::{
    AccessFlags, DeviceLimits, NumberHasher, Sge,
    provider::Memory,
    wr::{BindWindow, FastRegister},
};

use crate::{
    error::{KeyError, MemError},
    object::{FastRegion, Region, Window, WindowKind},
    span::{Mapping, Persist, Span},
};

/// A protection domain: only objects of the same one work together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PdHandle(u32);

impl PdHandle {
    /// The number.
    pub const fn value(self) -> u32 {
        self.0
    }
}

type KeyMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;

/// What is open under a key at the moment.
struct Open {
    mapping: Arc<Mapping>,
    iova: u64,
    access: AccessFlags,
}

impl Open {
    fn span(&self, addr: u64, len: u64, need: AccessFlags) -> Result<Span, KeyError> {
        if !self.access.contains(need) {
            return Err(KeyError::Access);
        }
        let (offset, len) = self.offset(addr, len)?;
        Span::new(self.mapping.clone(), offset, len).ok_or(KeyError::Range)
    }

    /// Offset and length within the mapping of a range of addresses.
    fn offset(&self, addr: u64, len: u64) -> Result<(usize, usize), KeyError> {
        let size = self.mapping.len() as u64;
        let offset = addr.checked_sub(self.iova).ok_or(KeyError::Range)?;
        if offset > size || len > size - offset {
            return Err(KeyError::Range);
        }
        // Both are at most `size`, which came from a usize.
        Ok((offset as usize, len as usize))
    }
}

enum Kind {
    Region,
    Fast(Arc<FastRegion>),
    Window(Arc<Window>, BoundTo),
}

/// Where a window is bound.
#[derive(Clone, Copy, Default)]
struct BoundTo {
    /// Index of the region's key.
    region: Option<u32>,
    /// The only queue pair that may use it (type 2).
    qpn: Option<Qpn>,
}

struct Entry {
    pd: PdHandle,
    key: u32,
    kind: Kind,
    open: Option<Open>,
    /// Windows bound to this region.
    windows: u32,
}

struct Inner {
    rng: ChaCha12Rng,
    /// Protection domains with the number of objects in each.
    pds: KeyMap<u32>,
    next_pd: u32,
    /// By index: the key's upper 24 bits.
    entries: KeyMap<Entry>,
    regions: u32,
    windows: u32,
}

/// What a region becomes ([`MemoryTable::reregister`]).
pub struct NewRegion {
    /// Protection domain.
    pub pd: PdHandle,
    /// First byte of the program's memory.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Address of the first byte.
    pub iova: u64,
    /// Rights.
    pub access: AccessFlags,
    /// What makes it survive the loss of power.
    pub persist: Option<Arc<dyn Persist>>,
}

/// All protection domains, regions and windows of a device, and their keys.
///
/// Keys come whole from a CSPRNG, so that a peer can't guess one. Shared between threads; every call is one short lock.
pub struct MemoryTable {
    inner: RwLock<Inner>,
    /// For the bytes of keys that owners choose; apart from the table, which traffic locks.
    bytes: Mutex<ChaCha12Rng>,
    max_pd: u32,
    max_mr: u32,
    max_mw: u32,
    max_mr_size: u64,
}

impl core::fmt::Debug for MemoryTable {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let inner = self.inner.read();
        f.debug_struct("MemoryTable")
            .field("pds", &inner.pds.len())
            .field("regions", &inner.regions)
            .field("windows", &inner.windows)
            .finish()
    }
}

/// The most keys that fit the 24 bits of index and still leave a random one quick to find.
const MAX_KEYS: usize = 1 << 22;

fn check_access(access: AccessFlags, persistent: bool) -> Result<(), MemError> {
    let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(AccessFlags::LOCAL_WRITE) {
        return Err(MemError::Access);
    }
    match access.contains(AccessFlags::FLUSH_PERSISTENT) && !persistent {
        true => Err(MemError::NotPersistent),
        false => Ok(()),
    }
}

/// Whether a view of a region may have these rights: what writes needs the region's local write right, and what flushes
/// the region's right to be flushed so.
fn may_open(region: AccessFlags, view: AccessFlags, writes: AccessFlags) -> bool {
    let flushes = AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
    (!view.intersects(writes) || region.contains(AccessFlags::LOCAL_WRITE)) && region.contains(view & flushes)
}

impl Inner {
    fn hold(&mut self, pd: PdHandle) -> Result<(), MemError> {
        let count = self.pds.get_mut(&pd.0).ok_or(MemError::NotFound)?;
        *count = count
            .checked_add(1)
            .ok_or(MemError::Limit("objects of a protection domain"))?;
        Ok(())
    }

    fn release(&mut self, pd: PdHandle) {
        if let Some(count) = self.pds.get_mut(&pd.0) {
            *count = count.saturating_sub(1);
        }
    }

    /// A random key whose index is free.
    fn new_key(&mut self) -> Result<u32, MemError> {
        if self.entries.len() >= MAX_KEYS {
            return Err(MemError::Limit("memory keys"));
        }
        loop {
            let key = self.rng.next_u32();
            // 0 and all-ones are customary marks for "no key".
            if key >> 8 != 0 && key >> 8 != 0x00ff_ffff && !self.entries.contains_key(&(key >> 8)) {
                return Ok(key);
            }
        }
    }

    fn insert(&mut self, pd: PdHandle, key: u32, kind: Kind, open: Option<Open>) -> Result<(), MemError> {
        self.hold(pd)?;
        let entry = Entry {
            pd,
            key,
            kind,
            open,
            windows: 0,
        };
        self.entries.insert(key >> 8, entry);
        Ok(())
    }

    /// Takes an entry out, closing it. Fails while windows are bound to it.
    fn remove(&mut self, key: u32) -> Result<Entry, MemError> {
        let entry = self.entries.get(&(key >> 8)).ok_or(MemError::NotFound)?;
        if entry.windows > 0 {
            return Err(MemError::Busy("memory windows are bound to the region"));
        }
        self.close(key >> 8);
        let entry = self.entries.remove(&(key >> 8)).ok_or(MemError::NotFound)?;
        self.release(entry.pd);
        Ok(entry)
    }

    /// Revokes what is open under an index, and unbinds a window from its region.
    fn close(&mut self, index: u32) {
        let Some(entry) = self.entries.get_mut(&index) else {
            return;
        };
        if let Some(open) = entry.open.take() {
            open.mapping.revoke();
        }
        if let Kind::Window(_, bound) = &mut entry.kind
            && let Some(region) = std::mem::take(bound).region
            && let Some(region) = self.entries.get_mut(&region)
        {
            region.windows = region.windows.saturating_sub(1);
        }
    }

    fn find(&self, pd: PdHandle, key: u32) -> Result<&Entry, KeyError> {
        let entry = self
            .entries
            .get(&(key >> 8))
            .filter(|e| e.key == key)
            .ok_or(KeyError::Unknown)?;
        if entry.pd != pd {
            return Err(KeyError::WrongPd);
        }
        Ok(entry)
    }

    /// Like [`Inner::find`] for an object that gets a new key byte: only the index must match.
    fn find_index(&self, pd: PdHandle, key: RKey) -> Result<&Entry, KeyError> {
        let entry = self.entries.get(&(key.0 >> 8)).ok_or(KeyError::Unknown)?;
        if entry.pd != pd {
            return Err(KeyError::WrongPd);
        }
        Ok(entry)
    }
}

impl MemoryTable {
    /// An empty table. `seed` must be secret and random: keys come from it.
    pub fn new(seed: [u8; 32], limits: &DeviceLimits) -> Self {
        let mut rng = ChaCha12Rng::from_seed(seed);
        let next_pd = rng.next_u32() & 0xffff;
        let mut seed = [0; 32];
        rng.fill_bytes(&mut seed);
        Self {
            bytes: Mutex::new(ChaCha12Rng::from_seed(seed)),
            inner: RwLock::new(Inner {
                rng,
                pds: KeyMap::default(),
                next_pd,
                entries: KeyMap::default(),
                regions: 0,
                windows: 0,
            }),
            max_pd: limits.max_pd,
            max_mr: limits.max_mr,
            max_mw: limits.max_mw,
            max_mr_size: limits.max_mr_size,
        }
    }

    /// Eight random bytes, for the parts of keys that their owners choose (the low byte of a key that a fast registration
    /// or a bind gives).
    pub fn random(&self) -> u64 {
        self.bytes.lock().next_u64()
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_pd(&self) -> Result<PdHandle, MemError> {
        let mut inner = self.inner.write();
        if inner.pds.len() >= self.max_pd as usize {
            return Err(MemError::Limit("protection domains"));
        }
        while inner.pds.contains_key(&inner.next_pd) {
            inner.next_pd = inner.next_pd.wrapping_add(1);
        }
        let pd = inner.next_pd;
        inner.next_pd = pd.wrapping_add(1);
        inner.pds.insert(pd, 0);
        Ok(PdHandle(pd))
    }

    /// Releases a protection domain.
    ///
    /// # Errors
    /// While objects exist in it, or when it does not exist.
    pub fn dealloc_pd(&self, pd: PdHandle) -> Result<(), MemError> {
        let mut inner = self.inner.write();
        match inner.pds.get(&pd.0) {
            None => Err(MemError::NotFound),
            Some(0) => {
                inner.pds.remove(&pd.0);
                Ok(())
            }
            Some(_) => Err(MemError::Busy("the protection domain has objects")),
        }
    }

    /// Counts one more user of a protection domain (a queue pair), which then can't be released.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn hold_pd(&self, pd: PdHandle) -> Result<(), MemError> {
        self.inner.write().hold(pd)
    }

    /// Takes back one [`MemoryTable::hold_pd`].
    pub fn release_pd(&self, pd: PdHandle) {
        self.inner.write().release(pd);
    }

    fn add_region(
        &self,
        pd: PdHandle,
        mapping: Arc<Mapping>,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Arc<Region>, MemError> {
        self.check_region(&mapping, iova, access)?;
        let mut inner = self.inner.write();
        if inner.regions >= self.max_mr {
            return Err(MemError::Limit("memory regions"));
        }
        let key = inner.new_key()?;
        let open = Open {
            mapping: mapping.clone(),
            iova,
            access,
        };
        inner.insert(pd, key, Kind::Region, Some(open))?;
        inner.regions += 1;
        Ok(Arc::new(Region {
            pd,
            key,
            iova,
            access,
            mapping,
        }))
    }

    /// Allocates zeroed memory on a page boundary and registers it. Its addresses start at the memory's own address, or
    /// at zero with [`AccessFlags::ZERO_BASED`].
    ///
    /// # Errors
    /// At a limit, without memory, or with rights that don't go together.
    pub fn alloc_region(&self, pd: PdHandle, len: usize, access: AccessFlags) -> Result<Arc<Region>, MemError> {
        check_access(access, false)?;
        if len as u64 > self.max_mr_size {
            return Err(MemError::Range(len as u64));
        }
        let mapping = Mapping::allocate(len)?;
        let iova = match access.contains(AccessFlags::ZERO_BASED) {
            true => 0,
            false => mapping.as_ptr() as u64,
        };
        self.add_region(pd, mapping, iova, access)
    }

    /// Registers memory that lives as long as the registration and all that was resolved through it. Its addresses start at
    /// `iova` (`None`: at the memory's own), or at zero with [`AccessFlags::ZERO_BASED`].
    ///
    /// # Errors
    /// At a limit, when the range is outside the memory, with rights that don't go together, or when the addresses would wrap.
    pub fn register_memory(
        &self,
        pd: PdHandle,
        memory: &Arc<dyn Memory>,
        range: core::ops::Range<usize>,
        iova: Option<u64>,
        access: AccessFlags,
    ) -> Result<Arc<Region>, MemError> {
        let len = range.len();
        let mapping = Mapping::share(memory, range.start, len).ok_or(MemError::Range(len as u64))?;
        let iova = match access.contains(AccessFlags::ZERO_BASED) {
            true => 0,
            false => iova.unwrap_or(mapping.as_ptr() as u64),
        };
        self.add_region(pd, mapping, iova, access)
    }

    /// Registers memory of the program, whose first byte gets the address `iova` (zero with
    /// [`AccessFlags::ZERO_BASED`]).
    ///
    /// # Errors
    /// At a limit, with rights that don't go together, or when the addresses would wrap.
    ///
    /// # Safety
    /// Until [`MemoryTable::deregister`] has returned, every lock under which a queue pair of this table works has been passed once,
    /// and no call of [`Region::read`] or [`Region::write`] is under way, the `len` bytes from `ptr` on are read and written at any
    /// time, and the program must not hold Rust references to them. It may unmap or protect them: accesses fail then. What it puts in
    /// their place is accessed as they were.
    pub unsafe fn register(
        &self,
        pd: PdHandle,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Arc<Region>, MemError> {
        // SAFETY: the caller promises the same.
        unsafe { self.register_persistent(pd, ptr, len, iova, access, None) }
    }

    /// Registers memory of the program as [`MemoryTable::register`]; `persist` makes it survive the loss of power, so that
    /// peers may be given the right to FLUSH to persistence.
    ///
    /// # Errors
    /// As [`MemoryTable::register`].
    ///
    /// # Safety
    /// As [`MemoryTable::register`].
    pub unsafe fn register_persistent(
        &self,
        pd: PdHandle,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: AccessFlags,
        persist: Option<Arc<dyn Persist>>,
    ) -> Result<Arc<Region>, MemError> {
        if (ptr.is_null() && len > 0) || (ptr as usize).checked_add(len).is_none() {
            return Err(MemError::Range(len as u64));
        }
        let iova = if access.contains(AccessFlags::ZERO_BASED) {
            0
        } else {
            iova
        };
        // SAFETY: the caller promises the same.
        let mapping = unsafe { Mapping::borrow(ptr, len, persist) };
        self.add_region(pd, mapping, iova, access)
    }

    /// Changes domain, memory or rights of a region under the same key; `old` ends with it, as by
    /// [`MemoryTable::deregister`]. For memory of the program as in [`MemoryTable::register_persistent`].
    ///
    /// # Errors
    /// While windows are bound to it, when it was ended before, or as [`MemoryTable::register`]; it stays as it was then.
    ///
    /// # Safety
    /// As [`MemoryTable::register`].
    pub unsafe fn reregister(&self, old: &Region, new: &NewRegion) -> Result<Arc<Region>, MemError> {
        let range = (new.ptr as usize).checked_add(new.len);
        if (new.ptr.is_null() && new.len > 0) || range.is_none() {
            return Err(MemError::Range(new.len as u64));
        }
        let iova = match new.access.contains(AccessFlags::ZERO_BASED) {
            true => 0,
            false => new.iova,
        };
        // SAFETY: the caller promises the same.
        let mapping = unsafe { Mapping::borrow(new.ptr, new.len, new.persist.clone()) };
        self.check_region(&mapping, iova, new.access)?;
        let mut inner = self.inner.write();
        let index = old.key >> 8;
        match inner.entries.get(&index) {
            Some(e) if matches!(e.kind, Kind::Region) && e.key == old.key => {}
            _ => return Err(MemError::NotFound),
        }
        inner.hold(new.pd)?;
        // Closes it, and gives back the old domain.
        if let Err(e) = inner.remove(old.key) {
            inner.release(new.pd);
            return Err(e);
        }
        inner.release(new.pd);
        let open = Open {
            mapping: mapping.clone(),
            iova,
            access: new.access,
        };
        inner.insert(new.pd, old.key, Kind::Region, Some(open))?;
        Ok(Arc::new(Region {
            pd: new.pd,
            key: old.key,
            iova,
            access: new.access,
            mapping,
        }))
    }

    fn check_region(&self, mapping: &Mapping, iova: u64, access: AccessFlags) -> Result<(), MemError> {
        let len = mapping.len() as u64;
        if len > self.max_mr_size || (len > 0 && iova.checked_add(len - 1).is_none()) {
            return Err(MemError::Range(len));
        }
        check_access(access, mapping.is_persistent())
    }

    /// Ends a region: its key stops resolving, and accesses through spans that were resolved before fail.
    ///
    /// # Errors
    /// While windows are bound to it, or when it was ended before.
    pub fn deregister(&self, region: &Region) -> Result<(), MemError> {
        let mut inner = self.inner.write();
        match inner.entries.get(&(region.key >> 8)) {
            Some(e) if matches!(e.kind, Kind::Region) && e.key == region.key => {}
            _ => return Err(MemError::NotFound),
        }
        inner.remove(region.key)?;
        inner.regions -= 1;
        Ok(())
    }

    /// Ends a region and whatever windows are bound to it: for owners that can't wait for their peers to let go.
    ///
    /// # Errors
    /// When it was ended before.
    pub fn revoke(&self, region: &Region) -> Result<(), MemError> {
        let mut inner = self.inner.write();
        let index = region.key >> 8;
        match inner.entries.get(&index) {
            Some(e) if matches!(e.kind, Kind::Region) && e.key == region.key => {}
            _ => return Err(MemError::NotFound),
        }
        let bound = |e: &Entry| matches!(e.kind, Kind::Window(_, BoundTo { region: Some(r), .. }) if r == index);
        let windows: Vec<u32> = inner
            .entries
            .iter()
            .filter(|(_, e)| bound(e))
            .map(|(i, _)| *i)
            .collect();
        for window in windows {
            inner.close(window);
        }
        inner.remove(region.key)?;
        inner.regions -= 1;
        Ok(())
    }

    /// Makes a target for fast registration, closed at first.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_fast(&self, pd: PdHandle) -> Result<Arc<FastRegion>, MemError> {
        let mut inner = self.inner.write();
        if inner.regions >= self.max_mr {
            return Err(MemError::Limit("memory regions"));
        }
        let key = inner.new_key()?;
        let fast = Arc::new(FastRegion {
            pd,
            key: AtomicU32::new(key),
        });
        inner.insert(pd, key, Kind::Fast(fast.clone()), None)?;
        inner.regions += 1;
        Ok(fast)
    }

    /// Ends a fast region, as [`MemoryTable::deregister`].
    ///
    /// # Errors
    /// While windows are bound to it, or when it was ended before.
    pub fn dealloc_fast(&self, fast: &Arc<FastRegion>) -> Result<(), MemError> {
        let mut inner = self.inner.write();
        let key = fast.rkey().0;
        match inner.entries.get(&(key >> 8)) {
            Some(Entry {
                kind: Kind::Fast(f), ..
            }) if Arc::ptr_eq(f, fast) => {}
            _ => return Err(MemError::NotFound),
        }
        inner.remove(key)?;
        inner.regions -= 1;
        Ok(())
    }

    /// Makes a memory window, closed at first.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_window(&self, pd: PdHandle, kind: WindowKind) -> Result<Arc<Window>, MemError> {
        let mut inner = self.inner.write();
        if inner.windows >= self.max_mw {
            return Err(MemError::Limit("memory windows"));
        }
        let key = inner.new_key()?;
        let window = Arc::new(Window {
            pd,
            kind,
            key: AtomicU32::new(key),
        });
        inner.insert(pd, key, Kind::Window(window.clone(), BoundTo::default()), None)?;
        inner.windows += 1;
        Ok(window)
    }

    /// Ends a window, bound or not.
    ///
    /// # Errors
    /// When it was ended before.
    pub fn dealloc_window(&self, window: &Arc<Window>) -> Result<(), MemError> {
        let mut inner = self.inner.write();
        let key = window.rkey().0;
        match inner.entries.get(&(key >> 8)) {
            Some(Entry {
                kind: Kind::Window(w, _),
                ..
            }) if Arc::ptr_eq(w, window) => {}
            _ => return Err(MemError::NotFound),
        }
        inner.remove(key)?;
        inner.windows -= 1;
        Ok(())
    }

    /// Checks a local scatter/gather element. `need` is empty for reading and [`AccessFlags::LOCAL_WRITE`] for writing.
    ///
    /// # Errors
    /// When key, domain, range or rights don't fit; windows have no local key.
    pub fn resolve_local(&self, pd: PdHandle, sge: &Sge, need: AccessFlags) -> Result<Span, KeyError> {
        let inner = self.inner.read();
        let entry = inner.find(pd, sge.lkey.0)?;
        if matches!(entry.kind, Kind::Window(..)) {
            return Err(KeyError::Unknown);
        }
        let open = entry.open.as_ref().ok_or(KeyError::Closed)?;
        open.span(sge.addr, u64::from(sge.length), need)
    }

    /// Checks a range that a peer names (IBA C9-81 ff.). Don't ask for 0 bytes: their key is not checked (C9-88).
    ///
    /// # Errors
    /// When key, domain, queue pair, range or rights don't fit.
    pub fn resolve_remote(
        &self,
        pd: PdHandle,
        qpn: Qpn,
        rkey: RKey,
        addr: u64,
        len: u32,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let inner = self.inner.read();
        inner.find_remote(pd, qpn, rkey)?.span(addr, u64::from(len), need)
    }

    /// Returns address and length of what is open under a key now, for the text of an error. `None` if nothing is.
    pub fn open_range(&self, key: u32) -> Option<(u64, u64)> {
        let inner = self.inner.read();
        let entry = inner.entries.get(&(key >> 8)).filter(|e| e.key == key)?;
        let open = entry.open.as_ref()?;
        Some((open.iova, open.mapping.len() as u64))
    }

    /// Checks a key that a peer wants everything flushed behind, and returns all that it opens.
    ///
    /// # Errors
    /// When key, domain, queue pair or rights don't fit.
    pub fn resolve_whole(&self, pd: PdHandle, qpn: Qpn, rkey: RKey, need: AccessFlags) -> Result<Span, KeyError> {
        let inner = self.inner.read();
        let open = inner.find_remote(pd, qpn, rkey)?;
        open.span(open.iova, open.mapping.len() as u64, need)
    }

    /// Executes a fast registration: from now on the key opens the range of the backing region.
    ///
    /// # Errors
    /// When the target is open already (invalidate it first), or backing region, range or rights don't fit.
    pub fn fast_register(&self, pd: PdHandle, args: &FastRegister) -> Result<(), KeyError> {
        let mut inner = self.inner.write();
        let zero = args.access.contains(AccessFlags::ZERO_BASED);
        let mapping = inner.view(pd, args.lkey, args.addr, args.length, args.access)?;
        let open = Open {
            mapping,
            iova: if zero { 0 } else { args.iova },
            access: args.access,
        };
        inner.open_fast(pd, args.key, open)
    }

    /// The same with several pieces of regions, each given as a local element: from now on the key opens them as one range, from
    /// the address `iova` on (zero with [`AccessFlags::ZERO_BASED`]), in this order.
    ///
    /// # Errors
    /// As [`MemoryTable::fast_register`]; also with the right to atomics, which pieces have no order for.
    pub fn fast_register_list(
        &self,
        pd: PdHandle,
        key: RKey,
        pieces: &[Sge],
        iova: u64,
        access: AccessFlags,
    ) -> Result<(), KeyError> {
        if access.contains(AccessFlags::REMOTE_ATOMIC) {
            return Err(KeyError::Access);
        }
        let mut inner = self.inner.write();
        let view = |piece: &Sge| inner.view(pd, piece.lkey, piece.addr, piece.length.into(), access);
        let mappings = pieces.iter().map(view).collect::<Result<Vec<_>, _>>()?;
        let mapping = Mapping::scattered(mappings).ok_or(KeyError::Range)?;
        let zero = access.contains(AccessFlags::ZERO_BASED);
        let iova = if zero { 0 } else { iova };
        inner.open_fast(pd, key, Open { mapping, iova, access })
    }

    /// Executes a window bind (IBA 10.6.7.2, C10-72 to C10-75).
    ///
    /// # Errors
    /// When window or region can't be bound like this; the window stays as it was.
    pub fn bind_window(&self, pd: PdHandle, qpn: Qpn, args: &BindWindow) -> Result<(), KeyError> {
        let mut inner = self.inner.write();
        let target = inner.entries.get(&(args.key.0 >> 8)).ok_or(KeyError::Unknown)?;
        let Kind::Window(window, _) = &target.kind else {
            return Err(KeyError::State);
        };
        let kind = window.kind;
        if target.pd != pd && kind != WindowKind::Type2A {
            return Err(KeyError::WrongPd);
        }
        let zero = args.access.contains(AccessFlags::ZERO_BASED);
        if kind.is_type2() && (target.open.is_some() || args.length == 0) {
            return Err(KeyError::State);
        }
        if kind == WindowKind::Type1 && zero {
            return Err(KeyError::Access);
        }
        let open = match args.length {
            0 => None,
            _ => Some(inner.window_view(pd, args, zero)?),
        };
        let (index, bound) = (args.key.0 >> 8, open.is_some());
        inner.close(index);
        if bound && let Some(region) = inner.entries.get_mut(&(args.lkey.0 >> 8)) {
            region.windows += 1;
        }
        let target = inner.entries.get_mut(&index).ok_or(KeyError::Unknown)?;
        target.key = args.key.0;
        target.open = open;
        if let Kind::Window(window, to) = &mut target.kind {
            window.key.store(args.key.0, Ordering::Release);
            *to = BoundTo {
                region: bound.then_some(args.lkey.0 >> 8),
                qpn: kind.is_type2().then_some(qpn),
            };
        }
        Ok(())
    }

    /// Closes a fast region or a type-2 window: a local invalidate, or a SEND with invalidate from a peer
    /// (IBA 10.6.7.2.6). A window must belong to the queue pair `qpn`.
    ///
    /// # Errors
    /// When the key does not name such an object, or windows are bound to the region.
    pub fn invalidate(&self, pd: PdHandle, qpn: Qpn, rkey: RKey) -> Result<(), KeyError> {
        let mut inner = self.inner.write();
        let entry = inner.find_for(pd, rkey)?;
        match &entry.kind {
            Kind::Region => return Err(KeyError::State),
            Kind::Fast(_) if entry.windows > 0 => return Err(KeyError::State),
            Kind::Fast(_) => {}
            Kind::Window(window, _) if window.kind == WindowKind::Type1 => return Err(KeyError::State),
            Kind::Window(_, to) if to.qpn.is_some_and(|owner| owner != qpn) => return Err(KeyError::WrongQp),
            Kind::Window(..) => {}
        }
        inner.close(rkey.0 >> 8);
        Ok(())
    }

    /// Closes the type-2 windows of a queue pair that is going away.
    pub fn forget_qp(&self, qpn: Qpn) {
        let mut inner = self.inner.write();
        if inner.windows == 0 {
            return;
        }
        let owned = |e: &Entry| matches!(e.kind, Kind::Window(_, BoundTo { qpn: Some(q), .. }) if q == qpn);
        let indices: Vec<u32> = inner
            .entries
            .iter()
            .filter(|(_, e)| owned(e))
            .map(|(i, _)| *i)
            .collect();
        for index in indices {
            inner.close(index);
        }
    }
}

impl Inner {
    /// What a fast registration with these rights opens of a region.
    fn view(
        &self,
        pd: PdHandle,
        lkey: LKey,
        addr: u64,
        length: u64,
        access: AccessFlags,
    ) -> Result<Arc<Mapping>, KeyError> {
        let backing = self.find(pd, lkey.0)?;
        if !matches!(backing.kind, Kind::Region) {
            return Err(KeyError::State);
        }
        let backing = backing.open.as_ref().ok_or(KeyError::Closed)?;
        let writes = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if !may_open(backing.access, access, writes) {
            return Err(KeyError::Access);
        }
        let (offset, len) = backing.offset(addr, length)?;
        backing.mapping.derive(offset, len).ok_or(KeyError::Range)
    }

    /// Opens a fast region under this key.
    fn open_fast(&mut self, pd: PdHandle, key: RKey, open: Open) -> Result<(), KeyError> {
        let target = self.find_index(pd, key)?;
        if !matches!(target.kind, Kind::Fast(_)) || target.open.is_some() || target.windows > 0 {
            return Err(KeyError::State);
        }
        let len = open.mapping.len() as u64;
        if len > 0 && open.iova.checked_add(len - 1).is_none() {
            return Err(KeyError::Range);
        }
        let target = self.entries.get_mut(&(key.0 >> 8)).ok_or(KeyError::Unknown)?;
        target.key = key.0;
        if let Kind::Fast(fast) = &target.kind {
            fast.key.store(key.0, Ordering::Release);
        }
        target.open = Some(open);
        Ok(())
    }

    /// The object of a key that a queue pair names: of its protection domain, or a type 2A window, which is bound to a queue
    /// pair alone.
    fn find_for(&self, pd: PdHandle, rkey: RKey) -> Result<&Entry, KeyError> {
        let entry = self.entries.get(&(rkey.0 >> 8)).filter(|e| e.key == rkey.0);
        let entry = entry.ok_or(KeyError::Unknown)?;
        let anywhere = matches!(&entry.kind, Kind::Window(w, _) if w.kind == WindowKind::Type2A);
        match entry.pd == pd || anywhere {
            true => Ok(entry),
            false => Err(KeyError::WrongPd),
        }
    }

    /// What a peer's key opens to a queue pair.
    fn find_remote(&self, pd: PdHandle, qpn: Qpn, rkey: RKey) -> Result<&Open, KeyError> {
        let entry = self.find_for(pd, rkey)?;
        if let Kind::Window(_, BoundTo { qpn: Some(owner), .. }) = entry.kind
            && owner != qpn
        {
            return Err(KeyError::WrongQp);
        }
        entry.open.as_ref().ok_or(KeyError::Closed)
    }

    /// What a window shall open, checked against the region that it is bound to.
    fn window_view(&self, pd: PdHandle, args: &BindWindow, zero: bool) -> Result<Open, KeyError> {
        let region = self.find(pd, args.lkey.0)?;
        if matches!(region.kind, Kind::Window(..)) {
            return Err(KeyError::State);
        }
        let region = region.open.as_ref().ok_or(KeyError::Closed)?;
        if region.access.contains(AccessFlags::ZERO_BASED) || !region.access.contains(AccessFlags::MW_BIND) {
            return Err(KeyError::Access);
        }
        let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if !may_open(region.access, args.access, writes) {
            return Err(KeyError::Access);
        }
        let (offset, len) = region.offset(args.addr, args.length)?;
        Ok(Open {
            mapping: region.mapping.derive(offset, len).ok_or(KeyError::Range)?,
            iova: if zero { 0 } else { args.addr },
            access: args.access,
        })
    }
}
