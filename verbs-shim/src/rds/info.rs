//! `RDS_INFO_*`.

use libc::{c_int, c_void, socklen_t};
use rds_local::Request;

use super::{control, user};
use crate::ret::{Errno, Result};

/// First and last number of the information that the kernel has.
pub(crate) const FIRST: c_int = 10000;
pub(crate) const LAST: c_int = 10017;
/// Most bytes that a node may give.
const MAX: u64 = 64 << 20;

/// `getsockopt` of information: gives the program all of it, and returns the size of an element; `ENOSPC` and the length if the program
/// has less room.
///
/// # Safety
/// The program expects both there.
pub(crate) unsafe fn get(number: c_int, value: *mut c_void, len: *mut socklen_t) -> Result<c_int> {
    let room = user::read::<c_int>(len.cast_const().cast())?;
    let room = usize::try_from(room).map_err(|_| Errno::INVAL)?;
    let (answer, files) = control::ask(&Request::Info(number.cast_unsigned()), &[])?;
    let size = c_int::try_from(answer.value).map_err(|_| Errno(libc::EPROTO))?;
    let bytes = match files.first() {
        Some(file) => rds_local::read_memory_file(file, answer.len.min(MAX) as usize)?,
        None => Vec::new(),
    };
    let whole = u32::try_from(bytes.len()).map_err(|_| Errno(libc::EPROTO))?;
    // SAFETY: the caller's promise.
    unsafe {
        if bytes.len() <= room {
            // What the kernel says of memory that it can't access here.
            user::write(value, &bytes).map_err(|_| Errno::AGAIN)?;
        }
        user::write_value(len.cast(), whole)?;
    }
    match bytes.len() <= room {
        true => Ok(size),
        false => Err(Errno(libc::ENOSPC)),
    }
}
