//! Files of `rtrs` and `rnbd` under /sys, which `ferroce serve`, `map` and `daemon` have in the tree of `--sysfs`: paths to them lead
//! there, and what comes back has its name under /sys again.

use std::{
    ffi::{CStr, CString, OsStr},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use libc::c_char;
use roce::environment;

use crate::config;

/// Paths that are answered from the tree: these, and everything below them.
const OURS: [&str; 6] = [
    "/sys/class/rnbd-client",
    "/sys/class/rnbd-server",
    "/sys/class/rtrs-client",
    "/sys/class/rtrs-server",
    "/sys/module/rnbd_server",
    "/sys/module/rtrs_server",
];
/// Block devices: those that the tree has.
const BLOCK: &str = "/sys/block/";
const SYS: &str = "/sys";

/// Mount point of the tree.
static ROOT: OnceLock<PathBuf> = OnceLock::new();

/// The tree, if there is one.
fn root() -> Option<&'static Path> {
    if let Some(root) = ROOT.get() {
        return Some(root);
    }
    let named = environment::var_os(config::SYS).map(PathBuf::from)?;
    // One that is not mounted yet may be the next time.
    let there = named.is_absolute() && named.join("class/rtrs-client").is_dir();
    there.then(|| ROOT.get_or_init(|| named).as_path())
}

/// Whether a path is a directory or below it.
pub(crate) fn is_below(path: &[u8], dir: &str) -> bool {
    let rest = path.strip_prefix(dir.as_bytes());
    rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Reports once that there is no tree.
fn complain() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        let text = "no attributes of ferroce are mounted: start `ferroce serve`, `map` or `daemon` with --sysfs DIR, and name another \
                    DIR than /run/ferroce-daemon/sys with FERROCE_SYS";
        config::complain(format_args!("{text}"));
    }
}

/// Returns the replacement of a path, and the tree that it is in, if it is one of these.
pub(crate) fn resolve(path: &CStr) -> Option<(CString, &'static Path)> {
    let bytes = path.to_bytes();
    if OURS.iter().any(|dir| is_below(bytes, dir)) {
        let root = root();
        if root.is_none() {
            complain();
        }
        return in_tree(root?, bytes);
    }
    // Cheap for all other paths: they are what a program opens.
    let device = bytes.strip_prefix(BLOCK.as_bytes())?.split(|b| *b == b'/').next()?;
    let root = root().filter(|_| !device.is_empty() && ![&b"."[..], b".."].contains(&device))?;
    let has = root.join("block").join(OsStr::from_bytes(device)).is_dir();
    has.then(|| in_tree(root, bytes)).flatten()
}

fn in_tree(root: &'static Path, path: &[u8]) -> Option<(CString, &'static Path)> {
    let rest = path.strip_prefix(SYS.as_bytes())?;
    let whole = CString::new([root.as_os_str().as_bytes(), rest].concat()).ok()?;
    Some((whole, root))
}

/// Gives a path in the tree its name under /sys.
///
/// # Safety
/// `path` is null or a C string that may be written to.
pub(crate) unsafe fn name_under_sys(path: *mut c_char, root: &Path) {
    let root = root.as_os_str().as_bytes();
    if path.is_null() || root.len() < SYS.len() {
        return;
    }
    // SAFETY: the caller's promise.
    let whole = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let Some(rest) = whole.strip_prefix(root).filter(|rest| [0, b'/'].contains(&rest[0])) else {
        return;
    };
    let name = [SYS.as_bytes(), rest].concat();
    // SAFETY: it is no longer than what was there, with the zero at its end.
    unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().cast(), path, name.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_names_are_below_a_directory() {
        assert!(is_below(b"/sys/class/rtrs-client", OURS[2]) && is_below(b"/sys/class/rtrs-client/x", OURS[2]));
        assert!(!is_below(b"/sys/class/rtrs-clients", OURS[2]) && !is_below(b"/sys/class", OURS[2]));
    }

    #[test]
    fn what_comes_back_has_its_name_under_sys() {
        let named = |path: &str, root: &str| {
            let mut bytes = [path.as_bytes(), &[0]].concat();
            // SAFETY: a C string of ours.
            unsafe { name_under_sys(bytes.as_mut_ptr().cast(), Path::new(root)) };
            CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(
            named("/run/ferroce/sys/block/rnbd0", "/run/ferroce/sys"),
            "/sys/block/rnbd0"
        );
        assert_eq!(named("/run/ferroce/sys", "/run/ferroce/sys"), "/sys");
        for other in ["/run/ferroce/system", "/run", ""] {
            assert_eq!(named(other, "/run/ferroce/sys"), other);
        }
        assert_eq!(named("/s/block", "/s"), "/s/block", "there is no room for a longer one");
    }
}
