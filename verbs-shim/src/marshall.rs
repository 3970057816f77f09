//! Structures of the kernel's user interface and of programs, converted for librdmacm (libibverbs' `marshall.h`).
//!
//! # Safety
//! Both arguments of each function point to such a structure.

use std::mem;

use libc::c_int;

use crate::{
    abi::{c_types, ibv_ah_attr, ibv_gid, ibv_qp_attr},
    rdmacm::abi::{AhAttr, QpAttrResp, UserPathRec},
};

c_types! {
    derive(Clone, Copy);

    /// Path record of programs; its big-endian fields stay so.
    struct SaPathRec = "struct ibv_sa_path_rec" {
        dgid sgid: ibv_gid,
        dlid slid: u16,
        raw_traffic: c_int,
        flow_label: [u8; 4],
        hop_limit traffic_class: u8,
        reversible: c_int,
        numb_path: u8,
        pkey: u16,
        sl mtu_selector mtu rate_selector rate packet_life_time_selector packet_life_time preference: u8,
    }
}

macro_rules! copy {
    ($to:expr, $from:expr; $($field:ident)*) => { $($to.$field = $from.$field;)* };
}

fn ah_attr(to: &mut ibv_ah_attr, from: &AhAttr) {
    to.grh.dgid.raw = from.dgid;
    copy!(to.grh, from; flow_label sgid_index hop_limit traffic_class);
    copy!(to, from; dlid sl src_path_bits static_rate is_global port_num);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_ah_attr_from_kern(to: *mut ibv_ah_attr, from: *const AhAttr) {
    // SAFETY: the caller's promise. All fields are plain numbers.
    unsafe {
        let mut out = to.read_unaligned();
        ah_attr(&mut out, &from.read_unaligned());
        to.write_unaligned(out);
    }
}

/// Converts attributes of a queue pair but for its state, which librdmacm sets.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_qp_attr_from_kern(to: *mut ibv_qp_attr, from: *const QpAttrResp) {
    // SAFETY: the caller's promise. All fields are plain numbers.
    let (mut out, from) = unsafe { (to.read_unaligned(), from.read_unaligned()) };
    out.cur_qp_state = from.cur_state;
    out.qp_access_flags = from.access;
    copy!(out.cap, from; max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data);
    ah_attr(&mut out.ah_attr, &from.ah_attr);
    ah_attr(&mut out.alt_ah_attr, &from.alt_ah_attr);
    copy!(out, from; path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num pkey_index alt_pkey_index en_sqd_async_notify
        sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout);
    // SAFETY: likewise.
    unsafe { to.write_unaligned(out) };
}

/// Copies the fields that both forms of a path record have.
macro_rules! copy_path {
    ($to:expr, $from:expr) => {
        copy!($to, $from; dlid slid raw_traffic flow_label hop_limit traffic_class reversible numb_path pkey sl mtu_selector
            rate_selector rate packet_life_time_selector packet_life_time preference)
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_path_rec_from_kern(to: *mut SaPathRec, from: *const UserPathRec) {
    // SAFETY: the caller's promise; `to` is written as a whole. All fields are plain numbers.
    unsafe {
        let (mut out, from) = (mem::zeroed::<SaPathRec>(), from.read_unaligned());
        copy_path!(out, from);
        (out.dgid.raw, out.sgid.raw) = (from.dgid, from.sgid);
        // A code of IBA, which needs six bits.
        out.mtu = from.mtu as u8;
        to.write_unaligned(out);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_path_rec_to_kern(to: *mut UserPathRec, from: *const SaPathRec) {
    // SAFETY: the caller's promise; `to` is written as a whole. All fields are plain numbers.
    unsafe {
        let (mut out, from) = (mem::zeroed::<UserPathRec>(), from.read_unaligned());
        copy_path!(out, from);
        (out.dgid, out.sgid) = (from.dgid.raw, from.sgid.raw);
        out.mtu = from.mtu.into();
        to.write_unaligned(out);
    }
}

#[cfg(test)]
mod tests {
    use std::mem::zeroed;

    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn path_records_come_back_as_they_went() {
        let mut kernel: UserPathRec = crate::rdmacm::abi::zeroed();
        for (i, byte) in kernel.as_mut_bytes().iter_mut().enumerate() {
            *byte = i as u8 + 1;
        }
        kernel.mtu = 5;
        // SAFETY: plain numbers.
        unsafe {
            let (mut user, mut back) = (zeroed::<SaPathRec>(), crate::rdmacm::abi::zeroed::<UserPathRec>());
            ibv_copy_path_rec_from_kern(&raw mut user, &raw const kernel);
            assert_eq!((user.pkey, user.sl, user.mtu), (kernel.pkey, kernel.sl, 5));
            ibv_copy_path_rec_to_kern(&raw mut back, &raw const user);
            assert_eq!(back.as_bytes(), kernel.as_bytes());
        }
    }

    #[test]
    fn attributes_keep_what_the_kernel_does_not_tell() {
        let mut from = QpAttrResp {
            state: 3,
            cur_state: 2,
            dest_qp_num: 7,
            max_send_wr: 1,
            max_inline_data: 5,
            timeout: 14,
            alt_timeout: 9,
            ..QpAttrResp::default()
        };
        from.ah_attr.dgid = [0xfe; 16];
        from.alt_ah_attr.port_num = 2;
        // SAFETY: plain numbers.
        unsafe {
            let mut to = zeroed::<ibv_qp_attr>();
            (to.qp_state, to.rate_limit) = (1, 77);
            ibv_copy_qp_attr_from_kern(&raw mut to, &raw const from);
            assert_eq!((to.qp_state, to.cur_qp_state, to.rate_limit), (1, 2, 77));
            assert_eq!((to.dest_qp_num, to.timeout, to.alt_timeout), (7, 14, 9));
            assert_eq!((to.cap.max_send_wr, to.cap.max_inline_data), (1, 5));
            assert_eq!((to.ah_attr.grh.dgid.raw, to.alt_ah_attr.port_num), ([0xfe; 16], 2));
        }
    }
}
