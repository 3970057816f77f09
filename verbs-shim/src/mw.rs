//! Memory windows.

use std::sync::Arc;

use libc::c_int;
use roce::WindowKind;

use crate::{
    abi::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, c_enum, ibv_mw, ibv_pd},
    core::Core,
    live::{self, Object as _},
    pd::{Pd, Users},
    ret::{self, Errno},
};

/// A memory window.
#[repr(C)]
pub(crate) struct Mw {
    abi: ibv_mw,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Mw,
    pub(crate) kind: c_enum,
    _user: Users,
}

live::object!(Mw, "memory window", ibv_mw, |mw| (*mw).context, (*mw).handle);

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_enum) -> *mut ibv_mw {
    ret::pointer(|| {
        let window = match kind {
            IBV_MW_TYPE_1 => WindowKind::Type1,
            IBV_MW_TYPE_2 => WindowKind::Type2,
            _ => return Err(Errno::INVAL.because(format_args!("{kind} is no type of a memory window"))),
        };
        // SAFETY: the program passes a domain of ours.
        let domain = unsafe { Pd::lookup(pd)? };
        let inner = domain.engine()?.device.alloc_window(&domain.inner, window)?;
        let mw = Mw {
            abi: ibv_mw {
                context: domain.context(),
                pd,
                rkey: inner.rkey().0,
                handle: inner.rkey().0 >> 8,
                kind,
            },
            core: domain.core.clone(),
            inner,
            kind,
            _user: domain.users.clone(),
        };
        mw.publish()
    })
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    ret::code(|| Mw::destroy(mw, |_| Ok(())))
}
