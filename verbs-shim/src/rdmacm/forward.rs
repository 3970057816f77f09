//! What librdmacm.so.1 of our directory has no function of its own for: the system's librdmacm, which is loaded when the first
//! of them is called.

use std::{
    ffi::{CString, OsStr, c_void},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    ptr,
    sync::{
        Once,
        atomic::{AtomicPtr, Ordering},
    },
};

use roce::environment;

use crate::{config, rebind, ret::Errno, table::SYSTEM};

const LIBRARY: &str = "librdmacm.so.1";
/// Has the path of every library that the dynamic linker finds by itself, between zeroes (ldconfig(8)).
const CACHE: &str = "/etc/ld.so.cache";
/// Where it looks beside them, on the systems that there are.
const FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];
/// Functions that return a pointer or a port, 0 when they fail; all others return -1, or nothing.
const ZERO: [&str; 4] = [
    "rdma_event_str",
    "rdma_get_devices",
    "rdma_get_dst_port",
    "rdma_get_src_port",
];

/// The library, and its functions as they are asked for. No lock: whoever comes at the same time finds the same, and a fork
/// in between leaves nothing half done.
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static FOUND: [AtomicPtr<c_void>; SYSTEM.len()] = [const { AtomicPtr::new(ptr::null_mut()) }; SYSTEM.len()];

/// Any function of librdmacm. All have integers and pointers alone, six at most; the calling conventions of 64-bit machines
/// don't mind how many are passed. A thread may be cancelled in it, which unwinds.
type Function = unsafe extern "C-unwind" fn(usize, usize, usize, usize, usize, usize) -> usize;

/// Function number `N` of [`SYSTEM`]; ENOSYS without a librdmacm, as its man pages have no such case.
///
/// # Safety
/// As that function.
pub(crate) unsafe extern "C-unwind" fn call<const N: usize>(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> usize {
    let function = function(N);
    if function.is_null() {
        Errno(libc::ENOSYS).set();
        let zero = SYSTEM[N].to_str().is_ok_and(|name| ZERO.contains(&name));
        return if zero { 0 } else { usize::MAX };
    }
    // SAFETY: the function of this name, with what the program passed to it.
    unsafe {
        let function = std::mem::transmute::<*mut c_void, Function>(function);
        function(a, b, c, d, e, f)
    }
}

fn function(number: usize) -> *mut c_void {
    let known = FOUND[number].load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    let library = library();
    if library.is_null() {
        return library;
    }
    // SAFETY: a handle that is never closed, and a C string.
    let found = unsafe { libc::dlsym(library, SYSTEM[number].as_ptr()) };
    if found.is_null() {
        config::complain(format_args!(
            "the system's {LIBRARY} has no function {}",
            SYSTEM[number].to_string_lossy()
        ));
    }
    FOUND[number].store(found, Ordering::Relaxed);
    found
}

/// The system's librdmacm, or null when there is none, of which the user is told.
fn library() -> *mut c_void {
    let known = HANDLE.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let (mut handle, mut reason) = (ptr::null_mut(), String::new());
    for path in places() {
        match open(&path) {
            Ok(opened) => {
                handle = opened;
                break;
            }
            Err(text) => reason = format!(": {text}"),
        }
    }
    if handle.is_null() {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            config::complain(format_args!(
                "RDMA_CM needs {LIBRARY} of this system, which is not found (Debian: librdmacm1, Fedora: librdmacm){reason}"
            ));
        });
        return handle;
    }
    // What it writes to event channels comes to us.
    rebind::run();
    rebind::librdmacm(handle);
    HANDLE.store(handle, Ordering::Release);
    handle
}

/// Opens a library by its path, so that ours, of the same SONAME, is not taken for it.
fn open(path: &Path) -> Result<*mut c_void, String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: a C string.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: the text lives until the next call of this thread.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    Err(text.unwrap_or_else(|| path.display().to_string()))
}

/// Where it may be; beside a stub of ours is the library itself.
fn places() -> Vec<PathBuf> {
    let asked = environment::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let asked = std::env::split_paths(&asked).filter(|dir| dir.is_absolute());
    let cache = fs::read(CACHE).unwrap_or_default();
    let all = asked
        .map(|dir| dir.join(LIBRARY))
        .chain(cached(&cache))
        .chain(FOLDERS.map(|dir| Path::new(dir).join(LIBRARY)));
    all.filter(|path| path.is_file() && !path.with_file_name(rebind::REAL).exists())
        .collect()
}

/// The paths of it that the dynamic linker's cache has.
fn cached(cache: &[u8]) -> Vec<PathBuf> {
    let texts = cache.split(|b| *b == 0).map(|t| Path::new(OsStr::from_bytes(t)));
    texts
        .filter(|path| path.is_absolute() && path.file_name() == Some(LIBRARY.as_ref()))
        .map(Path::to_path_buf)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_searched_for_whole_paths() {
        let cache =
            b"glibc-ld.so.cache1.1\0\x01\x02\0librdmacm.so.1\0/usr/lib64/librdmacm.so.1\0/opt/xlibrdmacm.so.1\0";
        assert_eq!(cached(cache), [PathBuf::from("/usr/lib64/librdmacm.so.1")]);
        assert!(cached(b"").is_empty());
    }

    #[test]
    fn functions_that_fail_with_zero_are_among_those_of_the_system() {
        for name in ZERO {
            assert!(SYSTEM.iter().any(|s| s.to_bytes() == name.as_bytes()), "{name}");
        }
    }
}
