//! Attributes that programs fill in or read.

use libc::{c_int, c_uint, c_void, size_t};
use zerocopy::FromZeros;

use super::{c_enum, ibv_comp_channel, ibv_context, ibv_cq, ibv_pd, ibv_srq, ibv_xrcd};

c_types! {
    derive(Clone, Copy, FromZeros);

    /// `union ibv_gid`: 16 bytes that are 8-byte aligned.
    #[repr(align(8))]
    #[derive(Default, PartialEq, Eq, Debug)]
    struct ibv_gid = "union ibv_gid" {
        raw: [u8; 16],
    }

    #[derive(Default)]
    struct ibv_gid_entry {
        gid: ibv_gid,
        gid_index port_num gid_type ndev_ifindex: u32,
    }

    struct ibv_device_attr {
        fw_ver: [u8; 64],
        node_guid sys_image_guid max_mr_size page_size_cap: u64,
        vendor_id: u32,
        versions = "vendor_part_id..hw_ver": [u32; 2],
        max_qp max_qp_wr: c_int,
        device_cap_flags: c_uint,
        max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom
            max_qp_init_rd_atom max_ee_init_rd_atom: c_int,
        atomic_cap: c_enum,
        datagram_domains = "max_ee..max_rdd": [c_int; 2],
        max_mw: c_int,
        raw_qps = "max_raw_ipv6_qp..max_raw_ethy_qp": [c_int; 2],
        max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah: c_int,
        fmrs = "max_fmr..max_map_per_fmr": [c_int; 2],
        max_srq max_srq_wr max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay phys_port_cnt: u8,
    }

    struct ibv_query_device_ex_input {
        comp_mask: u32,
    }

    struct ibv_device_attr_ex {
        orig_attr: ibv_device_attr,
        comp_mask: u32,
        odp_caps: [u64; 3],
        completion_timestamp_mask hca_core_clock device_cap_flags_ex: u64,
        other_caps = "tso_caps..xrc_odp_caps": [u32; 27],
        phys_port_cnt_ex: u32,
    }

    struct ibv_port_attr {
        state max_mtu active_mtu: c_enum,
        gid_tbl_len: c_int,
        port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lids = "lid..sm_lid": [u16; 2],
        lmc max_vl_num: u8,
        subnet = "sm_sl..init_type_reply": [u8; 3],
        active_width active_speed phys_state link_layer flags: u8,
        port_cap_flags2: u16,
    }

    #[derive(Default)]
    struct ibv_global_route {
        dgid: ibv_gid,
        flow_label: u32,
        sgid_index hop_limit traffic_class: u8,
    }

    /// The 40 bytes before a datagram's data. Over IPv4 the header is in the last 20.
    #[repr(align(8))]
    struct ibv_grh {
        bytes = "version_tclass_flow..dgid": [u8; 40],
    }

    #[derive(Default)]
    struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl src_path_bits static_rate is_global port_num: u8,
    }

    #[derive(Default)]
    struct ibv_srq_attr {
        max_wr max_sge srq_limit: u32,
    }

    struct ibv_srq_init_attr {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
    }

    struct ibv_srq_init_attr_ex {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
        comp_mask: u32,
        srq_type: c_enum,
        pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd,
        cq: *mut ibv_cq,
        tm_cap: [u32; 2],
    }

    #[derive(Default, Debug)]
    struct ibv_qp_cap {
        max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data: u32,
    }

    struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: c_enum,
        sq_sig_all: c_int,
    }

    struct ibv_qp_init_attr_ex {
        // The fields of ibv_qp_init_attr; its trailing padding is used here.
        qp_context: *mut c_void,
        send_cq recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: c_enum,
        sq_sig_all: c_int,
        comp_mask: u32,
        pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd,
        create_flags: u32,
        max_tso_header: u16,
        hashing = "rwq_ind_tbl..source_qpn": [u32; 9],
        send_ops_flags: u64,
    }

    struct ibv_qp_open_attr {
        comp_mask qp_num: u32,
        xrcd: *mut ibv_xrcd,
        qp_context: *mut c_void,
        qp_type: c_enum,
    }

    #[derive(Default)]
    struct ibv_qp_attr {
        qp_state cur_qp_state path_mtu path_mig_state: c_enum,
        qkey rq_psn sq_psn dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr alt_ah_attr: ibv_ah_attr,
        pkey_index alt_pkey_index: u16,
        en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt
            rnr_retry alt_port_num alt_timeout: u8,
        rate_limit: u32,
    }

    struct ibv_ece {
        vendor_id options comp_mask: u32,
    }

    struct ibv_cq_init_attr_ex {
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: u32,
        wc_flags: u64,
        comp_mask flags: u32,
        parent_domain: *mut ibv_pd,
    }

    struct ibv_modify_cq_attr {
        attr_mask: u32,
        moderate: [u16; 2],
    }

    struct ibv_poll_cq_attr {
        comp_mask: u32,
    }

    struct ibv_xrcd_init_attr {
        comp_mask: u32,
        fd oflags: c_int,
    }

    struct ibv_values_ex {
        comp_mask: u32,
        /// `struct timespec`.
        raw_clock: [i64; 2],
    }

    struct ibv_async_event {
        /// A pointer to the object, or the port number in the first four bytes.
        element: usize,
        event_type: c_enum,
    }

    struct ibv_mw_bind_info {
        mr: *mut super::ibv_mr,
        addr length: u64,
        mw_access_flags: c_uint,
    }

    struct ibv_mw_bind {
        wr_id: u64,
        send_flags: c_uint,
        bind_info: ibv_mw_bind_info,
    }

    struct ibv_parent_domain_init_attr {
        pd: *mut ibv_pd,
        td: *mut ibv_td,
        comp_mask: u32,
        allocator = "alloc..pd_context": [*mut c_void; 3],
    }

    struct ibv_td {
        context: *mut ibv_context,
    }

    struct ibv_data_buf {
        addr: *mut c_void,
        length: size_t,
    }
}
