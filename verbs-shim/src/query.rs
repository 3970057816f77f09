//! Queries of devices and ports: attributes, GIDs, partition keys, clocks.

use std::{net::IpAddr, ptr, time::Duration};

use libc::{c_char, c_int, c_void, size_t};
use roce::{DeviceLimits, JoinConfig, Mtu};
use zerocopy::FromZeros as _;

use crate::{
    abi::{
        CAP_EX_ATOMIC_WRITE, IBV_ATOMIC_HCA, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE,
        IBV_PORT_DOWN, IBV_QPF_GRH_REQUIRED, cap, ibv_context, ibv_device_attr, ibv_device_attr_ex, ibv_gid,
        ibv_gid_entry, ibv_port_attr, ibv_query_device_ex_input, ibv_values_ex,
    },
    core::{Context, Core},
    device::VerbsDevice,
    gids,
    live::Object as _,
    ret::{self, Errno, Result},
};

/// The default partition, the only one.
const PKEY: u16 = 0xffff;
/// rdma_rxe's.
const VENDOR_ID: u32 = 0x00ff_ffff;

fn limits(core: &Core) -> DeviceLimits {
    // Without a transport yet: the least that it will have.
    core.opened().map_or_else(
        || {
            let limits = DeviceLimits::software(0);
            let numbers = JoinConfig::from_env().map_or(u32::MAX, |how| how.sure_numbers());
            DeviceLimits {
                max_qp: limits.max_qp.min(numbers),
                ..limits
            }
        },
        |engine| engine.device.limits(),
    )
}

fn guid(device: &VerbsDevice) -> u64 {
    u64::from_ne_bytes(device.guid())
}

fn device_attr(core: &Core) -> ibv_device_attr {
    let l = limits(core);
    let n = |v: u32| c_int::try_from(v).unwrap_or(c_int::MAX);
    let mut a = ibv_device_attr::new_zeroed();
    a.node_guid = guid(core.device);
    a.sys_image_guid = a.node_guid;
    a.max_mr_size = l.max_mr_size;
    a.page_size_cap = !(u64::from(l.page_size) - 1);
    a.vendor_id = VENDOR_ID;
    a.max_qp = n(l.max_qp);
    a.max_qp_wr = n(l.max_qp_wr);
    a.device_cap_flags = cap::BAD_PKEY_CNTR
        | cap::BAD_QKEY_CNTR
        | cap::CHANGE_PHY_PORT
        | cap::UD_AV_PORT_ENFORCE
        | cap::CURR_QP_STATE_MOD
        | cap::PORT_ACTIVE_EVENT
        | cap::SYS_IMAGE_GUID
        | cap::RC_RNR_NAK_GEN
        | cap::SRQ_RESIZE
        | cap::MEM_WINDOW
        | cap::XRC
        | cap::MEM_MGT_EXTENSIONS
        | cap::MEM_WINDOW_TYPE_2B;
    a.max_sge = n(l.max_sge);
    a.max_sge_rd = n(l.max_sge_rd);
    a.max_cq = n(l.max_cq);
    a.max_cqe = n(l.max_cqe);
    a.max_mr = n(l.max_mr);
    a.max_pd = n(l.max_pd);
    a.max_qp_rd_atom = c_int::from(l.max_qp_rd_atom);
    a.max_res_rd_atom = n(l.max_res_rd_atom());
    a.max_qp_init_rd_atom = c_int::from(l.max_qp_init_rd_atom);
    a.atomic_cap = IBV_ATOMIC_HCA;
    a.max_mw = n(l.max_mw);
    a.max_mcast_grp = n(l.max_mcast_grp);
    a.max_mcast_qp_attach = n(l.max_mcast_qp_attach);
    a.max_total_mcast_qp_attach = n(l.max_total_mcast_qp_attach);
    a.max_ah = n(l.max_ah);
    a.max_srq = n(l.max_srq);
    a.max_srq_wr = n(l.max_srq_wr);
    a.max_srq_sge = n(l.max_srq_sge);
    a.max_pkeys = l.max_pkeys;
    a.local_ca_ack_delay = l.local_ca_ack_delay;
    a.phys_port_cnt = 1;
    a
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes an open context and room for the attributes.
        unsafe { attr.write_unaligned(device_attr(Context::of(context)?.core())) };
        Ok(())
    })
}

/// Copies as much of a structure as the caller has room for.
///
/// # Safety
/// `size` bytes at `to` are writable.
unsafe fn copy_out<T>(to: *mut T, value: &T, size: size_t) {
    // SAFETY: no more than either side has.
    unsafe {
        ptr::copy_nonoverlapping(
            ptr::from_ref(value).cast::<u8>(),
            to.cast::<u8>(),
            size.min(size_of::<T>()),
        )
    };
}

pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: size_t,
) -> c_int {
    ret::code(|| {
        // SAFETY: null or readable.
        if !input.is_null() && unsafe { input.read_unaligned() }.comp_mask != 0 || size < size_of::<ibv_device_attr>() {
            return Err(
                Errno::INVAL.because("the input has a comp_mask, or the structure is shorter than ibv_device_attr")
            );
        }
        let mut out = ibv_device_attr_ex::new_zeroed();
        // SAFETY: the program passes an open context.
        out.orig_attr = device_attr(unsafe { Context::of(context)? }.core());
        out.completion_timestamp_mask = u64::MAX;
        // Completions are stamped in nanoseconds: kHz.
        out.hca_core_clock = 1_000_000;
        out.device_cap_flags_ex = u64::from(out.orig_attr.device_cap_flags) | CAP_EX_ATOMIC_WRITE;
        out.phys_port_cnt_ex = 1;
        // SAFETY: the caller's structure is `size` bytes.
        unsafe { copy_out(attr, &out, size) };
        Ok(())
    })
}

fn port_attr(core: &Core) -> ibv_port_attr {
    let link = core.device.link();
    let counters = core.opened().map(|e| e.device.stats().port).unwrap_or_default();
    let mut a = ibv_port_attr::new_zeroed();
    a.state = if link.active { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    a.max_mtu = Mtu::B4096 as c_int;
    a.active_mtu = core.device.path_mtu().unwrap_or(Mtu::B256) as c_int;
    a.gid_tbl_len = gids::TABLE_LEN as c_int;
    // IBV_PORT_CM_SUP and IBV_PORT_IP_BASED_GIDS, as rxe.
    a.port_cap_flags = 1 << 16 | 1 << 26;
    a.max_msg_sz = limits(core).max_msg_size;
    a.bad_pkey_cntr = counters.pkey_violations().into();
    a.qkey_viol_cntr = counters.qkey_violations().into();
    a.pkey_tbl_len = 1;
    a.max_vl_num = 1;
    (a.active_width, a.active_speed) = (link.active_width, link.active_speed);
    a.phys_state = link.phys_state;
    a.link_layer = IBV_LINK_LAYER_ETHERNET;
    a.flags = IBV_QPF_GRH_REQUIRED;
    a
}

pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: size_t,
) -> c_int {
    ret::code(|| {
        check_port(u32::from(port))?;
        // SAFETY: the program passes an open context and `size` bytes.
        unsafe { copy_out(attr, &port_attr(Context::of(context)?.core()), size) };
        Ok(())
    })
}

/// The structure of `IBVERBS_1.1` ends before `port_cap_flags2`.
const COMPAT_PORT_ATTR: size_t = std::mem::offset_of!(ibv_port_attr, port_cap_flags2);

pub(crate) unsafe extern "C" fn compat_query_port(context: *mut ibv_context, port: u8, attr: *mut c_void) -> c_int {
    // SAFETY: as query_port, with the old structure.
    unsafe { query_port(context, port, attr.cast(), COMPAT_PORT_ATTR) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut c_void) -> c_int {
    // SAFETY: as query_port, with the old structure.
    unsafe { compat_query_port(context, port, attr) }
}

fn check_port(port: u32) -> Result<()> {
    match port {
        1 => Ok(()),
        other => Err(Errno::INVAL.because(format_args!("port {other}: the device has port 1 alone"))),
    }
}

/// Looks up the GID at an index of a port's table: `None` in a slot that is not in use.
///
/// # Errors
/// EINVAL for another port, and for an index out of range.
///
/// # Safety
/// The program does not close the context during the call.
unsafe fn gid_at(context: *mut ibv_context, port: u32, index: u32) -> Result<Option<ibv_gid_entry>> {
    check_port(port)?;
    let last = gids::TABLE_LEN - 1;
    if index as usize > last {
        return Err(Errno::INVAL.because(format_args!("the table of GIDs has indices 0 to {last}")));
    }
    // SAFETY: the caller's promise.
    let device = unsafe { Context::of(context)? }.core().device;
    Ok(device.gids.get(index as usize).map(|ip| entry(device, index, ip)))
}

fn entry(device: &VerbsDevice, gid_index: u32, ip: IpAddr) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: gids::gid_of(ip),
        gid_index,
        port_num: 1,
        gid_type: IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: device.ifindex(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes an open context and room for a GID. A slot that is not in use reads as zero.
        unsafe {
            let entry = gid_at(context, port.into(), index.cast_unsigned())?;
            gid.write_unaligned(entry.map(|e| e.gid).unwrap_or_default());
        }
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    out: *mut ibv_gid_entry,
    flags: u32,
    size: size_t,
) -> c_int {
    ret::code(|| {
        if flags != 0 {
            return Err(Errno::INVAL.because("flags has unknown bits"));
        }
        // SAFETY: the program passes an open context and `size` bytes.
        unsafe { copy_out(out, &gid_at(context, port, index)?.ok_or(Errno::NODATA)?, size) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max: size_t,
    flags: u32,
    size: size_t,
) -> isize {
    let count = ret::run(|| {
        // SAFETY: the program passes an open context.
        let device = unsafe { Context::of(context)? }.core().device;
        let all = device.gids.entries();
        if flags != 0 || size == 0 || all.len() > max {
            return Err(Errno::INVAL);
        }
        for (n, (index, ip)) in all.iter().enumerate() {
            // SAFETY: the caller has room for `max` structures of `size` bytes.
            unsafe { copy_out(entries.byte_add(n * size), &entry(device, *index as u32, *ip), size) };
        }
        Ok(all.len() as isize)
    });
    count.unwrap_or_else(|e| -(e.0 as isize))
}

/// `IBV_GID_TYPE_SYSFS_ROCE_V2`.
const GID_TYPE_SYSFS_ROCE_V2: c_int = 1;

/// An internal call of libibverbs that rdma-core's own programs make.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, kind: *mut c_int) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes an open context and room for the answer. 0 is "IB or RoCE v1", and also the type of slots that are
        // not in use.
        unsafe { kind.write_unaligned(gid_at(context, port.into(), index)?.map_or(0, |_| GID_TYPE_SYSFS_ROCE_V2)) };
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes an open context.
        unsafe { Context::of(context)? };
        check_port(u32::from(port))?;
        if index != 0 {
            return Err(Errno::INVAL.because("the partition table has index 0 alone"));
        }
        // SAFETY: the program passes room for the key.
        unsafe { pkey.write_unaligned(PKEY.to_be()) };
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes an open context.
        unsafe { Context::of(context)? };
        check_port(u32::from(port))?;
        if u16::from_be(pkey) == PKEY {
            Ok(0)
        } else {
            Err(Errno::INVAL.because("the partition table has the default partition, 0xffff, alone"))
        }
    })
}

/// The clock that completions are stamped with.
pub(crate) unsafe extern "C" fn query_rt_values(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes an open context.
        unsafe { Context::of(context)? };
        // SAFETY: the program passes a structure to read and fill.
        let mut out = unsafe { values.read_unaligned() };
        out.comp_mask &= 1;
        if out.comp_mask != 0 {
            let now = Duration::from_nanos(roce::now().as_nanos());
            out.raw_clock = [now.as_secs() as i64, now.subsec_nanos().into()];
        }
        // SAFETY: likewise.
        unsafe { values.write_unaligned(out) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    _attr: *mut c_void,
    mac: *mut u8,
    vid: *mut u16,
) -> c_int {
    // The system's network stack finds the way: there is no frame of ours that would need it.
    // SAFETY: the program passes six bytes, and room for a VLAN or null.
    unsafe {
        ptr::write_bytes(mac, 0, 6);
        if !vid.is_null() {
            vid.write_unaligned(0xffff);
        }
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}
