//! The sockets that packets leave from. A flow has the same source port whatever the IP version.

use std::{io, net::IpAddr};

use socket2::Socket;

use crate::{
    iface,
    socket::{OpenError, accept_nothing, context, grow_send_buffer, new_socket},
    sys,
};

/// The source ports that RoCEv2 uses for entropy (`IB_ROCE_UDP_ENCAP_VALID_PORT_MIN` and up).
const SPORT_MIN: u16 = 0xc000;
/// Ports that are tried.
const TRIES: u32 = 256;

/// A socket to send from for each of these addresses, all on one port of RoCE's range that is free at each.
///
/// # Errors
/// When none was found, or a socket can't be made.
pub(crate) fn bind(addrs: &[IpAddr]) -> Result<(u16, Vec<Socket>), OpenError> {
    let Some(first) = addrs.first() else {
        return Ok((SPORT_MIN, vec![]));
    };
    // Distinct devices start their search at distinct places: the system's own choice of a port is random.
    let start = system_choice(*first).map_err(context("looking for a free UDP port"))?;
    let span = u32::from(u16::MAX - SPORT_MIN) + 1;
    let ports = (0..TRIES).map(|step| SPORT_MIN + ((u32::from(start) + step * 97) % span) as u16);
    bind_one_of(addrs, ports)
}

fn bind_one_of(addrs: &[IpAddr], ports: impl Iterator<Item = u16>) -> Result<(u16, Vec<Socket>), OpenError> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    'ports: for port in ports {
        let mut sockets = Vec::with_capacity(addrs.len());
        for addr in addrs {
            // A socket that has a port keeps it, so each port is tried with new ones.
            let socket = new_sender(*addr)?;
            if let Err(e) = socket.bind(&iface::scoped(*addr, port).into()) {
                last = e;
                continue 'ports;
            }
            sockets.push(socket);
        }
        return Ok((port, sockets));
    }
    Err(context("binding a sending socket")(last))
}

fn new_sender(addr: IpAddr) -> Result<Socket, OpenError> {
    let socket = new_socket(addr)?;
    // What arrives there is dropped before it is queued.
    accept_nothing(&socket).map_err(context("attaching a filter to a sending socket"))?;
    grow_send_buffer(&socket)?;
    Ok(socket)
}

fn system_choice(addr: IpAddr) -> io::Result<u16> {
    let socket = Socket::from(sys::udp_socket(addr.is_ipv4())?);
    socket.bind(&iface::scoped(addr, 0).into())?;
    let bound = socket.local_addr()?.as_socket();
    bound
        .map(|a| a.port())
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};

    use super::*;

    /// Peers take packets from this port for ours: nobody may send from it, whatever options his socket has.
    #[test]
    fn nobody_can_bind_beside_a_sender() {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for ours in [here, BOTH[0]] {
            let (port, _sockets) = bind(&[ours]).unwrap();
            for theirs in [here, BOTH[0], BOTH[1]] {
                let socket = Socket::from(sys::udp_socket(theirs.is_ipv4()).unwrap());
                socket.set_reuse_address(true).unwrap();
                socket.set_reuse_port(true).unwrap();
                if theirs.is_ipv6() {
                    socket.set_only_v6(false).unwrap();
                }
                let refused = socket.bind(&iface::scoped(theirs, port).into()).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::AddrInUse, "{ours} {theirs}");
            }
        }
    }

    const BOTH: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

    #[test]
    fn a_port_that_another_has_at_one_address_is_passed_over() {
        let taken = UdpSocket::bind("[::1]:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        // Other tests of this machine have some of those that follow.
        let ports = std::iter::once(port).chain((SPORT_MIN..=u16::MAX).filter(|p| *p != port));
        let (got, sockets) = bind_one_of(&BOTH, ports).unwrap();
        assert_ne!(got, port);
        assert_eq!(sockets.len(), BOTH.len());
        for (socket, addr) in sockets.iter().zip(BOTH) {
            let at = socket.local_addr().unwrap().as_socket().unwrap();
            assert_eq!((at.ip(), at.port()), (addr, got));
        }
        let refused = bind_one_of(&BOTH, [port].into_iter()).unwrap_err();
        assert!(refused.to_string().contains("binding a sending socket"), "{refused}");
    }
}
