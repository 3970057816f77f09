//! `ioctl`.

use libc::{c_int, c_ulong, c_void};
use rds_local::{Request, SocketFlags, SocketKey};

use super::{control, socket, user};
use crate::ret::{Errno, Result};

const SET_TOS: c_ulong = 0x89e0;
const GET_TOS: c_ulong = 0x89e1;
/// Requests about descriptors (`FIONBIO`, `FIOASYNC`, `FIONCLEX`, `FIOCLEX`) and owners (`FIOSETOWN` to `SIOCGPGRP`), and about the host's
/// interfaces (`SIOCADDRT` to the last one before those of protocols).
const PASSED: [std::ops::RangeInclusive<c_ulong>; 4] =
    [0x5450..=0x5452, 0x5421..=0x5421, 0x8901..=0x8904, 0x890b..=0x89df];

/// `None`: the descriptor's own does it.
///
/// # Safety
/// As `ioctl`.
pub(crate) unsafe fn ioctl(key: SocketKey, fd: c_int, request: c_ulong, arg: *mut c_void) -> Result<Option<c_int>> {
    // The kernel looks at 32 bits.
    let request = request & 0xffff_ffff;
    let socket = socket::with_key(key, fd)?;
    match request {
        SET_TOS => {
            let tos = user::read::<u8>(arg)?;
            if socket.page.bound().is_none() {
                return Err(Errno(libc::ENOTTY));
            }
            if socket.page.flag(SocketFlags::Sent) {
                return Err(Errno::INVAL);
            }
            control::ask(&Request::SetTos(key, tos), &[]).map(|_| Some(0))
        }
        // SAFETY: the caller's promise.
        GET_TOS => unsafe { user::write_value(arg, socket.page.tos()) }.map(|()| Some(0)),
        other if PASSED.iter().any(|range| range.contains(&other)) => Ok(None),
        _ => Err(Errno(libc::ENOTTY)),
    }
}
