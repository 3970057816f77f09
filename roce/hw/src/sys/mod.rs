//! libibverbs and librdmacm, as types that keep alive what they are made of. All calls of the two libraries are here.
//!
//! rdma-sys has the structures, the functions, and most of those that C has in headers only; what it lacks is in [`ffi`].

mod cm;
mod context;
mod ffi;
mod memory;
mod queue;

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
};

use libc::c_int;

pub(crate) use cm::{CmId, EventChannel, News, Offer, Reply, kind};
pub(crate) use context::{AsyncNews, Context, Element};
pub(crate) use memory::{Kind, Mr, Mw, Pd};
pub(crate) use queue::{Attributes, Bind, Channel, Cq, Polled, Qp, RecvList, SendList, State};

/// The result of a call that returns 0, or else an error number or -1 with `errno`: verbs differ in that.
fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The result of a call that returns an object, or null with `errno`.
fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}

/// What would block is nothing.
fn unless_empty(done: io::Result<()>) -> io::Result<Option<()>> {
    match done {
        Ok(()) => Ok(Some(())),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

fn set_nonblocking(fd: c_int) -> io::Result<()> {
    // SAFETY: flags of a descriptor; no memory is involved.
    let set = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags != -1 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) != -1
    };
    set.then_some(()).ok_or_else(io::Error::last_os_error)
}

/// Which of these descriptors can be read. Does not wait.
pub(crate) fn readable(fds: &[BorrowedFd<'_>], into: &mut Vec<bool>) -> io::Result<()> {
    let watch = |fd: &BorrowedFd<'_>| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut polled: Vec<libc::pollfd> = fds.iter().map(watch).collect();
    // SAFETY: as many structures as are said.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
    into.clear();
    if count >= 0 {
        into.extend(polled.iter().map(|p| p.revents != 0));
        return Ok(());
    }
    match io::Error::last_os_error() {
        // Next time.
        e if e.kind() == io::ErrorKind::Interrupted => {
            into.resize(fds.len(), false);
            Ok(())
        }
        e => Err(e),
    }
}

/// The soft limit of memory that the process may lock, in bytes; `None`: no limit.
pub(crate) fn lockable() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is filled.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
