//! Structures of the kernel's user interface and of programs, converted for librdmacm (libibverbs' `marshall.h`).

use libc::c_int;

use crate::{
    abi::{ibv_ah_attr, ibv_gid, ibv_qp_attr, ibv_qp_cap},
    rdmacm::abi::{AhAttr, QpAttrResp, UserPathRec},
};

/// `struct ibv_sa_path_rec` (`infiniband/sa.h`); what is big-endian there stays so.
#[repr(C)]
struct SaPathRec {
    dgid: ibv_gid,
    sgid: ibv_gid,
    dlid: u16,
    slid: u16,
    raw_traffic: c_int,
    flow_label: [u8; 4],
    hop_limit: u8,
    traffic_class: u8,
    reversible: c_int,
    numb_path: u8,
    pkey: u16,
    sl: u8,
    mtu_selector: u8,
    mtu: u8,
    rate_selector: u8,
    rate: u8,
    packet_life_time_selector: u8,
    packet_life_time: u8,
    preference: u8,
}

/// Fills an address vector, but for what the kernel does not tell.
fn ah_attr(to: &mut ibv_ah_attr, from: &AhAttr) {
    to.grh.dgid.raw = from.dgid;
    to.grh.flow_label = from.flow_label;
    to.grh.sgid_index = from.sgid_index;
    to.grh.hop_limit = from.hop_limit;
    to.grh.traffic_class = from.traffic_class;
    to.dlid = from.dlid;
    to.sl = from.sl;
    to.src_path_bits = from.src_path_bits;
    to.static_rate = from.static_rate;
    to.is_global = from.is_global;
    to.port_num = from.port_num;
}

/// An address vector of the kernel's.
///
/// # Safety
/// Both are there; as in the functions below.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_ah_attr_from_kern(to: *mut ibv_ah_attr, from: *const AhAttr) {
    // SAFETY: the caller's promise. All fields are plain numbers.
    unsafe {
        let mut out = to.read_unaligned();
        ah_attr(&mut out, &from.read_unaligned());
        to.write_unaligned(out);
    }
}

/// Attributes of a queue pair; its state is not among them, librdmacm sets it.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_qp_attr_from_kern(to: *mut ibv_qp_attr, from: *const QpAttrResp) {
    // SAFETY: the caller's promise. All fields are plain numbers.
    let (mut out, from) = unsafe { (to.read_unaligned(), from.read_unaligned()) };
    out.cur_qp_state = from.cur_state.cast_signed();
    out.path_mtu = from.path_mtu.cast_signed();
    out.path_mig_state = from.path_mig_state.cast_signed();
    out.qkey = from.qkey;
    out.rq_psn = from.rq_psn;
    out.sq_psn = from.sq_psn;
    out.dest_qp_num = from.dest_qp_num;
    out.qp_access_flags = from.access;
    let [max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data] = from.caps;
    out.cap = ibv_qp_cap {
        max_send_wr,
        max_recv_wr,
        max_send_sge,
        max_recv_sge,
        max_inline_data,
    };
    ah_attr(&mut out.ah_attr, &from.ah_attr);
    ah_attr(&mut out.alt_ah_attr, &from.alt_ah_attr);
    out.pkey_index = from.pkey_index;
    out.alt_pkey_index = from.alt_pkey_index;
    out.en_sqd_async_notify = from.en_sqd_async_notify;
    out.sq_draining = from.sq_draining;
    out.max_rd_atomic = from.max_rd_atomic;
    out.max_dest_rd_atomic = from.max_dest_rd_atomic;
    out.min_rnr_timer = from.min_rnr_timer;
    out.port_num = from.port_num;
    out.timeout = from.timeout;
    out.retry_cnt = from.retry_cnt;
    out.rnr_retry = from.rnr_retry;
    out.alt_port_num = from.alt_port_num;
    out.alt_timeout = from.alt_timeout;
    // SAFETY: likewise.
    unsafe { to.write_unaligned(out) };
}

/// A path record of the kernel's.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_path_rec_from_kern(to: *mut SaPathRec, from: *const UserPathRec) {
    // SAFETY: the caller's promise; `to` is written as a whole.
    unsafe {
        let from = from.read_unaligned();
        to.write_unaligned(SaPathRec {
            dgid: ibv_gid { raw: from.dgid },
            sgid: ibv_gid { raw: from.sgid },
            dlid: from.dlid,
            slid: from.slid,
            raw_traffic: from.raw_traffic.cast_signed(),
            flow_label: from.flow_label,
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
            reversible: from.reversible.cast_signed(),
            numb_path: from.numb_path,
            pkey: u16::from_ne_bytes(from.pkey),
            sl: from.sl,
            mtu_selector: from.mtu_selector,
            // A code of IBA, which needs six bits.
            mtu: from.mtu as u8,
            rate_selector: from.rate_selector,
            rate: from.rate,
            packet_life_time_selector: from.packet_life_time_selector,
            packet_life_time: from.packet_life_time,
            preference: from.preference,
        });
    }
}

/// A path record for the kernel.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_copy_path_rec_to_kern(to: *mut UserPathRec, from: *const SaPathRec) {
    // SAFETY: the caller's promise; `to` is written as a whole.
    unsafe {
        let from = from.read_unaligned();
        to.write_unaligned(UserPathRec {
            dgid: from.dgid.raw,
            sgid: from.sgid.raw,
            dlid: from.dlid,
            slid: from.slid,
            raw_traffic: from.raw_traffic.cast_unsigned(),
            flow_label: from.flow_label,
            reversible: from.reversible.cast_unsigned(),
            mtu: u32::from(from.mtu),
            pkey: from.pkey.to_ne_bytes(),
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
            numb_path: from.numb_path,
            sl: from.sl,
            mtu_selector: from.mtu_selector,
            rate_selector: from.rate_selector,
            rate: from.rate,
            packet_life_time_selector: from.packet_life_time_selector,
            packet_life_time: from.packet_life_time,
            preference: from.preference,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, zeroed};

    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn path_records_come_back_as_they_went() {
        // `infiniband/sa.h` on LP64.
        assert_eq!(size_of::<SaPathRec>(), 64);
        assert_eq!(offset_of!(SaPathRec, flow_label), 40);
        assert_eq!(offset_of!(SaPathRec, reversible), 48);
        assert_eq!(offset_of!(SaPathRec, pkey), 54);
        assert_eq!(offset_of!(SaPathRec, preference), 63);
        let mut kernel: UserPathRec = crate::rdmacm::abi::zeroed();
        for (i, byte) in kernel.as_mut_bytes().iter_mut().enumerate() {
            *byte = i as u8 + 1;
        }
        kernel.mtu = 5;
        // SAFETY: plain numbers.
        unsafe {
            let (mut user, mut back) = (zeroed::<SaPathRec>(), crate::rdmacm::abi::zeroed::<UserPathRec>());
            ibv_copy_path_rec_from_kern(&raw mut user, &raw const kernel);
            assert_eq!(
                (user.pkey.to_ne_bytes(), user.sl, user.mtu),
                (kernel.pkey, kernel.sl, 5)
            );
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
            caps: [1, 2, 3, 4, 5],
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
