//! Interfaces and routes.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket},
    os::fd::AsFd,
};

use roce_verbs::{Mtu, PathMtus};

use crate::sys;
pub use sys::{Interface, InterfaceAddr, interface_addresses, interfaces};

/// The number of the interface that owns an address. Every address of 127.0.0.0/8 is the loopback interface's.
///
/// # Errors
/// `AddrNotAvailable` when no interface has it.
pub fn index_of(addr: IpAddr) -> io::Result<u32> {
    let all = interface_addresses()?;
    owner(&all, addr).map(|i| i.index)
}

fn owner(all: &[InterfaceAddr], addr: IpAddr) -> io::Result<&InterfaceAddr> {
    let addr = addr.to_canonical();
    all.iter()
        .find(|i| i.ip == addr)
        .or_else(|| all.iter().find(|i| i.loopback && addr.is_loopback() && addr.is_ipv4()))
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
    let all = interface_addresses()?;
    let name = owner(&all, addr)?.name.clone();
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
    let mut all = interface_addresses()?;
    all.retain(|i| i.up);
    let mut by_name = BTreeMap::new();
    for i in &all {
        if let (false, Ok(bytes)) = (by_name.contains_key(&i.name), mtu_of(&i.name)) {
            by_name.insert(i.name.clone(), bytes);
        }
    }
    // What is too small for RoCE holds nobody back; if nothing is left, the error says how small.
    let most = *by_name.values().max().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let each = by_name.values().filter_map(|bytes| Mtu::for_interface(*bytes));
    let usual = each.min().map_or_else(|| fits(most), Ok)?;
    let of = |i: &InterfaceAddr| Some((i.ip, Mtu::for_interface(*by_name.get(&i.name)?)?));
    Ok(PathMtus::new(usual, all.iter().filter_map(of).collect()))
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
