//! Work requests and completions.

use libc::{c_int, c_uint, c_void};

use super::{c_enum, ibv_ah, ibv_mw, ibv_mw_bind_info};

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union wr_target {
    pub rdma: wr_rdma,
    pub atomic: wr_atomic,
    pub ud: wr_ud,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union wr_extra {
    pub bind_mw: wr_bind_mw,
    pub tso: wr_tso,
}

c_types! {
    derive(Clone, Copy);

    struct ibv_sge {
        addr: u64,
        length lkey: u32,
    }

    struct wr_rdma = "__typeof__(((struct ibv_send_wr *)0)->wr.rdma)" {
        remote_addr: u64,
        rkey: u32,
    }

    struct wr_atomic = "__typeof__(((struct ibv_send_wr *)0)->wr.atomic)" {
        remote_addr compare_add swap: u64,
        rkey: u32,
    }

    struct wr_ud = "__typeof__(((struct ibv_send_wr *)0)->wr.ud)" {
        ah: *mut ibv_ah,
        remote_qpn remote_qkey: u32,
    }

    struct wr_bind_mw = "__typeof__(((struct ibv_send_wr *)0)->bind_mw)" {
        mw: *mut ibv_mw,
        rkey: u32,
        bind_info: ibv_mw_bind_info,
    }

    struct wr_tso = "__typeof__(((struct ibv_send_wr *)0)->tso)" {
        hdr: *mut c_void,
        hdr_sz mss: u16,
    }

    struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: c_enum,
        send_flags: c_uint,
        /// Immediate data in network byte order, or the rkey to invalidate.
        imm_data: u32,
        wr: wr_target,
        remote_srqn = "qp_type.xrc.remote_srqn": u32,
        extra = "bind_mw": wr_extra,
    }

    struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    #[derive(Default)]
    struct ibv_wc {
        wr_id: u64,
        status opcode: c_enum,
        vendor_err byte_len: u32,
        /// Immediate data in network byte order, or the invalidated rkey.
        imm_data: u32,
        qp_num src_qp: u32,
        wc_flags: c_uint,
        pkey_index slid: u16,
        sl dlid_path_bits: u8,
    }
}
