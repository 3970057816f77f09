//! Protection domains, thread domains and parent domains.

use std::sync::Arc;

use libc::c_int;
use roce::Provider;

use crate::{
    abi::{ibv_context, ibv_parent_domain_init_attr, ibv_pd, ibv_td},
    context::{Context, Core},
    engine::Engine,
    ret::{self, Errno, Result, object},
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

impl Pd {
    /// # Safety
    /// `pd` was made by us and lives as long as the reference.
    pub(crate) unsafe fn of<'a>(pd: *mut ibv_pd) -> &'a Self {
        // SAFETY: the public part is the first field.
        unsafe { &*pd.cast::<Self>() }
    }

    /// A use of it, which keeps it from being deallocated.
    pub(crate) fn user(&self) -> Users {
        self.users.clone()
    }

    /// The transport that it belongs to.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>> {
        self.core.engine()
    }

    fn boxed(context: *mut ibv_context, core: &Arc<Core>, inner: roce::Pd, of: Vec<Users>) -> *mut ibv_pd {
        let pd = Box::leak(Box::new(Self {
            abi: ibv_pd { context, handle: 1 },
            core: core.clone(),
            inner,
            users: Users::default(),
            _of: of,
        }));
        &raw mut pd.abi
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    ret::pointer(|| {
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(object(context)?) }.core();
        let inner = core.engine()?.device.alloc_pd()?;
        Ok(Pd::boxed(context, core, inner, Vec::new()))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a domain of ours.
        let this = unsafe { Pd::of(object(pd)?) };
        this.core.alive()?;
        if this.users.in_use() {
            return Err(Errno::BUSY);
        }
        // SAFETY: boxed by `Pd::boxed`; the program does not use it again.
        drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
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
        let (core, attr) = unsafe { (Context::of(object(context)?).core(), &*attr) };
        if attr.pd.is_null() || attr.comp_mask & !3 != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: a domain of ours.
        let of = unsafe { Pd::of(attr.pd) };
        // SAFETY: null or a thread domain of ours.
        let td = unsafe { attr.td.cast::<Td>().as_ref() };
        let uses = [Some(of.user()), td.map(|td| td.users.clone())];
        let uses = uses.into_iter().flatten().collect();
        Ok(Pd::boxed(context, core, of.inner.clone(), uses))
    })
}

/// A thread domain: a hint that this device has no use for.
#[repr(C)]
struct Td {
    abi: ibv_td,
    /// Parent domains with it. It can't go before them.
    users: Users,
}

pub(crate) unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut u32) -> *mut ibv_td {
    ret::pointer(|| {
        // SAFETY: the attributes are a mask of what is given.
        if unsafe { *attr } != 0 {
            return Err(Errno::NOTSUP);
        }
        let td = Box::leak(Box::new(Td {
            abi: ibv_td { context },
            users: Users::default(),
        }));
        Ok(&raw mut td.abi)
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    ret::code(|| {
        let td = object(td)?.cast::<Td>();
        // SAFETY: boxed by alloc_td.
        if unsafe { &*td }.users.in_use() {
            return Err(Errno::BUSY);
        }
        // SAFETY: as above; the program does not use it again.
        drop(unsafe { Box::from_raw(td) });
        Ok(())
    })
}
