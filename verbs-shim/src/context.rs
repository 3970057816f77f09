//! Contexts: opening and closing devices, and the table of verbs behind every context.

use std::{
    ptr,
    sync::{Arc, OnceLock},
};

use libc::{c_int, c_void};
use parking_lot::Mutex;

use crate::{
    abi::{ibv_context, ibv_context_ops, ibv_device, verbs_context},
    cq, cqex,
    device::VerbsDevice,
    engine::{self, Engine},
    events::Entry,
    fork,
    links::Links,
    live::{self, Object as _},
    mr, mw, pd, post, qp, query,
    queue::EventQueue,
    ret::{self, Errno, Result},
    srq, unopened, unsupported as no, xrc,
};

/// `__VERBS_ABI_IS_EXTENDED`.
const EXTENDED: *mut c_void = usize::MAX as *mut c_void;
/// Completion vectors: one thread moves everything, but programs that spread queues want to see some.
pub(crate) const COMP_VECTORS: c_int = 4;

/// State shared by a context's objects.
pub(crate) struct Core {
    pub(crate) device: &'static VerbsDevice,
    pub(crate) events: EventQueue<Entry>,
    born: u32,
    engine: OnceLock<Arc<Engine>>,
    /// Brings the events of the port; none where the system has no netlink.
    _links: Option<Arc<Links>>,
    opening: Mutex<()>,
}

impl Core {
    /// Fails in a child of the process that opened it.
    pub(crate) fn alive(&self) -> Result<()> {
        fork::check(self.born)
    }

    /// Checks that an object from which another one is made is in this context's table: the kernel has a table for each.
    ///
    /// # Errors
    /// ENOENT for an object of another context.
    pub(crate) fn finds(&self, other: &Self) -> Result<()> {
        self.same(other)
            .map_err(|_| Errno::NOENT.because("the objects are of different contexts (ibv_open_device)"))
    }

    /// Checks that an object is of this context, without which it can't be used.
    ///
    /// # Errors
    /// EINVAL for an object of another context.
    pub(crate) fn same(&self, other: &Self) -> Result<()> {
        match ptr::eq(self, other) {
            true => Ok(()),
            false => Err(Errno::INVAL.because("the objects are of different contexts (ibv_open_device)")),
        }
    }

    /// The transport if it is open.
    pub(crate) fn opened(&self) -> Option<&Arc<Engine>> {
        self.engine.get().filter(|_| self.alive().is_ok())
    }

    /// The transport, which opens now if it has to.
    ///
    /// # Errors
    /// When the port can't be had, or after a fork.
    pub(crate) fn engine(self: &Arc<Self>) -> Result<&Arc<Engine>> {
        self.alive()?;
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let _one = self.opening.lock();
        if self.engine.get().is_none() {
            let engine = Engine::get()?;
            engine.objects().watch(self);
            let _ = self.engine.set(engine);
        }
        self.engine.get().ok_or(Errno::IO)
    }
}

/// A context as programs see it. The public part is `abi.context`.
#[repr(C)]
pub(crate) struct Context {
    abi: verbs_context,
    core: Arc<Core>,
}

live::object!(
    Context,
    ibv_context,
    std::mem::offset_of!(verbs_context, context),
    |context| (*context).device,
    0
);

impl Context {
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    fn open(device: &'static VerbsDevice) -> Result<Self> {
        unopened::opened();
        let events = EventQueue::new()?;
        // Programs and their libraries look at cmd_fd, and close or poll what is in it: a descriptor that does nothing.
        // SAFETY: makes a descriptor, or fails.
        let cmd_fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if cmd_fd < 0 {
            return Err(Errno::last());
        }
        let links = engine::links();
        let core = Arc::new(Core {
            device,
            events,
            born: fork::generation(),
            engine: OnceLock::new(),
            _links: links.clone(),
            opening: Mutex::new(()),
        });
        if let Some(links) = links {
            links.add(&core);
        }
        let mut abi = verbs();
        abi.context.device = device.as_abi();
        abi.context.cmd_fd = cmd_fd;
        abi.context.async_fd = core.events.fd();
        Ok(Self { abi, core })
    }
}

/// The table of verbs. Inline calls do not check for NULL, so that every slot has a function.
fn verbs() -> verbs_context {
    verbs_context {
        query_port: query::query_port,
        advise_mr: mr::advise_mr,
        alloc_null_mr: no::pointer,
        read_counters: no::code,
        attach_counters_point_flow: no::code,
        create_counters: no::pointer,
        destroy_counters: no::code,
        reg_dm_mr: no::pointer,
        alloc_dm: no::pointer,
        free_dm: no::code,
        modify_flow_action_esp: no::code,
        destroy_flow_action: no::code,
        create_flow_action_esp: no::pointer,
        modify_qp_rate_limit: no::code,
        alloc_parent_domain: pd::alloc_parent_domain,
        dealloc_td: pd::dealloc_td,
        alloc_td: pd::alloc_td,
        modify_cq: cq::modify_cq,
        post_srq_ops: no::post_srq_ops,
        destroy_rwq_ind_table: no::code,
        create_rwq_ind_table: no::pointer,
        destroy_wq: no::code,
        modify_wq: no::code,
        create_wq: no::pointer,
        query_rt_values: query::query_rt_values,
        create_cq_ex: cqex::create_cq_ex,
        // libibverbs keeps its own table there; nobody may follow it, but it must not be NULL.
        private: ptr::dangling_mut::<u64>().cast(),
        query_device_ex: query::query_device_ex,
        destroy_flow: no::code,
        placeholder2: no::pointer,
        create_flow: no::pointer,
        placeholder1: no::pointer,
        open_qp: qp::open_qp,
        create_qp_ex: qp::create_qp_ex,
        get_srq_num: srq::get_srq_num,
        create_srq_ex: srq::create_srq_ex,
        open_xrcd: xrc::open_xrcd,
        close_xrcd: xrc::close_xrcd,
        placeholder3: 0,
        sz: size_of::<verbs_context>(),
        context: ibv_context {
            device: ptr::null_mut(),
            ops: ops(),
            cmd_fd: -1,
            async_fd: -1,
            num_comp_vectors: COMP_VECTORS,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            abi_compat: EXTENDED,
        },
    }
}

fn ops() -> ibv_context_ops {
    ibv_context_ops {
        compat_query_device: no::pointer,
        compat_query_port: query::compat_query_port,
        compat_pd_mr: [no::pointer; 5],
        alloc_mw: mw::alloc_mw,
        bind_mw: mw::bind_mw,
        dealloc_mw: mw::dealloc_mw,
        compat_create_cq: no::pointer,
        poll_cq: cq::poll_cq,
        req_notify_cq: cq::req_notify_cq,
        compat_cq_srq: [no::pointer; 7],
        post_srq_recv: srq::post_srq_recv,
        compat_qp: [no::pointer; 4],
        post_send: post::post_send,
        post_recv: post::post_recv,
        compat_ah: [no::pointer; 5],
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    ret::pointer(|| {
        Context::open(
            VerbsDevice::of(device)
                .ok_or_else(|| Errno::INVAL.because("the pointer is to no device of ibv_get_device_list"))?,
        )?
        .publish()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    ret::minus_one(|| {
        // A context has no handle: the kernel finds it by the descriptor.
        let context = Context::claim(context).map_err(|_| Errno::INVAL.because("the pointer is to no open context"))?;
        // SAFETY: made with the context.
        unsafe { libc::close(context.abi.context.cmd_fd) };
        match context.core.alive() {
            Ok(()) => context.free(),
            // A forked child's copy: its parts are the parent's business, and their locks may be in any state.
            Err(_) => context.forget(),
        }
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_device(_cmd_fd: c_int) -> *mut ibv_context {
    Errno::NOTSUP.set();
    ptr::null_mut()
}
