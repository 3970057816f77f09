//! Extended reliable connections.

use libc::c_int;

use crate::{
    abi::{ibv_context, ibv_qp, ibv_qp_open_attr, ibv_xrcd, ibv_xrcd_init_attr},
    ret::Errno,
};

pub(crate) unsafe extern "C" fn open_qp(_context: *mut ibv_context, _attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

pub(crate) unsafe extern "C" fn open_xrcd(
    _context: *mut ibv_context,
    _attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

pub(crate) unsafe extern "C" fn close_xrcd(_xrcd: *mut ibv_xrcd) -> c_int {
    libc::EOPNOTSUPP
}
