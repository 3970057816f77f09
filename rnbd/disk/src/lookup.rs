//! Opening names that a peer chose, below a folder and never outside it.

use std::{
    ffi::{CStr, CString, OsStr},
    fs::File,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rnbd::Errno;

use crate::sys::{self, last};

/// `openat` that retries interruptions.
fn openat(dir: RawFd, path: &CStr, flags: i32) -> Result<OwnedFd, Errno> {
    loop {
        // SAFETY: `path` is NUL-terminated; no flag here makes the call read a mode.
        let fd = unsafe { libc::openat(dir, path.as_ptr(), flags | libc::O_CLOEXEC) };
        if fd >= 0 {
            // SAFETY: a new descriptor that nobody else owns.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        match last() {
            Errno::EINTR => {}
            e => return Err(e),
        }
    }
}

/// A folder to look up in, as an `O_PATH` descriptor.
///
/// # Errors
/// When it does not exist or is no folder.
pub(crate) fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    Ok(openat(libc::AT_FDCWD, &path, libc::O_PATH | libc::O_DIRECTORY)?)
}

/// A path that the operator named, as an `O_PATH` descriptor. Symbolic links are followed.
pub(crate) fn open_path(path: &Path) -> Result<OwnedFd, Errno> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    openat(libc::AT_FDCWD, &path, libc::O_PATH)
}

/// Splits a name into components: leading and repeated slashes count as nothing, as for the kernel's server, and a name
/// with ".." anywhere is refused, as there.
pub(crate) fn components(name: &[u8]) -> Result<Vec<&[u8]>, Errno> {
    if name.contains(&0) || name.windows(2).any(|w| w == b"..") {
        return Err(Errno::EINVAL);
    }
    let parts: Vec<&[u8]> = name
        .split(|b| *b == b'/')
        .filter(|c| !c.is_empty() && *c != b".")
        .collect();
    if parts.is_empty() {
        Err(Errno::EINVAL)
    } else {
        Ok(parts)
    }
}

/// Opens `name` below `dir` as an `O_PATH` descriptor. Symbolic links that stay below are followed, others refused.
///
/// # Errors
/// EXDEV when the path leaves the folder, ELOOP when a link was met on a system without `openat2`, and those of `open`.
pub(crate) fn open_beneath(dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let parts = components(name)?;
    let path = CString::new(parts.join(&b'/')).map_err(|_| Errno::EINVAL)?;
    match openat2_beneath(dir, &path) {
        // Before Linux 5.6, or a sandbox that does not know it.
        Err(Errno::ENOSYS | Errno::EPERM) => walk_beneath(dir, &parts),
        r => r,
    }
}

fn openat2_beneath(dir: BorrowedFd<'_>, path: &CStr) -> Result<OwnedFd, Errno> {
    // SAFETY: all-zero is a valid `open_how`; it may have more fields than the three used.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_PATH | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS;
    // EAGAIN says that a rename raced with the resolution of "..": links may have them.
    for _ in 0..16 {
        // SAFETY: `path` is NUL-terminated, `how` is as large as said.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_openat2,
                dir.as_raw_fd(),
                path.as_ptr(),
                &raw const how,
                size_of_val(&how),
            )
        };
        if fd >= 0 {
            // SAFETY: a new descriptor that nobody else owns.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
        }
        match last() {
            Errno::EAGAIN | Errno::EINTR => {}
            e => return Err(e),
        }
    }
    Err(Errno::EAGAIN)
}

/// One component at a time, following no link at all.
fn walk_beneath(dir: BorrowedFd<'_>, parts: &[&[u8]]) -> Result<OwnedFd, Errno> {
    let mut at: Option<OwnedFd> = None;
    for (i, part) in parts.iter().enumerate() {
        let name = CString::new(*part).map_err(|_| Errno::EINVAL)?;
        let last = i + 1 == parts.len();
        let flags = libc::O_PATH | libc::O_NOFOLLOW | if last { 0 } else { libc::O_DIRECTORY };
        let from = at.as_ref().map_or(dir.as_raw_fd(), AsRawFd::as_raw_fd);
        let fd = openat(from, &name, flags)?;
        if last && file_type(&fd)? == libc::S_IFLNK {
            return Err(Errno::ELOOP);
        }
        at = Some(fd);
    }
    at.ok_or(Errno::EINVAL)
}

/// The `S_IFMT` bits of what a descriptor stands for.
pub(crate) fn file_type(fd: &impl AsRawFd) -> Result<u32, Errno> {
    sys::stat(fd).map(|s| s.st_mode & libc::S_IFMT)
}

/// Opens for I/O what an `O_PATH` descriptor stands for. The type is checked first, on that descriptor: opening may
/// have effects (a FIFO waits, a watchdog starts), and so there is no race with a rename. `flags` are added to those of `open`.
///
/// # Errors
/// ENOTBLK when it is neither a regular file nor a block device, and those of `open`.
pub(crate) fn reopen(handle: &OwnedFd, writable: bool, flags: i32) -> Result<File, Errno> {
    if !matches!(file_type(handle)?, libc::S_IFREG | libc::S_IFBLK) {
        return Err(Errno::ENOTBLK);
    }
    let path = CString::new(format!("/proc/self/fd/{}", handle.as_raw_fd())).map_err(|_| Errno::EINVAL)?;
    let mode = if writable { libc::O_RDWR } else { libc::O_RDONLY };
    openat(libc::AT_FDCWD, &path, mode | libc::O_NOCTTY | flags).map(File::from)
}

/// A session's name as the single path component that it may be; the peer chose it.
pub(crate) fn session_component(name: &str) -> Result<&OsStr, Errno> {
    let bad = name.is_empty() || name == "." || name.contains("..") || name.contains(['/', '\0']);
    if bad { Err(Errno::EINVAL) } else { Ok(OsStr::new(name)) }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsFd, os::unix::fs::symlink};

    use super::*;

    fn tree() -> (tempfile::TempDir, OwnedFd) {
        let t = tempfile::tempdir().unwrap();
        fs::write(t.path().join("secret"), b"s").unwrap();
        let root = t.path().join("root");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("disk"), b"d").unwrap();
        fs::write(root.join("sub/disk"), b"d").unwrap();
        symlink("sub/disk", root.join("inside")).unwrap();
        symlink("../secret", root.join("up")).unwrap();
        symlink(t.path().join("secret"), root.join("absolute")).unwrap();
        symlink(t.path(), root.join("dirlink")).unwrap();
        let d = open_dir(&root).unwrap();
        (t, d)
    }

    #[test]
    fn names_below_are_found_however_they_are_slashed() {
        let (_t, d) = tree();
        for name in ["disk", "/disk", "//disk", "./disk", "sub/disk", "/sub//disk", "inside"] {
            let fd = open_beneath(d.as_fd(), name.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(file_type(&fd).unwrap(), libc::S_IFREG, "{name}");
        }
        assert_eq!(open_beneath(d.as_fd(), b"nothing").unwrap_err(), Errno::ENOENT);
    }

    #[test]
    fn no_name_leaves_the_folder() {
        let (_t, d) = tree();
        for name in ["../secret", "..", "sub/../../secret", "a..b", "", "/", "."] {
            assert_eq!(
                open_beneath(d.as_fd(), name.as_bytes()).unwrap_err(),
                Errno::EINVAL,
                "{name}"
            );
        }
        for name in ["up", "absolute", "dirlink/secret"] {
            let e = open_beneath(d.as_fd(), name.as_bytes()).unwrap_err();
            assert!(
                matches!(e, Errno::EXDEV | Errno::ELOOP | Errno::EINVAL),
                "{name}: {e:?}"
            );
        }
    }

    #[test]
    fn the_walk_without_openat2_follows_nothing() {
        let (_t, d) = tree();
        assert!(walk_beneath(d.as_fd(), &[b"sub", b"disk"]).is_ok());
        assert_eq!(walk_beneath(d.as_fd(), &[b"inside"]).unwrap_err(), Errno::ELOOP);
        assert_eq!(walk_beneath(d.as_fd(), &[b"up"]).unwrap_err(), Errno::ELOOP);
        let via_link = walk_beneath(d.as_fd(), &[b"dirlink", b"secret"]).unwrap_err();
        assert!(matches!(via_link.raw(), libc::ENOTDIR | libc::ELOOP));
    }

    #[test]
    fn only_files_and_block_devices_are_opened() {
        let (t, d) = tree();
        let fifo = CString::new(t.path().join("root/fifo").as_os_str().as_bytes()).unwrap();
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        for name in ["fifo", "sub"] {
            let h = open_beneath(d.as_fd(), name.as_bytes()).unwrap();
            assert_eq!(reopen(&h, true, 0).unwrap_err(), Errno::ENOTBLK, "{name}");
        }
        let null = open_path(Path::new("/dev/null")).unwrap();
        assert_eq!(reopen(&null, false, 0).unwrap_err(), Errno::ENOTBLK);
    }

    #[test]
    fn session_names_are_one_component() {
        assert!(session_component("blya").is_ok());
        for bad in ["", ".", "..", "a/b", "a..", "/"] {
            assert_eq!(session_component(bad), Err(Errno::EINVAL), "{bad}");
        }
    }
}
