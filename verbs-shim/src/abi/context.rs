//! `ibv_context` and the `verbs_context` around it.

use libc::{c_int, c_void, pthread_mutex_t, size_t};

use super::{
    c_enum, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device, ibv_device_attr_ex, ibv_modify_cq_attr, ibv_mw,
    ibv_mw_bind, ibv_parent_domain_init_attr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_init_attr_ex, ibv_qp_open_attr,
    ibv_query_device_ex_input, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq, ibv_srq_init_attr_ex, ibv_td, ibv_values_ex,
    ibv_wc, ibv_xrcd, ibv_xrcd_init_attr,
};

/// A slot that only very old programs (`IBVERBS_1.0`) read.
pub(crate) type Compat = unsafe extern "C" fn() -> *mut c_void;

/// A slot for a verb that returns `int` and that this device does not have: the arguments are not read.
pub(crate) type IntSlot = unsafe extern "C" fn() -> c_int;
/// Likewise for a verb that returns a pointer.
pub(crate) type PtrSlot = unsafe extern "C" fn() -> *mut c_void;

c_types! {
    derive();

    struct ibv_context_ops {
        compat_query_device = "_compat_query_device": Compat,
        compat_query_port = "_compat_query_port": unsafe extern "C" fn(*mut ibv_context, u8, *mut c_void) -> c_int,
        compat_pd_mr = "_compat_alloc_pd.._compat_dereg_mr": [Compat; 5],
        alloc_mw: unsafe extern "C" fn(*mut ibv_pd, c_enum) -> *mut ibv_mw,
        bind_mw: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int,
        dealloc_mw: unsafe extern "C" fn(*mut ibv_mw) -> c_int,
        compat_create_cq = "_compat_create_cq": Compat,
        poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
        req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int,
        compat_cq_srq = "_compat_cq_event.._compat_destroy_srq": [Compat; 7],
        post_srq_recv: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
        compat_qp = "_compat_create_qp.._compat_destroy_qp": [Compat; 4],
        post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
        post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
        compat_ah = "_compat_create_ah.._compat_async_event": [Compat; 5],
    }

    struct ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd async_fd num_comp_vectors: c_int,
        mutex: pthread_mutex_t,
        abi_compat: *mut c_void,
    }

    struct verbs_context {
        query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, size_t) -> c_int,
        advise_mr: unsafe extern "C" fn(*mut ibv_pd, c_enum, u32, *mut ibv_sge, u32) -> c_int,
        alloc_null_mr: PtrSlot,
        read_counters attach_counters_point_flow: IntSlot,
        create_counters: PtrSlot,
        destroy_counters: IntSlot,
        reg_dm_mr alloc_dm: PtrSlot,
        free_dm modify_flow_action_esp destroy_flow_action: IntSlot,
        create_flow_action_esp: PtrSlot,
        modify_qp_rate_limit: IntSlot,
        alloc_parent_domain: unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd,
        dealloc_td: unsafe extern "C" fn(*mut ibv_td) -> c_int,
        alloc_td: unsafe extern "C" fn(*mut ibv_context, *mut u32) -> *mut ibv_td,
        modify_cq: unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int,
        post_srq_ops: unsafe extern "C" fn(*mut ibv_srq, *mut c_void, *mut *mut c_void) -> c_int,
        destroy_rwq_ind_table: IntSlot,
        create_rwq_ind_table: PtrSlot,
        destroy_wq modify_wq: IntSlot,
        create_wq: PtrSlot,
        query_rt_values: unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int,
        create_cq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex,
        private = "priv": *mut c_void,
        query_device_ex: unsafe extern "C" fn(
            *mut ibv_context,
            *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex,
            size_t,
        ) -> c_int,
        destroy_flow = "ibv_destroy_flow": IntSlot,
        placeholder2 = "ABI_placeholder2": Compat,
        create_flow = "ibv_create_flow": PtrSlot,
        placeholder1 = "ABI_placeholder1": Compat,
        open_qp: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp,
        create_qp_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp,
        get_srq_num: unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int,
        create_srq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq,
        open_xrcd: unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd,
        close_xrcd: unsafe extern "C" fn(*mut ibv_xrcd) -> c_int,
        placeholder3 = "_ABI_placeholder3": u64,
        sz: size_t,
        context: ibv_context,
    }
}
