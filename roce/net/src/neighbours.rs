//! Neighbours: whether the link address of the next hop towards a peer is known, as `rdma_resolve_addr` has to find out.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use socket2::Socket;

use crate::{
    iface::scoped,
    sys::{self, Rtnetlink, attribute, number},
};

/// The discard service, to which rdma-core sends for the same purpose (`libibverbs/neigh.c`).
const DISCARD: u16 = 9;

/// States in which a neighbour's link address can be used (`NUD_VALID`).
const VALID: u16 =
    libc::NUD_PERMANENT | libc::NUD_NOARP | libc::NUD_REACHABLE | libc::NUD_PROBE | libc::NUD_STALE | libc::NUD_DELAY;

/// A route's gateway of another family (`linux/rtnetlink.h`); not in `libc`.
const RTA_VIA: u16 = 18;

/// Bytes of `struct rtmsg` and `struct ndmsg`.
const ROUTE: usize = 12;

const fn family(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn bytes(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(v4) => v4.octets().into(),
        IpAddr::V6(v6) => v6.octets().into(),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}

/// Appends an attribute of whole 4-byte words.
fn put(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = (4 + value.len()) as u16;
    to.extend(len.to_ne_bytes());
    to.extend(kind.to_ne_bytes());
    to.extend(value);
}

/// The first hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    /// Number of the interface.
    pub(crate) interface: u32,
    /// The gateway, or the peer itself.
    pub(crate) neighbour: IpAddr,
}

/// Link address of a neighbour, as the kernel's table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkAddress {
    pub(crate) bytes: [u8; 6],
    /// It was confirmed a while ago: the kernel asks again when it sends there.
    pub(crate) stale: bool,
}

/// The first hop towards a peer; `None` where none is looked up: the peer is this host, or a group.
fn hop(route: &[u8], peer: IpAddr) -> Option<Hop> {
    if *route.get(7)? != libc::RTN_UNICAST {
        return None;
    }
    let attributes = route.get(ROUTE..)?;
    let gateway = attribute(attributes, libc::RTA_GATEWAY).and_then(address);
    // An IPv4 route by an IPv6 gateway: its family, then its address.
    let via = || attribute(attributes, RTA_VIA).and_then(|via| address(via.get(2..)?));
    Some(Hop {
        interface: number(attribute(attributes, libc::RTA_OIF)?)?,
        neighbour: gateway.or_else(via).unwrap_or(peer),
    })
}

/// Asks the kernel whether neighbours are known. Its descriptor is readable when the state of one may have changed.
#[derive(Debug)]
pub struct Neighbours {
    requests: Rtnetlink,
    changes: OwnedFd,
}

impl Neighbours {
    /// # Errors
    /// When the system has no netlink or no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            changes: sys::watch_neighbours()?,
            requests: Rtnetlink::new()?,
        })
    }

    /// Forgets the changes so far: the descriptor is not readable until the next one.
    pub fn forget_changes(&self) {
        sys::drain(self.changes.as_fd());
    }

    /// Returns whether packets from `local` reach `remote` without address resolution. The ports do not matter.
    ///
    /// # Errors
    /// When there is no route.
    pub fn knows(&self, local: IpAddr, remote: SocketAddr) -> io::Result<bool> {
        let peer = remote.ip();
        if peer.is_multicast() {
            return Ok(true);
        }
        let Some(hop) = hop(&self.route(local, remote)?, peer) else {
            return Ok(true);
        };
        Ok(!self.resolves(hop.interface)? || self.has(&hop)?)
    }

    /// Returns the first hop from `local` to `remote`; `None`: the peer is this host. The ports do not matter.
    ///
    /// # Errors
    /// When there is no route.
    pub(crate) fn first_hop(&self, local: IpAddr, remote: SocketAddr) -> io::Result<Option<Hop>> {
        Ok(hop(&self.route(local, remote)?, remote.ip()))
    }

    /// Returns the link address of a neighbour of an Ethernet interface; `None`: it is not known.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub(crate) fn link_address(&self, hop: &Hop) -> io::Result<Option<LinkAddress>> {
        let Some(neighbour) = self.find(hop)? else {
            return Ok(None);
        };
        let state = neighbour.get(8..10).ok_or(io::ErrorKind::UnexpectedEof)?;
        let state = u16::from_ne_bytes([state[0], state[1]]);
        let address = neighbour
            .get(ROUTE..)
            .and_then(|attributes| attribute(attributes, libc::NDA_LLADDR))
            .and_then(|address| address.try_into().ok())
            .filter(|_| state & VALID != 0);
        Ok(address.map(|bytes| LinkAddress {
            bytes,
            stale: state & libc::NUD_STALE != 0,
        }))
    }

    fn route(&self, local: IpAddr, remote: SocketAddr) -> io::Result<Vec<u8>> {
        let peer = bytes(remote.ip());
        let bits = (8 * peer.len()) as u8;
        let mut request = vec![0; ROUTE];
        (request[0], request[1]) = (family(remote.ip()), bits);
        put(&mut request, libc::RTA_DST, &peer);
        if !local.is_unspecified() && local.is_ipv4() == remote.is_ipv4() {
            request[2] = bits;
            put(&mut request, libc::RTA_SRC, &bytes(local));
        }
        if let SocketAddr::V6(v6) = remote
            && v6.scope_id() != 0
        {
            put(&mut request, libc::RTA_OIF, &v6.scope_id().to_ne_bytes());
        }
        self.requests.ask(libc::RTM_GETROUTE, &request)
    }

    /// Whether an interface resolves addresses at all (`IFF_NOARP`, `IFF_LOOPBACK`).
    fn resolves(&self, interface: u32) -> io::Result<bool> {
        let link = self.requests.link(interface)?;
        let flags = link.get(8..).and_then(number).ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(flags & (libc::IFF_NOARP | libc::IFF_LOOPBACK) as u32 == 0)
    }

    fn has(&self, hop: &Hop) -> io::Result<bool> {
        match self.find(hop) {
            Ok(None) => Ok(false),
            Ok(Some(neighbour)) => {
                let state = neighbour.get(8..10).ok_or(io::ErrorKind::UnexpectedEof)?;
                Ok(u16::from_ne_bytes([state[0], state[1]]) & VALID != 0)
            }
            // Linux before 5.0 has no such request: the neighbour is resolved with the first packet.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Returns what the kernel's table has of a neighbour: `struct ndmsg`, then attributes.
    fn find(&self, hop: &Hop) -> io::Result<Option<Vec<u8>>> {
        let mut request = vec![0; ROUTE];
        request[0] = family(hop.neighbour);
        request[4..8].copy_from_slice(&hop.interface.to_ne_bytes());
        put(&mut request, libc::NDA_DST, &bytes(hop.neighbour));
        match self.requests.ask(libc::RTM_GETNEIGH, &request) {
            Ok(neighbour) => Ok(Some(neighbour)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Neighbours {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }
}

/// Has the kernel resolve the next hop towards `remote`, by an empty datagram that no router forwards: only privileged users may
/// ask for it without one. Does not wait.
///
/// # Errors
/// When the system refuses.
pub fn solicit(local: IpAddr, mut remote: SocketAddr) -> io::Result<()> {
    let socket = Socket::from(sys::udp_socket(remote.is_ipv4())?);
    match remote {
        SocketAddr::V4(_) => socket.set_ttl_v4(1)?,
        SocketAddr::V6(_) => socket.set_unicast_hops_v6(1)?,
    }
    socket.set_nonblocking(true)?;
    socket.bind(&scoped(local, 0).into())?;
    remote.set_port(DISCARD);
    socket.send_to(&[], &remote.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(kind: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut out = vec![0; ROUTE];
        out[7] = kind;
        for (kind, value) in attributes {
            put(&mut out, *kind, value);
        }
        out
    }

    #[test]
    fn the_first_hop_is_the_gateway_or_the_peer() {
        let peer: IpAddr = "10.0.0.9".parse().unwrap();
        let oif = (libc::RTA_OIF, &7u32.to_ne_bytes()[..]);
        let via = |ip: &str| {
            Some(Hop {
                interface: 7,
                neighbour: ip.parse().unwrap(),
            })
        };
        let of = |kind, attributes: &[(u16, &[u8])]| hop(&route(kind, attributes), peer);
        assert_eq!(of(libc::RTN_UNICAST, &[oif]), via("10.0.0.9"));
        assert_eq!(
            of(libc::RTN_UNICAST, &[(libc::RTA_GATEWAY, &[10, 0, 0, 1]), oif]),
            via("10.0.0.1")
        );
        let mut six = vec![libc::AF_INET6 as u8, 0];
        six.extend("fe80::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        assert_eq!(of(libc::RTN_UNICAST, &[oif, (RTA_VIA, &six)]), via("fe80::1"));
        assert_eq!(of(libc::RTN_LOCAL, &[oif]), None);
        assert_eq!(of(libc::RTN_BROADCAST, &[oif]), None);
        assert_eq!(of(libc::RTN_UNICAST, &[]), None);
    }

    #[test]
    fn attributes_that_are_cut_short_are_none() {
        let whole = route(
            libc::RTN_UNICAST,
            &[(libc::RTA_DST, &[1; 4]), (libc::RTA_OIF, &[1, 0, 0, 0])],
        );
        for len in 0..whole.len() {
            assert_eq!(hop(&whole[..len], "10.0.0.9".parse().unwrap()), None, "{len}");
        }
        assert_eq!(attribute(&[3, 0, 1, 0], 1), None, "shorter than its header");
        assert_eq!(attribute(&[0; 8], 1), None);
    }

    #[test]
    fn this_host_and_groups_need_no_neighbour() {
        let neighbours = Neighbours::new().unwrap();
        let knows = |local: &str, remote: &str| {
            let remote = SocketAddr::new(remote.parse().unwrap(), 1);
            neighbours.knows(local.parse().unwrap(), remote).unwrap()
        };
        assert!(knows("127.0.0.1", "127.9.8.7"));
        assert!(knows("0.0.0.0", "127.0.0.1"));
        assert!(knows("127.0.0.1", "239.1.2.3"));
        assert!(knows("::1", "::1"));
    }
}
