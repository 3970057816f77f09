//! Protection domains, thread domains and parent domains.

use std::sync::Arc;

use libc::c_int;

use crate::{
    abi::{ibv_context, ibv_parent_domain_init_attr, ibv_pd, ibv_td, parent_domain},
    core::{Context, Core},
    engine::Engine,
    live::{self, Object as _},
    ret::{self, Errno, Result},
};

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    abi: ibv_pd,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Pd,
    /// Objects that were made in it, and parent domains of it. It can't be deallocated before them.
    pub(crate) users: Users,
    /// The uses that a parent domain makes of the one below and of its thread domain.
    _of: Vec<Users>,
}

/// Count of the uses of an object; a clone is a use.
#[derive(Clone, Default)]
pub(crate) struct Users(Arc<()>);

impl Users {
    /// Checks that nothing uses the object.
    ///
    /// # Errors
    /// EBUSY, for this reason.
    pub(crate) fn none(&self, reason: &str) -> Result<()> {
        match Arc::strong_count(&self.0) {
            1 => Ok(()),
            _ => Err(Errno::BUSY.because(reason)),
        }
    }
}

live::object!(Pd, "PD", ibv_pd, |pd| (*pd).context, (*pd).handle);

impl Pd {
    /// Returns its context, as the program knows it.
    pub(crate) fn context(&self) -> *mut ibv_context {
        self.abi.context
    }

    /// The transport that it belongs to.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>> {
        self.core.engine()
    }

    fn make(context: *mut ibv_context, core: &Arc<Core>, inner: roce::Pd, of: Vec<Users>) -> Result<*mut ibv_pd> {
        let handle = live::handle();
        let pd = Self {
            abi: ibv_pd { context, handle },
            core: core.clone(),
            inner,
            users: Users::default(),
            _of: of,
        };
        pd.publish()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    ret::pointer(|| {
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(context)? }.core();
        let inner = core.engine()?.device.alloc_pd()?;
        Pd::make(context, core, inner, Vec::new())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    ret::code(|| {
        let reason = "objects of the protection domain exist: queue pairs, regions, windows, address handles or SRQs";
        Pd::destroy(pd, |this| this.users.none(reason))
    })
}

/// Allocates a domain that stands for another one. Allocators of the program are not called: nothing is allocated for hardware.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    ret::pointer(|| {
        // SAFETY: the program passes an open context and attributes.
        let (core, attr) = unsafe { (Context::of(context)?.core(), attr.read_unaligned()) };
        if attr.comp_mask & !(parent_domain::ALLOCATORS | parent_domain::PD_CONTEXT) != 0 {
            return Err(Errno::INVAL.because("comp_mask has unknown bits"));
        }
        // SAFETY: the program destroys neither during this call.
        let (of, td) = unsafe { (Pd::lookup(attr.pd)?, Td::given(attr.td)?) };
        core.finds(&of.core)?;
        td.map_or(Ok(()), |td| core.finds(&td.core))?;
        let uses = [Some(of.users.clone()), td.map(|td| td.users.clone())];
        let uses = uses.into_iter().flatten().collect();
        Pd::make(context, core, of.inner.clone(), uses)
    })
}

/// A thread domain: a hint that this device has no use for.
#[repr(C)]
struct Td {
    abi: ibv_td,
    core: Arc<Core>,
    /// Parent domains with it. It can't go before them.
    users: Users,
}

live::object!(Td, "thread domain", ibv_td, |td| (*td).context, 0);

pub(crate) unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut u32) -> *mut ibv_td {
    ret::pointer(|| {
        // SAFETY: the attributes are a mask of what is given.
        if unsafe { attr.read_unaligned() } != 0 {
            return Err(Errno::NOTSUP.because("comp_mask has unknown bits"));
        }
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(context)? }.core();
        let td = Td {
            abi: ibv_td { context },
            core: core.clone(),
            users: Users::default(),
        };
        td.publish()
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    ret::code(|| Td::destroy(td, |td| td.users.none("parent domains with the thread domain exist")))
}
