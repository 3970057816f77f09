//! Memory windows.

use std::sync::Arc;

use libc::c_int;
use roce::{RKey, SendFlags, WindowKind};

use crate::{
    abi::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, c_enum, ibv_mw, ibv_mw_bind, ibv_pd, ibv_qp},
    batch::Batch,
    context::Core,
    live::{self, Object as _},
    pd::{Pd, Users},
    post,
    qp::Qp,
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

live::object!(Mw, ibv_mw, 0, |mw| (*mw).context, (*mw).handle);

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
            _user: domain.user(),
        };
        mw.publish()
    })
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    ret::code(|| {
        let this = Mw::claim(mw)?;
        match this.core.alive() {
            Ok(()) => this.free(),
            Err(_) => this.forget(),
        }
        Ok(())
    })
}

/// Binds a type 1 window; its key changes with each binding.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair and a window of ours, and a binding.
        let (this, window, bind, key) = unsafe { (Qp::named(qp)?, Mw::named(mw)?, bind.read_unaligned(), (*mw).rkey) };
        this.alive()?;
        this.core().same(&window.core)?;
        if window.kind != IBV_MW_TYPE_1 {
            return Err(Errno::INVAL.because("ibv_bind_mw binds windows of type 1 only"));
        }
        let next = RKey(key).next().0;
        let mut batch = Batch::default();
        // SAFETY: the binding's region is ours.
        let op = unsafe { post::bind(this, next, &bind.bind_info)? };
        let flags: SendFlags = post::flags(bind.send_flags);
        batch.begin(bind.wr_id, op, flags);
        batch.submit(this).map_err(|(_, e)| Errno::from(e))?;
        // SAFETY: as above.
        unsafe { (*mw).rkey = next };
        Ok(())
    })
}
