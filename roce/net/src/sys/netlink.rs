//! Sockets of rtnetlink: requests to the kernel, and notifications of it.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use libc::c_int;
use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket},
};

/// Bytes of a message header (`struct nlmsghdr`).
const HEADER: usize = size_of::<libc::nlmsghdr>();
/// Bytes of `struct ifinfomsg`.
const LINK: usize = 16;
/// Room for an answer, of which only the beginning matters: a link's counters and virtual functions may be cut off.
const ROOM: usize = 16_384;

fn rtnetlink(groups: c_int) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups as u32))?;
    Ok(fd)
}

/// A netlink socket that becomes readable when a link or an address of this network namespace changes.
pub(crate) fn watch_links() -> io::Result<OwnedFd> {
    rtnetlink(libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR)
}

/// A netlink socket that becomes readable when the state of a neighbour of this network namespace changes.
pub(crate) fn watch_neighbours() -> io::Result<OwnedFd> {
    rtnetlink(libc::RTMGRP_NEIGH)
}

/// Takes everything out of a socket, and says whether there was something. What the messages are does not matter: a
/// socket that overflowed (`ENOBUFS`) has lost some anyway.
pub(crate) fn drain(fd: BorrowedFd<'_>) -> bool {
    let mut scratch = [0u8; 8192];
    let mut any = false;
    loop {
        match recv(fd.as_raw_fd(), &mut scratch, MsgFlags::empty()) {
            Ok(_) | Err(Errno::ENOBUFS) => any = true,
            Err(Errno::EINTR) => {}
            Err(_) => return any,
        }
    }
}

/// Finds an attribute.
pub(crate) fn attribute(mut from: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let (head, _) = from.split_first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = from.get(4..len)?;
        if u16::from_ne_bytes([head[2], head[3]]) == wanted {
            return Some(value);
        }
        from = from.get(len.next_multiple_of(4)..)?;
    }
}

pub(crate) fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.first_chunk()?))
}

/// Requests to the kernel that each have one message for an answer. The kernel answers before the request returns.
#[derive(Debug)]
pub(crate) struct Rtnetlink(OwnedFd);

impl Rtnetlink {
    pub(crate) fn new() -> io::Result<Self> {
        rtnetlink(0).map(Self)
    }

    /// Returns an interface: `struct ifinfomsg`, then attributes.
    pub(crate) fn link(&self, index: u32) -> io::Result<Vec<u8>> {
        let mut request = [0; LINK];
        request[4..8].copy_from_slice(&index.to_ne_bytes());
        self.ask(libc::RTM_GETLINK, &request)
    }

    /// Sends a request of a type and returns the body of the answer, which may be cut short.
    ///
    /// # Errors
    /// The kernel's answer: ENOENT, ENETUNREACH and the like.
    pub(crate) fn ask(&self, kind: u16, body: &[u8]) -> io::Result<Vec<u8>> {
        let len = u32::try_from(HEADER + body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = libc::NLM_F_REQUEST as u16;
        let mut request = Vec::with_capacity(HEADER + body.len());
        request.extend(len.to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend(flags.to_ne_bytes());
        // Sequence number and port: one request at a time on a socket of its own.
        request.extend([0; 8]);
        request.extend(body);
        send(self.0.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut answer = vec![0; ROOM];
        let got = recv(self.0.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        answer.truncate(got);
        if answer.len() < HEADER {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let kind = u16::from_ne_bytes([answer[4], answer[5]]);
        let body = answer.split_off(HEADER);
        match body.first_chunk() {
            Some(error) if c_int::from(kind) == libc::NLMSG_ERROR => {
                Err(io::Error::from_raw_os_error(-i32::from_ne_bytes(*error)))
            }
            _ => Ok(body),
        }
    }
}
