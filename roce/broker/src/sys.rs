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

/// Has the sockets of a reuseport group chosen by a program that was loaded.
pub(crate) fn steer_group_by(fd: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    set_int(
        fd,
        libc::SOL_SOCKET,
        libc::SO_ATTACH_REUSEPORT_EBPF,
        program.as_raw_fd(),
    )
}

/// A socket's number that no other has had since the machine was started.
pub(crate) fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    get_u64(socket, libc::SO_COOKIE)
}

fn get_u64(socket: BorrowedFd<'_>, name: c_int) -> io::Result<u64> {
    let mut value = 0u64;
    let mut len = size_of::<u64>() as socklen_t;
    let (to, level) = ((&raw mut value).cast::<c_void>(), libc::SOL_SOCKET);
    // SAFETY: `value` lives on the stack for the call and `len` is its size.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut len) };
    check(rc).map(|()| value)
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

/// Returns the process at the other end of a unix socket: process id (0 when it has none here) and user id.
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
    get_u64(socket, libc::SO_NETNS_COOKIE).ok()
}

/// Waits until something has come over a socket, it takes something (`room`), or a counter is raised. May end early.
pub(crate) fn wait_for(socket: BorrowedFd<'_>, room: bool, counter: BorrowedFd<'_>) -> io::Result<()> {
    let entry = |fd: BorrowedFd<'_>, events| libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    };
    let also = if room { libc::POLLOUT } else { 0 };
    let mut all = [entry(socket, libc::POLLIN | also), entry(counter, libc::POLLIN)];
    // SAFETY: the array lives for the call and its length is right.
    let rc = unsafe { libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, -1) };
    match check(rc.min(0)) {
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
        done => done,
    }
}

fn check(rc: c_int) -> io::Result<()> {
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
