//! File calls of libc, in front of the real ones: paths below /sys/class/infiniband lead to the private directory that
//! [`crate::sysfs`] makes, and those to files of rtrs and rnbd to the tree of [`crate::attributes`]. Everything else goes straight
//! through.

use std::{
    ffi::CStr,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use libc::{DIR, FILE, c_char, c_int, c_void, mode_t, size_t, ssize_t};

use crate::{
    attributes, rebind,
    ret::{self, Errno},
    sysfs,
};

/// The next definition of a function, looked up once.
pub(crate) struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Null if there is none.
    pub(crate) fn get(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: C strings.
        let found = unsafe {
            let first = libc::dlsym(libc::RTLD_DEFAULT, self.name.as_ptr());
            // Of a library that was loaded late all others are in front, and none may be behind.
            match rebind::is_late() && !rebind::is_ours(first) {
                true => first,
                false => libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()),
            }
        };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// A function of ours in front of one of libc, by its name.
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) ours: *const c_void,
}

// SAFETY: an address of a function, which never changes.
unsafe impl Sync for Call {}

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
/// [`sysfs::place`], or [`sysfs::content`] for those that open files.
macro_rules! forward {
    ($($name:ident($($before:ident: $bty:ty,)* ; $lead:ident $(, $after:ident: $aty:ty)*) -> $ret:ty, $fail:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($before: $bty,)* path: *const c_char $(, $after: $aty)*) -> $ret {
            type Real = unsafe extern "C-unwind" fn($($bty,)* *const c_char $(, $aty)*) -> $ret;
            static NEXT: Next = Next::new(unsafe {
                // SAFETY: ends with the zero that is put there.
                CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes())
            });
            // SAFETY: libc's function of this name has this signature, or there is none.
            let real = unsafe { std::mem::transmute::<*mut c_void, Option<Real>>(NEXT.get()) };
            let Some(real) = real else {
                Errno(libc::ENOSYS).set();
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
    pub(crate) static CALLS: &[Call] = &[$(Call { name: stringify!($name), ours: $name as *const c_void }),*];
    };
}

// The mode of `open` is a variable argument in C; passing one that is not there does no harm with the C calling
// conventions of Linux.
forward! {
    open(; content, flags: c_int, mode: mode_t) -> c_int, -1;
    open64(; content, flags: c_int, mode: mode_t) -> c_int, -1;
    openat(dir: c_int, ; content, flags: c_int, mode: mode_t) -> c_int, -1;
    openat64(dir: c_int, ; content, flags: c_int, mode: mode_t) -> c_int, -1;
    fopen(; content, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    fopen64(; content, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    __open_2(; content, flags: c_int) -> c_int, -1;
    __open64_2(; content, flags: c_int) -> c_int, -1;
    __openat_2(dir: c_int, ; content, flags: c_int) -> c_int, -1;
    __openat64_2(dir: c_int, ; content, flags: c_int) -> c_int, -1;
    opendir(; place) -> *mut DIR, ptr::null_mut();
    stat(; place, out: *mut c_void) -> c_int, -1;
    stat64(; place, out: *mut c_void) -> c_int, -1;
    lstat(; place, out: *mut c_void) -> c_int, -1;
    lstat64(; place, out: *mut c_void) -> c_int, -1;
    fstatat(dir: c_int, ; place, out: *mut c_void, flags: c_int) -> c_int, -1;
    fstatat64(dir: c_int, ; place, out: *mut c_void, flags: c_int) -> c_int, -1;
    __xstat(version: c_int, ; place, out: *mut c_void) -> c_int, -1;
    __xstat64(version: c_int, ; place, out: *mut c_void) -> c_int, -1;
    __lxstat(version: c_int, ; place, out: *mut c_void) -> c_int, -1;
    statx(dir: c_int, ; place, flags: c_int, mask: u32, out: *mut c_void) -> c_int, -1;
    access(; place, mode: c_int) -> c_int, -1;
    faccessat(dir: c_int, ; place, mode: c_int, flags: c_int) -> c_int, -1;
    readlink(; place, out: *mut c_char, size: size_t) -> ssize_t, -1;
    realpath(; place, out: *mut c_char) -> *mut c_char, ptr::null_mut();
    __realpath_chk(; place, out: *mut c_char, room: size_t) -> *mut c_char, ptr::null_mut();
    canonicalize_file_name(; place) -> *mut c_char, ptr::null_mut();
    __readlink_chk(; place, out: *mut c_char, size: size_t, room: size_t) -> ssize_t, -1;
    readlinkat(dir: c_int, ; place, out: *mut c_char, size: size_t) -> ssize_t, -1;
    __readlinkat_chk(dir: c_int, ; place, out: *mut c_char, size: size_t, room: size_t) -> ssize_t, -1;
    scandir(; place, list: *mut c_void, filter: *mut c_void, order: *mut c_void) -> c_int, -1;
    scandir64(; place, list: *mut c_void, filter: *mut c_void, order: *mut c_void) -> c_int, -1;
    __lxstat64(version: c_int, ; place, out: *mut c_void) -> c_int, -1;
    __fxstatat(version: c_int, dir: c_int, ; place, out: *mut c_void, flags: c_int) -> c_int, -1;
    __fxstatat64(version: c_int, dir: c_int, ; place, out: *mut c_void, flags: c_int) -> c_int, -1;
}
