//! Sizes and offsets: as recorded from rdma-core 44's headers on x86-64, and as a C compiler sees the installed headers.

use std::{fmt::Write as _, fs, path::Path, process::Command};

use super::*;

/// One structure: its name in C, its size as recorded, here, and fields by name here, in C, offset as recorded, here.
struct Layout {
    c: &'static str,
    size: (usize, usize),
    fields: Vec<(&'static str, &'static str, usize, usize)>,
}

macro_rules! layouts {
    ($($kind:ident $ty:ident: $size:literal { $($field:ident $c:literal $offset:literal,)* })*) => {
        vec![$(Layout {
            c: concat!(stringify!($kind), " ", stringify!($ty)),
            size: ($size, size_of::<$ty>()),
            fields: vec![$((stringify!($field), $c, $offset, std::mem::offset_of!($ty, $field)),)*],
        },)*]
    };
}

#[rustfmt::skip]
fn layouts() -> Vec<Layout> {
    layouts! {
        union ibv_gid: 16 {
            raw "raw" 0,
        }
        struct ibv_gid_entry: 32 {
            gid "gid" 0,
            gid_index "gid_index" 16,
            port_num "port_num" 20,
            gid_type "gid_type" 24,
            ndev_ifindex "ndev_ifindex" 28,
        }
        struct ibv_device_attr: 232 {
            fw_ver "fw_ver" 0,
            node_guid "node_guid" 64,
            sys_image_guid "sys_image_guid" 72,
            max_mr_size "max_mr_size" 80,
            page_size_cap "page_size_cap" 88,
            vendor_id "vendor_id" 96,
            vendor_part_id "vendor_part_id" 100,
            hw_ver "hw_ver" 104,
            max_qp "max_qp" 108,
            max_qp_wr "max_qp_wr" 112,
            device_cap_flags "device_cap_flags" 116,
            max_sge "max_sge" 120,
            max_sge_rd "max_sge_rd" 124,
            max_cq "max_cq" 128,
            max_cqe "max_cqe" 132,
            max_mr "max_mr" 136,
            max_pd "max_pd" 140,
            max_qp_rd_atom "max_qp_rd_atom" 144,
            max_ee_rd_atom "max_ee_rd_atom" 148,
            max_res_rd_atom "max_res_rd_atom" 152,
            max_qp_init_rd_atom "max_qp_init_rd_atom" 156,
            max_ee_init_rd_atom "max_ee_init_rd_atom" 160,
            atomic_cap "atomic_cap" 164,
            max_ee "max_ee" 168,
            max_rdd "max_rdd" 172,
            max_mw "max_mw" 176,
            max_raw_ipv6_qp "max_raw_ipv6_qp" 180,
            max_raw_ethy_qp "max_raw_ethy_qp" 184,
            max_mcast_grp "max_mcast_grp" 188,
            max_mcast_qp_attach "max_mcast_qp_attach" 192,
            max_total_mcast_qp_attach "max_total_mcast_qp_attach" 196,
            max_ah "max_ah" 200,
            max_fmr "max_fmr" 204,
            max_map_per_fmr "max_map_per_fmr" 208,
            max_srq "max_srq" 212,
            max_srq_wr "max_srq_wr" 216,
            max_srq_sge "max_srq_sge" 220,
            max_pkeys "max_pkeys" 224,
            local_ca_ack_delay "local_ca_ack_delay" 226,
            phys_port_cnt "phys_port_cnt" 227,
        }
        struct ibv_query_device_ex_input: 4 {
            comp_mask "comp_mask" 0,
        }
        struct ibv_odp_caps: 24 {
            general_caps "general_caps" 0,
            rc_odp_caps "per_transport_caps.rc_odp_caps" 8,
            uc_odp_caps "per_transport_caps.uc_odp_caps" 12,
            ud_odp_caps "per_transport_caps.ud_odp_caps" 16,
        }
        struct ibv_rss_caps: 32 {
            supported_qpts "supported_qpts" 0,
            max_rwq_indirection_tables "max_rwq_indirection_tables" 4,
            max_rwq_indirection_table_size "max_rwq_indirection_table_size" 8,
            rx_hash_fields_mask "rx_hash_fields_mask" 16,
            rx_hash_function "rx_hash_function" 24,
        }
        struct ibv_device_attr_ex: 400 {
            orig_attr "orig_attr" 0,
            comp_mask "comp_mask" 232,
            odp_caps "odp_caps" 240,
            completion_timestamp_mask "completion_timestamp_mask" 264,
            hca_core_clock "hca_core_clock" 272,
            device_cap_flags_ex "device_cap_flags_ex" 280,
            tso_caps "tso_caps" 288,
            rss_caps "rss_caps" 296,
            max_wq_type_rq "max_wq_type_rq" 328,
            packet_pacing_caps "packet_pacing_caps" 332,
            raw_packet_caps "raw_packet_caps" 344,
            tm_caps "tm_caps" 348,
            cq_mod_caps "cq_mod_caps" 368,
            max_dm_size "max_dm_size" 376,
            pci_atomic_caps "pci_atomic_caps" 384,
            xrc_odp_caps "xrc_odp_caps" 392,
            phys_port_cnt_ex "phys_port_cnt_ex" 396,
        }
        struct ibv_port_attr: 52 {
            state "state" 0,
            max_mtu "max_mtu" 4,
            active_mtu "active_mtu" 8,
            gid_tbl_len "gid_tbl_len" 12,
            port_cap_flags "port_cap_flags" 16,
            max_msg_sz "max_msg_sz" 20,
            bad_pkey_cntr "bad_pkey_cntr" 24,
            qkey_viol_cntr "qkey_viol_cntr" 28,
            pkey_tbl_len "pkey_tbl_len" 32,
            lid "lid" 34,
            sm_lid "sm_lid" 36,
            lmc "lmc" 38,
            max_vl_num "max_vl_num" 39,
            sm_sl "sm_sl" 40,
            subnet_timeout "subnet_timeout" 41,
            init_type_reply "init_type_reply" 42,
            active_width "active_width" 43,
            active_speed "active_speed" 44,
            phys_state "phys_state" 45,
            link_layer "link_layer" 46,
            flags "flags" 47,
            port_cap_flags2 "port_cap_flags2" 48,
        }
        struct ibv_global_route: 24 {
            dgid "dgid" 0,
            flow_label "flow_label" 16,
            sgid_index "sgid_index" 20,
            hop_limit "hop_limit" 21,
            traffic_class "traffic_class" 22,
        }
        struct ibv_grh: 40 {
        }
        struct ibv_ah_attr: 32 {
            grh "grh" 0,
            dlid "dlid" 24,
            sl "sl" 26,
            src_path_bits "src_path_bits" 27,
            static_rate "static_rate" 28,
            is_global "is_global" 29,
            port_num "port_num" 30,
        }
        struct ibv_srq_attr: 12 {
            max_wr "max_wr" 0,
            max_sge "max_sge" 4,
            srq_limit "srq_limit" 8,
        }
        struct ibv_srq_init_attr: 24 {
            srq_context "srq_context" 0,
            attr "attr" 8,
        }
        struct ibv_srq_init_attr_ex: 64 {
            srq_context "srq_context" 0,
            attr "attr" 8,
            comp_mask "comp_mask" 20,
            srq_type "srq_type" 24,
            pd "pd" 32,
            xrcd "xrcd" 40,
            cq "cq" 48,
            tm_cap "tm_cap" 56,
        }
        struct ibv_qp_cap: 20 {
            max_send_wr "max_send_wr" 0,
            max_recv_wr "max_recv_wr" 4,
            max_send_sge "max_send_sge" 8,
            max_recv_sge "max_recv_sge" 12,
            max_inline_data "max_inline_data" 16,
        }
        struct ibv_qp_init_attr: 64 {
            qp_context "qp_context" 0,
            send_cq "send_cq" 8,
            recv_cq "recv_cq" 16,
            srq "srq" 24,
            cap "cap" 32,
            qp_type "qp_type" 52,
            sq_sig_all "sq_sig_all" 56,
        }
        struct ibv_rx_hash_conf: 24 {
            rx_hash_function "rx_hash_function" 0,
            rx_hash_key_len "rx_hash_key_len" 1,
            rx_hash_key "rx_hash_key" 8,
            rx_hash_fields_mask "rx_hash_fields_mask" 16,
        }
        struct ibv_qp_init_attr_ex: 136 {
            qp_context "qp_context" 0,
            send_cq "send_cq" 8,
            recv_cq "recv_cq" 16,
            srq "srq" 24,
            cap "cap" 32,
            qp_type "qp_type" 52,
            sq_sig_all "sq_sig_all" 56,
            comp_mask "comp_mask" 60,
            pd "pd" 64,
            xrcd "xrcd" 72,
            create_flags "create_flags" 80,
            max_tso_header "max_tso_header" 84,
            rwq_ind_tbl "rwq_ind_tbl" 88,
            rx_hash_conf "rx_hash_conf" 96,
            source_qpn "source_qpn" 120,
            send_ops_flags "send_ops_flags" 128,
        }
        struct ibv_qp_open_attr: 32 {
            comp_mask "comp_mask" 0,
            qp_num "qp_num" 4,
            xrcd "xrcd" 8,
            qp_context "qp_context" 16,
            qp_type "qp_type" 24,
        }
        struct ibv_qp_attr: 144 {
            qp_state "qp_state" 0,
            cur_qp_state "cur_qp_state" 4,
            path_mtu "path_mtu" 8,
            path_mig_state "path_mig_state" 12,
            qkey "qkey" 16,
            rq_psn "rq_psn" 20,
            sq_psn "sq_psn" 24,
            dest_qp_num "dest_qp_num" 28,
            qp_access_flags "qp_access_flags" 32,
            cap "cap" 36,
            ah_attr "ah_attr" 56,
            alt_ah_attr "alt_ah_attr" 88,
            pkey_index "pkey_index" 120,
            alt_pkey_index "alt_pkey_index" 122,
            en_sqd_async_notify "en_sqd_async_notify" 124,
            sq_draining "sq_draining" 125,
            max_rd_atomic "max_rd_atomic" 126,
            max_dest_rd_atomic "max_dest_rd_atomic" 127,
            min_rnr_timer "min_rnr_timer" 128,
            port_num "port_num" 129,
            timeout "timeout" 130,
            retry_cnt "retry_cnt" 131,
            rnr_retry "rnr_retry" 132,
            alt_port_num "alt_port_num" 133,
            alt_timeout "alt_timeout" 134,
            rate_limit "rate_limit" 136,
        }
        struct ibv_ece: 12 {
            vendor_id "vendor_id" 0,
            options "options" 4,
            comp_mask "comp_mask" 8,
        }
        struct ibv_cq_init_attr_ex: 56 {
            cqe "cqe" 0,
            cq_context "cq_context" 8,
            channel "channel" 16,
            comp_vector "comp_vector" 24,
            wc_flags "wc_flags" 32,
            comp_mask "comp_mask" 40,
            flags "flags" 44,
            parent_domain "parent_domain" 48,
        }
        struct ibv_modify_cq_attr: 8 {
            attr_mask "attr_mask" 0,
            cq_count "moderate.cq_count" 4,
            cq_period "moderate.cq_period" 6,
        }
        struct ibv_poll_cq_attr: 4 {
            comp_mask "comp_mask" 0,
        }
        struct ibv_xrcd_init_attr: 12 {
            comp_mask "comp_mask" 0,
            fd "fd" 4,
            oflags "oflags" 8,
        }
        struct ibv_values_ex: 24 {
            comp_mask "comp_mask" 0,
            raw_clock "raw_clock" 8,
        }
        struct ibv_async_event: 16 {
            element "element" 0,
            event_type "event_type" 8,
        }
        struct ibv_mw_bind_info: 32 {
            mr "mr" 0,
            addr "addr" 8,
            length "length" 16,
            mw_access_flags "mw_access_flags" 24,
        }
        struct ibv_mw_bind: 48 {
            wr_id "wr_id" 0,
            send_flags "send_flags" 8,
            bind_info "bind_info" 16,
        }
        struct ibv_parent_domain_init_attr: 48 {
            pd "pd" 0,
            td "td" 8,
            comp_mask "comp_mask" 16,
            alloc "alloc" 24,
            free "free" 32,
            pd_context "pd_context" 40,
        }
        struct ibv_td: 8 {
            context "context" 0,
        }
        struct ibv_data_buf: 16 {
            addr "addr" 0,
            length "length" 8,
        }
        struct ibv_device: 664 {
            ops "_ops" 0,
            node_type "node_type" 16,
            transport_type "transport_type" 20,
            name "name" 24,
            dev_name "dev_name" 88,
            dev_path "dev_path" 152,
            ibdev_path "ibdev_path" 408,
        }
        struct ibv_pd: 16 {
            context "context" 0,
            handle "handle" 8,
        }
        struct ibv_xrcd: 8 {
            context "context" 0,
        }
        struct ibv_mr: 48 {
            context "context" 0,
            pd "pd" 8,
            addr "addr" 16,
            length "length" 24,
            handle "handle" 32,
            lkey "lkey" 36,
            rkey "rkey" 40,
        }
        struct ibv_mw: 32 {
            context "context" 0,
            pd "pd" 8,
            rkey "rkey" 16,
            handle "handle" 20,
            kind "type" 24,
        }
        struct ibv_ah: 24 {
            context "context" 0,
            pd "pd" 8,
            handle "handle" 16,
        }
        struct ibv_comp_channel: 16 {
            context "context" 0,
            fd "fd" 8,
            refcnt "refcnt" 12,
        }
        struct ibv_srq: 128 {
            context "context" 0,
            srq_context "srq_context" 8,
            pd "pd" 16,
            handle "handle" 24,
            mutex "mutex" 32,
            cond "cond" 72,
            events_completed "events_completed" 120,
        }
        struct ibv_qp: 160 {
            context "context" 0,
            qp_context "qp_context" 8,
            pd "pd" 16,
            send_cq "send_cq" 24,
            recv_cq "recv_cq" 32,
            srq "srq" 40,
            handle "handle" 48,
            qp_num "qp_num" 52,
            state "state" 56,
            qp_type "qp_type" 60,
            mutex "mutex" 64,
            cond "cond" 104,
            events_completed "events_completed" 152,
        }
        struct ibv_qp_ex: 352 {
            qp_base "qp_base" 0,
            comp_mask "comp_mask" 160,
            wr_id "wr_id" 168,
            wr_flags "wr_flags" 176,
            wr_atomic_cmp_swp "wr_atomic_cmp_swp" 184,
            wr_atomic_fetch_add "wr_atomic_fetch_add" 192,
            wr_bind_mw "wr_bind_mw" 200,
            wr_local_inv "wr_local_inv" 208,
            wr_rdma_read "wr_rdma_read" 216,
            wr_rdma_write "wr_rdma_write" 224,
            wr_rdma_write_imm "wr_rdma_write_imm" 232,
            wr_send "wr_send" 240,
            wr_send_imm "wr_send_imm" 248,
            wr_send_inv "wr_send_inv" 256,
            wr_send_tso "wr_send_tso" 264,
            wr_set_ud_addr "wr_set_ud_addr" 272,
            wr_set_xrc_srqn "wr_set_xrc_srqn" 280,
            wr_set_inline_data "wr_set_inline_data" 288,
            wr_set_inline_data_list "wr_set_inline_data_list" 296,
            wr_set_sge "wr_set_sge" 304,
            wr_set_sge_list "wr_set_sge_list" 312,
            wr_start "wr_start" 320,
            wr_complete "wr_complete" 328,
            wr_abort "wr_abort" 336,
            wr_atomic_write "wr_atomic_write" 344,
        }
        struct ibv_cq: 128 {
            context "context" 0,
            channel "channel" 8,
            cq_context "cq_context" 16,
            handle "handle" 24,
            cqe "cqe" 28,
            mutex "mutex" 32,
            cond "cond" 72,
            comp_events_completed "comp_events_completed" 120,
            async_events_completed "async_events_completed" 124,
        }
        struct ibv_wc_tm_info: 16 {
            tag "tag" 0,
            private "priv" 8,
        }
        struct ibv_cq_ex: 288 {
            base "context" 0,
            comp_mask "comp_mask" 128,
            status "status" 132,
            wr_id "wr_id" 136,
            start_poll "start_poll" 144,
            next_poll "next_poll" 152,
            end_poll "end_poll" 160,
            read_opcode "read_opcode" 168,
            read_vendor_err "read_vendor_err" 176,
            read_byte_len "read_byte_len" 184,
            read_imm_data "read_imm_data" 192,
            read_qp_num "read_qp_num" 200,
            read_src_qp "read_src_qp" 208,
            read_wc_flags "read_wc_flags" 216,
            read_slid "read_slid" 224,
            read_sl "read_sl" 232,
            read_dlid_path_bits "read_dlid_path_bits" 240,
            read_completion_ts "read_completion_ts" 248,
            read_cvlan "read_cvlan" 256,
            read_flow_tag "read_flow_tag" 264,
            read_tm_info "read_tm_info" 272,
            read_completion_wallclock_ns "read_completion_wallclock_ns" 280,
        }
        struct ibv_sge: 16 {
            addr "addr" 0,
            length "length" 8,
            lkey "lkey" 12,
        }
        struct ibv_send_wr: 128 {
            wr_id "wr_id" 0,
            next "next" 8,
            sg_list "sg_list" 16,
            num_sge "num_sge" 24,
            opcode "opcode" 28,
            send_flags "send_flags" 32,
            imm_data "imm_data" 36,
            wr "wr" 40,
            remote_srqn "qp_type" 72,
            extra "bind_mw" 80,
        }
        struct ibv_recv_wr: 32 {
            wr_id "wr_id" 0,
            next "next" 8,
            sg_list "sg_list" 16,
            num_sge "num_sge" 24,
        }
        struct ibv_wc: 48 {
            wr_id "wr_id" 0,
            status "status" 8,
            opcode "opcode" 12,
            vendor_err "vendor_err" 16,
            byte_len "byte_len" 20,
            imm_data "imm_data" 24,
            qp_num "qp_num" 28,
            src_qp "src_qp" 32,
            wc_flags "wc_flags" 36,
            pkey_index "pkey_index" 40,
            slid "slid" 42,
            sl "sl" 44,
            dlid_path_bits "dlid_path_bits" 45,
        }
        struct ibv_context_ops: 256 {
            compat_query_device "_compat_query_device" 0,
            compat_query_port "_compat_query_port" 8,
            compat_pd_mr "_compat_alloc_pd" 16,
            alloc_mw "alloc_mw" 56,
            bind_mw "bind_mw" 64,
            dealloc_mw "dealloc_mw" 72,
            compat_create_cq "_compat_create_cq" 80,
            poll_cq "poll_cq" 88,
            req_notify_cq "req_notify_cq" 96,
            compat_cq_srq "_compat_cq_event" 104,
            post_srq_recv "post_srq_recv" 160,
            compat_qp "_compat_create_qp" 168,
            post_send "post_send" 200,
            post_recv "post_recv" 208,
            compat_ah "_compat_create_ah" 216,
        }
        struct ibv_context: 328 {
            device "device" 0,
            ops "ops" 8,
            cmd_fd "cmd_fd" 264,
            async_fd "async_fd" 268,
            num_comp_vectors "num_comp_vectors" 272,
            mutex "mutex" 280,
            abi_compat "abi_compat" 320,
        }
        struct verbs_context: 648 {
            query_port "query_port" 0,
            advise_mr "advise_mr" 8,
            alloc_null_mr "alloc_null_mr" 16,
            read_counters "read_counters" 24,
            attach_counters_point_flow "attach_counters_point_flow" 32,
            create_counters "create_counters" 40,
            destroy_counters "destroy_counters" 48,
            reg_dm_mr "reg_dm_mr" 56,
            alloc_dm "alloc_dm" 64,
            free_dm "free_dm" 72,
            modify_flow_action_esp "modify_flow_action_esp" 80,
            destroy_flow_action "destroy_flow_action" 88,
            create_flow_action_esp "create_flow_action_esp" 96,
            modify_qp_rate_limit "modify_qp_rate_limit" 104,
            alloc_parent_domain "alloc_parent_domain" 112,
            dealloc_td "dealloc_td" 120,
            alloc_td "alloc_td" 128,
            modify_cq "modify_cq" 136,
            post_srq_ops "post_srq_ops" 144,
            destroy_rwq_ind_table "destroy_rwq_ind_table" 152,
            create_rwq_ind_table "create_rwq_ind_table" 160,
            destroy_wq "destroy_wq" 168,
            modify_wq "modify_wq" 176,
            create_wq "create_wq" 184,
            query_rt_values "query_rt_values" 192,
            create_cq_ex "create_cq_ex" 200,
            private "priv" 208,
            query_device_ex "query_device_ex" 216,
            destroy_flow "ibv_destroy_flow" 224,
            placeholder2 "ABI_placeholder2" 232,
            create_flow "ibv_create_flow" 240,
            placeholder1 "ABI_placeholder1" 248,
            open_qp "open_qp" 256,
            create_qp_ex "create_qp_ex" 264,
            get_srq_num "get_srq_num" 272,
            create_srq_ex "create_srq_ex" 280,
            open_xrcd "open_xrcd" 288,
            close_xrcd "close_xrcd" 296,
            placeholder3 "_ABI_placeholder3" 304,
            sz "sz" 312,
            context "context" 320,
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn layouts_are_those_recorded() {
    for layout in layouts() {
        assert_eq!(layout.size.1, layout.size.0, "size of {}", layout.c);
        for (field, _, recorded, here) in layout.fields {
            assert_eq!(here, recorded, "offset of {}.{field}", layout.c);
        }
    }
}

/// A C program that prints all numbers, one per line.
fn program(all: &[Layout]) -> String {
    let mut text = String::from("#include <infiniband/verbs.h>\n#include <stdio.h>\nint main(void) {\n");
    for layout in all {
        let _ = writeln!(text, "printf(\"%zu\\n\", sizeof({}));", layout.c);
        for (_, c, ..) in &layout.fields {
            let _ = writeln!(text, "printf(\"%zu\\n\", offsetof({}, {c}));", layout.c);
        }
    }
    text + "return 0; }\n"
}

#[test]
fn layouts_are_those_of_the_installed_headers() {
    let dir = std::env::temp_dir().join(format!("ferroce-layout-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let all = layouts();
    let source = dir.join("layout.c");
    fs::write(&source, program(&all)).unwrap();
    let compiled = Command::new("cc")
        .arg("-o")
        .arg(dir.join("layout"))
        .arg(&source)
        .output();
    let here = Path::new("/usr/include/infiniband/verbs.h").exists();
    let printed = match compiled {
        Ok(out) if out.status.success() => Command::new(dir.join("layout")).output().unwrap().stdout,
        Ok(out) if here => panic!("the headers are there, but: {}", String::from_utf8_lossy(&out.stderr)),
        // Without headers or compiler the recorded numbers are all there is.
        _ => Vec::new(),
    };
    fs::remove_dir_all(&dir).unwrap();
    let mut numbers = std::str::from_utf8(&printed)
        .unwrap()
        .lines()
        .map(|l| l.parse::<usize>().unwrap());
    for layout in all.iter().filter(|_| !printed.is_empty()) {
        assert_eq!(numbers.next(), Some(layout.size.1), "size of {}", layout.c);
        for (field, _, _, here) in &layout.fields {
            assert_eq!(numbers.next(), Some(*here), "offset of {}.{field}", layout.c);
        }
    }
}
