//! Names that a server offers, and the sessions that have them open for writing.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{File, TryLockError},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use parking_lot::RwLock;

use rnbd::{
    Errno,
    proto::{AccessMode, NAME_MAX, instance::Instance},
    server::action::Identity,
};

use crate::{
    boot::Boot,
    failures::SyncFailures,
    file_system::FileSystem,
    image::{Caching, Image},
    lookup, sys,
    writers::{DeviceKey, Refused, WriterSlot, WriterTable},
};

/// `%SESSNAME%` in a folder: everything from there on is replaced by the session's name, as in the kernel server's
/// `dev_search_path`.
const SESSION_MARK: &str = "%SESSNAME%";

/// One name and the image file or block device behind it, `NAME=PATH[,ro|rw][,migrate]`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExportSpec {
    /// Name that clients ask for.
    pub name: String,
    /// File or device that they get.
    pub path: PathBuf,
    /// Nobody may write.
    pub read_only: bool,
    /// Beside a writer, a second one gets in with [`AccessMode::Migration`]. Without it that mode is read-write.
    pub migrate: bool,
    /// The path is this one or below it, whatever links are in it.
    pub within: Option<PathBuf>,
}

impl ExportSpec {
    /// Opens the file, without taking it from other writers.
    ///
    /// # Errors
    /// EXDEV when it is not where it has to be, and those of [`Image::open`].
    pub fn open(&self, writable: bool, caching: Caching) -> Result<Image, Errno> {
        let label = self.path.display().to_string();
        Image::from_handle(&self.handle()?, writable, caching, label)
    }

    fn handle(&self) -> Result<OwnedFd, Errno> {
        match &self.within {
            Some(root) => open_within(root, &self.path),
            None => lookup::open_path(&self.path),
        }
    }
}

/// Opens a path that leads to nothing but this root and what is below it.
fn open_within(root: &Path, path: &Path) -> Result<OwnedFd, Errno> {
    match path.strip_prefix(root) {
        Err(_) => Err(Errno::EXDEV),
        Ok(rest) if rest.as_os_str().is_empty() => lookup::open_path(root),
        Ok(rest) => lookup::open_beneath(lookup::open_dir(root)?.as_fd(), rest.as_os_str().as_bytes()),
    }
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
            within: None,
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
    /// As in [`ExportSpec::within`].
    pub within: Option<PathBuf>,
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
            within: None,
        })
    }
}

/// Rights of an export.
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
    file_system: FileSystem,
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
        let dir = match &spec.within {
            Some(root) => open_within(root, &path).map_err(described)?,
            None => lookup::open_dir(&path)?,
        };
        if lookup::file_type(&dir)? != libc::S_IFDIR {
            return Err(Errno::ENOTDIR.into());
        }
        Ok(Self {
            file_system: FileSystem::of(&dir)?,
            dir,
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

/// Identity of an export, however its name is spelled. Two names of the table are two exports, also when they have the
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
    /// Returns the identity that the name stands for.
    pub fn id(&self) -> &ExportId {
        &self.id
    }
}

/// The exports of a server.
#[derive(Debug)]
pub struct Exports {
    named: RwLock<Table>,
    folder: Option<Folder>,
    caching: Caching,
    writers: Arc<WriterTable>,
    boot: Boot,
}

/// Why a device was not opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenError {
    /// As [`Exports::open`].
    Errno(Errno),
    /// A writer of the device is being closed; see [`Exports::when_closed`].
    Closing(Closing),
}

impl From<Errno> for OpenError {
    fn from(e: Errno) -> Self {
        Self::Errno(e)
    }
}

/// A device whose writer is being closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closing(DeviceKey);

/// An open export. [Closing](Self::close) it, or dropping it, makes its writes durable, then admits the next writer; this waits for the
/// disk.
#[derive(Debug)]
pub struct OpenExport {
    // Dropped in this order. Operations in flight keep the image.
    image: Arc<Image>,
    writer: Option<WriterSlot>,
    instance: Option<Instance>,
}

impl OpenExport {
    /// The bytes.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Returns the instance of the cache in which acknowledged writes lie until a flush: equal for as long as nothing is lost of them.
    /// `None` if unknown.
    pub fn instance(&self) -> Option<Instance> {
        self.instance
    }

    pub(crate) fn share(&self) -> &Arc<Image> {
        &self.image
    }

    /// The file system that closing it may wait for.
    pub fn file_system(&self) -> FileSystem {
        self.image.file_system()
    }

    /// Announces that it is about to be closed: clients that want to write wait for that instead of being refused. Never waits.
    pub fn begin_close(&mut self) {
        if let Some(writer) = &mut self.writer {
            writer.begin_close();
        }
    }

    /// Makes what was written durable, closes it, and admits the next writer. Waits for the disk.
    pub fn close(self) {
        self.image.make_durable();
    }
}

impl From<Image> for OpenExport {
    /// An image that is in no table of exports.
    fn from(image: Image) -> Self {
        Self {
            image: Arc::new(image),
            writer: None,
            instance: None,
        }
    }
}

/// The exports with names of their own.
type Table = BTreeMap<Vec<u8>, Named>;

#[derive(Debug)]
struct Named {
    spec: ExportSpec,
    file_system: FileSystem,
}

/// Makes a table of names; every path can be opened as its export says.
fn table(named: impl IntoIterator<Item = ExportSpec>, caching: Caching) -> io::Result<Table> {
    let mut table = Table::new();
    for mut spec in named {
        // The process may change its folder later.
        spec.path = std::path::absolute(&spec.path)?;
        let image = spec
            .open(!spec.read_only, caching)
            .map_err(|e| named_error(&format!("export {} = {}", spec.name, spec.path.display()), e))?;
        let file_system = image.file_system();
        let name = key_of(spec.name.as_bytes()).map_err(|e| named_error(&spec.name, e))?;
        if let Some(other) = table.insert(name, Named { spec, file_system }) {
            let e = format!("export {} is there twice", other.spec.name);
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
        Self::on(Boot::of_system(), named, folder, caching)
    }

    /// The same on a machine that was booted then.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn on(
        boot: Boot,
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
            writers: Arc::default(),
            boot,
        }))
    }

    /// The table of names.
    pub fn named(&self) -> Vec<ExportSpec> {
        self.named.read().values().map(|named| named.spec.clone()).collect()
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

    /// Finds the export of a name.
    ///
    /// # Errors
    /// EINVAL for a bad name, ENOENT when there is none, EXDEV when it leads out of the folder, and those of `open`.
    pub fn find(&self, session: &str, name: &[u8]) -> Result<Found, Errno> {
        let key = key_of(name)?;
        let named = self.named.read().get(&key).map(|named| named.spec.clone());
        if let Some(spec) = named {
            return Ok(Found {
                id: ExportId(Id::Named(key)),
                handle: spec.handle()?,
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

    /// The file system that opening this name may wait for; files of the folder count as the folder's. Never waits.
    pub fn file_system(&self, name: &[u8]) -> FileSystem {
        let named = key_of(name).ok().and_then(|key| {
            let named = self.named.read();
            named.get(&key).map(|named| named.file_system)
        });
        let folder = || self.folder.as_ref().map(|folder| folder.file_system);
        named.or_else(folder).unwrap_or_default()
    }

    /// Opens what was found.
    ///
    /// # Errors
    /// As [`open`](Self::open); EPERM also while a writer is being closed.
    pub fn open_found(self: &Arc<Self>, found: Found, mode: AccessMode) -> Result<OpenExport, Errno> {
        self.try_open(found, mode).map_err(|e| match e {
            OpenError::Errno(e) => e,
            OpenError::Closing(_) => Errno::EPERM,
        })
    }

    /// Opens what was found, unless it has to wait for a writer that is being closed.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`OpenError::Closing`].
    pub fn try_open(&self, found: Found, mode: AccessMode) -> Result<OpenExport, OpenError> {
        if found.access.read_only && mode.writable() {
            return Err(Errno::EACCES.into());
        }
        let key = device_key(&found.handle)?;
        let writer = mode
            .writable()
            .then(|| {
                let lock = || lock_out_others(&found.handle);
                self.writers.admit(key, found.access.migrate, mode, lock)
            })
            .transpose()
            .map_err(|refused| match refused {
                Refused::Errno(e) => OpenError::Errno(e),
                Refused::Closing(key) => OpenError::Closing(Closing(key)),
            })?;
        let (failed, failures) = SyncFailures::of_process().open(key);
        let image = Image::from_handle(&found.handle, mode.writable(), self.caching, found.label)?;
        Ok(OpenExport {
            instance: image.instance(&self.boot, failures),
            image: Arc::new(image.sharing(failed)),
            writer,
        })
    }

    /// Calls `retry` when the writer has been closed: in the thread that closes it, or at once if it is closed by now.
    pub fn when_closed(&self, closing: Closing, retry: impl FnOnce() + Send + 'static) {
        self.writers.when_closed(closing.0, Box::new(retry));
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
    let io = described(e);
    io::Error::new(io.kind(), format!("{what}: {io}"))
}

fn described(e: Errno) -> io::Error {
    let io = io::Error::from(e);
    let text = match e {
        Errno::ENOTBLK => "neither an image file nor a block device",
        Errno::EXDEV => "it leads out of the folder that it has to be in",
        _ => return io,
    };
    io::Error::new(io.kind(), text)
}

#[cfg(test)]
mod tests;
