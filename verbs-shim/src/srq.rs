//! Shared receive queues.

use std::{cell::UnsafeCell, ffi::c_void, ptr, sync::Arc};

use libc::c_int;
use roce::{SrqAttr, SrqInit, SrqModify, SrqType};

use crate::{
    abi::{
        IBV_SRQ_LIMIT, IBV_SRQ_MAX_WR, IBV_SRQT_BASIC, IBV_SRQT_XRC, ibv_context, ibv_pd, ibv_recv_wr, ibv_srq,
        ibv_srq_attr, ibv_srq_init_attr, ibv_srq_init_attr_ex, srq_init,
    },
    core::{Context, Core},
    cq::Cq,
    events::{Acks, Target},
    live::{self, Object as _},
    pd::{Pd, Users},
    post,
    ret::{self, Errno, Result},
    xrc::Xrcd,
};

/// A shared receive queue.
#[repr(C)]
pub(crate) struct Srq {
    abi: UnsafeCell<ibv_srq>,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Srq,
    max_sge: usize,
    pub(crate) acks: Arc<Acks>,
    pub(crate) users: Users,
    /// Its protection domain, XRC domain and completion queue.
    _uses: Vec<Users>,
}

live::object!(Srq, "SRQ", ibv_srq, |srq| (*srq).context, (*srq).handle);

/// # Safety
/// `pd` is a domain of ours, `xrc` objects of ours.
unsafe fn create(
    pd: *mut ibv_pd,
    cookie: *mut c_void,
    attr: &mut ibv_srq_attr,
    xrc: Option<(&Xrcd, &Cq)>,
) -> Result<*mut ibv_srq> {
    // SAFETY: the caller's promise.
    let domain = unsafe { Pd::lookup(pd)? };
    if let Some((xrcd, cq)) = xrc {
        domain.core.finds(&xrcd.core)?;
        domain.core.finds(&cq.core)?;
    }
    let engine = domain.engine()?;
    let init = SrqInit {
        attr: SrqAttr {
            max_wr: attr.max_wr,
            max_sge: attr.max_sge,
            // Armed by modify (ibv_create_srq(3)).
            limit: 0,
        },
        xrc: xrc.map(|(x, c)| (&x.inner, &c.inner)),
    };
    let inner = engine.device.create_srq(&domain.inner, &init)?;
    let granted = inner.query();
    (attr.max_wr, attr.max_sge) = (granted.max_wr, granted.max_sge);
    let handle = inner.handle();
    let acks = Arc::new(Acks::default());
    let xrc_uses = xrc.into_iter().flat_map(|(x, c)| [x.users.clone(), c.users.clone()]);
    let uses = xrc_uses.chain([domain.users.clone()]).collect();
    let srq = Srq {
        abi: UnsafeCell::new(ibv_srq {
            context: domain.context(),
            srq_context: cookie,
            pd,
            handle,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            events_completed: 0,
        }),
        core: domain.core.clone(),
        inner,
        max_sge: granted.max_sge as usize,
        acks: acks.clone(),
        users: Users::default(),
        _uses: uses,
    };
    let public = srq.publish()?;
    let target = Target::new(&domain.core.events, public as usize, &acks);
    engine.objects().srqs.insert(handle, target);
    Ok(public)
}

pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue of ours and room for the number.
        unsafe {
            let this = Srq::of(srq)?;
            if this.inner.kind() != SrqType::Xrc {
                return Err(Errno::INVAL.because("only an SRQ of type IBV_SRQT_XRC has a number"));
            }
            number.write_unaligned(this.inner.number().value());
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    ret::pointer(|| {
        // SAFETY: the program passes an open context and attributes.
        let (core, mut init) = unsafe { (Context::of(context)?.core(), attr.read_unaligned()) };
        let mask = init.comp_mask;
        let has = |bit: u32| mask & bit != 0;
        if mask & !(srq_init::TYPE | srq_init::PD | srq_init::XRCD | srq_init::CQ) != 0 {
            return Err(Errno::NOTSUP.because("comp_mask has bits that this device does not support"));
        }
        let kind = if has(srq_init::TYPE) {
            init.srq_type
        } else {
            IBV_SRQT_BASIC
        };
        let pd = if has(srq_init::PD) { init.pd } else { ptr::null_mut() };
        // SAFETY: the program destroys none of the objects during this call.
        unsafe {
            core.finds(&Pd::lookup(pd)?.core)?;
            let srq = match kind {
                IBV_SRQT_BASIC => create(pd, init.srq_context, &mut init.attr, None),
                IBV_SRQT_XRC if has(srq_init::XRCD) && has(srq_init::CQ) => {
                    let xrc = (Xrcd::lookup(init.xrcd)?, Cq::lookup(init.cq)?);
                    create(pd, init.srq_context, &mut init.attr, Some(xrc))
                }
                IBV_SRQT_XRC => {
                    Err(Errno::INVAL.because("an SRQ of type XRC needs an XRC domain and a completion queue"))
                }
                other => Err(Errno::NOTSUP.because(format_args!(
                    "srq_type {other}: this device has IBV_SRQT_BASIC and IBV_SRQT_XRC"
                ))),
            }?;
            (&raw mut (*attr).attr).write_unaligned(init.attr);
            Ok(srq)
        }
    })
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue of ours, a list of receives, and room for the pointer.
        unsafe {
            let this = Srq::posting(srq).inspect_err(|_| bad.write_unaligned(wr))?;
            post::each_recv(wr, bad, this.max_sge, |wrs| this.inner.post_recv(wrs))
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the program passes a domain of ours and attributes, which get the sizes granted.
    ret::pointer(|| unsafe {
        let mut out = init.read_unaligned();
        let srq = create(pd, out.srq_context, &mut out.attr, None)?;
        (&raw mut (*init).attr).write_unaligned(out.attr);
        Ok(srq)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue of ours and attributes.
        let (this, attr) = unsafe { (Srq::of(srq)?, attr.read_unaligned()) };
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Errno::INVAL.because(format_args!("srq_attr_mask {mask:#x} has unknown bits")));
        }
        let change = SrqModify {
            max_wr: (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr),
            limit: (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit),
        };
        Ok(this.inner.modify(&change)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue of ours.
        let this = unsafe { Srq::of(srq)? };
        let now = this.inner.query();
        let out = ibv_srq_attr {
            max_wr: now.max_wr,
            max_sge: now.max_sge,
            srq_limit: now.limit,
        };
        // SAFETY: the program passes room for the attributes.
        unsafe { attr.write_unaligned(out) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    ret::code(|| {
        Srq::destroy(srq, |this| {
            this.users.none("queue pairs use the SRQ")?;
            let target = this.core.engine()?.objects().srqs.remove(&this.inner.handle());
            target.into_iter().for_each(Target::finish);
            Ok(())
        })
    })
}
