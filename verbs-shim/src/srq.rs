//! Shared receive queues.

use libc::c_int;

use crate::{
    abi::{ibv_context, ibv_pd, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_srq_init_attr_ex},
    events::Acks,
    ret::Errno,
};

/// A shared receive queue.
#[repr(C)]
pub(crate) struct Srq {
    abi: ibv_srq,
    acks: Acks,
}

impl Srq {
    /// # Safety
    /// `srq` was made by us and lives as long as the reference.
    pub(crate) unsafe fn of<'a>(srq: *mut ibv_srq) -> &'a Self {
        // SAFETY: the public part is the first field.
        unsafe { &*srq.cast::<Self>() }
    }

    pub(crate) fn acks(&self) -> &Acks {
        &self.acks
    }
}

pub(crate) unsafe extern "C" fn get_srq_num(_srq: *mut ibv_srq, _number: *mut u32) -> c_int {
    libc::EOPNOTSUPP
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    _attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    _srq: *mut ibv_srq,
    _wr: *mut ibv_recv_wr,
    _bad: *mut *mut ibv_recv_wr,
) -> c_int {
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_srq(_pd: *mut ibv_pd, _init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    Errno::NOTSUP.set();
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_srq(_srq: *mut ibv_srq, _attr: *mut ibv_srq_attr, _mask: c_int) -> c_int {
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_srq(_srq: *mut ibv_srq, _attr: *mut ibv_srq_attr) -> c_int {
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_srq(_srq: *mut ibv_srq) -> c_int {
    libc::EOPNOTSUPP
}
