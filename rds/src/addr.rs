//! Addresses that sockets may have.

use core::net::{IpAddr, SocketAddr};

use crate::error::Error;

/// Checks whether a socket may be connected to an address.
///
/// # Errors
/// [`Error::NoAddress`], [`Error::Invalid`].
pub fn check_peer(to: SocketAddr) -> Result<(), Error> {
    match to.ip() {
        addr if addr.is_unspecified() => Err(Error::NoAddress),
        addr if !is_unicast(addr) => Err(Error::Invalid),
        _ => Ok(()),
    }
}

/// Returns whether a host can have this address.
pub fn is_unicast(addr: IpAddr) -> bool {
    !addr.is_unspecified() && !addr.is_multicast() && addr != IpAddr::V4(core::net::Ipv4Addr::BROADCAST)
}
