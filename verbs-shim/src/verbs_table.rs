//! Entry points of devices and contexts, and the table of verbs behind every context.

use std::{os::fd::IntoRawFd as _, ptr};

use libc::{c_int, c_void};
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    abi::{ibv_context, ibv_context_ops, ibv_device, verbs_context},
    core::{COMP_VECTORS, Context, Core},
    cq, cqex,
    device::{self, VerbsDevice},
    live::Object as _,
    mr, mw, pd, post, qp_verbs, query, rebind,
    ret::{self, Errno},
    srq, unopened, unsupported as no, xrc,
};

/// `__VERBS_ABI_IS_EXTENDED`.
const EXTENDED: *mut c_void = usize::MAX as *mut c_void;

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
        // libibverbs keeps its own table there. It must not be NULL; programs may not follow it.
        private: ptr::dangling_mut::<u64>().cast(),
        query_device_ex: query::query_device_ex,
        destroy_flow: no::code,
        placeholder2: no::pointer,
        create_flow: no::pointer,
        placeholder1: no::pointer,
        open_qp: qp_verbs::open_qp,
        create_qp_ex: qp_verbs::create_qp_ex,
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
            num_comp_vectors: COMP_VECTORS.cast_signed(),
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
        bind_mw: post::bind_mw,
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
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    ret::pointer(|| {
        // A program that looks for devices is about to look at their files.
        rebind::run();
        let mut devices: Vec<*mut ibv_device> = device::list()?.into_iter().map(VerbsDevice::as_abi).collect();
        if !count.is_null() {
            // SAFETY: the program passes room for the number.
            unsafe { count.write_unaligned(devices.len() as c_int) };
        }
        devices.push(ptr::null_mut());
        // SAFETY: room for as many pointers as are copied; freed with free() in ibv_free_device_list.
        unsafe {
            let array = libc::calloc(devices.len(), size_of::<*mut ibv_device>()).cast::<*mut ibv_device>();
            if array.is_null() {
                return Err(Errno::NOMEM);
            }
            ptr::copy_nonoverlapping(devices.as_ptr(), array, devices.len());
            Ok(array)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: made by ibv_get_device_list with calloc.
    unsafe { libc::free(list.cast()) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    ret::pointer(|| {
        let device = VerbsDevice::of(device)
            .ok_or_else(|| Errno::INVAL.because("the pointer is to no device of ibv_get_device_list"))?;
        unopened::opened();
        rebind::run();
        let core = Core::new(device)?;
        // Programs and their libraries look at cmd_fd, and close or poll it: a descriptor that does nothing.
        let cmd_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Context::new(verbs(), core, cmd_fd.into_raw_fd()).publish()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    ret::minus_one(|| {
        // A context has no handle: the kernel finds it by the descriptor.
        let context = Context::claim(context).map_err(|_| Errno::INVAL.because("the pointer is to no open context"))?;
        // SAFETY: made with the context.
        unsafe { libc::close(context.cmd_fd()) };
        match context.core().alive() {
            Ok(()) => context.free(),
            // A forked child's copy: its parts are the parent's, and their locks may be in any state.
            Err(_) => context.forget(),
        }
        Ok(0)
    })
}
