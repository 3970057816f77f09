//! The socket file: made for its owner alone, taken over from a dead server, removed at the end.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// A listening socket and its file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    /// Device and inode: at the end only our own file is removed.
    id: (u64, u64),
}

impl SocketFile {
    /// Makes the file with mode 0600. A socket file on which nobody listens any more is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when somebody listens there, `AlreadyExists` when it is no socket, and those of `bind`.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let r = Self::bind_at(&path);
        r.map_err(|e| io::Error::new(e.kind(), format!("socket {}: {e}", path.display())))
    }

    fn bind_at(path: &Path) -> io::Result<Self> {
        let socket = socket()?;
        let folder = lock_folder(path.parent().unwrap_or(Path::new("/")));
        match bind(&socket, path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                bind(&socket, path)?;
            }
            r => r?,
        }
        drop(folder);
        // SAFETY: a plain call on our socket.
        if unsafe { libc::listen(socket.as_raw_fd(), 64) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let meta = fs::symlink_metadata(path)?;
        Ok(Self {
            listener: UnixListener::from(socket),
            path: path.into(),
            id: (meta.dev(), meta.ino()),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// One server at a time may find out that a socket is stale and replace it. Held for moments; a folder that can't be read
/// or that somebody else keeps locked is used without.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = File::open(path).ok()?;
    for _ in 0..100 {
        match folder.try_lock() {
            Ok(()) => return Some(folder),
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
            Err(TryLockError::Error(_)) => return None,
        }
    }
    None
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: a plain call.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // Linux gives the file the mode of the socket: there is no moment in which others may connect.
    // SAFETY: a plain call on our socket.
    if unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

fn bind(socket: &OwnedFd, path: &Path) -> io::Result<()> {
    // SAFETY: all-zero is a valid address to fill in.
    let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= addr.sun_path.len() || bytes.contains(&0) {
        let e = format!("path is longer than {} bytes", addr.sun_path.len() - 1);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, e));
    }
    for (to, from) in addr.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let len = size_of_val(&addr) as libc::socklen_t;
    // SAFETY: a NUL-terminated address of the given size.
    if unsafe { libc::bind(socket.as_raw_fd(), (&raw const addr).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the file exists and is no socket",
        ));
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(e) => Err(e),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens there")),
    }
}
