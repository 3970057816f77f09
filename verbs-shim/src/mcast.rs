//! Multicast groups.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use libc::c_int;

use crate::{
    abi::{IBV_QPT_UD, ibv_gid, ibv_qp},
    gids,
    live::Object as _,
    qp::Qp,
    ret::{self, Errno, Result},
};

/// The group of a GID, if the queue pair can have to do with groups at all.
fn group(qp: &Qp, gid: &ibv_gid) -> Result<IpAddr> {
    qp.alive()?;
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
    let entries = qp.core().device.gids.entries();
    let same = entries.into_iter().find(|(_, ip)| ip.is_ipv4() == group.is_ipv4());
    same.map_or_else(
        || match group {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        },
        |(_, ip)| ip,
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours and a GID.
        let (this, gid) = unsafe { (Qp::of(qp)?, gid.read_unaligned()) };
        let group = group(this, &gid)?;
        Ok(this.inner().attach_mcast(group, local(this, group))?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a queue pair of ours and a GID.
        let (this, gid) = unsafe { (Qp::of(qp)?, gid.read_unaligned()) };
        let group = group(this, &gid)?;
        Ok(this.inner().detach_mcast(group)?)
    })
}
