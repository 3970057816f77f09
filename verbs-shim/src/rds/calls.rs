//! Calls about sockets in front of the C library's: those on RDS sockets are done here, all others go straight through.

use libc::{c_int, c_ulong, c_void, sockaddr, socklen_t};
use rds_local::{Page, Request, SocketKey};
use std::os::fd::{AsRawFd as _, IntoRawFd as _};

use super::{control, fds, ioctls, names, options, real, socket};
use crate::{
    device, log,
    ret::{self, Errno, Result},
};

/// Runs a call on an RDS socket: its value, or -1 and errno. `None` has the descriptor's own do it.
fn run(name: &str, own: impl FnOnce() -> c_int, body: impl FnOnce() -> Result<Option<c_int>>) -> c_int {
    match ret::run(body) {
        Ok(Some(value)) => value,
        Ok(None) => own(),
        Err(e) => {
            ret::value((), || log::failed(name, e));
            e.set();
            -1
        }
    }
}

/// Fails a call that RDS sockets don't have.
fn unsupported() -> c_int {
    Errno::NOTSUP.set();
    -1
}

/// Makes a socket.
fn open(kind: c_int, protocol: c_int) -> Result<c_int> {
    const TYPE: c_int = 0xf;
    const FLAGS: c_int = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    if kind & !(TYPE | FLAGS) != 0 || !(0..=10).contains(&(kind & TYPE)) {
        return Err(Errno::INVAL);
    }
    if kind & TYPE != libc::SOCK_SEQPACKET || protocol != 0 {
        return Err(Errno(libc::ESOCKTNOSUPPORT));
    }
    device::watch_forks();
    let (answer, files) = control::ask(&Request::Socket, &[])?;
    let Ok([end, page]) = <[_; 2]>::try_from(files) else {
        return Err(Errno(libc::EPROTO));
    };
    socket::keep(SocketKey(answer.value), Page::map(page)?);
    // It came close-on-exec, and blocking.
    let set = |command, value: c_int| {
        let value = std::ptr::without_provenance_mut(value as usize);
        // SAFETY: sets flags.
        match unsafe { real::fcntl(end.as_raw_fd(), command, value) } {
            0 => Ok(()),
            _ => Err(Errno::last()),
        }
    };
    if kind & libc::SOCK_CLOEXEC == 0 {
        set(libc::F_SETFD, 0)?;
    }
    if kind & libc::SOCK_NONBLOCK != 0 {
        set(libc::F_SETFL, libc::O_NONBLOCK)?;
    }
    let fd = end.into_raw_fd();
    fds::forget(fd);
    Ok(fd)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain != libc::AF_RDS {
        // SAFETY: the caller's.
        return unsafe { real::socket(domain, kind, protocol) };
    }
    run("socket(AF_RDS)", || -1, || open(kind, protocol).map(Some))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socketpair(domain: c_int, kind: c_int, protocol: c_int, out: *mut c_int) -> c_int {
    if domain != libc::AF_RDS {
        // SAFETY: the caller's.
        return unsafe { real::socketpair(domain, kind, protocol, out) };
    }
    unsupported()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn bind(fd: c_int, name: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::bind(fd, name, len) };
    match fds::key(fd) {
        None => own(),
        Some(key) => run("bind", own, || names::bind(key, fd, name, len).map(|()| Some(0))),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn connect(fd: c_int, name: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::connect(fd, name, len) };
    match fds::key(fd) {
        None => own(),
        Some(key) => run("connect", own, || names::connect(key, fd, name, len).map(|()| Some(0))),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockname(fd: c_int, name: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::getsockname(fd, name, len) };
    match fds::key(fd) {
        None => own(),
        Some(key) => run("getsockname", own, || {
            // SAFETY: the caller's.
            unsafe { names::own(key, fd, name, len) }.map(|()| Some(0))
        }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getpeername(fd: c_int, name: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::getpeername(fd, name, len) };
    match fds::key(fd) {
        None => own(),
        Some(key) => run("getpeername", own, || {
            // SAFETY: the caller's.
            unsafe { names::peer(key, fd, name, len) }.map(|()| Some(0))
        }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::setsockopt(fd, level, option, value, len) };
    match fds::key(fd) {
        None => own(),
        Some(key) => run("setsockopt", own, || {
            options::set_option(key, fd, (level, option), value, len).map(|done| done.map(|()| 0))
        }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::getsockopt(fd, level, option, value, len) };
    match fds::key(fd) {
        None => own(),
        // SAFETY: likewise.
        Some(key) => run("getsockopt", own, || unsafe {
            options::get_option(key, fd, (level, option), value, len)
        }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    let own = || unsafe { real::ioctl(fd, request, arg) };
    match fds::key(fd) {
        None => own(),
        // SAFETY: likewise.
        Some(key) => run("ioctl", own, || unsafe { ioctls::ioctl(key, fd, request, arg) }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match fds::key(fd) {
        // SAFETY: the caller's.
        None => unsafe { real::shutdown(fd, how) },
        Some(_) => unsupported(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match fds::key(fd) {
        // SAFETY: the caller's.
        None => unsafe { real::listen(fd, backlog) },
        Some(_) => unsupported(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept(fd: c_int, name: *mut sockaddr, len: *mut socklen_t) -> c_int {
    match fds::key(fd) {
        // SAFETY: the caller's.
        None => unsafe { real::accept(fd, name, len) },
        Some(_) => unsupported(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept4(fd: c_int, name: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    match fds::key(fd) {
        // SAFETY: the caller's.
        None => unsafe { real::accept4(fd, name, len, flags) },
        Some(_) => unsupported(),
    }
}

/// Notes the copy that a call has made of a descriptor.
fn copied(fd: c_int, copy: c_int) -> c_int {
    fds::copied(fd, copy);
    copy
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: the caller's.
    copied(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    // SAFETY: the caller's.
    copied(fd, unsafe { real::dup2(fd, to) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the caller's.
    copied(fd, unsafe { real::dup3(fd, to, flags) })
}

/// Whether a command of `fcntl` copies the descriptor.
fn copies(command: c_int) -> bool {
    matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC)
}

// The argument is a variable one in C; passing one that is not there does no harm with the C calling conventions of Linux.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    let done = unsafe { real::fcntl(fd, command, arg) };
    if copies(command) { copied(fd, done) } else { done }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    let done = unsafe { real::fcntl64(fd, command, arg) };
    if copies(command) { copied(fd, done) } else { done }
}
