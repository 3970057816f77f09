//! System calls that no crate wraps.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
};

use libc::{c_int, c_void, socklen_t};

/// Sets a socket option whose value is an integer.
pub(crate) fn set_int(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: `value` lives on the stack for the call and `len` is its size.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast::<c_void>(), len) };
    check(rc)
}

/// Returns the value of a socket option.
///
/// # Safety
/// Any bytes must be a value of the type.
unsafe fn get<T>(socket: BorrowedFd<'_>, name: c_int, mut value: T) -> io::Result<T> {
    let mut len = size_of::<T>() as socklen_t;
    let (to, level) = ((&raw mut value).cast::<c_void>(), libc::SOL_SOCKET);
    // SAFETY: `value` lives on the stack for the call and `len` is its size; the caller vouches for what is written there.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut len) };
    check(rc).map(|()| value)
}

/// Closes every descriptor from `first` on: those that a program happened to leave open for its children.
///
/// # Safety
/// Nothing in this process may own one of them.
pub(crate) unsafe fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed; the caller vouches for the descriptors.
    let rc = unsafe { libc::close_range(first as libc::c_uint, libc::c_uint::MAX, 0) };
    check(rc)
}

/// Returns the process at the other end of a unix socket: process id and user id. The former is 0 when it has none here, which the type of
/// `rustix` does not allow.
///
/// # Errors
/// Errors of `getsockopt`.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let ucred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: three integers.
    let ucred = unsafe { get(socket, libc::SO_PEERCRED, ucred) }?;
    Ok((u32::try_from(ucred.pid).unwrap_or(0), ucred.uid))
}

/// Returns the number of a socket's network namespace, which no other ever gets; `None` where the kernel has none (before 5.14).
pub(crate) fn network(socket: BorrowedFd<'_>) -> Option<u64> {
    // SAFETY: an integer.
    unsafe { get(socket, libc::SO_NETNS_COOKIE, 0u64) }.ok()
}

fn check(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
