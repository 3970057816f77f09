//! Protection domains, registrations and memory windows.

use std::{io, ops::Range, ptr::NonNull, sync::Arc};

use rdma_sys::{
    ibv_alloc_mw, ibv_alloc_pd, ibv_dealloc_mw, ibv_dealloc_pd, ibv_dereg_mr, ibv_mr, ibv_mw, ibv_mw_type, ibv_pd,
    ibv_reg_mr_iova2,
};
use roce_verbs::{AccessFlags, LKey, RKey, provider::Memory};

use super::{Context, done, made};

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs lets any thread use a domain, and several at a time.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(crate) fn alloc(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ibv_alloc_pd(context.as_ptr()) })?;
        let context = context.clone();
        Ok(Arc::new(Self { raw, context }))
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: what is made in it keeps it, so nothing is left.
        if let Err(e) = done(unsafe { ibv_dealloc_pd(self.as_ptr()) }) {
            tracing::warn!("releasing a protection domain of {} failed: {e}", self.context.name());
        }
    }
}

/// A registration.
#[derive(Debug)]
pub(crate) struct Mr {
    raw: NonNull<ibv_mr>,
    memory: Arc<dyn Memory>,
    pd: Arc<Pd>,
}

// SAFETY: a registration is only read, and ended by whoever has it last.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers a range of memory, at an address of the caller's choice.
    ///
    /// # Errors
    /// When the range is outside; what the system says.
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
        let first = memory.as_ptr().wrapping_add(range.start);
        let iova = iova.unwrap_or(first as u64);
        let access = access - AccessFlags::ZERO_BASED;
        // SAFETY: the range is memory that stays where it is as long as `memory` lives, which the registration keeps.
        let raw = unsafe { ibv_reg_mr_iova2(pd.as_ptr(), first.cast(), range.len(), iova, access.bits()) };
        Ok(Self {
            raw: made(raw)?,
            memory: memory.clone(),
            pd: pd.clone(),
        })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }

    pub(crate) fn lkey(&self) -> LKey {
        // SAFETY: the registration lives.
        LKey(unsafe { (*self.as_ptr()).lkey })
    }

    pub(crate) fn rkey(&self) -> RKey {
        // SAFETY: the registration lives.
        RKey(unsafe { (*self.as_ptr()).rkey })
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        if let Err(e) = done(unsafe { ibv_dereg_mr(self.as_ptr()) }) {
            tracing::error!(
                "deregistering {} bytes with {} failed ({e}): they are never given back, since the device may use them",
                self.memory.len(),
                self.pd.context().name()
            );
            std::mem::forget(self.memory.clone());
        }
    }
}

/// The kinds of memory windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    One,
    Two,
}

/// A memory window.
#[derive(Debug)]
pub(crate) struct Mw {
    raw: NonNull<ibv_mw>,
    pd: Arc<Pd>,
}

// SAFETY: libibverbs lets any thread use a window; what changes in it changes through `&mut`.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    pub(crate) fn alloc(pd: &Arc<Pd>, kind: Kind) -> io::Result<Self> {
        let kind = match kind {
            Kind::One => ibv_mw_type::IBV_MW_TYPE_1,
            Kind::Two => ibv_mw_type::IBV_MW_TYPE_2,
        };
        // SAFETY: the domain lives. `None` is a device without windows.
        let raw = unsafe { ibv_alloc_mw(pd.as_ptr(), kind) };
        let raw = made(raw.unwrap_or(std::ptr::null_mut()))?;
        Ok(Self { raw, pd: pd.clone() })
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

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        if let Err(e) = done(unsafe { ibv_dealloc_mw(self.as_ptr()) }) {
            tracing::warn!("releasing a memory window of {} failed: {e}", self.pd.context().name());
        }
    }
}
