//! Multicast groups.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use libc::c_int;
use roce::VerbsError;

use crate::{
    abi::{IBV_QPT_UD, ibv_gid, ibv_qp},
    gids,
    live::Object as _,
    qp::Qp,
    ret::{self, Errno, Result},
};

/// The group of a GID, if the queue pair can have to do with groups at all.
fn group(qp: &Qp, gid: &ibv_gid) -> Result<IpAddr> {
    let ip = gids::ip_of(gid);
    match qp.kind() == IBV_QPT_UD && ip.is_multicast() {
        true => Ok(ip),
        false => Err(Errno::INVAL.because(format_args!(
            "{ip} is no multicast group, or the queue pair is not of type UD"
        ))),
    }
}

/// The address whose interface joins a group.
fn local(qp: &Qp, group: IpAddr) -> IpAddr {
    let any = match group {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    qp.core.device.gids.like(group).map_or(any, |(_, ip)| ip)
}

/// Changes the membership of a queue pair in the group of a GID.
///
/// # Safety
/// The program does not destroy the queue pair during the call, and `gid` is readable.
unsafe fn change(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    change: impl FnOnce(&Qp, IpAddr) -> std::result::Result<(), VerbsError>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (this, gid) = unsafe { (Qp::of(qp)?, gid.read_unaligned()) };
    Ok(change(this, group(this, &gid)?)?)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the program passes a queue pair of ours and a GID.
    ret::code(|| unsafe { change(qp, gid, |qp, group| qp.inner.attach_mcast(group, local(qp, group))) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the program passes a queue pair of ours and a GID.
    ret::code(|| unsafe { change(qp, gid, |qp, group| qp.inner.detach_mcast(group)) })
}
