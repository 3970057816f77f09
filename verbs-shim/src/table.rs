//! Tables that the stubs of libibverbs.so.1 and librdmacm.so.1 jump through, by number; made by `build.rs` from the lists in `symbols`.

use std::ffi::c_void;

use crate::rdmacm::forward;

/// The address of a function; null for what is no function.
#[repr(transparent)]
struct Entry(*const c_void);

// SAFETY: addresses of functions, which never change.
unsafe impl Sync for Entry {}

include!(concat!(env!("OUT_DIR"), "/table.rs"));
