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

#[repr(C)]
pub(crate) struct ibv_context_ops {
    pub compat_query_device: Compat,
    pub compat_query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut c_void) -> c_int,
    pub compat_pd_mr: [Compat; 5],
    pub alloc_mw: unsafe extern "C" fn(*mut ibv_pd, c_enum) -> *mut ibv_mw,
    pub bind_mw: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int,
    pub dealloc_mw: unsafe extern "C" fn(*mut ibv_mw) -> c_int,
    pub compat_create_cq: Compat,
    pub poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int,
    pub compat_cq_srq: [Compat; 7],
    pub post_srq_recv: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    pub compat_qp: [Compat; 4],
    pub post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
    pub post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    pub compat_ah: [Compat; 5],
}

#[repr(C)]
pub(crate) struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: pthread_mutex_t,
    pub abi_compat: *mut c_void,
}

/// A slot for a verb that returns `int` and that this device does not have: the arguments are not read.
pub(crate) type IntSlot = unsafe extern "C" fn() -> c_int;
/// Likewise for a verb that returns a pointer.
pub(crate) type PtrSlot = unsafe extern "C" fn() -> *mut c_void;

#[repr(C)]
pub(crate) struct verbs_context {
    pub query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, size_t) -> c_int,
    pub advise_mr: unsafe extern "C" fn(*mut ibv_pd, c_enum, u32, *mut ibv_sge, u32) -> c_int,
    pub alloc_null_mr: PtrSlot,
    pub read_counters: IntSlot,
    pub attach_counters_point_flow: IntSlot,
    pub create_counters: PtrSlot,
    pub destroy_counters: IntSlot,
    pub reg_dm_mr: PtrSlot,
    pub alloc_dm: PtrSlot,
    pub free_dm: IntSlot,
    pub modify_flow_action_esp: IntSlot,
    pub destroy_flow_action: IntSlot,
    pub create_flow_action_esp: PtrSlot,
    pub modify_qp_rate_limit: IntSlot,
    pub alloc_parent_domain: unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd,
    pub dealloc_td: unsafe extern "C" fn(*mut ibv_td) -> c_int,
    pub alloc_td: unsafe extern "C" fn(*mut ibv_context, *mut u32) -> *mut ibv_td,
    pub modify_cq: unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int,
    pub post_srq_ops: unsafe extern "C" fn(*mut ibv_srq, *mut c_void, *mut *mut c_void) -> c_int,
    pub destroy_rwq_ind_table: IntSlot,
    pub create_rwq_ind_table: PtrSlot,
    pub destroy_wq: IntSlot,
    pub modify_wq: IntSlot,
    pub create_wq: PtrSlot,
    pub query_rt_values: unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int,
    pub create_cq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex,
    pub private: *mut c_void,
    pub query_device_ex: unsafe extern "C" fn(
        *mut ibv_context,
        *const ibv_query_device_ex_input,
        *mut ibv_device_attr_ex,
        size_t,
    ) -> c_int,
    pub destroy_flow: IntSlot,
    pub placeholder2: Compat,
    pub create_flow: PtrSlot,
    pub placeholder1: Compat,
    pub open_qp: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp,
    pub create_qp_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp,
    pub get_srq_num: unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int,
    pub create_srq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq,
    pub open_xrcd: unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd,
    pub close_xrcd: unsafe extern "C" fn(*mut ibv_xrcd) -> c_int,
    pub placeholder3: u64,
    pub sz: size_t,
    pub context: ibv_context,
}
