//! `rdma_create_event_channel` and `rdma_destroy_event_channel`, in front of librdmacm's.

use std::ffi::c_int;

use super::{Errno, Result, ffi};
use crate::{
    device, fork, rebind, ret,
    symbols::{Call, calls},
};

/// `struct rdma_event_channel`.
#[repr(C)]
struct RdmaEventChannel {
    fd: c_int,
}

/// Both, for a librdmacm that was loaded without regard to symbol order.
pub(crate) static CALLS: &[Call] = calls![rdma_create_event_channel, rdma_destroy_event_channel];

fn create_event_channel() -> Result<*mut RdmaEventChannel> {
    ffi::REBIND.get_or_init(|| rebind::run)();
    if device::list()?.is_empty() {
        return Err(
            Errno::NODEV.because("no interface is up and has an address, or none has one of FERROCE_ADDR (--addr)")
        );
    }
    // SAFETY: plain allocation; freed in rdma_destroy_event_channel, or by librdmacm's own free().
    let channel = unsafe { libc::malloc(size_of::<RdmaEventChannel>()) }.cast::<RdmaEventChannel>();
    if channel.is_null() {
        return Err(Errno::NOMEM);
    }
    let opened = ffi::with(|ucma| {
        let fd = ucma.open_channel()?;
        fork::own_memory();
        ffi::CHANNELS.insert(fd).map(|()| fd).inspect_err(|_| {
            ucma.close_channel(fd);
            // SAFETY: the channel has given its descriptor up to us.
            unsafe { ffi::libc_close(fd) };
        })
    });
    // SAFETY: just allocated, for a structure of this size.
    unsafe {
        let fd = opened.inspect_err(|_| libc::free(channel.cast()))?;
        channel.write(RdmaEventChannel { fd });
    }
    Ok(channel)
}

/// Makes an event channel, or returns NULL with errno: ENODEV without devices.
#[unsafe(no_mangle)]
extern "C" fn rdma_create_event_channel() -> *mut RdmaEventChannel {
    ret::pointer(create_event_channel)
}

/// Destroys an event channel and what is left on it.
///
/// # Safety
/// `channel` is from [`rdma_create_event_channel`] and is not used any more.
#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut RdmaEventChannel) {
    if channel.is_null() {
        return;
    }
    ret::value((), || {
        // SAFETY: the caller's promise.
        let fd = unsafe { (*channel).fd };
        let lost = ffi::CHANNELS.contains(fd) && ffi::is_lost(fd);
        ffi::forget_channel(fd);
        // SAFETY: the channel's own descriptor and memory, by the caller's promise.
        unsafe {
            if !lost {
                ffi::libc_close(fd);
            }
            libc::free(channel.cast());
        }
    });
}
