//! ICMP errors about packets that a socket has sent.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsRawFd as _, BorrowedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt,
        sockopt::{Ipv4RecvErr, Ipv6RecvErr},
    },
};
use roce_verbs::provider::NoAnswer;
use socket2::Socket;

use crate::{datapath::Undeliverable, sys};

/// Bytes of a quoted packet that are kept: BTH, DETH and a MAD with its ICRC are 280.
const QUOTED: usize = 288;
/// Room for a `sock_extended_err` with an address behind it, bytes.
const CONTROL: usize = 128;

/// Bytes for control messages, aligned as `cmsghdr` must be.
#[repr(align(8))]
struct Control([u8; CONTROL]);

/// Errors that are taken at a time: whoever forges them shall not keep a thread.
const BUDGET: usize = 64;

/// Begins or ends to keep the ICMP errors about a socket's packets. Those that are there are dropped at the end: without that a socket
/// that nobody asks would stay ready.
pub(crate) fn hear(socket: &Socket, v4: bool, on: bool) -> io::Result<()> {
    match v4 {
        true => setsockopt(socket, Ipv4RecvErr, &on),
        false => setsockopt(socket, Ipv6RecvErr, &on),
    }?;
    if !on {
        // The last error of the socket is none of the next send's.
        let _ = socket.take_error();
    }
    Ok(())
}

/// Hands over the ICMP errors about a socket's packets.
pub(crate) fn take(socket: BorrowedFd<'_>, handle: &mut dyn FnMut(&Undeliverable<'_>)) {
    let (mut quoted, mut control) = ([0; QUOTED], Control([0; CONTROL]));
    for _ in 0..BUDGET {
        let mut payload = [IoSliceMut::new(&mut quoted)];
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut payload, Some(&mut control.0), flags);
        let (remote, cause, len) = match message {
            Ok(message) => {
                let remote = message.address.as_ref().and_then(sys::ip_of);
                let cause = message.cmsgs().ok().and_then(|mut all| all.find_map(cause));
                (remote, cause, message.bytes)
            }
            Err(Errno::EINTR) => continue,
            Err(_) => return,
        };
        if let (Some(remote), Some(why)) = (remote, cause) {
            let quoted = &quoted[..len];
            handle(&Undeliverable { remote, why, quoted });
        }
    }
}

/// Returns the cause that a control message names, if it is an ICMP error.
fn cause(message: ControlMessageOwned) -> Option<NoAnswer> {
    let error = match message {
        ControlMessageOwned::Ipv4RecvErr(error, _) => error,
        ControlMessageOwned::Ipv6RecvErr(error, _) => error,
        _ => return None,
    };
    match error.ee_origin {
        libc::SO_EE_ORIGIN_ICMP => why(true, error.ee_type, error.ee_code),
        libc::SO_EE_ORIGIN_ICMP6 => why(false, error.ee_type, error.ee_code),
        _ => None,
    }
}

/// Returns the cause that an ICMP error names, unless it is one that may pass, such as a host that does not answer ARP (yet).
fn why(v4: bool, kind: u8, code: u8) -> Option<NoAnswer> {
    // Destination unreachable: RFC 792 and 1812, and RFC 4443.
    const V4: u8 = 3;
    const V6: u8 = 1;
    match (v4, kind, code) {
        (true, V4, 3) | (false, V6, 4) => Some(NoAnswer::PortUnreachable),
        // Network, host or communication administratively prohibited; of IPv6 also by policy, and a reject route.
        (true, V4, 9 | 10 | 13) | (false, V6, 1 | 5 | 6) => Some(NoAnswer::Prohibited),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
        os::fd::AsFd as _,
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
        let (v4, v6) = (|code| why(true, 3, code), |code| why(false, 1, code));
        assert_eq!([v4(0), v4(1), v4(4), v6(0), v6(3)], [None; 5]);
        assert_eq!(v4(13), Some(NoAnswer::Prohibited));
        assert_eq!(v6(1), Some(NoAnswer::Prohibited));
        let time_exceeded = why(true, 11, 3);
        assert_eq!(time_exceeded, None);
    }
}
