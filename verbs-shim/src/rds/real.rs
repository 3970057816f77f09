//! The C library's socket calls, or those of another library in front of it.
//!
//! They are cancellation points: a thread may be cancelled in them, so frames above them have nothing to drop.

use libc::{c_int, c_uint, c_ulong, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec};

use crate::{errno::Errno, symbols::Next};

macro_rules! real {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(
            /// The function of this name.
            ///
            /// # Safety
            /// As the C library's.
            pub(crate) unsafe fn $name($($arg: $ty),*) -> $ret {
                match next::$name.get() {
                    // SAFETY: the caller's promise.
                    Some(real) => unsafe { real($($arg),*) },
                    None => {
                        Errno::NOSYS.set();
                        -1
                    }
                }
            }
        )*

        #[expect(non_upper_case_globals, reason = "named after the functions")]
        mod next {
            use super::*;
            use std::ffi::CStr;
            $(
                // SAFETY: libc's function of this name has this signature, or there is none; the name ends with the zero that is put
                // there.
                pub(super) static $name: Next<unsafe extern "C-unwind" fn($($ty),*) -> $ret> = unsafe {
                    Next::new(CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()))
                };
            )*
        }

        /// Looked up before the program begins: it may call them in a handler of signals first, where nothing can be looked up.
        #[used]
        #[unsafe(link_section = ".init_array")]
        static FIND_NEXT: extern "C" fn() = {
            extern "C" fn find() {
                $(next::$name.get();)*
            }
            find
        };
    };
}

real! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    socketpair(domain: c_int, kind: c_int, protocol: c_int, out: *mut c_int) -> c_int;
    bind(fd: c_int, name: *const sockaddr, len: socklen_t) -> c_int;
    connect(fd: c_int, name: *const sockaddr, len: socklen_t) -> c_int;
    getsockname(fd: c_int, name: *mut sockaddr, len: *mut socklen_t) -> c_int;
    getpeername(fd: c_int, name: *mut sockaddr, len: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, option: c_int, value: *const c_void, len: socklen_t) -> c_int;
    getsockopt(fd: c_int, level: c_int, option: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int;
    fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int;
    fcntl64(fd: c_int, command: c_int, arg: *mut c_void) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    accept(fd: c_int, name: *mut sockaddr, len: *mut socklen_t) -> c_int;
    accept4(fd: c_int, name: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    send(fd: c_int, data: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, data: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    recv(fd: c_int, data: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, data: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, time: *mut timespec) -> c_int;
    read(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t;
    readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    __read_chk(fd: c_int, data: *mut c_void, len: size_t, room: size_t) -> ssize_t;
    __recv_chk(fd: c_int, data: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t;
    __recvfrom_chk(fd: c_int, data: *mut c_void, len: size_t, room: size_t, flags: c_int, from: *mut sockaddr,
        from_len: *mut socklen_t) -> ssize_t;
}
