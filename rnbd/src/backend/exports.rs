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
    sync::Arc,
};

use parking_lot::Mutex;

use super::{Image, lookup};
use crate::{errno::Errno, proto::AccessMode};

/// `%SESSNAME%` in a folder: everything from there on is replaced by the session's name, as in the kernel server's
/// `dev_search_path`.
const SESSION_MARK: &str = "%SESSNAME%";

/// One name and the image file or block device behind it, `NAME=PATH[,ro]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportSpec {
    /// What clients ask for.
    pub name: String,
    /// What they get.
    pub path: PathBuf,
    /// Nobody may write.
    pub read_only: bool,
}

impl FromStr for ExportSpec {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (name, rest) = s
            .split_once('=')
            .ok_or_else(|| format!("{s:?} is not of the form NAME=PATH[,ro]"))?;
        let (path, read_only) = rest.strip_suffix(",ro").map_or((rest, false), |p| (p, true));
        let path = path.strip_suffix(",rw").unwrap_or(path);
        if name.is_empty() || path.is_empty() {
            return Err(format!("{s:?} is not of the form NAME=PATH[,ro]"));
        }
        if name.len() >= crate::proto::NAME_MAX || name.contains("..") {
            return Err(format!(
                "no client can ask for the name {name:?}: at most 254 bytes, without \"..\""
            ));
        }
        Ok(Self {
            name: name.into(),
            path: path.into(),
            read_only,
        })
    }
}

/// A folder whose files and block devices are offered by their path below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FolderSpec {
    /// The folder; may contain `%SESSNAME%`.
    pub path: PathBuf,
    /// Nobody may write.
    pub read_only: bool,
}

impl FromStr for FolderSpec {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (path, read_only) = s.strip_suffix(",ro").map_or((s, false), |p| (p, true));
        if path.is_empty() {
            Err("empty folder name".into())
        } else {
            Ok(Self {
                path: path.into(),
                read_only,
            })
        }
    }
}

#[derive(Debug)]
struct Folder {
    dir: OwnedFd,
    path: PathBuf,
    per_session: bool,
    read_only: bool,
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
            read_only: spec.read_only,
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

/// The exports of a server.
#[derive(Debug)]
pub struct Exports {
    named: BTreeMap<Vec<u8>, ExportSpec>,
    folder: Option<Folder>,
    writers: Mutex<HashMap<DeviceKey, Writers>>,
}

/// Who writes to a device.
#[derive(Debug)]
struct Writers {
    count: u32,
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

/// An export that is open. Dropping it makes its writes durable, then lets the next writer in.
#[derive(Debug)]
pub struct OpenExport {
    // Dropped in this order.
    image: Image,
    _writer: Option<WriterSlot>,
}

impl OpenExport {
    /// The bytes.
    pub fn image(&self) -> &Image {
        &self.image
    }
}

impl Exports {
    /// Checks that every path can be opened as asked and the folder exists.
    ///
    /// # Errors
    /// Names the path that can't, or the name that is there twice.
    pub fn new(named: impl IntoIterator<Item = ExportSpec>, folder: Option<&FolderSpec>) -> io::Result<Arc<Self>> {
        let mut table = BTreeMap::new();
        for mut spec in named {
            // The process may change its folder later.
            spec.path = std::path::absolute(&spec.path)?;
            Image::open(&spec.path, !spec.read_only)
                .map_err(|e| named_error(&format!("export {} = {}", spec.name, spec.path.display()), e))?;
            let name = key_of(spec.name.as_bytes()).map_err(|e| named_error(&spec.name, e))?;
            if let Some(other) = table.insert(name, spec) {
                let e = format!("export {} is there twice", other.name);
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, e));
            }
        }
        let folder = folder
            .map(|f| Folder::new(f).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", f.path.display()))))
            .transpose()?;
        Ok(Arc::new(Self {
            named: table,
            folder,
            writers: Mutex::default(),
        }))
    }

    /// The table of names.
    pub fn named(&self) -> impl Iterator<Item = &ExportSpec> {
        self.named.values()
    }

    /// Opens a device for a session: first by the table of names, then in the folder.
    ///
    /// # Errors
    /// EINVAL for a bad name, ENOENT when there is none, EACCES when a read-only export is to be written, EPERM when
    /// there is a writer already (two for [`AccessMode::Migration`]), EBUSY when another process writes, ENOTBLK, EXDEV, and those of `open`.
    pub fn open(self: &Arc<Self>, session: &str, name: &[u8], mode: AccessMode) -> Result<OpenExport, Errno> {
        let key = key_of(name)?;
        let (handle, read_only, label) = if let Some(spec) = self.named.get(&key) {
            (
                lookup::open_path(&spec.path)?,
                spec.read_only,
                spec.path.display().to_string(),
            )
        } else {
            let folder = self.folder.as_ref().ok_or(Errno::ENOENT)?;
            let label = folder
                .path
                .join(Path::new(std::ffi::OsStr::from_bytes(&key)))
                .display()
                .to_string();
            (folder.open(session, name)?, folder.read_only, label)
        };
        if read_only && mode.writable() {
            return Err(Errno::EACCES);
        }
        let writer = mode.writable().then(|| self.admit_writer(&handle, mode)).transpose()?;
        let image = Image::from_handle(&handle, mode.writable(), label)?;
        Ok(OpenExport { image, _writer: writer })
    }

    fn admit_writer(self: &Arc<Self>, handle: &OwnedFd, mode: AccessMode) -> Result<WriterSlot, Errno> {
        let st = lookup::stat(handle)?;
        let key = match st.st_mode & libc::S_IFMT {
            libc::S_IFBLK => (libc::S_IFBLK, st.st_rdev, 0),
            other => (other, st.st_dev, st.st_ino),
        };
        let limit = if mode == AccessMode::Migration { 2 } else { 1 };
        let mut w = self.writers.lock();
        match w.get_mut(&key) {
            Some(n) if n.count >= limit => return Err(Errno::EPERM),
            Some(n) => n.count += 1,
            None => {
                let lock = lock_out_others(handle)?;
                w.insert(key, Writers { count: 1, _lock: lock });
            }
        }
        Ok(WriterSlot {
            exports: self.clone(),
            key,
        })
    }
}

/// Takes a lock that another server which exports the same file would have to have (`flock`). `None` where the file system
/// has no locks.
fn lock_out_others(handle: &OwnedFd) -> Result<Option<File>, Errno> {
    let file = lookup::reopen(handle, false)?;
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

    use super::*;

    fn image(path: &Path, len: u64) {
        fs::File::create(path).unwrap().set_len(len).unwrap();
    }

    fn spec(name: &str, path: &Path, read_only: bool) -> ExportSpec {
        ExportSpec {
            name: name.into(),
            path: path.into(),
            read_only,
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
        for bad in ["disk", "=x", "disk=", "a..b=x", "d=,ro"] {
            assert!(bad.parse::<ExportSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn one_writer_many_readers_two_for_migration() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        image(&path, 1 << 20);
        fs::hard_link(&path, t.path().join("j")).unwrap();
        let folder = FolderSpec {
            path: t.path().into(),
            read_only: false,
        };
        let ex = Exports::new([spec("disk", &path, false)], Some(&folder)).unwrap();
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
    fn two_servers_do_not_write_to_one_image() {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        image(&path, 4096);
        let [a, b] = [(); 2].map(|()| Exports::new([spec("disk", &path, false)], None).unwrap());
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
        };
        let ex = Exports::new([spec("disk", &path, true)], Some(&folder)).unwrap();
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
            read_only: false,
        };
        let ex = Exports::new([], Some(&folder)).unwrap();
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
        let e = Exports::new([spec("d", Path::new("/nonexistent/i"), false)], None).unwrap_err();
        assert!(e.to_string().contains("/nonexistent/i"), "{e}");
        let e = Exports::new([spec("d", Path::new("/dev/null"), false)], None).unwrap_err();
        assert!(e.to_string().contains("/dev/null: neither an image"), "{e}");
        let f = FolderSpec {
            path: "/nonexistent".into(),
            read_only: false,
        };
        assert!(Exports::new([], Some(&f)).is_err());
    }
}
