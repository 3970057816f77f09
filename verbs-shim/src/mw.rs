//! Memory windows.

use std::sync::Arc;

use libc::c_int;
use roce::{RKey, SendFlags, WindowKind};

use crate::{
    abi::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, c_enum, ibv_mw, ibv_mw_bind, ibv_pd, ibv_qp},
    batch::Batch,
    context::Core,
    pd::{Pd, Users},
    post,
    qp::Qp,
    ret::{self, Errno, object},
};

/// A memory window.
#[repr(C)]
struct Mw {
    abi: ibv_mw,
    core: Arc<Core>,
    _inner: roce::Mw,
    _user: Users,
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_enum) -> *mut ibv_mw {
    ret::pointer(|| {
        let window = match kind {
            IBV_MW_TYPE_1 => WindowKind::Type1,
            IBV_MW_TYPE_2 => WindowKind::Type2,
            _ => return Err(Errno::INVAL),
        };
        // SAFETY: the program passes a domain of ours.
        let domain = unsafe { Pd::of(object(pd)?) };
        let inner = domain.engine()?.device.alloc_window(&domain.inner, window)?;
        let mw = Box::leak(Box::new(Mw {
            abi: ibv_mw {
                // SAFETY: as above.
                context: unsafe { (*pd).context },
                pd,
                rkey: inner.rkey().0,
                handle: inner.rkey().0 >> 8,
                kind,
            },
            core: domain.core.clone(),
            _inner: inner,
            _user: domain.user(),
        }));
        Ok(&raw mut mw.abi)
    })
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    ret::code(|| {
        // SAFETY: boxed above; the program does not use it again.
        let this = unsafe { Box::from_raw(object(mw)?.cast::<Mw>()) };
        if this.core.alive().is_err() {
            std::mem::forget(this);
        }
        Ok(())
    })
}

/// Binds a type 1 window; its key changes with each binding.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair and a window of ours, and a binding.
        let (this, bind, key) = unsafe { (Qp::of(qp), &*bind, (*mw).rkey) };
        this.alive()?;
        let next = RKey(key).next().0;
        let mut batch = Batch::default();
        // SAFETY: the binding's region is ours.
        let op = unsafe { post::bind(next, &bind.bind_info)? };
        let flags: SendFlags = post::flags(bind.send_flags);
        batch.begin(bind.wr_id, op, flags);
        batch.submit(this).map_err(|(_, e)| Errno::from(e))?;
        // SAFETY: as above.
        unsafe { (*mw).rkey = next };
        Ok(())
    })
}
