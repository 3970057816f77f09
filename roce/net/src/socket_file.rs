//! Unix socket files: bound with their final owner and mode, taken over from a dead server, removed at the end.
//!
//! No file is changed by a path that another user could redirect. The folder is opened once and has to be one in which only root and
//! this user can replace files; whatever follows is relative to it and follows no link.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, TryLockError},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{MetadataExt, OpenOptionsExt},
            net::UnixListener,
        },
    },
    path::Path,
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::AtFlags,
    sys::{
        socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket},
        stat::{FchmodatFlags, FileStat, Mode, SFlag, fchmod, fchmodat, fstatat},
    },
    unistd::{Gid, UnlinkatFlags, fchownat, getegid, geteuid, unlinkat},
};

/// The owner of files whose user is unknown in a user namespace (`/proc/sys/kernel/overflowuid`).
const OVERFLOW_USER: u32 = 65534;
const STICKY: u32 = 0o1000;

/// The users who may connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The owner: mode 0600.
    Owner,
    /// The owner and this group, or that of the process: mode 0660.
    Group(Option<u32>),
    /// Users that these permissions let in.
    Mode(u32),
}

impl Access {
    const fn mode(self) -> Mode {
        Mode::from_bits_truncate(match self {
            Self::Owner => 0o600,
            Self::Group(_) => 0o660,
            Self::Mode(mode) => mode,
        })
    }
}

/// Type of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Bytes (`SOCK_STREAM`).
    Stream,
    /// Records (`SOCK_SEQPACKET`).
    Records,
}

impl Kind {
    fn socket(self, flags: SockFlag) -> io::Result<OwnedFd> {
        let kind = match self {
            Self::Stream => SockType::Stream,
            Self::Records => SockType::SeqPacket,
        };
        Ok(socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC | flags, None)?)
    }

    /// Connections that may wait to be accepted.
    const fn backlog(self) -> i32 {
        match self {
            Self::Stream => 64,
            Self::Records => 1024,
        }
    }
}

/// A listening socket and its file.
#[derive(Debug)]
pub struct SocketFile {
    listener: UnixListener,
    folder: File,
    name: OsString,
    /// Device and inode: at the end only this file is removed.
    id: (u64, u64),
}

impl SocketFile {
    /// Creates the file and listens. A socket file without a listener is replaced.
    ///
    /// # Errors
    /// `AddrInUse` when another process listens there, `AlreadyExists` when the file is no socket, `PermissionDenied` when another user
    /// could replace the file, those of `bind`, and of giving it to a group.
    pub fn bind(path: &Path, kind: Kind, access: Access) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let bound = Self::bind_at(&path, kind, access);
        bound.map_err(|e| io::Error::new(e.kind(), format!("socket {}: {e}", path.display())))
    }

    fn bind_at(path: &Path, kind: Kind, access: Access) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(invalid("it has no file name"));
        };
        let address = UnixAddr::new(path).map_err(|e| match e {
            Errno::ENAMETOOLONG => invalid("its path is longer than 107 bytes"),
            e => e.into(),
        })?;
        check_folders(parent)?;
        let folder = File::options()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
            .open(parent)?;
        check_folder(parent, &folder.metadata()?)?;
        let socket = kind.socket(SockFlag::empty())?;
        // Linux gives the file the mode of the socket: at no moment may others connect.
        fchmod(&socket, Mode::from_bits_truncate(0o600))?;
        let lock = lock_folder(parent);
        match bind(as_raw(&socket), &address) {
            Err(Errno::EADDRINUSE) => {
                remove_stale(&folder, name, kind, &address)?;
                bind(as_raw(&socket), &address)?;
            }
            bound => bound?,
        }
        drop(lock);
        let file = own_socket(&folder, name)?;
        let this = Self {
            listener: UnixListener::from(socket),
            folder,
            name: name.to_owned(),
            id: (file.st_dev, file.st_ino),
        };
        // No client can connect before it listens.
        this.admit(access)?;
        listen(&this.listener, Backlog::new(kind.backlog())?)?;
        Ok(this)
    }

    /// Gives the file its group and its mode, part of which the umask has withheld.
    fn admit(&self, access: Access) -> io::Result<()> {
        if let Access::Group(Some(group)) = access {
            fchownat(
                &self.folder,
                &*self.name,
                None,
                Some(Gid::from_raw(group)),
                AtFlags::AT_SYMLINK_NOFOLLOW,
            )
            .map_err(|e| {
                io::Error::new(
                    io::Error::from(e).kind(),
                    format!("can't be given to group {group}: {e}"),
                )
            })?;
        }
        if access != Access::Owner {
            fchmodat(&self.folder, &*self.name, access.mode(), FchmodatFlags::NoFollowSymlink)?;
        }
        Ok(())
    }

    /// The socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl AsFd for SocketFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let found = look_at(&self.folder, &self.name);
        if found.is_ok_and(|file| (file.st_dev, file.st_ino) == self.id) {
            let _ = unlinkat(&self.folder, &*self.name, UnlinkatFlags::NoRemoveDir);
        }
    }
}

fn as_raw(socket: &OwnedFd) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(socket)
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.to_owned())
}

fn look_at(folder: &File, name: &OsStr) -> io::Result<FileStat> {
    Ok(fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW)?)
}

fn is_socket(file: &FileStat) -> bool {
    SFlag::from_bits_truncate(file.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFSOCK
}

/// The file that was bound. Its path may lead elsewhere by now, but no other user can put a socket of this user into this folder.
fn own_socket(folder: &File, name: &OsStr) -> io::Result<FileStat> {
    match look_at(folder, name) {
        Ok(file) if is_socket(&file) && file.st_uid == geteuid().as_raw() => Ok(file),
        _ => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "another user has moved its folder",
        )),
    }
}

/// Checks that only root and this user can replace files in the folder, or the folder itself, or a link on the way to it.
fn check_folders(path: &Path) -> io::Result<()> {
    let real = path.canonicalize()?;
    let mut folders = path.ancestors().chain(real.ancestors());
    folders.try_for_each(|folder| check_folder(folder, &folder.metadata()?))
}

fn check_folder(path: &Path, folder: &fs::Metadata) -> io::Result<()> {
    let (own, mode) = (geteuid().as_raw(), folder.mode());
    let denied = |who: String| {
        let text = format!(
            "{who} can write to the folder {} (mode {:04o}) and replace the socket: use a folder of user {own} or root that no others can write to",
            path.display(),
            mode & 0o7777
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    };
    if ![0, own].contains(&folder.uid()) && !is_unknown_user(folder.uid()) {
        return denied(format!("user {}", folder.uid()));
    }
    let group_writes = mode & 0o020 != 0 && ![0, getegid().as_raw()].contains(&folder.gid());
    match mode & STICKY != 0 {
        // Only owners replace files there.
        true => Ok(()),
        false if mode & 0o002 != 0 => denied("everybody".to_owned()),
        false if group_writes => denied(format!("group {}", folder.gid())),
        false => Ok(()),
    }
}

/// Whether this is how a user namespace shows users that have no number there, such as the host's root.
fn is_unknown_user(user: u32) -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let has = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        matches!(numbers[..], [first, _, count] if (first..first.saturating_add(count)).contains(&user.into()))
    };
    user == OVERFLOW_USER && !map.is_empty() && !map.lines().any(has)
}

/// One server at a time may find out that a socket is stale and replace it. Held for moments; a folder that can't be read, or that
/// another process keeps locked, is used without.
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

fn remove_stale(folder: &File, name: &OsStr, kind: Kind, address: &UnixAddr) -> io::Result<()> {
    let file = look_at(folder, name)?;
    if !is_socket(&file) {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the file exists and is no socket",
        ));
    }
    let probe = kind.socket(SockFlag::SOCK_NONBLOCK)?;
    match connect(as_raw(&probe), address) {
        Err(Errno::ECONNREFUSED) => Ok(unlinkat(folder, name, UnlinkatFlags::NoRemoveDir)?),
        // The queue of a server that is there is full, or it is a server of another kind.
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens there"))
        }
        Err(e) => Err(e.into()),
    }
}
