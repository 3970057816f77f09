//! Protection domains, memory regions, revocable regions and memory windows.

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use roce_verbs::mem::{NewRegion, PdHandle, Persist, Region, Renewable, RenewedKey, WindowKind};
use roce_verbs::{AccessFlags, RKey, Sge, provider::VerbsError};

use crate::{
    device::{Device, DeviceInner},
    error::mem_error,
};

/// A protection domain.
#[derive(Clone, Debug)]
pub struct Pd(pub(crate) Arc<PdInner>);

#[derive(Debug)]
pub(crate) struct PdInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) handle: PdHandle,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        let Ok(engines) = self.device.live() else { return };
        // Everything made in it holds it, so it is empty now; but a closed device ends no queue pairs any more.
        if let Err(e) = self.device.mem.dealloc_pd(self.handle)
            && !engines.is_closed()
        {
            tracing::error!("releasing a protection domain failed: {e}");
        }
    }
}

impl Pd {
    pub(crate) fn check(&self, device: &Arc<DeviceInner>) -> Result<(), VerbsError> {
        device.check(&self.0.device, "protection domain")
    }
}

/// A memory region. It ends with its last clone; when that drop has returned, no peer reaches the memory any more.
#[derive(Clone, Debug)]
pub struct Mr(Arc<MrInner>);

#[derive(Debug)]
struct MrInner {
    region: Arc<Region>,
    pd: Pd,
    /// The memory is the program's.
    lent: bool,
    persist: Option<Arc<dyn Persist>>,
    ended: AtomicBool,
}

/// Changes to a registration (`ibv_rereg_mr`). What is `None` stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reregister<'a> {
    /// Protection domain.
    pub pd: Option<&'a Pd>,
    /// First byte, bytes, and the address of the first byte.
    pub memory: Option<(*mut u8, usize, u64)>,
    /// Rights.
    pub access: Option<AccessFlags>,
}

impl Drop for MrInner {
    fn drop(&mut self) {
        let device = &self.pd.0.device;
        let Ok(engines) = device.live() else { return };
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        if let Err(e) = device.mem.revoke(&self.region) {
            tracing::error!("deregistering memory failed: {e}");
        }
        // Whoever had resolved the key before is done when the port's lock is free.
        engines.pass_locks();
    }
}

impl Mr {
    fn new(pd: &Pd, region: Arc<Region>, lent: bool, persist: Option<Arc<dyn Persist>>) -> Self {
        Self(Arc::new(MrInner {
            region,
            pd: pd.clone(),
            lent,
            persist,
            ended: AtomicBool::new(false),
        }))
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.0.pd
    }

    /// Ends the registration now, whatever clones there are (`ibv_dereg_mr`). When it has returned no peer reaches the
    /// memory any more. (A drop ends windows that are bound, too.)
    ///
    /// # Errors
    /// [`VerbsError::Busy`] while memory windows are bound to it; nothing changes then.
    pub fn deregister(&self) -> Result<(), VerbsError> {
        let device = &self.0.pd.0.device;
        let engines = device.live()?;
        device.mem.deregister(&self.0.region).map_err(mem_error)?;
        self.0.ended.store(true, Ordering::Release);
        engines.pass_locks();
        Ok(())
    }

    /// Registers the memory again with something changed and the same keys, and ends this registration (`ibv_rereg_mr`).
    ///
    /// # Errors
    /// [`VerbsError::Busy`] while memory windows are bound to it, or why the new registration is not possible; the old one
    /// stays then.
    ///
    /// # Safety
    /// As [`Device::register_mr`], for the memory named or the memory registered before.
    pub unsafe fn reregister(&self, change: &Reregister<'_>) -> Result<Self, VerbsError> {
        if !self.0.lent {
            return Err(VerbsError::Invalid(
                "only memory of the program's own can be registered anew".into(),
            ));
        }
        let (old, device) = (&self.0.region, &self.0.pd.0.device);
        let pd = change.pd.unwrap_or(&self.0.pd);
        pd.check(device)?;
        let (ptr, len, iova) = change.memory.unwrap_or((old.as_ptr(), old.len(), old.addr()));
        let new = NewRegion {
            pd: pd.0.handle,
            ptr,
            len,
            iova,
            access: change.access.unwrap_or(old.access()),
            persist: self.0.persist.clone(),
        };
        // SAFETY: the caller promises it; dropping the region passes the port's lock.
        let region = unsafe { device.mem.reregister(old, &new) }.map_err(mem_error)?;
        self.0.ended.store(true, Ordering::Release);
        device.engines.pass_locks();
        Ok(Self::new(pd, region, true, self.0.persist.clone()))
    }

    /// A scatter/gather element for a range of it. Ranges are checked when the element is used.
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge {
            addr: self.addr().wrapping_add(offset as u64),
            length: u32::try_from(len).unwrap_or(u32::MAX),
            lkey: self.lkey(),
        }
    }
}

/// Addresses, keys, and copies in and out. Peers may change the bytes at any time.
impl Deref for Mr {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0.region
    }
}

impl Device {
    /// Creates a protection domain.
    ///
    /// # Errors
    /// If the limit of the device is reached.
    pub fn alloc_pd(&self) -> Result<Pd, VerbsError> {
        let handle = self.0.mem.alloc_pd().map_err(mem_error)?;
        Ok(Pd(Arc::new(PdInner {
            device: self.0.clone(),
            handle,
        })))
    }

    /// Allocates and registers memory, page-aligned and zeroed.
    ///
    /// # Errors
    /// If the limit of the device is reached, or there is no memory.
    pub fn alloc_mr(&self, pd: &Pd, len: usize, access: AccessFlags) -> Result<Mr, VerbsError> {
        pd.check(&self.0)?;
        self.0.may_register()?;
        let region = self.0.mem.alloc_region(pd.0.handle, len, access).map_err(mem_error)?;
        Ok(Mr::new(pd, region, false, None))
    }

    /// Creates a revocable region, closed until it is granted with [`crate::Qp::post_grant`].
    ///
    /// # Errors
    /// If the limit of the device is reached.
    pub fn alloc_revocable(&self, pd: &Pd) -> Result<Revocable, VerbsError> {
        pd.check(&self.0)?;
        let fast = self.0.mem.alloc_fast(pd.0.handle).map_err(mem_error)?;
        Ok(Revocable(Keyed::new(pd, Renewable::Fast(fast))))
    }

    /// Registers memory of the program, whose first byte gets the address `iova` (zero with
    /// [`AccessFlags::ZERO_BASED`]).
    ///
    /// # Errors
    /// At the device's limit, with rights that don't go together, or when the addresses would wrap.
    ///
    /// # Safety
    /// Until the drop of the last clone of the returned region has returned, peers read and write the `len` bytes at `ptr` at any
    /// time, and the program must not hold Rust references to them. It may unmap or protect them: work that needs a page that is
    /// not there fails with an error. What it puts in their place is accessed as they were.
    pub unsafe fn register_mr(
        &self,
        pd: &Pd,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Mr, VerbsError> {
        // SAFETY: the caller promises the same.
        unsafe { self.register(pd, ptr, len, iova, access, None) }
    }

    /// Like [`Device::register_mr`], of memory that survives the loss of power: `persist` makes bytes of it do so, and peers
    /// may be given the right to FLUSH to persistence.
    ///
    /// # Errors
    /// As [`Device::register_mr`].
    ///
    /// # Safety
    /// As [`Device::register_mr`].
    pub unsafe fn register_persistent_mr(
        &self,
        pd: &Pd,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: AccessFlags,
        persist: Arc<dyn Persist>,
    ) -> Result<Mr, VerbsError> {
        // SAFETY: the caller promises the same.
        unsafe { self.register(pd, ptr, len, iova, access, Some(persist)) }
    }

    /// # Safety
    /// As [`Device::register_mr`].
    unsafe fn register(
        &self,
        pd: &Pd,
        ptr: *mut u8,
        len: usize,
        iova: u64,
        access: AccessFlags,
        persist: Option<Arc<dyn Persist>>,
    ) -> Result<Mr, VerbsError> {
        pd.check(&self.0)?;
        self.0.may_register()?;
        let new = NewRegion {
            pd: pd.0.handle,
            ptr,
            len,
            iova,
            access,
            persist: persist.clone(),
        };
        // SAFETY: the caller promises the same; ending the region passes the port's lock, under which all of the device's
        // queue pairs work.
        let region = unsafe { self.0.mem.register(&new) };
        Ok(Mr::new(pd, region.map_err(mem_error)?, true, persist))
    }

    /// Makes a memory window of type 2B, closed until it is bound with [`crate::Qp::post_bind`].
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_mw(&self, pd: &Pd) -> Result<Mw, VerbsError> {
        self.alloc_window(pd, WindowKind::Type2)
    }

    /// Makes a memory window of any type.
    ///
    /// # Errors
    /// At the device's limit.
    pub fn alloc_window(&self, pd: &Pd, kind: WindowKind) -> Result<Mw, VerbsError> {
        pd.check(&self.0)?;
        let window = self.0.mem.alloc_window(pd.0.handle, kind).map_err(mem_error)?;
        Ok(Mw(Keyed::new(pd, Renewable::Window(window)), kind))
    }
}

/// Object whose key work requests of a queue pair change.
#[derive(Debug)]
pub(crate) struct Keyed {
    pd: Pd,
    pub(crate) key: Mutex<RenewedKey>,
}

impl Keyed {
    fn new(pd: &Pd, object: Renewable) -> Arc<Self> {
        Arc::new(Self {
            pd: pd.clone(),
            key: Mutex::new(RenewedKey::new(object)),
        })
    }

    /// Returns the key that it has once everything posted is executed.
    fn rkey(&self) -> RKey {
        self.key.lock().posted.key
    }
}

impl Drop for Keyed {
    fn drop(&mut self) {
        let device = &self.pd.0.device;
        let Ok(engines) = device.live() else { return };
        if let Err(e) = self.key.get_mut().release(&device.mem) {
            tracing::error!("releasing a memory window or revocable region failed: {e}");
        }
        engines.pass_locks();
    }
}

/// A fast-registered region: a key that is renewed and taken back in the order of a send queue.
#[derive(Clone, Debug)]
pub struct Revocable(pub(crate) Arc<Keyed>);

impl Revocable {
    /// Returns the current key.
    pub fn rkey(&self) -> RKey {
        self.0.rkey()
    }
}

/// A memory window.
#[derive(Clone, Debug)]
pub struct Mw(pub(crate) Arc<Keyed>, WindowKind);

impl Mw {
    /// Returns the key that it has once everything posted is executed.
    pub fn rkey(&self) -> RKey {
        self.0.rkey()
    }

    /// Returns its type.
    pub fn kind(&self) -> WindowKind {
        self.1
    }
}
