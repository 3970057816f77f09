//! Verbs that this device does not have, which report EOPNOTSUPP. The lists in `symbols` name the function here that stands for
//! each other symbol of libibverbs.

use std::sync::Once;

use libc::{c_int, c_void};

use crate::{
    abi::{ibv_ece, ibv_qp, ibv_srq},
    config, log,
    ret::{self, Errno},
};

fn refuse() {
    ret::value((), || {
        log::failed("a verb that this device does not have", Errno::NOTSUP)
    });
    Errno::NOTSUP.set();
}

/// A verb that returns an error number.
pub(crate) unsafe extern "C" fn code() -> c_int {
    refuse();
    libc::EOPNOTSUPP
}

/// A verb that returns an object.
pub(crate) unsafe extern "C" fn pointer() -> *mut c_void {
    refuse();
    std::ptr::null_mut()
}

/// A function that returns -1 when it fails.
pub(crate) unsafe extern "C" fn minus_one() -> c_int {
    refuse();
    -1
}

/// A function that returns a number of objects, of which there are none.
pub(crate) unsafe extern "C" fn zero() -> c_int {
    0
}

/// A function that has nothing to do: registering a provider, logging, freeing an object that can't exist.
pub(crate) unsafe extern "C" fn nothing() {}

/// Reports once why a program of libibverbs 1.0 (2006) finds no device: its structures are not those of 1.1.
fn obsolete() {
    static REPORTED: Once = Once::new();
    ret::value((), || {
        REPORTED.call_once(|| {
            config::complain(format_args!(
                "this program was built for libibverbs 1.0, before IBVERBS_1.1: build it again with a later one"
            ));
        });
    });
    Errno::NOSYS.set();
}

/// `ibv_get_device_list` of 1.0.
///
/// # Safety
/// `count` is null or has room for a number.
pub(crate) unsafe extern "C" fn list_1_0(count: *mut c_int) -> *mut c_void {
    obsolete();
    if !count.is_null() {
        // SAFETY: the caller's promise.
        unsafe { count.write_unaligned(0) };
    }
    std::ptr::null_mut()
}

/// A function of 1.0 that returned an object, a name or a number.
pub(crate) unsafe extern "C" fn null_1_0() -> *mut c_void {
    obsolete();
    std::ptr::null_mut()
}

/// A function of 1.0 that returned an error number.
pub(crate) unsafe extern "C" fn code_1_0() -> c_int {
    obsolete();
    libc::ENOSYS
}

/// A function of 1.0 that returned -1 when it failed.
pub(crate) unsafe extern "C" fn minus_one_1_0() -> c_int {
    obsolete();
    -1
}

/// Tag matching.
pub(crate) unsafe extern "C" fn post_srq_ops(_srq: *mut ibv_srq, op: *mut c_void, bad: *mut *mut c_void) -> c_int {
    // SAFETY: the program passes room for the pointer.
    unsafe { bad.write_unaligned(op) };
    refuse();
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the program passes room for the answer, which libibverbs clears.
    unsafe {
        ece.write_unaligned(ibv_ece {
            vendor_id: 0,
            options: 0,
            comp_mask: 0,
        });
    }
    refuse();
    libc::EOPNOTSUPP
}

/// Exports functions whose arguments are not read.
macro_rules! exports {
    ($($name:ident -> $ret:ty: $as:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() -> $ret {
            // SAFETY: no arguments.
            unsafe { $as() }
        }
    )*};
}

exports! {
    ibv_set_ece -> c_int: code;
    ibv_reg_dmabuf_mr -> *mut c_void: pointer;
    ibv_import_device -> *mut c_void: pointer;
    ibv_import_pd -> *mut c_void: pointer;
    ibv_unimport_pd -> (): nothing;
    ibv_import_mr -> *mut c_void: pointer;
    ibv_unimport_mr -> (): nothing;
    ibv_import_dm -> *mut c_void: pointer;
    ibv_unimport_dm -> (): nothing;
    // Providers that are linked in or found by name can't register here: there are none.
    ibv_register_driver -> (): nothing;
    // Whether data lands in order: no promise is made.
    ibv_query_qp_data_in_order -> c_int: zero;
}
