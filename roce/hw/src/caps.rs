//! Capabilities of a device: reported ones, and those that are tried.

use std::{io, sync::Arc};

use rdma_sys::{ibv_atomic_cap, ibv_device_attr};
use roce_verbs::{
    DeviceLimits, QpCaps,
    provider::{DeviceCaps, KeyKind},
};

use crate::sys::{Context, Cq, Mw, Pd, Qp};

/// `IBV_DEVICE_MEM_WINDOW`.
const MEM_WINDOW: u32 = 1 << 17;
/// `IBV_DEVICE_MEM_WINDOW_TYPE_2A`, `IBV_DEVICE_MEM_WINDOW_TYPE_2B`.
const MEM_WINDOW_2: u32 = 1 << 23 | 1 << 24;
/// `RXE_VENDOR_ID` (`rxe_param.h`): what it tells programs of a SEND with invalidate has neither a flag nor the key.
const RXE_VENDOR_ID: u32 = 0x00ff_ffff;
/// Inline data that is tried in this order, bytes, until a queue pair can be created with it. Drivers do not report their limit.
const INLINE: [u32; 6] = [1024, 512, 256, 128, 64, 32];

fn number(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

fn byte(n: i32) -> u8 {
    u8::try_from(n.clamp(0, 255)).unwrap_or(0)
}

fn limits(attr: &ibv_device_attr, max_msg_size: u32, max_inline_data: u32) -> DeviceLimits {
    DeviceLimits {
        node_guid: u64::from_be(attr.node_guid),
        max_qp: number(attr.max_qp),
        max_qp_wr: number(attr.max_qp_wr),
        max_sge: number(attr.max_sge),
        max_inline_data,
        max_cq: number(attr.max_cq),
        max_cqe: number(attr.max_cqe),
        max_mr: number(attr.max_mr),
        max_mr_size: attr.max_mr_size,
        max_mw: number(attr.max_mw),
        max_pd: number(attr.max_pd),
        max_qp_rd_atom: byte(attr.max_qp_rd_atom),
        max_qp_init_rd_atom: byte(attr.max_qp_init_rd_atom),
        max_msg_size,
        // The smallest page that it can map.
        page_size: attr.page_size_cap.checked_ilog2().map_or(4096, |_| {
            let smallest = attr.page_size_cap & attr.page_size_cap.wrapping_neg();
            u32::try_from(smallest).unwrap_or(4096).max(4096)
        }),
        max_sge_rd: match number(attr.max_sge_rd) {
            0 => number(attr.max_sge),
            n => n,
        },
        max_srq: number(attr.max_srq),
        max_srq_wr: number(attr.max_srq_wr),
        max_srq_sge: number(attr.max_srq_sge),
        max_ah: number(attr.max_ah),
        max_xrcd: 0,
        max_mcast_grp: number(attr.max_mcast_grp),
        max_mcast_qp_attach: number(attr.max_mcast_qp_attach),
        max_total_mcast_qp_attach: number(attr.max_total_mcast_qp_attach),
        max_pkeys: attr.max_pkeys,
        local_ca_ack_delay: attr.local_ca_ack_delay,
    }
}

/// Returns the inline data that a queue pair of one element can have.
fn inline(pd: &Arc<Pd>, context: &Arc<Context>) -> io::Result<u32> {
    let cq = Cq::create(context, 2, 0)?;
    let with = |max_inline_data| QpCaps {
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data,
    };
    let mut made = INLINE
        .into_iter()
        .filter_map(|bytes| Qp::create(pd, &cq, &with(bytes), false, 0).ok());
    Ok(made.next().map_or(0, |qp| qp.max_inline_data()))
}

/// Queries a device, of which one port is used, or all. Returns its capabilities, the ports of its addresses, and whether it has atomics.
pub(crate) fn query(context: &Arc<Context>, port: Option<u8>) -> io::Result<(DeviceCaps, Vec<u8>, bool)> {
    let attr = context.attributes()?;
    let max_msg_size = context.port(port.unwrap_or(1))?.max_msg_sz;
    let pd = Pd::alloc(context)?;
    let (addrs, ports) = context.addresses(port)?.into_iter().unzip();
    let window = |flags: u32, kind| attr.device_cap_flags & flags != 0 && Mw::alloc(&pd, kind).is_ok();
    let caps = DeviceCaps {
        name: None,
        limits: limits(&attr, max_msg_size, inline(&pd, context)?),
        fast_registration: false,
        window_1: window(MEM_WINDOW, KeyKind::Window1),
        window_2: window(MEM_WINDOW_2, KeyKind::Window2),
        tells_invalidated: attr.vendor_id != RXE_VENDOR_ID,
        instant_keys: false,
        scattered_keys: false,
        zero_based: true,
        iova: true,
        addrs,
    };
    let atomics = attr.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE;
    Ok((caps, ports, atomics))
}
