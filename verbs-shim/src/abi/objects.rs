//! Objects that programs hold pointers to.

use libc::{c_char, c_int, c_uint, c_void, pthread_cond_t, pthread_mutex_t, size_t};

use super::{c_enum, ibv_context, ibv_data_buf, ibv_mw_bind_info, ibv_poll_cq_attr, ibv_sge};

c_types! {
    derive();

    struct ibv_device {
        ops = "_ops": [*mut c_void; 2],
        node_type transport_type: c_enum,
        name dev_name: [c_char; 64],
        dev_path ibdev_path: [c_char; 256],
    }

    struct ibv_pd {
        context: *mut ibv_context,
        handle: u32,
    }

    struct ibv_xrcd {
        context: *mut ibv_context,
    }

    struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: size_t,
        handle lkey rkey: u32,
    }

    struct ibv_mw {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        rkey handle: u32,
        kind = "type": c_enum,
    }

    struct ibv_ah {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        handle: u32,
    }

    struct ibv_comp_channel {
        context: *mut ibv_context,
        fd refcnt: c_int,
    }

    struct ibv_srq {
        context: *mut ibv_context,
        srq_context: *mut c_void,
        pd: *mut ibv_pd,
        handle: u32,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }

    struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        handle qp_num: u32,
        state qp_type: c_enum,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }

    struct ibv_qp_ex {
        qp_base: ibv_qp,
        comp_mask wr_id: u64,
        wr_flags: c_uint,
        wr_atomic_cmp_swp: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64),
        wr_atomic_fetch_add: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64),
        wr_bind_mw: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info),
        wr_local_inv: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_rdma_read wr_rdma_write: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64),
        wr_rdma_write_imm: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
        wr_send: unsafe extern "C" fn(*mut ibv_qp_ex),
        wr_send_imm wr_send_inv: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_send_tso: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, u16, u16),
        wr_set_ud_addr: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32),
        wr_set_xrc_srqn: unsafe extern "C" fn(*mut ibv_qp_ex, u32),
        wr_set_inline_data: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, size_t),
        wr_set_inline_data_list: unsafe extern "C" fn(*mut ibv_qp_ex, size_t, *const ibv_data_buf),
        wr_set_sge: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
        wr_set_sge_list: unsafe extern "C" fn(*mut ibv_qp_ex, size_t, *const ibv_sge),
        wr_start: unsafe extern "C" fn(*mut ibv_qp_ex),
        wr_complete: unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int,
        wr_abort: unsafe extern "C" fn(*mut ibv_qp_ex),
        wr_atomic_write: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, *const c_void),
    }

    struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed async_events_completed: u32,
    }

    struct ibv_wc_tm_info {
        tag: u64,
        private = "priv": u32,
    }

    struct ibv_cq_ex {
        base = "context..async_events_completed": ibv_cq,
        comp_mask: u32,
        status: c_enum,
        wr_id: u64,
        start_poll: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int,
        next_poll: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int,
        end_poll: unsafe extern "C" fn(*mut ibv_cq_ex),
        read_opcode: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_enum,
        read_vendor_err read_byte_len read_imm_data read_qp_num
            read_src_qp: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_wc_flags: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint,
        read_slid: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_sl read_dlid_path_bits: unsafe extern "C" fn(*mut ibv_cq_ex) -> u8,
        read_completion_ts: unsafe extern "C" fn(*mut ibv_cq_ex) -> u64,
        read_cvlan: unsafe extern "C" fn(*mut ibv_cq_ex) -> u16,
        read_flow_tag: unsafe extern "C" fn(*mut ibv_cq_ex) -> u32,
        read_tm_info: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_wc_tm_info),
        read_completion_wallclock_ns: unsafe extern "C" fn(*mut ibv_cq_ex) -> u64,
    }
}
