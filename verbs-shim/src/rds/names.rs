//! `bind`, `connect`, `getsockname` and `getpeername`.

use std::net::SocketAddr;

use libc::{c_int, sockaddr, socklen_t};
use rds_local::{Request, SocketKey};

use super::{
    address::{self, Name, Named, Parsed},
    control, socket,
};
use crate::ret::{Errno, Result};

/// `sizeof(sa_family_t)`.
const FAMILY_LEN: usize = 2;

pub(crate) fn bind(key: SocketKey, fd: c_int, name: *const sockaddr, len: socklen_t) -> Result<()> {
    let name = Name::read(name, len)?;
    let socket = socket::with_key(key, fd)?;
    let addr = match name.parse() {
        Parsed::V4(ip, _) if address::is_no_host(ip) => None,
        Parsed::V6(ip, ..) if address::is_no_host_v6(ip) => None,
        Parsed::V6(ip, _, 0) if address::is_link_local(ip) => None,
        _ if name.len() < FAMILY_LEN => None,
        other => other.addr(),
    };
    let addr = addr.ok_or(Errno::INVAL)?;
    if socket.page.bound().is_some() {
        return Err(Errno::INVAL);
    }
    control::ask(&Request::Bind(key, addr), &[]).map(drop)
}

pub(crate) fn connect(key: SocketKey, fd: c_int, name: *const sockaddr, len: socklen_t) -> Result<()> {
    let name = Name::read(name, len)?;
    let socket = socket::with_key(key, fd)?;
    if name.len() < FAMILY_LEN {
        return Err(Errno::INVAL);
    }
    let addr: SocketAddr = match name.parse() {
        Parsed::Short => return Err(Errno::INVAL),
        Parsed::Other => return Err(Errno(libc::EAFNOSUPPORT)),
        Parsed::V4(ip, _) if ip.is_unspecified() => return Err(Errno(libc::EDESTADDRREQ)),
        Parsed::V4(ip, _) if address::is_no_host(ip) => return Err(Errno::INVAL),
        Parsed::V6(ip, ..) if address::is_no_host_v6(ip) => return Err(Errno(libc::EPROTOTYPE)),
        Parsed::V6(ip, _, scope) if address::is_link_local(ip) && !is_on_link(socket.page.bound(), scope) => {
            return Err(Errno::INVAL);
        }
        other => other.addr().ok_or(Errno::INVAL)?,
    };
    control::ask(&Request::Connect(key, addr), &[]).map(drop)
}

/// Whether a link is that of the address that a socket is bound to, or may be.
fn is_on_link(bound: Option<SocketAddr>, scope: u32) -> bool {
    let own = match bound {
        Some(SocketAddr::V6(own)) => own.scope_id(),
        _ => 0,
    };
    scope != 0 && (own == 0 || own == scope)
}

/// # Safety
/// The program expects a name there.
pub(crate) unsafe fn own(key: SocketKey, fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> Result<()> {
    let page = &socket::with_key(key, fd)?.page;
    let named = page.bound().map_or_else(|| Named::none(page.peer()), Named::new);
    // SAFETY: the caller's promise.
    unsafe { named.write(to, len) }
}

/// # Safety
/// The program expects a name there.
pub(crate) unsafe fn peer(key: SocketKey, fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> Result<()> {
    let page = &socket::with_key(key, fd)?.page;
    let peer = page.peer().ok_or(Errno(libc::ENOTCONN))?;
    // SAFETY: the caller's promise.
    unsafe { Named::new(peer).write(to, len) }
}
