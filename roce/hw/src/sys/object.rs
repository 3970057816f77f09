//! Results of the libraries' calls, and objects that are destroyed when they are dropped.

use std::{io, ptr::NonNull};

use libc::c_int;
use rdma_sys::{
    ibv_close_device, ibv_comp_channel, ibv_context, ibv_cq, ibv_dealloc_mw, ibv_dealloc_pd, ibv_destroy_comp_channel,
    ibv_destroy_cq, ibv_destroy_qp, ibv_mw, ibv_pd, ibv_qp, rdma_cm_id, rdma_destroy_event_channel, rdma_destroy_id,
    rdma_event_channel,
};

/// Returns the result of a call that returns 0, or else an error number or -1 with `errno`: verbs differ in that.
pub(super) fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether a call that does not block has found something.
pub(super) fn found(code: c_int) -> io::Result<bool> {
    match done(code) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(e) => Err(e),
    }
}

/// Kind of object.
pub(super) trait Kind {
    const NAME: &str;

    /// Destroys an object.
    ///
    /// # Safety
    /// It exists, and nothing uses it any more.
    unsafe fn destroy(object: *mut Self) -> c_int;
}

/// Object of the libraries. Its owner keeps what it is made of in fields below, which are dropped later.
pub(super) struct Owned<T: Kind>(NonNull<T>);

// SAFETY: both libraries let any thread use an object, and several at a time. What changes in one changes through `&mut`.
unsafe impl<T: Kind> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Kind> Sync for Owned<T> {}

impl<T: Kind> Owned<T> {
    /// Takes the result of a call that makes an object, or returns null with `errno`.
    ///
    /// # Safety
    /// The object is new, and nobody else's.
    pub(super) unsafe fn new(object: *mut T) -> io::Result<Self> {
        NonNull::new(object).map(Self).ok_or_else(io::Error::last_os_error)
    }

    /// Returns the object, which lives as long as `self`.
    pub(super) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T: Kind> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: nobody else has it, and what is made of it keeps its owner.
        if let Err(e) = done(unsafe { T::destroy(self.as_ptr()) }) {
            tracing::warn!("destroying {} failed: {e}", T::NAME);
        }
    }
}

/// Destroys an event channel.
///
/// # Safety
/// As [`Kind::destroy`].
unsafe fn destroy_event_channel(channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { rdma_destroy_event_channel(channel) };
    0
}

macro_rules! kinds {
    ($($kind:ty, $destroy:ident, $name:literal;)*) => {$(
        impl Kind for $kind {
            const NAME: &str = $name;

            unsafe fn destroy(object: *mut Self) -> c_int {
                // SAFETY: the caller's promise.
                unsafe { $destroy(object) }
            }
        }
    )*};
}

kinds! {
    ibv_context, ibv_close_device, "an open device";
    ibv_pd, ibv_dealloc_pd, "a protection domain";
    ibv_mw, ibv_dealloc_mw, "a memory window";
    ibv_comp_channel, ibv_destroy_comp_channel, "a completion channel";
    ibv_cq, ibv_destroy_cq, "a completion queue";
    ibv_qp, ibv_destroy_qp, "a queue pair";
    rdma_event_channel, destroy_event_channel, "an event channel";
    rdma_cm_id, rdma_destroy_id, "a connection";
}
