//! Files that only their owner may read.

use std::{
    fs::{File, Permissions},
    io::{self, ErrorKind},
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

use rustix::{fs::OFlags, process::geteuid};

/// Paths of descriptors that a program has open itself: links there lead to them.
const OWN_DESCRIPTORS: [&str; 4] = ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self/fd"];

/// Makes a file for what others must not see, a capture for instance: mode 0600, and not through a symbolic link, with which
/// somebody else could choose the file where the folder is everybody's (`/tmp`). A file that is there is emptied, and loses the
/// rights of others. A named pipe must have a reader. `/dev/stdout` and the like are the descriptors that they stand for.
///
/// # Errors
/// `PermissionDenied` for a file or pipe that belongs to another user, or is known by further names (hard links); ELOOP for a
/// symbolic link; ENXIO for a pipe without a reader; `InvalidInput` for what is no file, pipe or character device; those of
/// `open`.
pub fn create_private(path: impl AsRef<Path>) -> io::Result<File> {
    open(path.as_ref(), false)
}

/// Opens a file as [`create_private`] does, but keeps what is in it and adds to that.
///
/// # Errors
/// Opens a file to append to, as [`create_private`].
pub fn append_private(path: impl AsRef<Path>) -> io::Result<File> {
    open(path.as_ref(), true)
}

fn open(path: &Path, append: bool) -> io::Result<File> {
    let own = OWN_DESCRIPTORS.iter().any(|dir| path.starts_with(dir));
    // Not to wait for the reader of somebody else's pipe.
    let mut flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    if !own {
        flags |= OFlags::NOFOLLOW;
    }
    let opened = File::options()
        .write(true)
        .append(append)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let file = opened.map_err(|e| match e.raw_os_error() {
        Some(n) if n == rustix::io::Errno::LOOP.raw_os_error() => {
            io::Error::new(e.kind(), format!("a symbolic link is not followed here ({e})"))
        }
        Some(n) if n == rustix::io::Errno::NXIO.raw_os_error() => {
            io::Error::new(e.kind(), format!("nobody reads from it ({e})"))
        }
        _ => e,
    })?;
    take(&file, own)?;
    if !append && file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Makes an open file ours alone.
fn take(file: &File, own: bool) -> io::Result<()> {
    let refuse = |text: &str| Err(io::Error::new(ErrorKind::PermissionDenied, text));
    let meta = file.metadata()?;
    let kind = meta.file_type();
    let ours = meta.uid() == geteuid().as_raw();
    if kind.is_char_device() || own {
        return Ok(());
    }
    if !kind.is_file() && !kind.is_fifo() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "neither a file nor a pipe"));
    }
    if !ours {
        return refuse("it belongs to another user");
    }
    if kind.is_fifo() {
        return Ok(());
    }
    if meta.nlink() > 1 {
        return refuse("it has other names (hard links)");
    }
    file.set_permissions(Permissions::from_mode(0o600))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        os::unix::fs::symlink,
    };

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_file_is_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new");
        create_private(&path).unwrap().write_all(b"first").unwrap();
        assert_eq!(mode(&path), 0o600);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        create_private(&path).unwrap().write_all(b"2nd").unwrap();
        assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o600, b"2nd".to_vec()));
        append_private(&path).unwrap().write_all(b" and 3rd").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"2nd and 3rd");
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let [victim, link, hard] = ["victim", "link", "hard"].map(|n| dir.path().join(n));
        fs::write(&victim, b"precious").unwrap();
        symlink(&victim, &link).unwrap();
        let e = create_private(&link).unwrap_err();
        assert!(e.to_string().contains("symbolic link"), "{e}");
        symlink(dir.path().join("missing"), dir.path().join("dangling")).unwrap();
        create_private(dir.path().join("dangling")).unwrap_err();
        assert!(!dir.path().join("missing").exists());
        fs::hard_link(&victim, &hard).unwrap();
        assert_eq!(create_private(&hard).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn a_file_of_somebody_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("theirs");
        fs::write(&path, b"theirs").unwrap();
        // Only root can give files away.
        if std::os::unix::fs::chown(&path, Some(65_534), None).is_ok() {
            assert_eq!(create_private(&path).unwrap_err().kind(), ErrorKind::PermissionDenied);
            assert_eq!(fs::read(&path).unwrap(), b"theirs");
        }
    }

    #[test]
    fn pipes_and_devices_work() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(create_private(&path).is_err(), "nobody reads");
        let reader = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut got = Vec::new();
                File::open(path).unwrap().read_to_end(&mut got).unwrap();
                got
            }
        });
        let mut pipe = loop {
            match create_private(&path) {
                Ok(pipe) => break pipe,
                Err(_) => std::thread::yield_now(),
            }
        };
        // More than fits: it waits for the reader, as any file that is not O_NONBLOCK.
        pipe.write_all(&vec![7; 1 << 20]).unwrap();
        drop(pipe);
        assert_eq!(reader.join().unwrap(), vec![7; 1 << 20]);
        create_private("/dev/null").unwrap().write_all(b"x").unwrap();
        assert!(create_private(dir.path()).is_err());
    }

    #[test]
    fn own_descriptors_may_be_named() {
        use std::os::fd::AsRawFd;
        let (mut reader, writer) = io::pipe().unwrap();
        let name = format!("/dev/fd/{}", writer.as_raw_fd());
        create_private(name).unwrap().write_all(b"x").unwrap();
        drop(writer);
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"x");
    }
}
