//! Sockets of rtnetlink: requests to the kernel, and notifications of it.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use libc::{c_int, c_void, socklen_t};

use super::check;

/// Bytes of a message header (`struct nlmsghdr`).
const HEADER: usize = size_of::<libc::nlmsghdr>();
/// Room for an answer, of which only the beginning matters: a link's counters and virtual functions may be cut off.
const ROOM: usize = 16_384;

fn socket(groups: c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) })?;
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain data, for which zero is a value.
    let mut addr: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    addr.nl_family = libc::AF_NETLINK as _;
    addr.nl_groups = groups as u32;
    let len = size_of::<libc::sockaddr_nl>() as socklen_t;
    // SAFETY: the address lives on the stack and `len` is its size.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast::<libc::sockaddr>(), len) })?;
    Ok(fd)
}

/// A netlink socket that becomes readable when a link or an address of this network namespace changes.
pub(crate) fn watch_links() -> io::Result<OwnedFd> {
    socket(libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR)
}

/// A netlink socket that becomes readable when the state of a neighbour of this network namespace changes.
pub(crate) fn watch_neighbours() -> io::Result<OwnedFd> {
    socket(libc::RTMGRP_NEIGH)
}

/// Takes everything out of a socket, and says whether there was something. What the messages are does not matter: a
/// socket that overflowed (`ENOBUFS`) has lost some anyway.
pub(crate) fn drain(fd: BorrowedFd<'_>) -> bool {
    let mut scratch = [0u8; 8192];
    let mut any = false;
    loop {
        match receive(fd, &mut scratch) {
            Ok(_) => any = true,
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::ENOBUFS) => any = true,
                _ => return any,
            },
        }
    }
}

fn receive(fd: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: at most the length of `into` is written to it.
    let got = unsafe { libc::recv(fd.as_raw_fd(), into.as_mut_ptr().cast::<c_void>(), into.len(), 0) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Requests to the kernel that each have one message for an answer. The kernel answers before the request returns.
#[derive(Debug)]
pub(crate) struct Rtnetlink(OwnedFd);

impl Rtnetlink {
    pub(crate) fn new() -> io::Result<Self> {
        socket(0).map(Self)
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
        // SAFETY: the request's bytes are read.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), request.as_ptr().cast::<c_void>(), request.len(), 0) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
        let mut answer = vec![0; ROOM];
        let got = receive(self.0.as_fd(), &mut answer)?;
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
