//! `setsockopt` and `getsockopt`.
//!
//! Options of the level SOL_SOCKET are the descriptor's own, but for those that RDS means otherwise.

use std::fs;

use libc::{c_int, c_void, socklen_t};
use rds_local::{Request, SocketFlags, SocketKey, SocketOption};
use zerocopy::FromBytes as _;

use super::{
    address::{self, Name},
    cmsg::SOL_RDS,
    control, info,
    operation::{self, MapArgs},
    real,
    socket::{self, Socket},
    user,
};
use crate::ret::{Errno, Result};

const CANCEL_SENT_TO: c_int = 1;
const GET_MR: c_int = 2;
const FREE_MR: c_int = 3;
const RECVERR: c_int = 5;
const CONG_MONITOR: c_int = 6;
const GET_MR_FOR_DEST: c_int = 7;
const TRANSPORT: c_int = 8;
/// Transports are numbered below this.
const TRANSPORTS: c_int = 3;
const INT: usize = size_of::<c_int>();

/// Least values of SO_SNDBUF and SO_RCVBUF as they are told, twice the effective ones (`SOCK_MIN_SNDBUF`, `SOCK_MIN_RCVBUF`).
const MIN_SEND: usize = 4608;
const MIN_RECV: usize = 2304;

/// Reads an option's `int`.
fn int(value: *const c_void, len: socklen_t) -> Result<c_int> {
    match len as usize >= INT {
        true => user::read(value),
        false => Err(Errno::INVAL),
    }
}

/// Sets an option of a socket that the node keeps.
fn set(key: SocketKey, option: SocketOption, value: u64) -> Result<()> {
    control::ask(&Request::SetOption(key, option, value), &[]).map(drop)
}

/// `setsockopt`; `None`: the descriptor's own does it.
pub(crate) fn set_option(
    key: SocketKey,
    fd: c_int,
    (level, option): (c_int, c_int),
    value: *const c_void,
    len: socklen_t,
) -> Result<Option<()>> {
    let socket = socket::with_key(key, fd)?;
    if len.cast_signed() < 0 {
        return Err(Errno::INVAL);
    }
    match level {
        libc::SOL_SOCKET => set_common(&socket, fd, option, value, len),
        SOL_RDS => set_rds(&socket, fd, option, value, len).map(Some),
        _ => Err(Errno(libc::ENOPROTOOPT)),
    }
}

fn set_common(socket: &Socket, fd: c_int, option: c_int, value: *const c_void, len: socklen_t) -> Result<Option<()>> {
    match option {
        libc::SO_SNDBUF | libc::SO_RCVBUF | libc::SO_SNDBUFFORCE | libc::SO_RCVBUFFORCE => {
            set_buffer(socket, fd, option, int(value, len)?).map(Some)
        }
        libc::SO_TIMESTAMP => set_timestamp(socket, int(value, len)?).map(Some),
        libc::SO_ZEROCOPY => match int(value, len)? {
            0 | 1 => Ok(Some(())),
            _ => Err(Errno::INVAL),
        },
        // Of unix sockets alone.
        libc::SO_PEEK_OFF => Err(Errno::NOTSUP),
        _ => Ok(None),
    }
}

fn set_timestamp(socket: &Socket, value: c_int) -> Result<()> {
    socket.page.set_flag(SocketFlags::Timestamp, value != 0);
    Ok(())
}

/// A limit of the kernel's for buffers.
fn limit(name: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/sys/net/core/{name}")).unwrap_or_default();
    text.trim().parse().unwrap_or(212_992)
}

/// Sets a buffer's size as the kernel does: twice the value, within limits. RDS uses half of that.
fn set_buffer(socket: &Socket, fd: c_int, option: c_int, value: c_int) -> Result<()> {
    let is_send = matches!(option, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE);
    let is_forced = matches!(option, libc::SO_SNDBUFFORCE | libc::SO_RCVBUFFORCE);
    let most = match (is_forced, is_send) {
        (true, _) => c_int::MAX as usize / 2,
        (false, true) => limit("wmem_max"),
        (false, false) => limit("rmem_max"),
    };
    let value = usize::try_from(value)
        .unwrap_or(if is_forced { 0 } else { usize::MAX })
        .min(most);
    let effective = (value * 2).max(if is_send { MIN_SEND } else { MIN_RECV }) / 2;
    // The descriptor's own, which the kernel doubles. This also refuses who may not force it.
    let own = c_int::try_from(effective).unwrap_or(c_int::MAX / 2);
    // SAFETY: a local of this length.
    if unsafe { real::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const own).cast(), INT as u32) } < 0 {
        return Err(Errno::last());
    }
    let option = if is_send {
        SocketOption::SendBuffer
    } else {
        SocketOption::RecvBuffer
    };
    set(socket.key, option, effective as u64)
}

fn set_rds(socket: &Socket, fd: c_int, option: c_int, value: *const c_void, len: socklen_t) -> Result<()> {
    match option {
        CANCEL_SENT_TO => cancel(socket, value, len),
        GET_MR | GET_MR_FOR_DEST => get_mr(socket, option, value, len),
        FREE_MR => free_mr(socket, value, len),
        RECVERR => set(socket.key, SocketOption::RecvErr, u64::from(int(value, len)? != 0)),
        CONG_MONITOR => set(socket.key, SocketOption::CongMonitor, u64::from(int(value, len)? != 0)),
        TRANSPORT => set_transport(socket, value, len),
        libc::SO_TIMESTAMP => {
            let on = int(value, len)?;
            // SAFETY: a local of this length.
            unsafe { real::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const on).cast(), INT as u32) };
            set_timestamp(socket, on)
        }
        // `SO_RDS_MSG_RXPATH_LATENCY` too: nothing measures them.
        _ => Err(Errno(libc::ENOPROTOOPT)),
    }
}

/// `RDS_CANCEL_SENT_TO`.
fn cancel(socket: &Socket, value: *const c_void, len: socklen_t) -> Result<()> {
    if socket.page.bound().is_none() {
        return Err(Errno(libc::ENOTCONN));
    }
    let len = len as usize;
    if len < address::V4_LEN {
        return Err(Errno::INVAL);
    }
    let name = Name::read(value.cast(), len.min(address::V6_LEN) as u32)?;
    // The kernel goes by the length, not the family.
    let named = if len < address::V6_LEN {
        name.as_v4()
    } else {
        name.as_v6()
    };
    let addr = named.addr().ok_or(Errno::INVAL)?;
    control::ask(&Request::Cancel(socket.key, addr), &[]).map(drop)
}

fn set_transport(socket: &Socket, value: *const c_void, len: socklen_t) -> Result<()> {
    if socket.page.transport().is_some() || socket.page.bound().is_some() {
        return Err(Errno::NOTSUP);
    }
    if len as usize != INT {
        return Err(Errno::INVAL);
    }
    let number = int(value, len)?;
    match number {
        0 => set(socket.key, SocketOption::Transport, 0),
        1..TRANSPORTS => Err(Errno(libc::ENOPROTOOPT)),
        _ => Err(Errno::INVAL),
    }
}

fn get_mr(socket: &Socket, option: c_int, value: *const c_void, len: socklen_t) -> Result<()> {
    /// `struct rds_get_mr_for_dest_args` begins with a `struct sockaddr_storage`.
    const DEST: usize = size_of::<libc::sockaddr_storage>();
    let at = if option == GET_MR { 0 } else { DEST };
    if len as usize != at + size_of::<MapArgs>() {
        return Err(Errno::INVAL);
    }
    let args: [u8; size_of::<MapArgs>()] = user::read(value.wrapping_byte_add(at))?;
    let args = MapArgs::read_from_bytes(&args).map_err(|_| Errno::INVAL)?;
    if socket.page.bound().is_none() {
        return Err(Errno(libc::ENOTCONN));
    }
    operation::map(socket, &args).map(drop)
}

fn free_mr(socket: &Socket, value: *const c_void, len: socklen_t) -> Result<()> {
    if len as usize != 16 {
        return Err(Errno::INVAL);
    }
    let [cookie, flags]: [u64; 2] = user::read(value)?;
    let request = Request::Unmap {
        socket: socket.key,
        cookie,
        flags: flags as u32,
    };
    control::ask(&request, &[]).map(drop)
}

/// Gives the program an option's `int`, as far as it has room for it.
///
/// # Safety
/// The program expects it there.
unsafe fn give(number: c_int, value: *mut c_void, len: *mut socklen_t, exact: bool) -> Result<c_int> {
    let room = user::read::<c_int>(len.cast_const().cast())?;
    if room.cast_unsigned() < INT as u32 && exact {
        return Err(Errno::INVAL);
    }
    let room = usize::try_from(room).unwrap_or(INT).min(INT);
    // SAFETY: the caller's promise.
    unsafe {
        user::write(value, &number.to_ne_bytes()[..room])?;
        user::write_value(len.cast(), room as u32)?;
    }
    Ok(0)
}

/// `getsockopt`; `None`: the descriptor's own does it.
///
/// # Safety
/// The program expects the value and its length there.
pub(crate) unsafe fn get_option(
    key: SocketKey,
    fd: c_int,
    (level, option): (c_int, c_int),
    value: *mut c_void,
    len: *mut socklen_t,
) -> Result<Option<c_int>> {
    let socket = socket::with_key(key, fd)?;
    let page = &socket.page;
    let (number, exact) = match (level, option) {
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => (libc::AF_RDS, false),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL | libc::SO_ZEROCOPY) => (0, false),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => (twice(page.buffers().0), false),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => (twice(page.buffers().1), false),
        (libc::SOL_SOCKET, libc::SO_TIMESTAMP) => (page.flag(SocketFlags::Timestamp).into(), false),
        (libc::SOL_SOCKET, _) => return Ok(None),
        (SOL_RDS, RECVERR) => (page.flag(SocketFlags::RecvErr).into(), true),
        // Bound, it is InfiniBand's: 0.
        (SOL_RDS, TRANSPORT) => (
            if page.transport().is_some() || page.bound().is_some() {
                0
            } else {
                -1
            },
            true,
        ),
        // SAFETY: the caller's promise.
        (SOL_RDS, info::FIRST..=info::LAST) => return unsafe { info::get(option, value, len) }.map(Some),
        _ => return Err(Errno(libc::ENOPROTOOPT)),
    };
    // SAFETY: the caller's promise.
    unsafe { give(number, value, len, exact) }.map(Some)
}

fn twice(bytes: usize) -> c_int {
    c_int::try_from(bytes.saturating_mul(2)).unwrap_or(c_int::MAX)
}
