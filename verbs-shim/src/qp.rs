//! Queue pairs.

use std::{cell::UnsafeCell, ptr, sync::Arc};

use libc::c_int;
use roce::{
    PostError, QpCaps, QpInit, QueuePair,
    verbs::{SendRequest, Target},
};

use crate::{
    abi::{
        IBV_QPT_RC, SEND_OPS, c_enum, ibv_ah_attr, ibv_context, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex,
        ibv_qp_init_attr, ibv_qp_init_attr_ex, qp_init,
    },
    context::Core,
    cq::Cq,
    events::{Acks, Target as EventTarget},
    pd::{Pd, Users},
    qpattr,
    ret::{self, Errno, Result},
    wrex::{self, Builder},
};

/// A queue pair; always the extended structure, whichever call made it.
#[repr(C)]
pub(crate) struct Qp {
    abi: UnsafeCell<ibv_qp_ex>,
    core: Arc<Core>,
    inner: roce::Qp,
    init: ibv_qp_init_attr,
    /// Made with `send_ops_flags`, so that `ibv_wr_*` may be called.
    extended: bool,
    builder: Builder,
    acks: Arc<Acks>,
    /// The path as the program gave it, for queries.
    path: parking_lot::Mutex<Option<ibv_ah_attr>>,
    /// Its protection domain and queues.
    _uses: Vec<Users>,
}

impl Qp {
    /// # Safety
    /// `qp` was made by us and lives as long as the reference.
    pub(crate) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Self {
        // SAFETY: the public part is the first field.
        unsafe { &*qp.cast::<Self>() }
    }

    /// The transport's queue pair.
    pub(crate) fn inner(&self) -> &roce::Qp {
        &self.inner
    }

    pub(crate) fn alive(&self) -> Result<()> {
        self.core.alive()
    }

    pub(crate) fn acks(&self) -> &Acks {
        &self.acks
    }

    pub(crate) fn builder(&self) -> &Builder {
        &self.builder
    }

    /// `ibv_qp_type`.
    pub(crate) fn kind(&self) -> c_enum {
        self.init.qp_type
    }

    pub(crate) fn max_send_sge(&self) -> usize {
        self.init.cap.max_send_sge as usize
    }

    pub(crate) fn max_inline(&self) -> u64 {
        self.init.cap.max_inline_data.into()
    }

    /// Posts sends.
    ///
    /// # Errors
    /// With the number of work requests that were accepted before.
    pub(crate) fn post(&self, requests: &[SendRequest<'_>]) -> std::result::Result<(), (usize, PostError)> {
        let mut wrs: smallvec::SmallVec<[roce::SendWr<'_>; 2]> = smallvec::SmallVec::new();
        for (i, request) in requests.iter().enumerate() {
            if request.target != Target::Peer {
                return Err((i, PostError::Invalid("only connected queue pairs")));
            }
            wrs.push(request.wr);
        }
        self.inner.post_send(&wrs)
    }

    fn public(&self) -> *mut ibv_qp {
        self.abi.get().cast()
    }
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
    let list = init.cap.max_send_sge.saturating_mul(size_of::<crate::abi::ibv_sge>() as u32);
    init.cap.max_inline_data = init.cap.max_inline_data.max(list);
    init
}

/// What is asked for beyond `ibv_qp_init_attr`.
struct Extra {
    pd: *mut ibv_pd,
    extended: bool,
}

/// # Safety
/// The pointers in `init` and `extra` are null or objects of ours.
unsafe fn create(init: &ibv_qp_init_attr, extra: &Extra) -> Result<*mut ibv_qp> {
    if extra.pd.is_null() || init.send_cq.is_null() || init.recv_cq.is_null() {
        return Err(Errno::INVAL);
    }
    let init = &roomy(init);
    if init.qp_type != IBV_QPT_RC || !init.srq.is_null() {
        return Err(Errno::NOTSUP);
    }
    // SAFETY: the caller's promise.
    let (domain, send_cq, recv_cq) = unsafe { (Pd::of(extra.pd), Cq::of(init.send_cq), Cq::of(init.recv_cq)) };
    let engine = domain.engine()?;
    let args = QpInit {
        send_cq: &send_cq.inner,
        recv_cq: &recv_cq.inner,
        caps: caps(&init.cap),
        signal_all: init.sq_sig_all != 0,
    };
    let inner = engine.device.create_qp_in_reset(&domain.inner, &args)?;
    let number = inner.qpn().value();
    let base = ibv_qp {
        // SAFETY: the caller's promise.
        context: unsafe { (*extra.pd).context },
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
    let qp = Box::leak(Box::new(Qp {
        abi: UnsafeCell::new(wrex::public(base)),
        core: domain.core.clone(),
        inner,
        init: *init,
        extended: extra.extended,
        builder: Builder::new(),
        acks: acks.clone(),
        path: parking_lot::Mutex::new(None),
        _uses: vec![domain.user(), send_cq.user(), recv_cq.user()],
    }));
    let public = qp.public();
    let target = EventTarget::new(&domain.core, public as usize, &acks);
    engine.objects().qps.insert(number, target);
    Ok(public)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the program passes a domain of ours and attributes with objects of ours.
    ret::pointer(|| unsafe { create(&*init, &Extra { pd, extended: false }) })
}

/// What of `ibv_qp_init_attr_mask` is understood.
const INIT_MASK: u32 = qp_init::PD | qp_init::XRCD | qp_init::CREATE_FLAGS | qp_init::SEND_OPS_FLAGS;

pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    ret::pointer(|| {
        // SAFETY: the program passes attributes.
        let attr = unsafe { &*attr };
        let has = |bit: u32| attr.comp_mask & bit != 0;
        if attr.comp_mask & !INIT_MASK != 0 || (has(qp_init::CREATE_FLAGS) && attr.create_flags != 0) {
            return Err(Errno::NOTSUP);
        }
        let extended = has(qp_init::SEND_OPS_FLAGS);
        if extended && attr.send_ops_flags & !SEND_OPS != 0 {
            return Err(Errno::NOTSUP);
        }
        let extra = Extra {
            pd: if has(qp_init::PD) { attr.pd } else { ptr::null_mut() },
            extended,
        };
        // SAFETY: with objects of ours.
        unsafe { create(&attr.base(), &extra) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the program passes a queue pair of ours.
    match unsafe { Qp::of(qp) }.extended {
        true => qp.cast(),
        false => ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours and attributes.
        let (this, attr) = unsafe { (Qp::of(qp), &*attr) };
        this.alive()?;
        let change = qpattr::from_c(&this.core, attr, mask as u32)?;
        this.inner.modify(&change)?;
        if change.av.is_some() {
            *this.path.lock() = Some(attr.ah_attr);
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
        let this = unsafe { Qp::of(qp) };
        this.alive()?;
        let mut out = qpattr::to_c(&this.core, &this.inner.query()?);
        if let Some(path) = *this.path.lock() {
            out.ah_attr = path;
        }
        out.cap = this.init.cap;
        // SAFETY: the program passes room for both; the state is the public part's field.
        unsafe {
            (&raw mut (*qp).state).write(out.qp_state);
            attr.write(out);
            init.write(this.init);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours.
        let this = unsafe { Qp::of(qp) };
        let Ok(engine) = this.core.engine() else {
            // A forked child's copy: it stays, as the queue pair is the parent's.
            return Ok(());
        };
        let target = engine.objects().qps.remove(&this.inner.qpn().value());
        if let Some(target) = target {
            target.finish();
        }
        // SAFETY: boxed by `create`, and nobody has it any more.
        drop(unsafe { Box::from_raw(qp.cast::<Qp>()) });
        Ok(())
    })
}
