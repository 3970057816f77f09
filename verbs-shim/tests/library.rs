//! The directory `lib/ferroce`, as programs use it that find libibverbs.so.1 and librdmacm.so.1 by their names: the build's own
//! files, loaded by the dynamic linker.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
    process::Command,
};

#[path = "../build/symbols.rs"]
mod symbols;

use symbols::{Answer, Symbol};

const REAL: &str = "libferroce_verbs.so";
const VERBS: &str = "libibverbs.so.1";
const RDMACM: &str = "librdmacm.so.1";
/// Set for the process that `one_instance_however_it_is_loaded` starts.
const CHILD: &str = "FERROCE_TEST_CHILD";

fn lists() -> (Vec<Symbol>, Vec<Symbol>) {
    let fail = |line: String| panic!("{line}");
    let mut verbs = symbols::public(include_str!("../symbols/libibverbs.txt"), Answer::Own).unwrap_or_else(fail);
    verbs.extend(symbols::private(include_str!("../symbols/private.txt")).unwrap_or_else(fail));
    let rdmacm = symbols::rdmacm(include_str!("../symbols/librdmacm.txt")).unwrap_or_else(fail);
    (verbs, rdmacm)
}

/// The library that cargo has linked for this test, and the folder of the profile.
fn built() -> (PathBuf, PathBuf) {
    let own = std::env::current_exe().unwrap();
    let deps = own.parent().unwrap();
    (deps.join(REAL), deps.parent().unwrap().to_path_buf())
}

/// The directory as `cargo xtask install` makes it.
fn install(to: &Path) {
    let (real, profile) = built();
    symlink(real, to.join(REAL)).unwrap();
    for name in [VERBS, RDMACM] {
        fs::copy(profile.join("lib/ferroce").join(name), to.join(name)).unwrap();
    }
    // Cargo's LD_LIBRARY_PATH leads to what was last built outside of tests, before the directory's own.
    load(&to.join(REAL));
}

fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn load(path: &Path) -> *mut c_void {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: C strings.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!handle.is_null(), "{:?}", CStr::from_ptr(libc::dlerror()));
        handle
    }
}

/// A symbol of a version, or the default one.
fn find(handle: *mut c_void, name: &str, version: Option<&str>) -> *mut c_void {
    // SAFETY: a handle and C strings.
    unsafe {
        match version {
            None => libc::dlsym(handle, c(name).as_ptr()),
            Some(version) => libc::dlvsym(handle, c(name).as_ptr(), c(version).as_ptr()),
        }
    }
}

/// The file that has an address.
fn file_of(address: *mut c_void) -> PathBuf {
    // SAFETY: plain data, which the call fills.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        assert_ne!(libc::dladdr(address, &raw mut info), 0);
        std::ffi::OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes()).into()
    }
}

type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
type Name = unsafe extern "C" fn(*mut c_void) -> *const c_char;

/// Returns the devices of a list with their names; they are never freed.
fn devices(handle: *mut c_void) -> Vec<(usize, String)> {
    let (list, name) = (
        find(handle, "ibv_get_device_list", Some("IBVERBS_1.1")),
        find(handle, "ibv_get_device_name", None),
    );
    // SAFETY: the functions of these names; the list ends with null.
    unsafe {
        let list = std::mem::transmute::<*mut c_void, List>(list);
        let name = std::mem::transmute::<*mut c_void, Name>(name);
        let mut count = 0;
        let all = list(&raw mut count);
        assert!(!all.is_null());
        let all = std::slice::from_raw_parts(all, count as usize);
        let named = |device: &*mut c_void| CStr::from_ptr(name(*device)).to_string_lossy().into_owned();
        all.iter().map(|device| (*device as usize, named(device))).collect()
    }
}

#[test]
fn every_symbol_is_there_by_its_version() {
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let (verbs, rdmacm) = lists();
    assert!(symbols::versions(&verbs).contains(&"IBVERBS_PRIVATE_34"));
    assert_eq!(symbols::versions(&rdmacm).len(), 6);
    for (file, symbols) in [(VERBS, verbs), (RDMACM, rdmacm)] {
        let handle = load(&dir.path().join(file));
        let ours = dir.path().join(file);
        for symbol in &symbols {
            let found = find(handle, &symbol.name, Some(&symbol.version));
            assert!(!found.is_null(), "{}", symbol.versioned());
            assert_eq!(file_of(found), ours, "{}", symbol.versioned());
            if symbol.default {
                assert_eq!(find(handle, &symbol.name, None), found, "{}", symbol.versioned());
            }
        }
        let wrong = find(handle, &symbols[0].name, Some("IBVERBS_9.9"));
        assert!(wrong.is_null(), "a version that is not there");
    }
}

#[test]
fn a_library_that_was_loaded_late_has_devices_and_their_files() {
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let devices = devices(load(&dir.path().join(VERBS)));
    assert!(devices.iter().any(|(_, name)| name == "ferroce0"), "{devices:?}");
    // Of the process itself: neither through the library, nor through one that came after it.
    let node = fs::read_to_string("/sys/class/infiniband/ferroce0/node_type");
    assert_eq!(node.unwrap(), "1: CA\n");
    assert!(fs::metadata("/sys/class/infiniband/ferroce0/ports/1/gids/0").is_ok());
    assert!(
        fs::read_to_string("/proc/self/comm").is_ok(),
        "other files are what they are"
    );
}

#[test]
fn programs_of_the_old_interface_find_no_device() {
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let handle = load(&dir.path().join(VERBS));
    let list = find(handle, "ibv_get_device_list", Some("IBVERBS_1.0"));
    assert_ne!(list, find(handle, "ibv_get_device_list", Some("IBVERBS_1.1")));
    // SAFETY: the function of this name and version.
    unsafe {
        let list = std::mem::transmute::<*mut c_void, List>(list);
        let mut count = 77;
        assert!(list(&raw mut count).is_null());
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
        assert_eq!(count, 0);
    }
}

/// In a process that has the library preloaded, and the directory to look in.
fn check_one_instance() {
    let preloaded = libc::RTLD_DEFAULT;
    let by_name = load(Path::new(VERBS));
    load(Path::new(RDMACM));
    // SAFETY: a C string.
    let direct = unsafe { libc::dlsym(preloaded, c"ibv_get_device_list".as_ptr()) };
    assert_eq!(file_of(direct).file_name().unwrap(), REAL);
    // SAFETY: the function of this name.
    let first = unsafe {
        let list = std::mem::transmute::<*mut c_void, List>(direct);
        let mut count = 0;
        *list(&raw mut count) as usize
    };
    assert_eq!(devices(by_name)[0].0, first, "the same device by both ways");
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let begins = |line: &&str| line.contains(REAL) && line.split(' ').nth(2) == Some("00000000");
    assert_eq!(maps.lines().filter(begins).count(), 1, "{maps}");
}

#[test]
fn one_instance_however_it_is_loaded() {
    if std::env::var_os(CHILD).is_some() {
        return check_one_instance();
    }
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_instance_however_it_is_loaded", "--nocapture"])
        .env(CHILD, "1")
        // By its real name, and by the one in the directory of the stubs.
        .env("LD_PRELOAD", built().0)
        .env("LD_LIBRARY_PATH", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}{text}", String::from_utf8_lossy(&out.stdout));
    assert!(!text.contains("version"), "the dynamic linker warns: {text}");
}

/// The system's library of the same SONAME may be loaded later, and be taken for ours by the next library that needs it.
#[test]
fn its_names_stay_taken_when_the_last_user_has_closed_it() {
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    for name in [RDMACM, VERBS] {
        let path = dir.path().join(name);
        let handle = load(&path);
        let at = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: a handle that is not used again, and a C string.
        let again = unsafe {
            assert_eq!(libc::dlclose(handle), 0);
            libc::dlopen(at.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD)
        };
        assert!(!again.is_null(), "{name} is gone");
    }
}

/// A library that interposes `write` and `close` for descriptors of its own, as librspreload does; 7000 is one.
const IN_FRONT: &str = "
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
ssize_t write(int fd, const void *buf, size_t len)
{
	return fd == 7000 ? 77 : ((ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, \"write\"))(fd, buf, len);
}
int close(int fd)
{
	return fd == 7000 ? 78 : ((int (*)(int))dlsym(RTLD_NEXT, \"close\"))(fd);
}
";

#[test]
fn others_in_front_of_the_c_library_keep_their_calls() {
    if std::env::var_os(CHILD).is_some() {
        devices(load(Path::new(VERBS)));
        // SAFETY: no memory, and descriptors that nobody has.
        unsafe {
            assert_eq!((libc::write(7000, c"".as_ptr().cast(), 1), libc::close(7000)), (77, 78));
            assert_eq!((libc::write(7001, c"".as_ptr().cast(), 1), libc::close(7001)), (-1, -1));
        }
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    install(dir.path());
    let (source, front) = (dir.path().join("front.c"), dir.path().join("front.so"));
    fs::write(&source, IN_FRONT).unwrap();
    let mut cc = Command::new("cc");
    let built_it = cc
        .args(["-shared", "-fPIC", "-o"])
        .arg(&front)
        .arg(&source)
        .arg("-ldl")
        .status();
    assert!(built_it.unwrap().success());
    let (front, ours) = (front.display(), built().0);
    for preload in [
        format!("{front}"),
        format!("{front}:{}", ours.display()),
        format!("{}:{front}", ours.display()),
    ] {
        let out = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "others_in_front_of_the_c_library_keep_their_calls",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .env("LD_PRELOAD", &preload)
            .env("LD_LIBRARY_PATH", dir.path())
            .output()
            .unwrap();
        let text = [out.stdout, out.stderr].concat();
        assert!(out.status.success(), "{preload}: {}", String::from_utf8_lossy(&text));
    }
}

/// The versions of a library that the dynamic linker will look for, from its section `.gnu.version_r`.
fn needed_versions(file: &Path) -> Vec<String> {
    let bytes = fs::read(file).unwrap();
    let number = |at: usize, len: usize| {
        let mut out = [0; 8];
        out[..len].copy_from_slice(&bytes[at..at + len]);
        u64::from_le_bytes(out) as usize
    };
    // `Elf64_Ehdr`, `Elf64_Shdr`, `Elf64_Verneed`, `Elf64_Vernaux` (elf.h).
    let (sections, size, count) = (number(40, 8), number(58, 2), number(60, 2));
    let section = |index: usize| sections + index * size;
    const SHT_GNU_VERNEED: usize = 0x6fff_fffe;
    let mut out = Vec::new();
    for at in (0..count)
        .map(section)
        .filter(|at| number(at + 4, 4) == SHT_GNU_VERNEED)
    {
        let strings = number(section(number(at + 40, 4)) + 24, 8);
        let mut need = number(at + 24, 8);
        for _ in 0..number(at + 44, 4) {
            let mut aux = need + number(need + 8, 4);
            for _ in 0..number(need + 2, 2) {
                let text = &bytes[strings + number(aux + 8, 4)..];
                out.push(CStr::from_bytes_until_nul(text).unwrap().to_string_lossy().into_owned());
                aux += number(aux + 12, 4);
            }
            need += number(need + 12, 4);
        }
    }
    out
}

/// RHEL 8, Debian 10 and everything later have glibc 2.28.
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
#[test]
fn the_library_loads_with_glibc_2_28() {
    let versions = needed_versions(&built().0);
    let glibc = |v: &String| -> Option<Vec<u32>> {
        let numbers = v.strip_prefix("GLIBC_")?.split('.');
        Some(numbers.map(|n| n.parse().unwrap()).collect())
    };
    let newest = versions.iter().filter_map(glibc).max();
    assert!(newest.is_some(), "{versions:?}");
    assert!(newest <= Some(vec![2, 28]), "needs {versions:?}: see build/glibc.rs");
}
