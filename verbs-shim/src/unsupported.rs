//! Verbs that this device does not have, as it should be: EOPNOTSUPP, and no crash.

use libc::{c_char, c_int, c_void};

use crate::{
    abi::{ibv_context, ibv_ece, ibv_mr, ibv_pd, ibv_qp, ibv_srq},
    ret::Errno,
};

/// A verb that returns an error number.
pub(crate) unsafe extern "C" fn code() -> c_int {
    Errno::NOTSUP.set();
    libc::EOPNOTSUPP
}

/// A verb that returns an object.
pub(crate) unsafe extern "C" fn pointer() -> *mut c_void {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

/// Tag matching.
pub(crate) unsafe extern "C" fn post_srq_ops(_srq: *mut ibv_srq, op: *mut c_void, bad: *mut *mut c_void) -> c_int {
    // SAFETY: the program passes room for the pointer.
    unsafe { bad.write(op) };
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    Errno::NOTSUP.set();
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the program passes room for the answer, which libibverbs clears.
    unsafe {
        ece.write(ibv_ece {
            vendor_id: 0,
            options: 0,
            comp_mask: 0,
        });
    }
    Errno::NOTSUP.set();
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_pd(_context: *mut ibv_context, _handle: u32) -> *mut ibv_pd {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_unimport_pd(_pd: *mut ibv_pd) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_mr(_pd: *mut ibv_pd, _handle: u32) -> *mut ibv_mr {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_unimport_mr(_mr: *mut ibv_mr) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_dm(_context: *mut ibv_context, _handle: u32) -> *mut c_void {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_unimport_dm(_dm: *mut c_void) {}

/// Providers that are linked in or found by name can't register here: there are none.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_register_driver(_name: *const c_char, _init: *mut c_void) {}

/// Whether data lands in order: no promise is made.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: c_int, _flags: u32) -> c_int {
    0
}
