//! Objects that programs hold pointers to.

use libc::{c_char, c_int, c_uint, c_void, pthread_cond_t, pthread_mutex_t, size_t};

use super::{c_enum, ibv_context, ibv_data_buf, ibv_mw_bind_info, ibv_poll_cq_attr, ibv_sge};

#[repr(C)]
pub(crate) struct ibv_device {
    pub ops: [*mut c_void; 2],
    pub node_type: c_enum,
    pub transport_type: c_enum,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

#[repr(C)]
pub(crate) struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

#[repr(C)]
pub(crate) struct ibv_xrcd {
    pub context: *mut ibv_context,
}

#[repr(C)]
pub(crate) struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: size_t,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub(crate) struct ibv_mw {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub rkey: u32,
    pub handle: u32,
    pub kind: c_enum,
}

#[repr(C)]
pub(crate) struct ibv_ah {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub handle: u32,
}

#[repr(C)]
pub(crate) struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub(crate) struct ibv_srq {
    pub context: *mut ibv_context,
    pub srq_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub handle: u32,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_enum,
    pub qp_type: c_enum,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_qp_ex {
    pub qp_base: ibv_qp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: c_uint,
    pub wr_atomic_cmp_swp: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64),
    pub wr_atomic_fetch_add: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64),
    pub wr_bind_mw: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info),
    pub wr_local_inv: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
    pub wr_rdma_read: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64),
    pub wr_rdma_write: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64),
    pub wr_rdma_write_imm: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
    pub wr_send: unsafe extern "C" fn(*mut ibv_qp_ex),
    pub wr_send_imm: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
    pub wr_send_inv: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
    pub wr_send_tso: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, u16, u16),
    pub wr_set_ud_addr: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32),
    pub wr_set_xrc_srqn: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
    pub wr_set_inline_data: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, size_t),
    pub wr_set_inline_data_list: unsafe extern "C" fn(*mut ibv_qp_ex, size_t, *const ibv_data_buf),
    pub wr_set_sge: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
    pub wr_set_sge_list: unsafe extern "C" fn(*mut ibv_qp_ex, size_t, *const ibv_sge),
    pub wr_start: unsafe extern "C" fn(*mut ibv_qp_ex),
    pub wr_complete: unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int,
    pub wr_abort: unsafe extern "C" fn(*mut ibv_qp_ex),
    pub wr_atomic_write: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, *const c_void),
}

#[repr(C)]
pub(crate) struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_wc_tm_info {
    pub tag: u64,
    pub private: u32,
}

#[repr(C)]
pub(crate) struct ibv_cq_ex {
    pub base: ibv_cq,
    pub comp_mask: u32,
    pub status: c_enum,
    pub wr_id: u64,
    pub start_poll: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int,
    pub next_poll: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int,
    pub end_poll: unsafe extern "C" fn(*mut ibv_cq_ex),
    pub read_opcode: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_enum,
    pub read_vendor_err: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_byte_len: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_imm_data: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_qp_num: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_src_qp: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_wc_flags: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint,
    pub read_slid: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_sl: unsafe extern "C" fn(*mut ibv_cq_ex) -> u8,
    pub read_dlid_path_bits: unsafe extern "C" fn(*mut ibv_cq_ex) -> u8,
    pub read_completion_ts: unsafe extern "C" fn(*mut ibv_cq_ex) -> u64,
    pub read_cvlan: unsafe extern "C" fn(*mut ibv_cq_ex) -> u16,
    pub read_flow_tag: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
    pub read_tm_info: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_wc_tm_info),
    pub read_completion_wallclock_ns: unsafe extern "C" fn(*mut ibv_cq_ex) -> u64,
}
