//! Functions of the C library that this one stands in front of, and its own place among the loaded objects.

use std::{
    ffi::{CStr, OsStr, c_int, c_void},
    marker::PhantomData,
    mem,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicPtr, Ordering},
    },
};

use libc::{Elf64_Phdr, dl_phdr_info};

/// SONAME of this library.
pub(crate) const REAL: &str = "libferroce_verbs.so";

unsafe extern "C-unwind" {
    /// The C library's own `write`, under a name that no library interposes. A thread may be cancelled in it, which unwinds.
    #[link_name = "__write"]
    pub(crate) fn libc_write(fd: c_int, buf: *const c_void, len: usize) -> isize;
}

/// A function of this library in front of one of the C library, by its name.
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) ours: *const c_void,
}

// SAFETY: an address of a function, which never changes.
unsafe impl Sync for Call {}

/// Lists calls of this library by their names.
macro_rules! calls {
    ($($name:ident),*) => {
        &[$($crate::symbols::Call { name: stringify!($name), ours: $name as *const std::ffi::c_void }),*]
    };
}
pub(crate) use calls;

/// The next definition of a function of type `F`, looked up once.
pub(crate) struct Next<F> {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
    function: PhantomData<F>,
}

impl<F: Copy> Next<F> {
    /// # Safety
    /// `F` is a pointer to functions of this name.
    pub(crate) const unsafe fn new(name: &'static CStr) -> Self {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        Self {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
            function: PhantomData,
        }
    }

    /// Returns the function, if there is one.
    pub(crate) fn get(&self) -> Option<F> {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            // SAFETY: C strings.
            found = unsafe {
                let first = libc::dlsym(libc::RTLD_DEFAULT, self.name.as_ptr());
                // All others are in front of a library that was loaded late, and none may be behind it.
                match is_late() && !is_ours(first) {
                    true => first,
                    false => libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()),
                }
            };
            self.found.store(found, Ordering::Relaxed);
        }
        // SAFETY: a function of this name, which has this type.
        (!found.is_null()).then(|| unsafe { mem::transmute_copy(&found) })
    }
}

/// Returns an address inside of this library.
pub(crate) fn inside() -> *const c_void {
    object_of as *const c_void
}

/// Looks up the loaded object that has an address.
fn info_of(address: *const c_void) -> Option<libc::Dl_info> {
    // SAFETY: plain data, which the call fills; any address may be asked for.
    unsafe {
        let mut info: libc::Dl_info = mem::zeroed();
        (libc::dladdr(address, &raw mut info) != 0).then_some(info)
    }
}

/// Returns the beginning of the object that has an address, or null.
pub(crate) fn object_of(address: *const c_void) -> *mut c_void {
    info_of(address).map_or(ptr::null_mut(), |info| info.dli_fbase)
}

/// Whether an address is in this library.
fn is_ours(address: *const c_void) -> bool {
    static BASE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut own = BASE.load(Ordering::Relaxed);
    if own.is_null() {
        own = object_of(inside());
        BASE.store(own, Ordering::Relaxed);
    }
    object_of(address) == own
}

/// Returns the file of this library; `None` when it is part of a program, as in its tests.
pub(crate) fn own_path() -> Option<PathBuf> {
    let name = info_of(inside())?.dli_fname;
    // SAFETY: null, or a C string that lives as long as the library.
    let path = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })?;
    let path = PathBuf::from(OsStr::from_bytes(path.to_bytes())).canonicalize().ok()?;
    (path.file_name() == Some(REAL.as_ref())).then_some(path)
}

/// Whether our calls are behind libc's in the dynamic linker's search order. Nothing changes that.
pub(crate) fn is_late() -> bool {
    static LATE: OnceLock<bool> = OnceLock::new();
    *LATE.get_or_init(|| {
        // SAFETY: a C string.
        let first = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"write".as_ptr()) };
        !is_ours(first) && is_behind_libc()
    })
}

/// Whether the dynamic linker has loaded this library after libc; another library may be in front of both.
fn is_behind_libc() -> bool {
    let mut behind = false;
    each_object(|info| {
        // SAFETY: a loaded object.
        let segments = unsafe { segments(info) };
        let has = |address: *const c_void| {
            let mut loaded = segments.clone().filter(|s| s.kind == libc::PT_LOAD);
            loaded.any(|s| (s.at..s.at + s.len).contains(&(address as usize)))
        };
        behind = has(libc_write as *const c_void);
        behind || has(inside())
    });
    behind
}

/// Visits the loaded objects in the order of loading, until `visit` returns true. The dynamic linker keeps each from being unloaded
/// during the call, and holds a lock.
pub(crate) fn each_object<F: FnMut(&dl_phdr_info) -> bool>(mut visit: F) {
    unsafe extern "C" fn call<F: FnMut(&dl_phdr_info) -> bool>(
        info: *mut dl_phdr_info,
        _size: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: what the dynamic linker passes, and what is passed below.
        c_int::from(unsafe { (*visit.cast::<F>())(&*info) })
    }
    // SAFETY: the function gets what it expects.
    unsafe { libc::dl_iterate_phdr(Some(call::<F>), (&raw mut visit).cast()) };
}

/// A segment of a loaded object (`Elf64_Phdr`).
pub(crate) struct Segment {
    pub(crate) kind: u32,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// Returns the segments of an object.
///
/// # Safety
/// `info` is the dynamic linker's, of an object that is loaded.
pub(crate) unsafe fn segments(info: &dl_phdr_info) -> impl Iterator<Item = Segment> + Clone {
    let base = info.dlpi_addr as usize;
    // SAFETY: the caller's promise.
    let headers: &[Elf64_Phdr] = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    headers.iter().map(move |p| Segment {
        kind: p.p_type,
        at: base.wrapping_add(p.p_vaddr as usize),
        len: p.p_memsz as usize,
    })
}
