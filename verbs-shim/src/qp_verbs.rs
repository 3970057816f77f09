//! Creation, opening, modification, queries and destruction of queue pairs.

use std::{cell::UnsafeCell, ptr, sync::Arc};

use libc::c_int;
use roce::{QpCaps, QpOptions, QpState, QpType, verbs::legal};
use zerocopy::FromZeros as _;

use crate::{
    abi::{
        IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND, SEND_OPS, c_enum, ibv_context, ibv_pd,
        ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_qp_open_attr, ibv_sge,
        ibv_xrcd, qp_init, qp_open,
    },
    batch::Builder,
    core::{Context, Core},
    cq::Cq,
    engine::{self, Engine},
    events::{Acks, Target},
    live::Object as _,
    pd::{Pd, Users},
    qp::Qp,
    qpattr,
    ret::{self, Errno, Result},
    srq::Srq,
    wrex,
    xrc::Xrcd,
};

/// The transport service of an `ibv_qp_type`.
fn service(kind: c_enum) -> Result<QpType> {
    match kind {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        IBV_QPT_XRC_SEND => Ok(QpType::XrcIni),
        IBV_QPT_XRC_RECV => Ok(QpType::XrcTgt),
        other => Err(Errno::NOTSUP.because(format_args!("qp_type {other}: this device has RC, UC, UD and XRC"))),
    }
}

/// Returns the operations that a queue pair of this type can post with `ibv_wr_*`.
fn send_ops(qp_type: QpType) -> u64 {
    let legal = SEND_OPS.iter().filter(|(_, op)| legal::is_legal(qp_type, *op));
    legal.fold(0, |bits, (bit, _)| bits | bit)
}

/// The transport's sizes.
fn caps(c: &ibv_qp_cap) -> QpCaps {
    QpCaps {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline_data: c.max_inline_data,
    }
}

/// The attributes with inline data as long as a full list of elements would be: what rdma_rxe grants unasked, and
/// rdma_xclient relies on.
fn roomy(init: &ibv_qp_init_attr) -> ibv_qp_init_attr {
    let mut init = *init;
    let list = init.cap.max_send_sge.saturating_mul(size_of::<ibv_sge>() as u32);
    init.cap.max_inline_data = init.cap.max_inline_data.max(list);
    init
}

/// Attributes beyond `ibv_qp_init_attr`.
struct Extra {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    xrcd: *mut ibv_xrcd,
    extended: bool,
}

/// # Safety
/// The program destroys none of the objects in `init` and `extra` during the call.
unsafe fn create(init: &ibv_qp_init_attr, extra: &Extra) -> Result<*mut ibv_qp> {
    let init = &roomy(init);
    let qp_type = service(init.qp_type)?;
    // SAFETY: the caller's promise.
    let (core, domain, xrcd, srq, send_cq, recv_cq) = unsafe {
        (
            Context::of(extra.context)?.core(),
            Pd::given(extra.pd)?,
            Xrcd::given(extra.xrcd)?,
            Srq::given(init.srq)?,
            Cq::given(init.send_cq)?,
            Cq::given(init.recv_cq)?,
        )
    };
    let given = [
        domain.map(|d| (&d.core, &d.users)),
        xrcd.map(|x| (&x.core, &x.users)),
        srq.map(|s| (&s.core, &s.users)),
        send_cq.map(|c| (&c.core, &c.users)),
        recv_cq.map(|c| (&c.core, &c.users)),
    ];
    let given = || given.iter().flatten();
    given().try_for_each(|(other, _)| core.finds(other))?;
    if domain.is_none() && xrcd.is_none() {
        return Err(Errno::INVAL.because("neither a protection domain nor an XRC domain is given"));
    }
    let engine = core.engine()?;
    let options = QpOptions {
        qp_type,
        send_cq: send_cq.map(|c| &c.inner),
        recv_cq: recv_cq.map(|c| &c.inner),
        srq: srq.map(|s| &s.inner),
        xrcd: xrcd.map(|x| &x.inner),
        caps: caps(&init.cap),
        signal_all: init.sq_sig_all != 0,
    };
    let inner = engine.device.create_qp_as(domain.map(|d| &d.inner), &options)?;
    let granted = inner.caps();
    let cap = ibv_qp_cap {
        max_send_wr: granted.max_send_wr,
        max_recv_wr: granted.max_recv_wr,
        max_send_sge: granted.max_send_sge,
        max_recv_sge: granted.max_recv_sge,
        max_inline_data: granted.max_inline_data,
    };
    publish(
        core,
        engine,
        inner,
        &ibv_qp_init_attr { cap, ..*init },
        extra,
        xrcd.map(|x| &x.inner).filter(|_| qp_type == QpType::XrcTgt),
        given().map(|(_, users)| (*users).clone()).collect(),
    )
}

/// Makes the object of a queue pair, and directs its events to it. `xrcd`: the domain of an XRC target.
fn publish(
    core: &Arc<Core>,
    engine: &Engine,
    inner: roce::Qp,
    init: &ibv_qp_init_attr,
    extra: &Extra,
    xrcd: Option<&roce::Xrcd>,
    uses: Vec<Users>,
) -> Result<*mut ibv_qp> {
    let number = inner.qpn().value();
    let base = ibv_qp {
        context: extra.context,
        qp_context: init.qp_context,
        pd: extra.pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: number,
        qp_num: number,
        state: 0,
        qp_type: init.qp_type,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    let acks = Arc::new(Acks::default());
    let qp = Qp {
        abi: UnsafeCell::new(wrex::public(base)),
        core: core.clone(),
        inner,
        init: *init,
        extended: extra.extended,
        builder: Builder::new(),
        acks: acks.clone(),
        path: parking_lot::Mutex::new(None),
        _uses: uses,
    };
    let shared = qp.inner.clone();
    let public = qp.publish()?;
    let target = Target::new(&core.events, public as usize, &acks);
    engine.objects().add_qp(shared, xrcd, target);
    Ok(public)
}

/// Bits of `ibv_qp_open_attr_mask` that `ibv_open_qp` requires; the context's cookie may be left out.
const OPEN_NEEDED: u32 = qp_open::NUM | qp_open::XRCD | qp_open::TYPE;

/// Opens a target queue pair again: it lives until its last object is destroyed, and all of them get its events
/// (`ib_open_qp`). Only those of this process can be opened: others' memory is theirs.
pub(crate) unsafe extern "C" fn open_qp(context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    ret::pointer(|| {
        // SAFETY: the program passes an open context and attributes.
        let (core, attr) = unsafe { (Context::of(context)?.core(), attr.read_unaligned()) };
        if attr.comp_mask & OPEN_NEEDED != OPEN_NEEDED || attr.comp_mask & !(OPEN_NEEDED | qp_open::CONTEXT) != 0 {
            return Err(Errno::INVAL.because("comp_mask needs number, XRC domain and type"));
        }
        if attr.qp_type != IBV_QPT_XRC_RECV {
            return Err(Errno::INVAL.because("only queue pairs of type IBV_QPT_XRC_RECV can be opened"));
        }
        // SAFETY: a domain of ours.
        let xrcd = unsafe { Xrcd::lookup(attr.xrcd)? };
        core.finds(&xrcd.core)?;
        let engine = core.engine()?;
        let inner = engine.objects().xrc_target(attr.qp_num, &xrcd.inner).ok_or_else(|| {
            let number = attr.qp_num;
            Errno::INVAL.because(format_args!("this process has no XRC target {number:#x} in the domain"))
        })?;
        let mut init = ibv_qp_init_attr::new_zeroed();
        init.qp_type = attr.qp_type;
        if attr.comp_mask & qp_open::CONTEXT != 0 {
            init.qp_context = attr.qp_context;
        }
        let extra = Extra {
            context,
            pd: ptr::null_mut(),
            xrcd: attr.xrcd,
            extended: false,
        };
        publish(
            core,
            engine,
            inner,
            &init,
            &extra,
            Some(&xrcd.inner),
            vec![xrcd.users.clone()],
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    ret::pointer(|| {
        // SAFETY: the program passes a domain of ours and attributes with objects of ours, which get the sizes granted.
        unsafe {
            let extra = Extra {
                context: Pd::lookup(pd)?.context(),
                pd,
                xrcd: ptr::null_mut(),
                extended: false,
            };
            let qp = create(&init.read_unaligned(), &extra)?;
            (&raw mut (*init).cap).write_unaligned(Qp::of(qp)?.init.cap);
            Ok(qp)
        }
    })
}

/// Bits of `ibv_qp_init_attr_mask` that are supported.
const INIT_MASK: u32 = qp_init::PD | qp_init::XRCD | qp_init::CREATE_FLAGS | qp_init::SEND_OPS_FLAGS;

pub(crate) unsafe extern "C" fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    ret::pointer(|| {
        // SAFETY: the program passes attributes.
        let init = unsafe { attr.read_unaligned() };
        let comp_mask = init.comp_mask;
        let has = |bit: u32| comp_mask & bit != 0;
        if comp_mask & !INIT_MASK != 0 || (has(qp_init::CREATE_FLAGS) && init.create_flags != 0) {
            return Err(Errno::NOTSUP.because("comp_mask or create_flags has bits that this device does not support"));
        }
        let extended = has(qp_init::SEND_OPS_FLAGS);
        if extended && init.send_ops_flags & !send_ops(service(init.qp_type)?) != 0 {
            return Err(
                Errno::NOTSUP.because("send_ops_flags has operations that this type of queue pair does not have")
            );
        }
        let extra = Extra {
            context,
            pd: if has(qp_init::PD) { init.pd } else { ptr::null_mut() },
            xrcd: if has(qp_init::XRCD) { init.xrcd } else { ptr::null_mut() },
            extended,
        };
        // SAFETY: with objects of ours. The attributes begin with those of `ibv_create_qp`, whose trailing padding is used.
        unsafe {
            let qp = create(&attr.cast::<ibv_qp_init_attr>().read_unaligned(), &extra)?;
            (&raw mut (*attr).cap).write_unaligned(Qp::of(qp)?.init.cap);
            Ok(qp)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the program passes a queue pair of ours.
    match unsafe { Qp::of(qp) }.is_ok_and(|qp| qp.extended) {
        true => qp.cast(),
        false => ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours and attributes.
        let (this, attr) = unsafe { (Qp::of(qp)?, attr.read_unaligned()) };
        let change = qpattr::from_c(&this.core, this.kind(), &attr, mask as u32)?;
        this.inner.modify(&change)?;
        if change.av.is_some() {
            *this.path.lock() = Some(attr.ah_attr);
        }
        if change.state == Some(QpState::Reset) {
            this.forget_completions();
        }
        if let Some(state) = change.state {
            // SAFETY: the public part's field, which only this call and queries write.
            unsafe { (&raw mut (*qp).state).write(state as c_enum) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours.
        let this = unsafe { Qp::of(qp)? };
        let mut out = qpattr::to_c(&this.core, &this.inner.query()?);
        if let Some(path) = *this.path.lock() {
            out.ah_attr = path;
        }
        out.cap = this.init.cap;
        // SAFETY: the program passes room for both; the state is the public part's field.
        unsafe {
            (&raw mut (*qp).state).write(out.qp_state);
            attr.write_unaligned(out);
            init.write_unaligned(this.init);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    ret::code(|| {
        Qp::destroy(qp, |this| {
            if !this.inner.mcast_groups().is_empty() {
                return Err(Errno::BUSY.because("the queue pair is attached to a multicast group"));
            }
            // The last chance to report it.
            engine::log_failure(&this.inner);
            let number = this.inner.qpn().value();
            let target = this.core.engine()?.objects().forget_qp(number, qp as usize);
            target.into_iter().for_each(Target::finish);
            Ok(())
        })
    })
}
