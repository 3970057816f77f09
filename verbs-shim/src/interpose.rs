//! File calls of libc, in front of the real ones: paths below /sys/class/infiniband lead to the private directory that
//! [`crate::sysfs`] makes, and those to files of rtrs and rnbd to the tree of [`crate::attributes`]. Everything else goes straight
//! through.

use std::{ffi::CStr, ptr};

use libc::{DIR, FILE, c_char, c_int, c_void, mode_t, size_t, ssize_t};

use crate::{
    attributes,
    ret::{self, Errno},
    symbols::{Call, Next, calls},
    sysfs,
};

/// Returns the replacement of a path.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn target(path: *const c_char, lead: fn(&CStr) -> Option<sysfs::Target>) -> Option<sysfs::Target> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    lead(unsafe { CStr::from_ptr(path) })
}

/// Return value of a function.
trait Returned: Sized {
    /// As the program is to have it.
    ///
    /// # Safety
    /// It is what the function has given for this target.
    unsafe fn under_sys(self, _target: &sysfs::Target) -> Self {
        self
    }
}

impl Returned for c_int {}
impl Returned for ssize_t {}
impl Returned for *mut FILE {}
impl Returned for *mut DIR {}

/// The path where the target is.
impl Returned for *mut c_char {
    unsafe fn under_sys(self, target: &sysfs::Target) -> Self {
        if let Some(root) = target.tree {
            // SAFETY: null, or a string in the program's room for a path or in memory that was made for it.
            unsafe { attributes::name_under_sys(self, root) };
        }
        self
    }
}

/// Functions with a path among their arguments: the real one is called with where it leads, by
/// [`sysfs::resolve`], or [`sysfs::resolve_content`] for those that open files.
macro_rules! forward {
    ($($name:ident($($before:ident: $bty:ty,)* ; $lead:ident $(, $after:ident: $aty:ty)*) -> $ret:ty, $fail:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($before: $bty,)* path: *const c_char $(, $after: $aty)*) -> $ret {
            type Real = unsafe extern "C-unwind" fn($($bty,)* *const c_char $(, $aty)*) -> $ret;
            // SAFETY: libc's function of this name has this signature, or there is none; the name ends with the zero that is put
            // there.
            static NEXT: Next<Real> = unsafe {
                Next::new(CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()))
            };
            let Some(real) = NEXT.get() else {
                Errno::NOSYS.set();
                return $fail;
            };
            // SAFETY: the arguments are the program's. A thread is not cancelled while there is a path to drop.
            let elsewhere = ret::guard(|| unsafe {
                let other = target(path, sysfs::$lead)?;
                let done = Returned::under_sys(real($($before,)* other.path.as_ptr() $(, $after)*), &other);
                Some((done, Errno::last()))
            });
            if let Some(Some((done, errno))) = elsewhere {
                errno.set();
                return done;
            }
            // SAFETY: likewise. This frame has nothing to drop if the thread is cancelled.
            unsafe { real($($before,)* path $(, $after)*) }
        }
    )*

    /// All of them.
    pub(crate) static CALLS: &[Call] = calls![$($name),*];
    };
}

// The mode of `open` is a variable argument in C; passing one that is not there does no harm with the C calling
// conventions of Linux.
forward! {
    open(; resolve_content, flags: c_int, mode: mode_t) -> c_int, -1;
    open64(; resolve_content, flags: c_int, mode: mode_t) -> c_int, -1;
    openat(dir: c_int, ; resolve_content, flags: c_int, mode: mode_t) -> c_int, -1;
    openat64(dir: c_int, ; resolve_content, flags: c_int, mode: mode_t) -> c_int, -1;
    fopen(; resolve_content, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    fopen64(; resolve_content, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    __open_2(; resolve_content, flags: c_int) -> c_int, -1;
    __open64_2(; resolve_content, flags: c_int) -> c_int, -1;
    __openat_2(dir: c_int, ; resolve_content, flags: c_int) -> c_int, -1;
    __openat64_2(dir: c_int, ; resolve_content, flags: c_int) -> c_int, -1;
    opendir(; resolve) -> *mut DIR, ptr::null_mut();
    stat(; resolve, out: *mut c_void) -> c_int, -1;
    stat64(; resolve, out: *mut c_void) -> c_int, -1;
    lstat(; resolve, out: *mut c_void) -> c_int, -1;
    lstat64(; resolve, out: *mut c_void) -> c_int, -1;
    fstatat(dir: c_int, ; resolve, out: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64(dir: c_int, ; resolve, out: *mut c_void, flags: c_int) -> c_int, -1;
    __xstat(version: c_int, ; resolve, out: *mut c_void) -> c_int, -1;
    __xstat64(version: c_int, ; resolve, out: *mut c_void) -> c_int, -1;
    __lxstat(version: c_int, ; resolve, out: *mut c_void) -> c_int, -1;
    statx(dir: c_int, ; resolve, flags: c_int, mask: u32, out: *mut c_void) -> c_int, -1;
    access(; resolve, mode: c_int) -> c_int, -1;
    faccessat(dir: c_int, ; resolve, mode: c_int, flags: c_int) -> c_int, -1;
    readlink(; resolve, out: *mut c_char, size: size_t) -> ssize_t, -1;
    realpath(; resolve, out: *mut c_char) -> *mut c_char, ptr::null_mut();
    __realpath_chk(; resolve, out: *mut c_char, room: size_t) -> *mut c_char, ptr::null_mut();
    canonicalize_file_name(; resolve) -> *mut c_char, ptr::null_mut();
    __readlink_chk(; resolve, out: *mut c_char, size: size_t, room: size_t) -> ssize_t, -1;
    readlinkat(dir: c_int, ; resolve, out: *mut c_char, size: size_t) -> ssize_t, -1;
    __readlinkat_chk(dir: c_int, ; resolve, out: *mut c_char, size: size_t, room: size_t) -> ssize_t, -1;
    scandir(; resolve, list: *mut c_void, filter: *mut c_void, order: *mut c_void) -> c_int, -1;
    scandir64(; resolve, list: *mut c_void, filter: *mut c_void, order: *mut c_void) -> c_int, -1;
    __lxstat64(version: c_int, ; resolve, out: *mut c_void) -> c_int, -1;
    __fxstatat(version: c_int, dir: c_int, ; resolve, out: *mut c_void, flags: c_int) -> c_int, -1;
    __fxstatat64(version: c_int, dir: c_int, ; resolve, out: *mut c_void, flags: c_int) -> c_int, -1;
}
