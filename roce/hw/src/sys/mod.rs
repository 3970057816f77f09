//! libibverbs and librdmacm, as types that keep alive what they are made of. All calls of the two libraries are here.
//!
//! rdma-sys has the structures, the functions, and most of those that C has in headers only; what it lacks is in [`ffi`].

mod cm;
mod context;
mod ffi;
mod memory;
mod poll;
mod queue;

use std::{io, ptr::NonNull};

use libc::c_int;

pub(crate) use cm::{CmId, EventChannel, News, Offer, Reply, close_dead_device, kind};
pub(crate) use context::{AsyncNews, Context, Element, Found};
pub(crate) use memory::{Kind, Mr, Mw, Pd};
pub(crate) use poll::{NODES, Nodes, Watched};
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

/// Returns `None` for a call that would block.
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
