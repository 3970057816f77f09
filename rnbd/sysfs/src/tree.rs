//! Requests of the kernel, answered from the registry.

use std::{
    ffi::OsStr,
    io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyPoll, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use rnbd_admin::Registry;
use rnbd_host::control::{Entry, Kind, Refused, Stat};
use roce_net::places::{Full, Identity, Peer};

use crate::{
    caller::{Admission, Caller},
    handles::{Handles, Name, Open},
    inodes::Inodes,
    writes::Writes,
};

/// Bytes of every file, as sysfs says.
const FILE_SIZE: u64 = 4096;
/// Bytes of a name at most.
const NAME_MAX: usize = 255;
/// Bytes of one write request of the kernel at most. More than an attribute takes, so that a longer write is one request, and is refused.
const MAX_WRITE: u32 = 128 << 10;
/// Cache time of the kernel: attributes change at any time.
const NO_TIME: Duration = Duration::ZERO;

/// The file system.
pub(crate) struct Tree {
    registry: Arc<Registry>,
    admission: Box<dyn Admission>,
    owner: u32,
    mounted: SystemTime,
    inodes: Mutex<Inodes>,
    handles: Mutex<Handles>,
    writes: Writes,
}

type Answer<T> = Result<T, Errno>;

impl Tree {
    /// A view of this registry.
    ///
    /// # Errors
    /// When there is no thread left.
    pub(crate) fn new(registry: Registry, admission: impl Admission) -> io::Result<Self> {
        Ok(Self {
            registry: Arc::new(registry),
            admission: Box::new(admission),
            owner: nix::unistd::geteuid().as_raw(),
            mounted: SystemTime::now(),
            inodes: Mutex::default(),
            handles: Mutex::default(),
            writes: Writes::new()?,
        })
    }

    fn admit(&self, request: &Request) -> Answer<Caller> {
        let caller = Caller::of(request);
        match self.admission.admits(&caller) {
            true => Ok(caller),
            false => Err(Errno::EACCES),
        }
    }

    fn path(&self, inode: INodeNo) -> Answer<Arc<str>> {
        self.inodes.lock().path(inode.0).ok_or(Errno::ENOENT)
    }

    fn opened(&self, handle: FileHandle) -> Answer<Arc<Open>> {
        self.handles.lock().get(handle.0).ok_or(Errno::EBADF)
    }

    fn attributes(&self, inode: u64, stat: &Stat) -> FileAttr {
        let kind = kind(&stat.kind);
        FileAttr {
            ino: INodeNo(inode),
            size: if kind == FileType::RegularFile { FILE_SIZE } else { 0 },
            blocks: 0,
            atime: self.mounted,
            mtime: self.mounted,
            ctime: self.mounted,
            crtime: self.mounted,
            kind,
            perm: stat.mode as u16,
            // Of a directory: programs that walk a tree must not take it for the number of directories in it.
            nlink: 1,
            uid: self.owner,
            gid: self.admission.group(),
            rdev: 0,
            blksize: FILE_SIZE as u32,
            flags: 0,
        }
    }

    fn find(&self, request: &Request, parent: INodeNo, name: &OsStr) -> Answer<FileAttr> {
        self.admit(request)?;
        let name = name.to_str().filter(|name| is_name(name)).ok_or(Errno::ENOENT)?;
        let path = join(&self.path(parent)?, name);
        let stat = self.registry.stat(&path).map_err(refused)?;
        let inode = self.inodes.lock().look_up(&path);
        Ok(self.attributes(inode, &stat))
    }

    fn status(&self, request: &Request, inode: INodeNo) -> Answer<FileAttr> {
        self.admit(request)?;
        let stat = self.registry.stat(&self.path(inode)?).map_err(refused)?;
        Ok(self.attributes(inode.0, &stat))
    }

    fn link(&self, request: &Request, inode: INodeNo) -> Answer<String> {
        self.admit(request)?;
        match self.registry.stat(&self.path(inode)?).map_err(refused)?.kind {
            Kind::Link(target) => Ok(target),
            Kind::Dir | Kind::File => Err(Errno::EINVAL),
        }
    }

    /// Checks the mode, also for root, as the kernel does (`kernfs_fop_open`).
    fn allow(&self, request: &Request, inode: INodeNo, writes: bool, executes: bool) -> Answer<Arc<str>> {
        self.admit(request)?;
        let path = self.path(inode)?;
        let stat = self.registry.stat(&path).map_err(refused)?;
        let is_file = stat.kind == Kind::File;
        match (writes && stat.mode & 0o222 == 0) || (executes && is_file) {
            true => Err(Errno::EACCES),
            false => Ok(path),
        }
    }

    fn user(&self, request: &Request) -> Peer {
        let user = request.uid();
        Peer {
            identity: Identity::User(user),
            trusted: self.admission.trusts(user),
        }
    }

    fn open_at(&self, request: &Request, path: Arc<str>) -> Answer<FileHandle> {
        let opened = self.handles.lock().open(self.user(request), path);
        opened.map(FileHandle).map_err(|full| match full {
            Full::Peer(..) => Errno::EMFILE,
            Full::All(_) => Errno::ENFILE,
        })
    }

    /// The text is made at the first read, and kept until the file is read from its start again (`seq_read`).
    fn text(&self, handle: FileHandle, from: u64, size: u32) -> Answer<Arc<str>> {
        let open = self.opened(handle)?;
        let kept = open.text.lock().clone().filter(|_| from > 0 || size == 0);
        if let Some(text) = kept {
            return Ok(text);
        }
        let read = self.registry.read(&open.path);
        let text: Arc<str> = read.map_err(|why| gone(&self.registry, &open.path, why))?.into();
        *open.text.lock() = Some(text.clone());
        Ok(text)
    }

    /// The entries of a directory, as of the first read.
    fn names(&self, handle: FileHandle, from: u64) -> Answer<Arc<[Name]>> {
        let open = self.opened(handle)?;
        if from == 0 {
            let found = self.registry.list(&open.path).map_err(refused)?;
            let inodes = self.inodes.lock();
            let parent = open.path.rsplit_once('/').map_or("", |(parent, _)| parent);
            let directory = |name: &str, path: &str| Name {
                number: inodes.number(path),
                kind: FileType::Directory,
                name: name.to_owned(),
            };
            // Sessions have names of their clients' choice. The kernel would show nothing of a directory with one that is none.
            let entries = found.into_iter().filter(|entry| is_name(&entry.name));
            let entry = |entry: Entry| Name {
                number: inodes.number(&join(&open.path, &entry.name)),
                kind: kind(&entry.stat.kind),
                name: entry.name,
            };
            let own = [directory(".", &open.path), directory("..", parent)];
            *open.names.lock() = own.into_iter().chain(entries.map(entry)).collect();
        }
        let names = open.names.lock().clone();
        Ok(names)
    }
}

fn kind(kind: &Kind) -> FileType {
    match kind {
        Kind::Dir => FileType::Directory,
        Kind::File => FileType::RegularFile,
        Kind::Link(_) => FileType::Symlink,
    }
}

fn is_name(name: &str) -> bool {
    !["", ".", ".."].contains(&name) && name.len() <= NAME_MAX && !name.contains(['/', '\0'])
}

fn join(parent: &str, name: &str) -> String {
    match parent {
        "" => name.to_owned(),
        parent => format!("{parent}/{name}"),
    }
}

fn refused(refused: Refused) -> Errno {
    Errno::from_i32(refused.errno.raw())
}

/// Error of an open file: ENODEV if its directory has been removed (`kernfs_get_active`). ENOENT may also be the result of a request.
fn gone(registry: &Registry, path: &str, why: Refused) -> Errno {
    match refused(why) {
        Errno::ENOENT if registry.stat(path).is_err() => Errno::ENODEV,
        other => other,
    }
}

/// Operations that are refused, each with its arguments, its reply, and its error.
macro_rules! refuse {
    ($($name:ident($($argument:ty),*) $reply:ty: $errno:ident;)*) => {
        $(fn $name(&self, _: &Request, $(_: $argument,)* reply: $reply) {
            reply.error(Errno::$errno);
        })*
    };
}

impl Filesystem for Tree {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config
            .set_max_write(MAX_WRITE)
            .map(|_| ())
            .map_err(|most| io::Error::other(format!("requests have {most} bytes at most")))
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.find(request, parent, name) {
            Ok(found) => reply.entry(&NO_TIME, &found, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn forget(&self, _request: &Request, inode: INodeNo, lookups: u64) {
        self.inodes.lock().forget(inode.0, lookups);
    }

    fn getattr(&self, request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.status(request, inode) {
            Ok(found) => reply.attr(&NO_TIME, &found),
            Err(errno) => reply.error(errno),
        }
    }

    /// Another length (`>` of a shell) and other times are accepted and change nothing.
    fn setattr(
        &self,
        request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let allowed = match mode.or(uid).or(gid) {
            Some(_) => self.admit(request).and(Err(Errno::EPERM)),
            None => self.allow(request, inode, size.is_some(), false),
        };
        match allowed.and_then(|_| self.status(request, inode)) {
            Ok(found) => reply.attr(&NO_TIME, &found),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, request: &Request, inode: INodeNo, reply: ReplyData) {
        match self.link(request, inode) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn access(&self, request: &Request, inode: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let (writes, executes) = (mask.contains(AccessFlags::W_OK), mask.contains(AccessFlags::X_OK));
        match self.allow(request, inode, writes, executes) {
            Ok(_) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        let opened = self
            .allow(request, inode, writes, false)
            .and_then(|path| self.open_at(request, path));
        let how = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        match opened {
            Ok(handle) => reply.opened(handle, how),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        from: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.text(handle, from, size) {
            Ok(text) => {
                let rest = usize::try_from(from).ok().and_then(|from| text.as_bytes().get(from..));
                let rest = rest.unwrap_or_default();
                reply.data(&rest[..rest.len().min(size as usize)]);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _from: u64,
        data: &[u8],
        _how: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let open = match self.opened(handle) {
            Ok(open) => open,
            Err(errno) => return reply.error(errno),
        };
        let (registry, data) = (self.registry.clone(), data.to_vec());
        self.writes
            .start(Caller::of(request), self.user(request), reply, move || {
                let written = registry.write(&open.path, &data);
                written.map_err(|why| gone(&registry, &open.path, why))?;
                Ok(data.len() as u32)
            });
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.handles.lock().close(handle.0);
        reply.ok();
    }

    fn opendir(&self, request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let opened = self
            .allow(request, inode, false, false)
            .and_then(|path| self.open_at(request, path));
        match opened {
            Ok(handle) => reply.opened(handle, FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(&self, _request: &Request, _inode: INodeNo, handle: FileHandle, from: u64, mut reply: ReplyDirectory) {
        let names = match self.names(handle, from) {
            Ok(names) => names,
            Err(errno) => return reply.error(errno),
        };
        let rest = names
            .iter()
            .enumerate()
            .skip(usize::try_from(from).unwrap_or(usize::MAX));
        for (place, entry) in rest {
            if reply.add(INodeNo(entry.number), place as u64 + 1, entry.kind, &entry.name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.handles.lock().close(handle.0);
        reply.ok();
    }

    refuse! {
        // The kernel does without these after ENOSYS, and does not ask again.
        flush(INodeNo, FileHandle, LockOwner) ReplyEmpty: ENOSYS;
        fsync(INodeNo, FileHandle, bool) ReplyEmpty: ENOSYS;
        fsyncdir(INodeNo, FileHandle, bool) ReplyEmpty: ENOSYS;
        poll(INodeNo, FileHandle, PollNotifier, PollEvents, PollFlags) ReplyPoll: ENOSYS;
        lseek(INodeNo, FileHandle, i64, i32) ReplyLseek: ENOSYS;
        fallocate(INodeNo, FileHandle, u64, u64, i32) ReplyEmpty: ENOSYS;
        copy_file_range(INodeNo, FileHandle, u64, INodeNo, FileHandle, u64, u64, CopyFileRangeFlags) ReplyWrite: ENOSYS;
        getxattr(INodeNo, &OsStr, u32) ReplyXattr: ENOSYS;
        listxattr(INodeNo, u32) ReplyXattr: ENOSYS;
        setxattr(INodeNo, &OsStr, &[u8], i32, u32) ReplyEmpty: ENOSYS;
        removexattr(INodeNo, &OsStr) ReplyEmpty: ENOSYS;
        // The kernel's sysfs refuses these so.
        ioctl(INodeNo, FileHandle, IoctlFlags, u32, &[u8], u32) ReplyIoctl: ENOTTY;
        create(INodeNo, &OsStr, u32, u32, i32) ReplyCreate: EACCES;
        mknod(INodeNo, &OsStr, u32, u32, u32) ReplyEntry: EPERM;
        mkdir(INodeNo, &OsStr, u32, u32) ReplyEntry: EPERM;
        unlink(INodeNo, &OsStr) ReplyEmpty: EPERM;
        rmdir(INodeNo, &OsStr) ReplyEmpty: EPERM;
        symlink(INodeNo, &OsStr, &Path) ReplyEntry: EPERM;
        link(INodeNo, INodeNo, &OsStr) ReplyEntry: EPERM;
        rename(INodeNo, &OsStr, INodeNo, &OsStr, RenameFlags) ReplyEmpty: EPERM;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_file_can_be_called_is_a_name() {
        for name in ["db", "ip:10.0.0.1@ip:10.0.0.2", "..."] {
            assert!(is_name(name), "{name}");
        }
        for none in ["", ".", "..", "a/b", "a\0b", &"x".repeat(NAME_MAX + 1)] {
            assert!(!is_name(none), "{none:?}");
        }
        assert_eq!(
            (join("", "class"), join("class", "x")),
            ("class".into(), "class/x".into())
        );
    }
}
