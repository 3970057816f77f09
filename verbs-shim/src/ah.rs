//! Address handles.

use std::sync::Arc;

use libc::c_int;
use roce::{AddressHandle, AddressVector, NetworkHeader};

use crate::{
    abi::{IBV_WC_GRH, ibv_ah, ibv_ah_attr, ibv_context, ibv_grh, ibv_pd, ibv_wc},
    core::{Context, Core},
    gids,
    live::{self, Object as _},
    pd::{Pd, Users},
    ret::{self, Errno, Result},
};

/// Least hop limit of packets that are not for a group: the route's, as the kernel's
/// (`ib_resolve_unicast_gid_dmac`). Programs leave theirs at 0 or 1.
const HOP_LIMIT: u8 = 64;

/// An address handle.
#[repr(C)]
pub(crate) struct Ah {
    abi: ibv_ah,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: AddressHandle,
    _user: Users,
}

live::object!(Ah, "address handle", ibv_ah, |ah| (*ah).context, (*ah).handle);

/// The UDP source port that a flow label stands for (`ibv_flow_label_to_udp_sport`); 0 for none.
fn source_port(flow_label: u32) -> u16 {
    let label = flow_label & 0x000f_ffff;
    match label {
        0 => 0,
        _ => ((label & 0x3fff) ^ (label >> 14)) as u16 | 0xc000,
    }
}

/// The path of an attribute.
///
/// # Errors
/// EINVAL without a GRH, at another port, or for a GID that we don't have.
pub(crate) fn address_vector(core: &Core, attr: &ibv_ah_attr) -> Result<AddressVector> {
    if attr.is_global == 0 {
        return Err(Errno::INVAL.because(
            "RoCE needs a GRH (is_global, sgid_index and the peer's GID): programs take a GID index, often as -g or -x",
        ));
    }
    if attr.port_num != 1 {
        return Err(Errno::INVAL.because(format_args!("port_num {}: the device has port 1 alone", attr.port_num)));
    }
    let index = attr.grh.sgid_index;
    let no_gid = || {
        let device = core.device;
        Errno::INVAL.because(format_args!(
            "sgid_index {index}: {} ({}) has no such GID",
            device.name, device.interface
        ))
    };
    let local = core.device.gids.get(index.into()).ok_or_else(no_gid)?;
    let remote = gids::ip_of(&attr.grh.dgid);
    if local.is_ipv4() != remote.is_ipv4() || remote.is_unspecified() {
        return Err(Errno::INVAL.because(format_args!(
            "no path from {local} (sgid_index {index}) to {remote}: both must be addresses of one IP version"
        )));
    }
    Ok(AddressVector {
        local,
        remote,
        hop_limit: match remote.is_multicast() {
            true => attr.grh.hop_limit.max(1),
            false => attr.grh.hop_limit.max(HOP_LIMIT),
        },
        traffic_class: attr.grh.traffic_class,
        udp_sport: source_port(attr.grh.flow_label),
    })
}

/// # Safety
/// The program does not deallocate the domain during the call.
unsafe fn create(pd: *mut ibv_pd, attr: impl FnOnce(&Core) -> Result<ibv_ah_attr>) -> Result<*mut ibv_ah> {
    // SAFETY: the caller's promise.
    let domain = unsafe { Pd::lookup(pd)? };
    let path = address_vector(&domain.core, &attr(&domain.core)?)?;
    let inner = domain.engine()?.device.create_ah(&domain.inner, &path)?;
    let ah = Ah {
        abi: ibv_ah {
            context: domain.context(),
            pd,
            handle: live::handle(),
        },
        core: domain.core.clone(),
        inner,
        _user: domain.users.clone(),
    };
    ah.publish()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the program passes a domain of ours and attributes.
    ret::pointer(|| unsafe { create(pd, |_| Ok(attr.read_unaligned())) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    ret::code(|| Ah::destroy(ah, |_| Ok(())))
}

fn reply_to(core: &Core, port: u8, wc: &ibv_wc, grh: *const ibv_grh) -> Result<ibv_ah_attr> {
    if port != 1 || wc.wc_flags & IBV_WC_GRH == 0 || grh.is_null() {
        // On Ethernet the address is in the header and nowhere else.
        return Err(Errno::INVAL.because("only a completion with a GRH (IBV_WC_GRH) on port 1 says who has sent"));
    }
    // SAFETY: the program passes the first 40 bytes of what was received.
    let header = NetworkHeader::parse(&unsafe { grh.read_unaligned() }.bytes);
    let ours = header.destination;
    // To a group: answered from any address of the same kind.
    let gids = &core.device.gids;
    let index = match ours.is_multicast() {
        true => gids.like(ours).map(|(index, _)| index),
        false => gids.find(ours),
    };
    let mut attr = ibv_ah_attr {
        src_path_bits: wc.dlid_path_bits,
        dlid: wc.slid,
        is_global: 1,
        port_num: port,
        ..ibv_ah_attr::default()
    };
    attr.grh.dgid = gids::gid_of(header.source);
    let index = index.and_then(|i| u8::try_from(i).ok());
    attr.grh.sgid_index =
        index.ok_or_else(|| Errno::INVAL.because(format_args!("{ours} is no address of the device")))?;
    attr.grh.hop_limit = 0xff;
    attr.grh.traffic_class = header.traffic_class;
    attr.grh.flow_label = header.flow_label;
    Ok(attr)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes an open context, a completion and room for the attributes.
        unsafe { attr.write_unaligned(reply_to(Context::of(context)?.core(), port, &wc.read_unaligned(), grh)?) };
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: the program passes a domain of ours and a completion.
    ret::pointer(|| unsafe { create(pd, |core| reply_to(core, port, &wc.read_unaligned(), grh)) })
}
