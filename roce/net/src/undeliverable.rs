//! ICMP errors about packets that a socket has sent.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
};

use roce_verbs::provider::NoAnswer;
use socket2::Socket;

use crate::{
    datapath::Undeliverable,
    sys::{self, IcmpError},
};

/// Errors that are taken at a time: whoever forges them shall not keep a thread.
const BUDGET: usize = 64;

/// Begins or ends to keep the ICMP errors about a socket's packets. Those that are there are dropped at the end: without that a socket
/// that nobody asks would stay ready.
pub(crate) fn hear(socket: &Socket, v4: bool, on: bool) -> io::Result<()> {
    let (level, name) = match v4 {
        true => (libc::IPPROTO_IP, libc::IP_RECVERR),
        false => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    };
    sys::set_int(socket.as_fd(), level, name, i32::from(on))?;
    if !on {
        // The last error of the socket is none of the next send's.
        let _ = socket.take_error();
    }
    Ok(())
}

/// Hands over what ICMP said of a socket's packets.
pub(crate) fn take(socket: BorrowedFd<'_>, handle: &mut dyn FnMut(&Undeliverable<'_>)) {
    let mut quoted = [0; sys::QUOTED];
    for _ in 0..BUDGET {
        match sys::receive_error(socket, &mut quoted) {
            Ok(Some((remote, error, len))) => {
                if let Some(why) = why(error) {
                    let quoted = &quoted[..len];
                    handle(&Undeliverable { remote, why, quoted });
                }
            }
            // Another kind of error.
            Ok(None) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Cause that an ICMP error names, unless it is one that may pass, such as a host that does not answer ARP (yet).
fn why(error: IcmpError) -> Option<NoAnswer> {
    // Destination unreachable: RFC 792 and 1812, and RFC 4443.
    const V4: u8 = 3;
    const V6: u8 = 1;
    match error {
        IcmpError {
            v4: true,
            kind: V4,
            code: 3,
        }
        | IcmpError {
            v4: false,
            kind: V6,
            code: 4,
        } => Some(NoAnswer::PortUnreachable),
        // Network, host or communication administratively prohibited; of IPv6 also by policy, and a reject route.
        IcmpError {
            v4: true,
            kind: V4,
            code: 9 | 10 | 13,
        }
        | IcmpError {
            v4: false,
            kind: V6,
            code: 1 | 5 | 6,
        } => Some(NoAnswer::Prohibited),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
        time::Duration,
    };

    use super::*;

    /// A socket, and an address where nobody listens.
    fn to_nobody(ip: IpAddr) -> (Socket, SocketAddr) {
        let nobody = UdpSocket::bind((ip, 0)).unwrap().local_addr().unwrap();
        (UdpSocket::bind((ip, 0)).unwrap().into(), nobody)
    }

    #[test]
    fn a_closed_port_is_heard_of_with_the_packet() {
        for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            let (socket, nobody) = to_nobody(ip);
            hear(&socket, ip.is_ipv4(), true).unwrap();
            let packet: Vec<u8> = (0..=255).collect();
            socket.send_to(&packet, &nobody.into()).unwrap();
            sys::wait_readable(socket.as_fd(), Some(Duration::from_secs(20))).unwrap();
            let mut heard = vec![];
            take(socket.as_fd(), &mut |e| {
                heard.push((e.remote, e.why, e.quoted.to_vec()))
            });
            assert_eq!(heard, [(ip, NoAnswer::PortUnreachable, packet)]);
            assert!(
                !sys::wait_readable(socket.as_fd(), Some(Duration::ZERO)).unwrap(),
                "no error is left"
            );
        }
    }

    #[test]
    fn nothing_is_kept_for_a_socket_that_does_not_listen_for_it() {
        let (socket, nobody) = to_nobody(Ipv4Addr::LOCALHOST.into());
        let send = || socket.send_to(&[0; 64], &nobody.into());
        send().unwrap();
        hear(&socket, true, true).unwrap();
        send().unwrap();
        // Loopback has delivered the error by now.
        hear(&socket, true, false).unwrap();
        assert!(!sys::wait_readable(socket.as_fd(), Some(Duration::ZERO)).unwrap());
        send().unwrap();
        send().unwrap();
    }

    #[test]
    fn what_may_pass_ends_nothing() {
        let v4 = |code| {
            why(IcmpError {
                v4: true,
                kind: 3,
                code,
            })
        };
        let v6 = |code| {
            why(IcmpError {
                v4: false,
                kind: 1,
                code,
            })
        };
        assert_eq!([v4(0), v4(1), v4(4), v6(0), v6(3)], [None; 5]);
        assert_eq!(v4(13), Some(NoAnswer::Prohibited));
        assert_eq!(v6(1), Some(NoAnswer::Prohibited));
        let time_exceeded = IcmpError {
            v4: true,
            kind: 11,
            code: 3,
        };
        assert_eq!(why(time_exceeded), None);
    }
}
