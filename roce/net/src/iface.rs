//! Interfaces and routes.

use std::{
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket},
    os::fd::AsFd,
};

use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    net::if_::InterfaceFlags,
};
use roce_verbs::{Mtu, PathMtus};

use crate::sys;

/// One network interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Number.
    pub index: u32,
    /// It is a loopback interface.
    pub loopback: bool,
    /// It is up.
    pub up: bool,
    /// It is up and has a link.
    pub running: bool,
    /// IPv4 and IPv6 addresses, in the kernel's order.
    pub addresses: Vec<IpAddr>,
}

/// Flags of an interface that is up and has a carrier, as rdma_rxe's port. IFF_RUNNING follows the carrier up to a second later.
const RUNNING: InterfaceFlags = InterfaceFlags::IFF_UP.union(InterfaceFlags::IFF_LOWER_UP);

/// All interfaces of this network namespace, in the order of their numbers.
///
/// # Errors
/// When the kernel can't tell.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    Ok(fold(getifaddrs()?))
}

/// Puts the kernel's list, which has one entry for each interface and one for each address, together.
fn fold(entries: impl Iterator<Item = InterfaceAddress>) -> Vec<Interface> {
    let mut all: Vec<Interface> = Vec::new();
    let (links, addresses): (Vec<_>, Vec<_>) = entries.partition(|e| link_index(e).is_some());
    for link in links {
        all.push(Interface {
            index: link_index(&link).unwrap_or(0),
            loopback: link.flags.contains(InterfaceFlags::IFF_LOOPBACK),
            up: link.flags.contains(InterfaceFlags::IFF_UP),
            running: link.flags.contains(RUNNING),
            name: link.interface_name,
            addresses: Vec::new(),
        });
    }
    for entry in addresses {
        // An address may have a label: the name, and more behind it.
        let owners = all.iter_mut().filter(|i| entry.interface_name.starts_with(&i.name));
        if let Some(owner) = owners.max_by_key(|i| i.name.len()) {
            owner.addresses.extend(entry.address.as_ref().and_then(sys::ip_of));
        }
    }
    all.sort_by_key(|i| i.index);
    all
}

/// Returns the number of the interface that an entry is of itself.
fn link_index(entry: &InterfaceAddress) -> Option<u32> {
    let link = entry.address.as_ref()?.as_link_addr()?;
    Some(link.ifindex() as u32)
}

/// Returns whether an interface has Ethernet frames.
///
/// # Errors
/// When the kernel can't tell.
pub(crate) fn is_ethernet(index: u32) -> io::Result<bool> {
    let mut links = getifaddrs()?.filter_map(|entry| entry.address?.as_link_addr().copied());
    Ok(links.any(|link| link.ifindex() as u32 == index && link.hatype() == libc::ARPHRD_ETHER))
}

/// The number of the interface that owns an address. Every address of 127.0.0.0/8 is the loopback interface's.
///
/// # Errors
/// `AddrNotAvailable` when no interface has it.
pub fn index_of(addr: IpAddr) -> io::Result<u32> {
    owner(addr).map(|i| i.index)
}

fn owner(addr: IpAddr) -> io::Result<Interface> {
    let addr = addr.to_canonical();
    let mut all = interfaces()?;
    let loopback = |i: &Interface| i.loopback && !i.addresses.is_empty() && addr.is_loopback() && addr.is_ipv4();
    let found = all.iter().position(|i| i.addresses.contains(&addr));
    let found = found.or_else(|| all.iter().position(loopback));
    found
        .map(|at| all.swap_remove(at))
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

/// One of our addresses as one to bind to: a link-local one means nothing without its interface.
pub fn scoped(addr: IpAddr, port: u16) -> SocketAddr {
    match addr {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            SocketAddrV6::new(v6, port, 0, index_of(addr).unwrap_or(0)).into()
        }
        other => SocketAddr::new(other, port),
    }
}

/// The interface that owns an address: its name and MTU, bytes. Every address of 127.0.0.0/8 is the loopback interface's.
///
/// # Errors
/// `AddrNotAvailable` when no interface has it.
pub fn interface_of(addr: IpAddr) -> io::Result<(String, u32)> {
    let name = owner(addr)?.name;
    let mtu = mtu_of(&name)?;
    Ok((name, mtu))
}

/// The MTU of an interface, bytes.
///
/// # Errors
/// When there is none of this name.
pub fn mtu_of(name: &str) -> io::Result<u32> {
    let any = sys::udp_socket(true).or_else(|_| sys::udp_socket(false))?;
    sys::interface_mtu(any.as_fd(), name)
}

/// The path MTUs that a device at `addr` can offer: the largest that fits its interface. With an unspecified address each
/// local one has its own, and what fits every interface that is up is the usual.
///
/// # Errors
/// When no interface has the address, or the MTU of all is too small for RoCE.
pub fn path_mtus(addr: IpAddr) -> io::Result<PathMtus> {
    if !addr.is_unspecified() {
        return fits(interface_of(addr)?.1).map(PathMtus::from);
    }
    let mut all = interfaces()?;
    all.retain(|i| i.up && !i.addresses.is_empty());
    let mtus: Vec<(&Interface, u32)> = all.iter().filter_map(|i| Some((i, mtu_of(&i.name).ok()?))).collect();
    // What is too small for RoCE holds nobody back; if nothing is left, the error says how small.
    let most = mtus.iter().map(|(_, bytes)| *bytes).max();
    let most = most.ok_or(io::ErrorKind::AddrNotAvailable)?;
    let fitting = mtus
        .iter()
        .filter_map(|(i, bytes)| Some((i, Mtu::for_interface(*bytes)?)));
    let usual = fitting.clone().map(|(_, mtu)| mtu).min();
    let usual = usual.map_or_else(|| fits(most), Ok)?;
    let each = fitting.flat_map(|(i, mtu)| i.addresses.iter().map(move |ip| (*ip, mtu)));
    Ok(PathMtus::new(usual, each.collect()))
}

fn fits(bytes: u32) -> io::Result<Mtu> {
    Mtu::for_interface(bytes).ok_or_else(|| {
        let text = format!("an interface MTU of {bytes} bytes is too small: RoCE needs 352");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

/// The local address that the routing table gives for a peer. Nothing is sent.
///
/// # Errors
/// When there is no route.
pub fn route_to(remote: IpAddr) -> io::Result<IpAddr> {
    route_to_scoped(SocketAddr::new(remote, 0))
}

/// The same for an address that may be link-local, and then says by which interface. The port does not matter.
///
/// # Errors
/// When there is no route.
pub fn route_to_scoped(mut remote: SocketAddr) -> io::Result<IpAddr> {
    let probe = UdpSocket::from(sys::udp_socket(remote.is_ipv4())?);
    remote.set_port(roce_bth::ROCE_UDP_PORT);
    probe.connect(remote)?;
    probe.local_addr().map(|a| a.ip())
}
