//! Multicast groups.

use libc::c_int;

use crate::{
    abi::{ibv_gid, ibv_qp},
    ret::Errno,
};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_attach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> c_int {
    Errno::NOTSUP.set();
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_detach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> c_int {
    Errno::NOTSUP.set();
    libc::EOPNOTSUPP
}
