//! The table of keys: protection domains, and the life of regions and windows.

pub(crate) mod cache;
mod entries;
mod keys;

use std::sync::Arc;

use crate::{AccessFlags, DeviceLimits, provider::Memory};
use parking_lot::{Mutex, RwLock};
use rand_chacha::{
    ChaCha12Rng,
    rand_core::{RngCore, SeedableRng},
};

use self::entries::{BoundTo, Inner, KeyMap, Kind};
use crate::mem::{
    error::MemError,
    object::{FastRegion, Open, PdHandle, Region, Window, WindowKind},
    span::{Mapping, Persist},
};

/// Memory of the program to register ([`MemoryTable::register`], [`MemoryTable::reregister`]).
pub struct NewRegion {
    /// Protection domain.
    pub pd: PdHandle,
    /// First byte of the program's memory.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Address of the first byte; zero with [`AccessFlags::ZERO_BASED`], whatever this says.
    pub iova: u64,
    /// Rights.
    pub access: AccessFlags,
    /// Makes it survive the loss of power, so that peers may be given the right to FLUSH to persistence.
    pub persist: Option<Arc<dyn Persist>>,
}

/// All protection domains, regions and windows of a device, and their keys.
///
/// Keys come whole from a CSPRNG, so that a peer can't guess one. Shared between threads; every call is one short lock.
pub struct MemoryTable {
    inner: RwLock<Inner>,
    /// For the bytes of keys that owners choose; apart from the table, which traffic locks.
    bytes: Mutex<ChaCha12Rng>,
}

impl core::fmt::Debug for MemoryTable {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("MemoryTable").finish_non_exhaustive()
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
                limits: limits.clone(),
                rng,
                pds: KeyMap::default(),
                next_pd,
                entries: KeyMap::default(),
                regions: 0,
                windows: 0,
                qp_windows: KeyMap::default(),
            }),
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
        if inner.pds.len() >= inner.limits.max_pd as usize {
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

    fn add_region(&self, pd: PdHandle, open: Open) -> Result<Arc<Region>, MemError> {
        let mut inner = self.inner.write();
        check(&open, &inner.limits)?;
        let key = inner.new_region_key()?;
        inner.insert(pd, key, Kind::Region, Some(open.clone()))?;
        Ok(Arc::new(Region { pd, key, open }))
    }

    /// Allocates zeroed memory on a page boundary and registers it. Its addresses start at the memory's own address, or
    /// at zero with [`AccessFlags::ZERO_BASED`].
    ///
    /// # Errors
    /// At a limit, without memory, or with rights that don't go together.
    pub fn alloc_region(&self, pd: PdHandle, len: usize, access: AccessFlags) -> Result<Arc<Region>, MemError> {
        if len as u64 > self.inner.read().limits.max_mr_size {
            return Err(MemError::Range(len as u64));
        }
        let mapping = Mapping::allocate(len)?;
        let iova = mapping.as_ptr() as u64;
        self.add_region(pd, Open::new(mapping, iova, access))
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
        let iova = iova.unwrap_or(mapping.as_ptr() as u64);
        self.add_region(pd, Open::new(mapping, iova, access))
    }

    /// Registers memory of the program.
    ///
    /// # Errors
    /// At a limit, with rights that don't go together, or when the addresses would wrap.
    ///
    /// # Safety
    /// Until [`MemoryTable::deregister`] has returned, every lock under which a queue pair of this table works has been passed once,
    /// and no call of [`Region::read`] or [`Region::write`] is under way, the `len` bytes from `ptr` on are read and written at any
    /// time, and the program must not hold Rust references to them. It may unmap or protect them: accesses fail then. What it puts in
    /// their place is accessed as they were.
    pub unsafe fn register(&self, new: &NewRegion) -> Result<Arc<Region>, MemError> {
        // SAFETY: the caller promises the same.
        let open = unsafe { borrow(new) }?;
        self.add_region(new.pd, open)
    }

    /// Changes domain, memory or rights of a region under the same key; `old` ends with it, as by
    /// [`MemoryTable::deregister`].
    ///
    /// # Errors
    /// While windows are bound to it, when it was ended before, or as [`MemoryTable::register`]; it stays as it was then.
    ///
    /// # Safety
    /// As [`MemoryTable::register`].
    pub unsafe fn reregister(&self, old: &Region, new: &NewRegion) -> Result<Arc<Region>, MemError> {
        // SAFETY: the caller promises the same.
        let open = unsafe { borrow(new) }?;
        let (pd, key) = (new.pd, old.key);
        let mut inner = self.inner.write();
        check(&open, &inner.limits)?;
        if !inner.pds.contains_key(&pd.0) {
            return Err(MemError::NotFound);
        }
        inner.remove(key)?;
        inner.insert(pd, key, Kind::Region, Some(open.clone()))?;
        Ok(Arc::new(Region { pd, key, open }))
    }

    /// Ends a region: its key stops resolving, and accesses through spans that were resolved before fail.
    ///
    /// # Errors
    /// While windows are bound to it, or when it was ended before.
    pub fn deregister(&self, region: &Region) -> Result<(), MemError> {
        self.inner.write().remove(region.key)
    }

    /// Ends a region and the windows that are bound to it, for owners that can't wait until their peers give the windows back.
    ///
    /// # Errors
    /// When it was ended before.
    pub fn revoke(&self, region: &Region) -> Result<(), MemError> {
        let mut inner = self.inner.write();
        inner.close_windows(region.key);
        inner.remove(region.key)
    }

    /// Makes a target for fast registration, closed at first.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_fast(&self, pd: PdHandle) -> Result<Arc<FastRegion>, MemError> {
        let mut inner = self.inner.write();
        let key = inner.new_region_key()?;
        let fast = Arc::new(FastRegion { key: key.into() });
        inner.insert(pd, key, Kind::Fast(fast.clone()), None)?;
        Ok(fast)
    }

    /// Ends a fast region, as [`MemoryTable::deregister`].
    ///
    /// # Errors
    /// While windows are bound to it, or when it was ended before.
    pub fn dealloc_fast(&self, fast: &FastRegion) -> Result<(), MemError> {
        self.inner.write().remove(fast.rkey().0)
    }

    /// Makes a memory window, closed at first.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_window(&self, pd: PdHandle, kind: WindowKind) -> Result<Arc<Window>, MemError> {
        let mut inner = self.inner.write();
        let key = inner.new_window_key()?;
        let window = Arc::new(Window { kind, key: key.into() });
        inner.insert(pd, key, Kind::Window(window.clone(), BoundTo::default()), None)?;
        Ok(window)
    }

    /// Ends a window, bound or not.
    ///
    /// # Errors
    /// When it was ended before.
    pub fn dealloc_window(&self, window: &Window) -> Result<(), MemError> {
        self.inner.write().remove(window.rkey().0)
    }
}

/// Opens memory of the program.
///
/// # Safety
/// As [`MemoryTable::register`].
unsafe fn borrow(new: &NewRegion) -> Result<Open, MemError> {
    if (new.ptr.is_null() && new.len > 0) || (new.ptr as usize).checked_add(new.len).is_none() {
        return Err(MemError::Range(new.len as u64));
    }
    // SAFETY: the caller promises the same.
    let mapping = unsafe { Mapping::borrow(new.ptr, new.len, new.persist.clone()) };
    Ok(Open::new(mapping, new.iova, new.access))
}

/// Checks range and rights of a new region.
fn check(open: &Open, limits: &DeviceLimits) -> Result<(), MemError> {
    if open.len() > limits.max_mr_size || open.wraps() {
        return Err(MemError::Range(open.len()));
    }
    let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    if open.access.intersects(writes) && !open.access.contains(AccessFlags::LOCAL_WRITE) {
        return Err(MemError::Access);
    }
    match open.access.contains(AccessFlags::FLUSH_PERSISTENT) && !open.mapping.is_persistent() {
        true => Err(MemError::NotPersistent),
        false => Ok(()),
    }
}
