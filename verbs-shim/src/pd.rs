//! Protection domains, thread domains and parent domains.

use std::sync::Arc;

use libc::c_int;

use crate::{
    abi::{ibv_context, ibv_parent_domain_init_attr, ibv_pd, ibv_td},
    context::{Context, Core},
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
    /// Objects that were made in it, and parent domains of it. It can't go before them.
    users: Users,
    /// The uses that a parent domain makes of the one below and of its thread domain.
    _of: Vec<Users>,
}

/// Counts what uses an object.
#[derive(Clone, Default)]
pub(crate) struct Users(Arc<()>);

impl Users {
    pub(crate) fn in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

live::object!(Pd, ibv_pd, 0, |pd| (*pd).context, (*pd).handle);

impl Pd {
    /// A use of it, which keeps it from being deallocated.
    pub(crate) fn user(&self) -> Users {
        self.users.clone()
    }

    /// Its context, as the program knows it.
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
        let this = Pd::claim(pd)?;
        this.core.alive()?;
        if this.users.in_use() {
            return Err(Errno::BUSY.because(
                "objects of the protection domain exist: queue pairs, regions, windows, address handles or SRQs",
            ));
        }
        this.free();
        Ok(())
    })
}

/// A domain that stands for another one. Allocators of the program are not called: nothing is allocated for hardware.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    ret::pointer(|| {
        // SAFETY: the program passes an open context and attributes.
        let (core, attr) = unsafe { (Context::of(context)?.core(), attr.read_unaligned()) };
        if attr.comp_mask & !3 != 0 {
            return Err(Errno::INVAL.because("comp_mask has unknown bits"));
        }
        // SAFETY: the program destroys neither meanwhile.
        let (of, td) = unsafe { (Pd::lookup(attr.pd)?, Td::given(attr.td)?) };
        core.finds(&of.core)?;
        td.map_or(Ok(()), |td| core.finds(&td.core))?;
        let uses = [Some(of.user()), td.map(|td| td.users.clone())];
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

live::object!(Td, ibv_td, 0, |td| (*td).context, 0);

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
    ret::code(|| {
        let td = Td::claim(td)?;
        if td.users.in_use() {
            return Err(Errno::BUSY.because("parent domains with the thread domain exist"));
        }
        td.free();
        Ok(())
    })
}
