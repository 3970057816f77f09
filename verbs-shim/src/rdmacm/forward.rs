//! Forwards calls of librdmacm.so.1 in ferroce's directory to the system's librdmacm, which is loaded at the first of them.

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

use libc::c_int;
use roce::environment;

use super::event_channel;
use crate::{
    config, rebind,
    ret::{self, Errno, Result},
    symbols,
};

include!(concat!(env!("OUT_DIR"), "/system.rs"));

const LIBRARY: &str = "librdmacm.so.1";
/// Paths of the libraries in the dynamic linker's search path, between zeroes (ldconfig(8)).
const CACHE: &str = "/etc/ld.so.cache";
/// Directories that the dynamic linker searches as well.
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

/// Without a librdmacm of the system.
const MISSING: Errno = Errno::NOSYS;

/// The library and its functions, looked up at their first call. No lock: threads that race find the same address, and a fork
/// interrupts no update.
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static FOUND: [AtomicPtr<c_void>; SYSTEM.len()] = [const { AtomicPtr::new(ptr::null_mut()) }; SYSTEM.len()];

/// Any function of librdmacm. All take at most six integers or pointers; the calling conventions of 64-bit machines allow
/// passing more than a function takes. A thread may be cancelled in it, which unwinds.
type Function = unsafe extern "C-unwind" fn(usize, usize, usize, usize, usize, usize) -> usize;

/// Function number `N` of [`SYSTEM`]; ENOSYS without a librdmacm, as its man pages have no such case, or EMFILE without a
/// descriptor to load it with. Success leaves errno as it was.
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
    let function = match ret::run(|| function(N)) {
        Ok(function) => function,
        Err(e) => {
            e.set();
            return if fails_with_zero(N) { 0 } else { usize::MAX };
        }
    };
    let before = Errno::last();
    // SAFETY: the function of this name, with what the program passed to it.
    let result = unsafe {
        let function = std::mem::transmute::<*mut c_void, Function>(function);
        function(a, b, c, d, e, f)
    };
    let failed = match fails_with_zero(N) {
        true => result == 0,
        // An int or a long; error codes of rdma_getaddrinfo are negative, too.
        false => (result as c_int) < 0,
    };
    if !failed {
        before.set();
    }
    result
}

fn fails_with_zero(number: usize) -> bool {
    SYSTEM[number].to_str().is_ok_and(|name| ZERO.contains(&name))
}

fn function(number: usize) -> Result<*mut c_void> {
    let known = FOUND[number].load(Ordering::Relaxed);
    if !known.is_null() {
        return Ok(known);
    }
    let library = library()?;
    // SAFETY: a handle that is never closed, and a C string.
    let found = unsafe { libc::dlsym(library, SYSTEM[number].as_ptr()) };
    if found.is_null() {
        config::complain(format_args!(
            "the system's {LIBRARY} has no function {}",
            SYSTEM[number].to_string_lossy()
        ));
        return Err(MISSING);
    }
    FOUND[number].store(found, Ordering::Relaxed);
    Ok(found)
}

/// Returns the system's librdmacm.
///
/// # Errors
/// ENOSYS and a message on stderr where there is none; EMFILE when the process can have no more descriptors.
fn library() -> Result<*mut c_void> {
    let known = HANDLE.load(Ordering::Acquire);
    if !known.is_null() {
        return Ok(known);
    }
    let (mut handle, mut reason) = (ptr::null_mut(), String::new());
    for path in places() {
        match open(&path) {
            Ok(opened) => {
                handle = opened;
                break;
            }
            Err((e @ Errno(libc::EMFILE | libc::ENFILE), _)) => return Err(e),
            Err((_, text)) => reason = format!(": {text}"),
        }
    }
    if handle.is_null() {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            config::complain(format_args!(
                "RDMA_CM needs {LIBRARY} of this system, which is not found (Debian: librdmacm1, Fedora: librdmacm){reason}"
            ));
        });
        return Err(MISSING);
    }
    // Its writes to event channels become commands.
    rebind::run();
    rebind::librdmacm(handle, event_channel::CALLS);
    HANDLE.store(handle, Ordering::Release);
    Ok(handle)
}

/// Opens a library by its path: by name, dlopen would return the stub with the same SONAME.
fn open(path: &Path) -> std::result::Result<*mut c_void, (Errno, String)> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| (MISSING, e.to_string()))?;
    // SAFETY: a C string.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // dlopen gives no error number.
    let errno = fs::File::open(path).map_or_else(Errno::from, |_| MISSING);
    // SAFETY: the text lives until the next call of this thread.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    Err((errno, text.unwrap_or_else(|| path.display().to_string())))
}

/// Paths at which it may be. A directory with libferroce_verbs.so has the stub.
fn places() -> Vec<PathBuf> {
    let asked = environment::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let asked = std::env::split_paths(&asked).filter(|dir| dir.is_absolute());
    let cache = fs::read(CACHE).unwrap_or_default();
    let all = asked
        .map(|dir| dir.join(LIBRARY))
        .chain(cached(&cache))
        .chain(FOLDERS.map(|dir| Path::new(dir).join(LIBRARY)));
    all.filter(|path| path.is_file() && !path.with_file_name(symbols::REAL).exists())
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
