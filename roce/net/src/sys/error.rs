//! A socket's error queue (`ip(7)`, IP_RECVERR).

use std::{
    io,
    net::IpAddr,
    os::fd::{AsRawFd, BorrowedFd},
};

use libc::{c_void, iovec, sockaddr_storage};

use super::msg::{empty_name, read_name};

/// Bytes of a quoted packet that are kept: BTH, DETH and a MAD with its ICRC are 280.
pub(crate) const QUOTED: usize = 288;
/// Room for a `sock_extended_err` with an address behind it.
const CONTROL: usize = 128;

/// Type and code of an ICMP (IPv4) or ICMPv6 message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IcmpError {
    pub(crate) v4: bool,
    pub(crate) kind: u8,
    pub(crate) code: u8,
}

/// Aligned as control messages must be.
#[repr(align(8))]
struct Control([u8; CONTROL]);

/// Takes an error out of a socket's queue without waiting: the address that the packet was sent to, what ICMP said, and how many bytes
/// of the UDP payload were written to `quoted`. `None`: an error of another origin.
///
/// # Errors
/// `WouldBlock` when there is none.
pub(crate) fn receive_error(
    fd: BorrowedFd<'_>,
    quoted: &mut [u8; QUOTED],
) -> io::Result<Option<(IpAddr, IcmpError, usize)>> {
    let mut name = empty_name();
    let mut control = Control([0; CONTROL]);
    let mut vector = iovec {
        iov_base: quoted.as_mut_ptr().cast::<c_void>(),
        iov_len: quoted.len(),
    };
    // SAFETY: plain data, for which zero is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = (&raw mut name).cast::<c_void>();
    header.msg_namelen = size_of::<sockaddr_storage>() as _;
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast::<c_void>();
    header.msg_controllen = CONTROL as _;
    // SAFETY: the header points at locals, each with its true length, that live for the call.
    let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    let len = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let remote = read_name(&name, header.msg_namelen as usize).map(|addr| addr.ip());
    let error = icmp_error(&header);
    Ok(remote.zip(error).map(|(remote, error)| (remote, error, len)))
}

fn icmp_error(header: &libc::msghdr) -> Option<IcmpError> {
    // SAFETY: the kernel has written well-formed control messages and set their total length. The value is read unaligned, and as long
    // as its kind is.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            let kind = ((*at).cmsg_level, (*at).cmsg_type);
            if matches!(
                kind,
                (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            ) {
                let error = libc::CMSG_DATA(at).cast::<libc::sock_extended_err>().read_unaligned();
                let v4 = match error.ee_origin {
                    libc::SO_EE_ORIGIN_ICMP => true,
                    libc::SO_EE_ORIGIN_ICMP6 => false,
                    _ => return None,
                };
                return Some(IcmpError {
                    v4,
                    kind: error.ee_type,
                    code: error.ee_code,
                });
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
    None
}
