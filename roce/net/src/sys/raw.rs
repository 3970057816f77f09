//! Raw IP and packet sockets, and filters of what they receive.
//!
//! `pnet` opens such sockets as well (`transport_channel`, `datalink::channel`), but leaves them to programs that are executed (no
//! `SOCK_CLOEXEC`), and binds packet sockets before a filter can be attached; its channels wait, and move one packet per call.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use libc::{c_int, c_void, sockaddr_ll, socklen_t};
use nix::errno::Errno;
use socket2::{SockAddr, SockAddrStorage};

fn open(domain: c_int, protocol: c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = Errno::result(unsafe { libc::socket(domain, kind, protocol) })?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a raw IP socket for UDP packets. It does not block.
///
/// # Errors
/// `PermissionDenied` without CAP_NET_RAW, and when the process has no descriptor left.
pub(crate) fn raw_socket(v4: bool) -> io::Result<OwnedFd> {
    let domain = if v4 { libc::AF_INET } else { libc::AF_INET6 };
    open(domain, libc::IPPROTO_UDP)
}

/// Opens a packet socket that receives nothing before [`bind_link`]. It does not block.
///
/// # Errors
/// `PermissionDenied` without CAP_NET_RAW, and when the process has no descriptor left.
pub(crate) fn packet_socket() -> io::Result<OwnedFd> {
    open(libc::AF_PACKET, 0)
}

/// Returns the address of an interface for packet sockets. `protocol`: an EtherType.
pub(super) fn link_address(index: u32, protocol: u16) -> SockAddr {
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: any address fits into the storage, and zeros are a value of all fields.
    let addr = unsafe { storage.view_as::<sockaddr_ll>() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = protocol.to_be();
    addr.sll_ifindex = index as c_int;
    // SAFETY: it has been set to an address of this length.
    unsafe { SockAddr::new(storage, size_of::<sockaddr_ll>() as socklen_t) }
}

/// Has a packet socket receive the frames of an interface that its filter accepts, with any EtherType.
///
/// # Errors
/// When there is no such interface.
pub(crate) fn bind_link(socket: BorrowedFd<'_>, index: u32) -> io::Result<()> {
    let addr = link_address(index, libc::ETH_P_ALL as u16);
    // SAFETY: the address lives until the call returns, and has this length.
    Errno::result(unsafe { libc::bind(socket.as_raw_fd(), addr.as_ptr().cast(), addr.len()) })?;
    Ok(())
}

/// Replaces the filter of a socket.
///
/// # Errors
/// When the kernel refuses the program, such as for its length.
pub(crate) fn attach_filter(socket: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_mut_ptr(),
    };
    let (value, len) = (
        (&raw const program).cast::<c_void>(),
        size_of_val(&program) as socklen_t,
    );
    // SAFETY: `value` points at a description of `len` bytes, whose program lives until the call returns.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, value, len) };
    Errno::result(rc)?;
    Ok(())
}
