//! System calls that no crate wraps.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use libc::{c_int, c_void, socklen_t};

/// Sets a socket option whose value is an integer.
pub(crate) fn set_int(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: `value` lives on the stack for the call and `len` is its size.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast::<c_void>(), len) };
    check(rc)
}

/// Has the sockets of a reuseport group chosen by a classic BPF program: it sees the UDP payload and returns the index of
/// a socket.
pub(crate) fn steer_group(fd: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_mut_ptr(),
    };
    let len = size_of::<libc::sock_fprog>() as socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF);
    // SAFETY: `program` and the instructions that it points at (`len` of them) live for the call; the kernel copies them.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const program).cast::<c_void>(), len) };
    check(rc)
}

/// Closes every descriptor from `first` on: what a program happened to leave open for its children.
///
/// # Safety
/// Nothing in this process may own one of them.
pub(crate) unsafe fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed; the caller vouches for the descriptors.
    let rc = unsafe { libc::close_range(first as libc::c_uint, libc::c_uint::MAX, 0) };
    check(rc)
}

/// Owns a descriptor that the process was started with.
///
/// # Safety
/// It must be open and nobody else's.
pub(crate) unsafe fn inherited(fd: RawFd) -> OwnedFd {
    // SAFETY: as above.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Who is at the other end of a unix socket: process id (0 when it has none here) and user id.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut ucred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as socklen_t;
    let (to, level) = ((&raw mut ucred).cast::<c_void>(), libc::SOL_SOCKET);
    // SAFETY: `ucred` lives on the stack for the call and `len` is its size.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, libc::SO_PEERCRED, to, &raw mut len) };
    check(rc)?;
    Ok((u32::try_from(ucred.pid).unwrap_or(0), ucred.uid))
}

/// The number of a socket's network namespace, which no other ever gets; `None` where the kernel has none (before 5.14).
pub(crate) fn network(socket: BorrowedFd<'_>) -> Option<u64> {
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as socklen_t;
    let (to, level) = ((&raw mut cookie).cast::<c_void>(), libc::SOL_SOCKET);
    // SAFETY: `cookie` lives on the stack for the call and `len` is its size.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, libc::SO_NETNS_COOKIE, to, &raw mut len) };
    check(rc).ok().map(|()| cookie)
}

/// Has a function called when the process ends by `exit()` or by returning from `main`.
pub(crate) fn at_exit(handler: extern "C" fn()) -> io::Result<()> {
    // SAFETY: the function stays: what this crate is linked into owns threads, so it is never unloaded.
    match unsafe { libc::atexit(handler) } {
        0 => Ok(()),
        _ => Err(io::ErrorKind::OutOfMemory.into()),
    }
}

fn check(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
