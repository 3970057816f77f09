//! The table of keys: protection domains, and the life of regions and windows.

pub(crate) mod cache;
mod entries;
mod keys;

use std::sync::{Arc, atomic::AtomicU32};

use parking_lot::{Mutex, RwLock};
use rand_chacha::{
    ChaCha12Rng,
    rand_core::{RngCore, SeedableRng},
};
use roce_verbs::{AccessFlags, DeviceLimits, provider::Memory};

use self::entries::{BoundTo, Entry, Inner, KeyMap, Kind, Open, check_access};
use crate::{
    error::MemError,
    object::{FastRegion, PdHandle, Region, Window, WindowKind},
    span::{Mapping, Persist},
};

/// New attributes of a region ([`MemoryTable::reregister`]).
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
    /// Flushes it to persistence, so that it survives the loss of power.
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
                qp_windows: KeyMap::default(),
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
        let windows = inner.entries.get_mut(&index).map(|e| std::mem::take(&mut e.windows));
        for window in windows.unwrap_or_default() {
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
}
