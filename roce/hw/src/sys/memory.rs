//! Protection domains, registrations and memory windows.

use std::{
    io,
    ops::Range,
    ptr::{self, NonNull},
    sync::Arc,
};

use rdma_sys::{ibv_alloc_mw, ibv_alloc_pd, ibv_dereg_mr, ibv_mr, ibv_mw, ibv_mw_type, ibv_pd, ibv_reg_mr_iova2};
use roce_verbs::{
    AccessFlags, LKey, RKey,
    provider::{KeyKind, Memory},
};

use super::{
    context::Context,
    object::{Owned, done},
};

/// Protection domain.
pub(crate) struct Pd {
    raw: Owned<ibv_pd>,
    _context: Arc<Context>,
}

impl Pd {
    pub(crate) fn alloc(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { Owned::new(ibv_alloc_pd(context.as_ptr())) }?;
        let _context = context.clone();
        Ok(Arc::new(Self { raw, _context }))
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

/// Registration.
pub(crate) struct Mr {
    raw: NonNull<ibv_mr>,
    addr: u64,
    len: usize,
    memory: Arc<dyn Memory>,
    _pd: Arc<Pd>,
}

// SAFETY: a registration is only read, and ended by whoever has it last.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers a range of memory, at an address of the caller's choice.
    ///
    /// # Errors
    /// If the range is outside the memory, or the memory another process's; errors of the system.
    pub(crate) fn register(
        pd: &Arc<Pd>,
        memory: &Arc<dyn Memory>,
        range: Range<usize>,
        iova: Option<u64>,
        access: AccessFlags,
    ) -> io::Result<Self> {
        if range.start > range.end || range.end > memory.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if memory.foreign().is_some() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "hardware can't access memory of another process",
            ));
        }
        let first = memory.as_ptr().wrapping_add(range.start);
        let addr = iova.unwrap_or(first as u64);
        let access = access - AccessFlags::ZERO_BASED;
        // SAFETY: the range is memory that stays where it is as long as `memory` lives, which the registration keeps.
        let raw = unsafe { ibv_reg_mr_iova2(pd.as_ptr(), first.cast(), range.len(), addr, access.bits()) };
        Ok(Self {
            raw: NonNull::new(raw).ok_or_else(io::Error::last_os_error)?,
            addr,
            len: range.len(),
            memory: memory.clone(),
            _pd: pd.clone(),
        })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }

    /// Returns the address of the first byte, for SGEs and for peers.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn keys(&self) -> (LKey, RKey) {
        // SAFETY: the registration lives.
        unsafe { (LKey((*self.as_ptr()).lkey), RKey((*self.as_ptr()).rkey)) }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        if let Err(e) = done(unsafe { ibv_dereg_mr(self.as_ptr()) }) {
            tracing::error!(
                "deregistering {} bytes failed ({e}): they are never given back, since the device may use them",
                self.memory.len()
            );
            std::mem::forget(self.memory.clone());
        }
    }
}

/// Memory window.
pub(crate) struct Mw {
    raw: Owned<ibv_mw>,
    _pd: Arc<Pd>,
}

impl Mw {
    /// Allocates a window, of type 2 if the kind is not type 1.
    pub(crate) fn alloc(pd: &Arc<Pd>, kind: KeyKind) -> io::Result<Self> {
        let kind = match kind {
            KeyKind::Window1 => ibv_mw_type::IBV_MW_TYPE_1,
            KeyKind::Window2 | KeyKind::FastRegistration => ibv_mw_type::IBV_MW_TYPE_2,
        };
        // SAFETY: the domain lives. `None` is a device without windows.
        let raw = unsafe { Owned::new(ibv_alloc_mw(pd.as_ptr(), kind).unwrap_or(ptr::null_mut())) }?;
        Ok(Self { raw, _pd: pd.clone() })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_mw {
        self.raw.as_ptr()
    }

    pub(crate) fn rkey(&self) -> RKey {
        // SAFETY: the window lives.
        RKey(unsafe { (*self.as_ptr()).rkey })
    }

    /// Notes the key of a type 2 window, which drivers look at when it is bound again.
    pub(crate) fn set_rkey(&mut self, key: RKey) {
        // SAFETY: the window lives, and nobody else has it.
        unsafe { (*self.as_ptr()).rkey = key.0 };
    }
}
