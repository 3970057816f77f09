//! File calls of libc, in front of the real ones: paths below /sys/class/infiniband lead to the private directory that
//! [`crate::sysfs`] makes. Everything else goes straight through.

use std::{
    ffi::{CStr, CString},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use libc::{DIR, FILE, c_char, c_int, c_void, mode_t, size_t, ssize_t};

use crate::sysfs;

/// The next definition of a function, looked up once.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn get(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Where a path leads.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn target(path: *const c_char) -> Option<CString> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    sysfs::redirect(unsafe { CStr::from_ptr(path) })
}

/// Functions with a path among their arguments: the real one is called with where it leads.
macro_rules! forward {
    ($($name:ident($($before:ident: $bty:ty,)* ; path $(, $after:ident: $aty:ty)*) -> $ret:ty, $fail:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($before: $bty,)* path: *const c_char $(, $after: $aty)*) -> $ret {
            static NEXT: Next = Next::new(unsafe {
                // SAFETY: ends with the zero that is put there.
                CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes())
            });
            let real = NEXT.get();
            if real.is_null() {
                crate::ret::Errno(libc::ENOSYS).set();
                return $fail;
            }
            // SAFETY: libc's function of this name has this signature; the arguments are the program's.
            unsafe {
                type Real = unsafe extern "C" fn($($bty,)* *const c_char $(, $aty)*) -> $ret;
                let real = std::mem::transmute::<*mut c_void, Real>(real);
                match target(path) {
                    None => real($($before,)* path $(, $after)*),
                    Some(other) => real($($before,)* other.as_ptr() $(, $after)*),
                }
            }
        }
    )*};
}

// The mode of `open` is a variable argument in C; passing one that is not there does no harm with the C calling
// conventions of Linux.
forward! {
    open(; path, flags: c_int, mode: mode_t) -> c_int, -1;
    open64(; path, flags: c_int, mode: mode_t) -> c_int, -1;
    openat(dir: c_int, ; path, flags: c_int, mode: mode_t) -> c_int, -1;
    openat64(dir: c_int, ; path, flags: c_int, mode: mode_t) -> c_int, -1;
    fopen(; path, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    fopen64(; path, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    opendir(; path) -> *mut DIR, ptr::null_mut();
    stat(; path, out: *mut c_void) -> c_int, -1;
    stat64(; path, out: *mut c_void) -> c_int, -1;
    lstat(; path, out: *mut c_void) -> c_int, -1;
    lstat64(; path, out: *mut c_void) -> c_int, -1;
    fstatat(dir: c_int, ; path, out: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64(dir: c_int, ; path, out: *mut c_void, flags: c_int) -> c_int, -1;
    __xstat(version: c_int, ; path, out: *mut c_void) -> c_int, -1;
    __xstat64(version: c_int, ; path, out: *mut c_void) -> c_int, -1;
    __lxstat(version: c_int, ; path, out: *mut c_void) -> c_int, -1;
    statx(dir: c_int, ; path, flags: c_int, mask: u32, out: *mut c_void) -> c_int, -1;
    access(; path, mode: c_int) -> c_int, -1;
    faccessat(dir: c_int, ; path, mode: c_int, flags: c_int) -> c_int, -1;
    readlink(; path, out: *mut c_char, size: size_t) -> ssize_t, -1;
    realpath(; path, out: *mut c_char) -> *mut c_char, ptr::null_mut();
}
