//! Protection domains, memory regions, revocable regions and memory windows.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use roce_mem::{FastRegion, NewRegion, PdHandle, Persist, PostedKey, Region, Window, WindowKind};
use roce_verbs::{
    AccessFlags, LKey, RKey, Sge,
    provider::{RangeError, VerbsError},
};

use crate::device::{Device, DeviceInner, mem_error};

/// A protection domain.
#[derive(Clone)]
pub struct Pd(pub(crate) Arc<PdInner>);

pub(crate) struct PdInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) handle: PdHandle,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        if self.device.engines.is_inherited() {
            return;
        }
        // Everything made in it holds it, so it is empty now; but a closed device ends no queue pairs any more.
        if let Err(e) = self.device.mem.dealloc_pd(self.handle)
            && !self.device.engines.is_closed()
        {
            tracing::error!("releasing a protection domain failed: {e}");
        }
    }
}

impl core::fmt::Debug for Pd {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Pd").field(&self.0.handle).finish()
    }
}

impl Pd {
    /// Whether it was made by this device.
    pub(crate) fn check(&self, device: &Arc<DeviceInner>) -> Result<(), VerbsError> {
        match Arc::ptr_eq(&self.0.device, device) {
            true => Ok(()),
            false => Err(VerbsError::Invalid("the protection domain is another device's".into())),
        }
    }
}

/// A memory region. It ends with its last clone; when that drop has returned, no peer reaches the memory any more.
#[derive(Clone)]
pub struct Mr(Arc<MrInner>);

struct MrInner {
    region: Arc<Region>,
    pd: Pd,
    /// The memory is the program's.
    lent: Option<Lent>,
    ended: AtomicBool,
}

/// Memory that the program registered.
struct Lent {
    persist: Option<Arc<dyn Persist>>,
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
        if self.ended.load(Ordering::Acquire) || device.engines.is_inherited() {
            return;
        }
        if let Err(e) = device.mem.revoke(&self.region) {
            tracing::error!("deregistering memory failed: {e}");
        }
        // Whoever had resolved the key before is done when the port's lock is free.
        device.engines.pass_locks();
    }
}

impl core::fmt::Debug for Mr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mr")
            .field("addr", &format_args!("{:#x}", self.addr()))
            .field("len", &self.len())
            .field("lkey", &self.lkey())
            .finish_non_exhaustive()
    }
}

impl Mr {
    fn of(pd: &Pd, region: Arc<Region>, lent: Option<Lent>) -> Self {
        Self(Arc::new(MrInner {
            region,
            pd: pd.clone(),
            lent,
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
        if device.engines.is_inherited() {
            return Err(VerbsError::Closed);
        }
        device.mem.deregister(&self.0.region).map_err(mem_error)?;
        self.0.ended.store(true, Ordering::Release);
        device.engines.pass_locks();
        Ok(())
    }

    /// Registers the memory anew with something changed and the same keys, and ends this registration (`ibv_rereg_mr`).
    ///
    /// # Errors
    /// [`VerbsError::Busy`] while memory windows are bound to it, or why the new registration is not possible; the old one
    /// stays then.
    ///
    /// # Safety
    /// As [`Device::register_mr`], for the memory named or the memory registered before.
    pub unsafe fn reregister(&self, change: &Reregister<'_>) -> Result<Self, VerbsError> {
        let Some(lent) = &self.0.lent else {
            return Err(VerbsError::Invalid(
                "only memory of the program's own can be registered anew".into(),
            ));
        };
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
            persist: lent.persist.clone(),
        };
        // SAFETY: the caller promises it; dropping the region passes the port's lock.
        let region = unsafe { device.mem.reregister(old, &new) }.map_err(mem_error)?;
        self.0.ended.store(true, Ordering::Release);
        device.engines.pass_locks();
        let persist = lent.persist.clone();
        Ok(Self::of(pd, region, Some(Lent { persist })))
    }

    /// A scatter/gather element for a range of it. Ranges are checked when the element is used.
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge {
            addr: self.addr().wrapping_add(offset as u64),
            length: u32::try_from(len).unwrap_or(u32::MAX),
            lkey: self.lkey(),
        }
    }

    /// The rights.
    pub fn access(&self) -> AccessFlags {
        self.0.region.access()
    }

    /// Returns the address of the first byte, for SGEs and for peers.
    pub fn addr(&self) -> u64 {
        self.0.region.addr()
    }

    /// Returns the length, bytes.
    pub fn len(&self) -> usize {
        self.0.region.len()
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the local key.
    pub fn lkey(&self) -> LKey {
        self.0.region.lkey()
    }

    /// Returns the remote key. It is valid if the access flags include a remote right.
    pub fn rkey(&self) -> RKey {
        self.0.region.rkey()
    }

    /// Copies bytes out. Peers may change them at any time.
    ///
    /// # Errors
    /// If the range is outside the region. Then nothing is copied.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        self.0.region.read(offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// If the range is outside the region. Then nothing is copied.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.0.region.write(offset, data)
    }

    /// Returns the first byte, for system calls that read or write the memory (`pread`, `pwrite`, io_uring).
    ///
    /// It is valid while the region lives. Never make a reference from it: peers may change the memory at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.region.as_ptr()
    }
}

/// # Safety
/// As [`Device::register_mr`].
unsafe fn register(
    pd: &Pd,
    ptr: *mut u8,
    len: usize,
    iova: u64,
    access: AccessFlags,
    persist: Option<Arc<dyn Persist>>,
) -> Result<Mr, VerbsError> {
    pd.0.device.may_register()?;
    let mem = &pd.0.device.mem;
    // SAFETY: the caller promises the same; ending the region passes the port's lock, under which all of the device's
    // queue pairs work.
    let region = unsafe { mem.register_persistent(pd.0.handle, ptr, len, iova, access, persist.clone()) };
    Ok(Mr::of(pd, region.map_err(mem_error)?, Some(Lent { persist })))
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
        Ok(Mr::of(pd, region, None))
    }

    /// Creates a revocable region, closed until it is granted with [`crate::Qp::post_grant`].
    ///
    /// # Errors
    /// If the limit of the device is reached.
    pub fn alloc_revocable(&self, pd: &Pd) -> Result<Revocable, VerbsError> {
        pd.check(&self.0)?;
        let fast = self.0.mem.alloc_fast(pd.0.handle).map_err(mem_error)?;
        let key = Mutex::new(PostedKey::new(fast.rkey()));
        Ok(Revocable(Arc::new(RevocableInner {
            fast,
            pd: pd.clone(),
            key,
        })))
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
        pd.check(&self.0)?;
        // SAFETY: the caller promises the same.
        unsafe { register(pd, ptr, len, iova, access, None) }
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
        pd.check(&self.0)?;
        // SAFETY: the caller promises the same.
        unsafe { register(pd, ptr, len, iova, access, Some(persist)) }
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
        let key = Mutex::new(PostedKey::new(window.rkey()));
        Ok(Mw(Arc::new(MwInner {
            window,
            pd: pd.clone(),
            key,
        })))
    }
}

/// A fast-registered region: a key that is renewed and taken back in the order of a send queue.
#[derive(Clone)]
pub struct Revocable(Arc<RevocableInner>);

struct RevocableInner {
    fast: Arc<FastRegion>,
    pd: Pd,
    key: Mutex<PostedKey>,
}

impl Drop for RevocableInner {
    fn drop(&mut self) {
        let device = &self.pd.0.device;
        if device.engines.is_inherited() {
            return;
        }
        if let Err(e) = device.mem.dealloc_fast(&self.fast) {
            tracing::error!("releasing a revocable region failed: {e}");
        }
        device.engines.pass_locks();
    }
}

impl Revocable {
    pub(crate) fn posted(&self) -> &Mutex<PostedKey> {
        &self.0.key
    }

    /// Returns the current key.
    pub fn rkey(&self) -> RKey {
        self.0.key.lock().key
    }
}

/// A memory window.
#[derive(Clone)]
pub struct Mw(Arc<MwInner>);

struct MwInner {
    window: Arc<Window>,
    pd: Pd,
    key: Mutex<PostedKey>,
}

impl Drop for MwInner {
    fn drop(&mut self) {
        let device = &self.pd.0.device;
        if device.engines.is_inherited() {
            return;
        }
        if let Err(e) = device.mem.dealloc_window(&self.window) {
            tracing::error!("releasing a memory window failed: {e}");
        }
        device.engines.pass_locks();
    }
}

impl Mw {
    /// The key that it has once everything posted is executed.
    pub fn rkey(&self) -> RKey {
        self.0.key.lock().key
    }

    /// Its type.
    pub fn kind(&self) -> WindowKind {
        self.0.window.kind()
    }

    pub(crate) fn posted(&self) -> &Mutex<PostedKey> {
        &self.0.key
    }
}
