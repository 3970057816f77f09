//! Which names a server offers, and who has them open for writing.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    fs::{File, TryLockError},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    str::FromStr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use parking_lot::{Mutex, RwLock};

use rnbd::{
    Errno,
    proto::{AccessMode, NAME_MAX},
    server::action::Identity,
};

use crate::{
    image::{Caching, Image},
    lookup, sys,
};

/// `%SESSNAME%` in a folder: everything from there on is replaced by the session's name, as in the kernel server's
/// `dev_search_path`.
const SESSION_MARK: &str = "%SESSNAME%";

/// One name and the image file or block device behind it, `NAME=PATH[,ro|rw][,migrate]`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExportSpec {
    /// What clients ask for.
    pub name: String,
    /// What they get.
    pub path: PathBuf,
    /// Nobody may write.
    pub read_only: bool,
    /// Beside a writer, a second one gets in with [`AccessMode::Migration`]. Without it that mode is read-write.
    pub migrate: bool,
}

impl FromStr for ExportSpec {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let form = || format!("{s:?} is not of the form NAME=PATH[,ro][,migrate]");
        let (name, rest) = s.split_once('=').ok_or_else(form)?;
        let (path, access) = parse_access(rest)?;
        if name.is_empty() || path.as_os_str().is_empty() {
            return Err(form());
        }
        if name.len() >= NAME_MAX || lookup::components(name.as_bytes()).is_err() {
            return Err(format!(
                "no client can ask for the name {name:?}: at most 254 bytes, without \"..\", and more than slashes and \".\""
            ));
        }
        Ok(Self {
            name: name.into(),
            path,
            read_only: access.read_only,
            migrate: access.migrate,
        })
    }
}

/// A folder whose files and block devices are offered by their path below it, `DIR[,ro|rw][,migrate]`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FolderSpec {
    /// The folder; may contain `%SESSNAME%`.
    pub path: PathBuf,
    /// Nobody may write.
    pub read_only: bool,
    /// As in [`ExportSpec::migrate`], for all of them.
    pub migrate: bool,
}

impl FromStr for FolderSpec {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (path, access) = parse_access(s)?;
        if path.as_os_str().is_empty() {
            return Err("empty folder name".into());
        }
        Ok(Self {
            path,
            read_only: access.read_only,
            migrate: access.migrate,
        })
    }
}

/// What an export allows.
#[derive(Clone, Copy, Debug)]
struct Access {
    read_only: bool,
    migrate: bool,
}

/// Splits `PATH[,OPTION]…`. Two commas stand for one in the path, as in QEMU's options.
fn parse_access(text: &str) -> Result<(PathBuf, Access), String> {
    let mut path = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(',') {
        path.push_str(before);
        let Some(further) = after.strip_prefix(',') else {
            return Ok((path.into(), parse_options(after)?));
        };
        path.push(',');
        rest = further;
    }
    path.push_str(rest);
    Ok((path.into(), parse_options("rw")?))
}

fn parse_options(text: &str) -> Result<Access, String> {
    let words: Vec<&str> = text.split(',').collect();
    if let Some(unknown) = words.iter().find(|w| !["ro", "rw", "migrate"].contains(w)) {
        return Err(format!(
            "unknown option {unknown:?} of an export: there are ro, rw and migrate (a comma in the path is written \",,\")"
        ));
    }
    let has = |word| words.contains(&word);
    if has("ro") && has("rw") {
        return Err("an export is either ro or rw".into());
    }
    if has("ro") && has("migrate") {
        return Err("an export with ro has no writers: migrate would be for a second one".into());
    }
    Ok(Access {
        read_only: has("ro"),
        migrate: has("migrate"),
    })
}

#[derive(Debug)]
struct Folder {
    dir: OwnedFd,
    path: PathBuf,
    per_session: bool,
    access: Access,
}

impl Folder {
    fn new(spec: &FolderSpec) -> io::Result<Self> {
        let bytes = spec.path.as_os_str().as_bytes();
        let mark = bytes
            .windows(SESSION_MARK.len())
            .position(|w| w == SESSION_MARK.as_bytes());
        let path = match mark {
            Some(0) => PathBuf::from("."),
            Some(at) => PathBuf::from(OsString::from_vec(bytes[..at].to_vec())),
            None => spec.path.clone(),
        };
        Ok(Self {
            dir: lookup::open_dir(&path)?,
            path,
            per_session: mark.is_some(),
            access: Access {
                read_only: spec.read_only,
                migrate: spec.migrate,
            },
        })
    }

    fn open(&self, session: &str, name: &[u8]) -> Result<OwnedFd, Errno> {
        if !self.per_session {
            return lookup::open_beneath(self.dir.as_fd(), name);
        }
        // Two steps, so that a link in one session's folder can't reach another's.
        let sub = lookup::open_beneath(self.dir.as_fd(), lookup::session_component(session)?.as_bytes())?;
        lookup::open_beneath(sub.as_fd(), name)
    }
}

/// What a device is, whatever name it was opened by: inode of an image file, or number of a block device.
type DeviceKey = (u32, u64, u64);

/// Which export a name stands for, however it is spelled. Two names of the table are two exports, also when they have the
/// same file behind them: what they allow may differ. In the folder every link to a file is that file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportId(Id);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Id {
    Named(Vec<u8>),
    File(DeviceKey),
}

impl ExportId {
    /// As the state machine of the server compares them.
    pub fn identity(&self) -> Identity {
        Identity(match &self.0 {
            Id::Named(name) => [b"name ", name.as_slice()].concat(),
            Id::File((kind, device, inode)) => format!("file {kind} {device} {inode}").into_bytes(),
        })
    }
}

/// An export that was found and is not open yet.
#[derive(Debug)]
pub struct Found {
    id: ExportId,
    handle: OwnedFd,
    access: Access,
    label: String,
}

impl Found {
    /// What the name stands for.
    pub fn id(&self) -> &ExportId {
        &self.id
    }
}

/// The exports of a server.
#[derive(Debug)]
pub struct Exports {
    named: RwLock<BTreeMap<Vec<u8>, ExportSpec>>,
    folder: Option<Folder>,
    caching: Caching,
    writers: Mutex<HashMap<DeviceKey, Writers>>,
    /// Of the files and devices that are open: whether a sync has failed.
    failures: Mutex<HashMap<DeviceKey, Weak<AtomicBool>>>,
}

/// Who writes to a device.
#[derive(Debug)]
struct Writers {
    count: u32,
    /// All of them came by exports that let a second one in.
    migrate: bool,
    /// Holds a lock against other servers' writers.
    _lock: Option<File>,
}

/// The right to write, returned when dropped.
#[derive(Debug)]
struct WriterSlot {
    exports: Arc<Exports>,
    key: DeviceKey,
}

impl Drop for WriterSlot {
    fn drop(&mut self) {
        let mut w = self.exports.writers.lock();
        if let Some(n) = w.get_mut(&self.key) {
            n.count -= 1;
            if n.count == 0 {
                w.remove(&self.key);
            }
        }
    }
}

/// An export that is open. Dropping it makes its writes durable, then lets the next writer in; this waits for the disk.
#[derive(Debug)]
pub struct OpenExport {
    // Dropped in this order. Whoever does I/O has a share of the image until it is over.
    image: Arc<Image>,
    _writer: Option<WriterSlot>,
}

impl OpenExport {
    /// The bytes.
    pub fn image(&self) -> &Image {
        &self.image
    }

    pub(crate) fn share(&self) -> &Arc<Image> {
        &self.image
    }

    /// The same open file for another loop's disks: what is written by any of them, flushed, or lost is that of all. The right to
    /// write stays here, so that parts are to be dropped first.
    pub fn part(&self) -> Self {
        self.image.shared.store(true, SeqCst);
        Self {
            image: self.image.clone(),
            _writer: None,
        }
    }
}

impl From<Image> for OpenExport {
    /// An image that is in no table of exports.
    fn from(image: Image) -> Self {
        Self {
            image: Arc::new(image),
            _writer: None,
        }
    }
}

/// A table of names, of which every path can be opened as asked.
fn table(named: impl IntoIterator<Item = ExportSpec>, caching: Caching) -> io::Result<BTreeMap<Vec<u8>, ExportSpec>> {
    let mut table = BTreeMap::new();
    for mut spec in named {
        // The process may change its folder later.
        spec.path = std::path::absolute(&spec.path)?;
        Image::open(&spec.path, !spec.read_only, caching)
            .map_err(|e| named_error(&format!("export {} = {}", spec.name, spec.path.display()), e))?;
        let name = key_of(spec.name.as_bytes()).map_err(|e| named_error(&spec.name, e))?;
        if let Some(other) = table.insert(name, spec) {
            let e = format!("export {} is there twice", other.name);
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, e));
        }
    }
    Ok(table)
}

impl Exports {
    /// Checks that every path can be opened as asked and the folder exists. `caching` is for all of them.
    ///
    /// # Errors
    /// Names the path that can't, or the name that is there twice.
    pub fn new(
        named: impl IntoIterator<Item = ExportSpec>,
        folder: Option<&FolderSpec>,
        caching: Caching,
    ) -> io::Result<Arc<Self>> {
        let table = table(named, caching)?;
        let folder = folder
            .map(|f| Folder::new(f).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", f.path.display()))))
            .transpose()?;
        Ok(Arc::new(Self {
            named: RwLock::new(table),
            folder,
            caching,
            writers: Mutex::default(),
            failures: Mutex::default(),
        }))
    }

    /// The table of names.
    pub fn named(&self) -> Vec<ExportSpec> {
        self.named.read().values().cloned().collect()
    }

    /// Makes another table of names the one that devices are opened by from now on. Who has a device open keeps it as it is.
    ///
    /// # Errors
    /// As of [`new`](Self::new): then the table stays.
    pub fn set_named(&self, named: impl IntoIterator<Item = ExportSpec>) -> io::Result<()> {
        *self.named.write() = table(named, self.caching)?;
        Ok(())
    }

    /// Opens a device for a session: first by the table of names, then in the folder.
    ///
    /// # Errors
    /// EINVAL for a bad name, ENOENT when there is none, EACCES when a read-only export is to be written, EPERM when
    /// there is a writer already (two, with [`AccessMode::Migration`] and an export that allows it), EBUSY when another
    /// process writes, ENOTBLK, EXDEV, and those of `open`.
    pub fn open(self: &Arc<Self>, session: &str, name: &[u8], mode: AccessMode) -> Result<OpenExport, Errno> {
        self.open_found(self.find(session, name)?, mode)
    }

    /// What a name stands for.
    ///
    /// # Errors
    /// EINVAL for a bad name, ENOENT when there is none, EXDEV when it leads out of the folder, and those of `open`.
    pub fn find(&self, session: &str, name: &[u8]) -> Result<Found, Errno> {
        let key = key_of(name)?;
        let named = self.named.read().get(&key).cloned();
        if let Some(spec) = named {
            return Ok(Found {
                id: ExportId(Id::Named(key)),
                handle: lookup::open_path(&spec.path)?,
                access: Access {
                    read_only: spec.read_only,
                    migrate: spec.migrate,
                },
                label: spec.path.display().to_string(),
            });
        }
        let folder = self.folder.as_ref().ok_or(Errno::ENOENT)?;
        let handle = folder.open(session, name)?;
        let label = folder.path.join(Path::new(std::ffi::OsStr::from_bytes(&key)));
        Ok(Found {
            id: ExportId(Id::File(device_key(&handle)?)),
            handle,
            access: folder.access,
            label: label.display().to_string(),
        })
    }

    /// Opens what was found.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_found(self: &Arc<Self>, found: Found, mode: AccessMode) -> Result<OpenExport, Errno> {
        if found.access.read_only && mode.writable() {
            return Err(Errno::EACCES);
        }
        let writer = mode.writable().then(|| self.admit_writer(&found, mode)).transpose()?;
        let failure = self.failure(device_key(&found.handle)?);
        let image = Image::from_handle(&found.handle, mode.writable(), self.caching, found.label)?;
        Ok(OpenExport {
            image: Arc::new(image.sharing(failure)),
            _writer: writer,
        })
    }

    /// Whether a sync of this device has failed: known to all who have it open, as long as one of them has.
    fn failure(&self, key: DeviceKey) -> Arc<AtomicBool> {
        let mut failures = self.failures.lock();
        if let Some(known) = failures.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        failures.retain(|_, failure| failure.strong_count() > 0);
        let failure = Arc::default();
        failures.insert(key, Arc::downgrade(&failure));
        failure
    }

    fn admit_writer(self: &Arc<Self>, found: &Found, mode: AccessMode) -> Result<WriterSlot, Errno> {
        let key = device_key(&found.handle)?;
        let migrate = found.access.migrate;
        let second = migrate && mode == AccessMode::Migration;
        let mut w = self.writers.lock();
        match w.get_mut(&key) {
            Some(n) if second && n.migrate && n.count < 2 => n.count += 1,
            Some(_) => return Err(Errno::EPERM),
            None => {
                let writers = Writers {
                    count: 1,
                    migrate,
                    _lock: lock_out_others(&found.handle)?,
                };
                w.insert(key, writers);
            }
        }
        Ok(WriterSlot {
            exports: self.clone(),
            key,
        })
    }
}

fn device_key(handle: &OwnedFd) -> Result<DeviceKey, Errno> {
    let st = sys::stat(handle)?;
    Ok(match st.st_mode & libc::S_IFMT {
        libc::S_IFBLK => (libc::S_IFBLK, st.st_rdev, 0),
        other => (other, st.st_dev, st.st_ino),
    })
}

/// Takes a lock that another server which exports the same file would have to have (`flock`). `None` where the file system
/// has no locks.
fn lock_out_others(handle: &OwnedFd) -> Result<Option<File>, Errno> {
    let file = lookup::reopen(handle, false, 0)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(Errno::EBUSY),
        Err(TryLockError::Error(e)) => {
            tracing::debug!("no lock against other servers: {e}");
            Ok(None)
        }
    }
}

/// Names are compared without leading and repeated slashes: clients write `/disk` for what is configured as `disk`.
fn key_of(name: &[u8]) -> Result<Vec<u8>, Errno> {
    Ok(lookup::components(name)?.join(&b'/'))
}

fn named_error(what: &str, e: Errno) -> io::Error {
    let io = io::Error::from(e);
    let text = match e {
        Errno::ENOTBLK => "neither an image file nor a block device".to_owned(),
        _ => io.to_string(),
    };
    io::Error::new(io.kind(), format!("{what}: {text}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rnbd::block::BlockOp;

    use super::*;

    fn exports(named: impl IntoIterator<Item = ExportSpec>, folder: Option<&FolderSpec>) -> io::Result<Arc<Exports>> {
        Exports::new(named, folder, Caching::PageCache)
    }

    fn image(path: &Path, len: u64) {
        fs::File::create(path).unwrap().set_len(len).unwrap();
    }

    fn spec(name: &str, path: &Path, read_only: bool) -> ExportSpec {
        ExportSpec {
            name: name.into(),
            path: path.into(),
            read_only,
            migrate: false,
        }
    }

    fn migrating(name: &str, path: &Path) -> ExportSpec {
        ExportSpec {
            migrate: true,
            ..spec(name, path, false)
        }
    }

    #[test]
    fn specs_parse() {
        let s: ExportSpec = "disk=/a/b=c.img,ro".parse().unwrap();
        assert_eq!(s, spec("disk", Path::new("/a/b=c.img"), true));
        assert_eq!(
            "d=x,rw".parse::<ExportSpec>().unwrap(),
            spec("d", Path::new("x"), false)
        );
        for text in ["d=x,migrate", "d=x,rw,migrate", "d=x,migrate,rw"] {
            assert_eq!(
                text.parse::<ExportSpec>().unwrap(),
                migrating("d", Path::new("x")),
                "{text}"
            );
        }
        assert_eq!(
            "d=a,,b,,,ro".parse::<ExportSpec>().unwrap(),
            spec("d", Path::new("a,b,"), true)
        );
        for bad in [
            "disk",
            "=x",
            "disk=",
            "a..b=x",
            "d=,ro",
            "d=x,ro,migrate",
            "d=x,ro,rw",
            "d=x,",
        ] {
            assert!(bad.parse::<ExportSpec>().is_err(), "{bad}");
        }
        let e = "d=x,ro,exclusive".parse::<ExportSpec>().unwrap_err();
        assert!(e.contains("\"exclusive\"") && e.contains("migrate"), "{e}");
        let folder: FolderSpec = "/images,migrate".parse().unwrap();
        assert!(folder.migrate && !folder.read_only && folder.path == Path::new("/images"));
        assert!("/images,migrate,ro".parse::<FolderSpec>().is_err());
        assert!("/images,x".parse::<FolderSpec>().is_err() && ",ro".parse::<FolderSpec>().is_err());
    }

    /// The second writer, in mode "migration" beside one in mode `first`.
    fn second_writer(first: AccessMode, migrate: [bool; 2]) -> Result<(), Errno> {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        image(&path, 4096);
        let [a, b] = [("a", migrate[0]), ("b", migrate[1])].map(|(name, migrate)| ExportSpec {
            migrate,
            ..spec(name, &path, false)
        });
        let ex = exports([a, b], None).unwrap();
        let w = ex.open("s", b"a", first).unwrap();
        let second = ex.open("t", b"b", AccessMode::Migration).map(drop);
        assert_eq!(ex.open("t", b"b", AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
        drop(w);
        ex.open("t", b"b", AccessMode::Migration)
            .expect("alone it is read-write");
        second
    }

    #[test]
    fn a_second_writer_needs_an_export_that_migrates() {
        for first in [AccessMode::ReadWrite, AccessMode::Migration] {
            assert_eq!(second_writer(first, [false, false]), Err(Errno::EPERM));
            assert_eq!(second_writer(first, [true, true]), Ok(()));
            // Both names of the file have to allow it.
            assert_eq!(second_writer(first, [true, false]), Err(Errno::EPERM));
            assert_eq!(second_writer(first, [false, true]), Err(Errno::EPERM));
        }
    }

    #[test]
    fn all_spellings_are_one_export() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("disk");
        image(&path, 4096);
        fs::hard_link(&path, t.path().join("link")).unwrap();
        std::os::unix::fs::symlink(".", t.path().join("self")).unwrap();
        let folder = FolderSpec {
            path: t.path().into(),
            ..FolderSpec::default()
        };
        let id = |ex: &Exports, name: &str| ex.find("s", name.as_bytes()).unwrap().id().clone();
        let ex = exports([], Some(&folder)).unwrap();
        let spellings = [
            "disk",
            "/disk",
            "//disk",
            "./disk",
            "disk/",
            "disk/.",
            "link",
            "self/self/disk",
        ];
        for name in spellings {
            assert_eq!(id(&ex, name), id(&ex, "disk"), "{name}");
        }
        assert_eq!(ex.find("s", b"a/../disk").unwrap_err(), Errno::EINVAL);
        let ex = exports([spec("disk", &path, false), spec("other", &path, true)], Some(&folder)).unwrap();
        assert_eq!(id(&ex, "//disk"), id(&ex, "disk"));
        assert_ne!(id(&ex, "disk"), id(&ex, "other"), "what they allow differs");
    }

    #[test]
    fn one_writer_many_readers_two_for_migration() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        image(&path, 1 << 20);
        fs::hard_link(&path, t.path().join("j")).unwrap();
        let folder = FolderSpec {
            path: t.path().into(),
            migrate: true,
            ..FolderSpec::default()
        };
        let ex = exports([migrating("disk", &path)], Some(&folder)).unwrap();
        let w = ex.open("s", b"disk", AccessMode::ReadWrite).unwrap();
        assert_eq!(w.image().geometry().size, 1 << 20);
        for same in [&b"disk"[..], b"/disk", b"i", b"j"] {
            assert_eq!(ex.open("t", same, AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
            ex.open("t", same, AccessMode::ReadOnly).unwrap();
        }
        let m = ex.open("t", b"j", AccessMode::Migration).unwrap();
        assert_eq!(ex.open("u", b"disk", AccessMode::Migration).unwrap_err(), Errno::EPERM);
        drop(w);
        assert_eq!(ex.open("u", b"disk", AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
        drop(m);
        ex.open("u", b"disk", AccessMode::ReadWrite).unwrap();
        assert!(ex.writers.lock().is_empty());
    }

    #[test]
    fn a_failed_sync_is_known_to_all_who_have_the_file_open() {
        let t = tempfile::tempdir().unwrap();
        let (path, other) = (t.path().join("i"), t.path().join("o"));
        image(&path, 4096);
        image(&other, 4096);
        let ex = exports(
            [
                migrating("disk", &path),
                spec("same", &path, true),
                spec("other", &other, false),
            ],
            None,
        )
        .unwrap();
        let writer = ex.open("s", b"disk", AccessMode::ReadWrite).unwrap();
        let second = ex.open("t", b"disk", AccessMode::Migration).unwrap();
        let elsewhere = ex.open("t", b"other", AccessMode::ReadWrite).unwrap();
        second.image().sync().sync_failed();
        for open in [&writer, &second, &ex.open("u", b"same", AccessMode::ReadOnly).unwrap()] {
            assert_eq!(open.image().sync().check(BlockOp::Flush), Err(Errno::EIO));
        }
        assert_eq!(elsewhere.image().sync().check(BlockOp::Flush), Ok(()));
        // Who comes next, while one of them is there, can't rely on what was written either.
        drop(second);
        let next = ex.open("t", b"disk", AccessMode::Migration).unwrap();
        assert_eq!(next.image().sync().check(BlockOp::Flush), Err(Errno::EIO));
        drop((writer, next));
        let anew = ex.open("t", b"disk", AccessMode::ReadWrite).unwrap();
        assert_eq!(anew.image().sync().check(BlockOp::Flush), Ok(()));
    }

    #[test]
    fn two_servers_do_not_write_to_one_image() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        image(&path, 4096);
        let [a, b] = [(); 2].map(|()| exports([migrating("disk", &path)], None).unwrap());
        let w = a.open("s", b"disk", AccessMode::ReadWrite).unwrap();
        let m = a.open("s", b"disk", AccessMode::Migration).unwrap();
        drop(w);
        assert_eq!(b.open("s", b"disk", AccessMode::ReadWrite).unwrap_err(), Errno::EBUSY);
        b.open("s", b"disk", AccessMode::ReadOnly).unwrap();
        drop(m);
        b.open("s", b"disk", AccessMode::ReadWrite).unwrap();
    }

    #[test]
    fn read_only_exports_and_folders() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        image(&path, 4096);
        let folder = FolderSpec {
            path: t.path().into(),
            read_only: true,
            ..FolderSpec::default()
        };
        let ex = exports([spec("disk", &path, true)], Some(&folder)).unwrap();
        for name in [&b"disk"[..], b"i"] {
            assert_eq!(ex.open("s", name, AccessMode::ReadWrite).unwrap_err(), Errno::EACCES);
            assert_eq!(ex.open("s", name, AccessMode::Migration).unwrap_err(), Errno::EACCES);
            assert!(
                ex.open("s", name, AccessMode::ReadOnly)
                    .unwrap()
                    .image()
                    .geometry()
                    .read_only
            );
        }
        assert_eq!(ex.open("s", b"other", AccessMode::ReadOnly).unwrap_err(), Errno::ENOENT);
        assert_eq!(ex.open("s", b"..", AccessMode::ReadOnly).unwrap_err(), Errno::EINVAL);
    }

    #[test]
    fn each_session_sees_its_own_folder() {
        let t = tempfile::tempdir().unwrap();
        for s in ["a", "b"] {
            fs::create_dir(t.path().join(s)).unwrap();
        }
        image(&t.path().join("a/disk"), 4096);
        std::os::unix::fs::symlink("../a/disk", t.path().join("b/theirs")).unwrap();
        let folder = FolderSpec {
            path: t.path().join("%SESSNAME%/ignored"),
            ..FolderSpec::default()
        };
        let ex = exports([], Some(&folder)).unwrap();
        ex.open("a", b"/disk", AccessMode::ReadOnly).unwrap();
        assert_eq!(ex.open("b", b"disk", AccessMode::ReadOnly).unwrap_err(), Errno::ENOENT);
        assert!(ex.open("b", b"theirs", AccessMode::ReadOnly).is_err());
        for bad in ["..", ".", "a/../a", "", "a/"] {
            assert_eq!(
                ex.open(bad, b"disk", AccessMode::ReadOnly).unwrap_err(),
                Errno::EINVAL,
                "{bad}"
            );
        }
    }

    #[test]
    fn a_missing_image_is_told_at_start() {
        let e = exports([spec("d", Path::new("/nonexistent/i"), false)], None).unwrap_err();
        assert!(e.to_string().contains("/nonexistent/i"), "{e}");
        let e = exports([spec("d", Path::new("/dev/null"), false)], None).unwrap_err();
        assert!(e.to_string().contains("/dev/null: neither an image"), "{e}");
        let f = FolderSpec {
            path: "/nonexistent".into(),
            ..FolderSpec::default()
        };
        assert!(exports([], Some(&f)).is_err());
    }
}
