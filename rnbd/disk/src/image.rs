//! An image file or a block device that is open, and what has become of it.

use std::{
    fs::{File, Metadata},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::UNIX_EPOCH,
};

use rnbd::{Errno, block::Geometry, proto::instance::Instance, server::sync::SyncState};

use crate::{
    boot::Boot,
    file_system::FileSystem,
    geometry::{self, Alignment, Kind},
    lookup,
    probe::Traits,
    sys,
    throttle::Throttle,
};

/// For all images: a peer can have one opened again and again, so a throttle of each would let a line through each time.
static LOG: Throttle = Throttle::new();
static ODD_SIZE_LOG: Throttle = Throttle::new();
static CACHED_LOG: Throttle = Throttle::new();

/// Whether the page cache takes part.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Caching {
    /// Reads and writes go through it.
    #[default]
    PageCache,
    /// They go round it (O_DIRECT), where the file can do that; a line in the log says where it can't. Clients then see what the
    /// device below takes for the block size.
    Direct,
}

/// Abilities that a file lacks, which need not be tried again.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// `RWF_DSYNC`.
    pub(crate) dsync: AtomicBool,
    /// `FALLOC_FL_ZERO_RANGE`.
    pub(crate) zero_range: AtomicBool,
    /// `FALLOC_FL_PUNCH_HOLE`.
    pub(crate) punch: AtomicBool,
}

/// A file's size, looked at when it is first wanted, without waiting for its file system.
#[derive(Debug, Default)]
pub(crate) struct Look(Option<Result<u64, Errno>>);

/// An open image file or block device. Dropping a written one makes its data durable.
#[derive(Debug)]
pub struct Image {
    file: File,
    kind: Kind,
    traits: Traits,
    direct: Option<Alignment>,
    label: String,
    file_system: FileSystem,
    geometry: Geometry,
    /// Bytes. Looked at again when a request reaches beyond, and now and then: a device may grow and shrink while it is open.
    size: AtomicU64,
    /// State of writes through this descriptor.
    sync: SyncState,
    pub(crate) missing: Missing,
}

impl Image {
    /// Opens a path that the operator named.
    ///
    /// # Errors
    /// ENOTBLK when it is neither a regular file nor a block device, EACCES when a read-only device is to be written,
    /// and those of `open`.
    pub fn open(path: &Path, writable: bool, caching: Caching) -> Result<Self, Errno> {
        let label = path.display().to_string();
        Self::from_handle(&lookup::open_path(path)?, writable, caching, label)
    }

    /// An image of a file that is already open, an anonymous one for instance, through the page cache.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_file(file: File, writable: bool, label: impl Into<String>) -> Result<Self, Errno> {
        let kind = kind_of(&file)?;
        Self::new(file, kind, None, writable, label.into())
    }

    pub(crate) fn from_handle(
        handle: &OwnedFd,
        writable: bool,
        caching: Caching,
        label: String,
    ) -> Result<Self, Errno> {
        if caching == Caching::Direct {
            if let Some((file, kind, alignment)) = open_direct(handle, writable)? {
                return Self::new(file, kind, Some(alignment), writable, label);
            }
            if let Some(suppressed) = CACHED_LOG.pass() {
                tracing::info!(image = label, suppressed, "no direct I/O here, the page cache is used");
            }
        }
        Self::from_file(lookup::reopen(handle, writable, 0)?, writable, label)
    }

    fn new(file: File, kind: Kind, direct: Option<Alignment>, writable: bool, label: String) -> Result<Self, Errno> {
        let bytes = file.metadata()?.len();
        let mut geometry = match kind {
            Kind::Block => geometry::of_block(&file, direct)?,
            Kind::File => geometry::of_file(bytes, direct),
        };
        if writable && geometry.read_only {
            return Err(Errno::EACCES);
        }
        if kind == Kind::File
            && bytes != geometry.size
            && let Some(suppressed) = ODD_SIZE_LOG.pass()
        {
            tracing::warn!(
                image = label,
                bytes,
                suppressed,
                "size is no multiple of {}; the last bytes are left out",
                geometry.logical_block_size
            );
        }
        geometry.read_only = !writable;
        if !writable || (kind == Kind::File && !geometry::can_punch(&file, bytes)) {
            geometry.max_discard = 0;
            geometry.max_write_zeroes = 0;
        }
        Ok(Self {
            traits: Traits::of(&file, kind == Kind::File, direct.is_some()),
            file_system: FileSystem::of(&file)?,
            file,
            kind,
            direct,
            label,
            missing: Missing {
                punch: AtomicBool::new(geometry.max_discard == 0),
                ..Missing::default()
            },
            size: AtomicU64::new(geometry.size),
            geometry,
            sync: SyncState::default(),
        })
    }

    /// Shares it with others of the same file or device whether a sync has failed.
    pub(crate) fn sharing(mut self, sync_failed: Arc<AtomicBool>) -> Self {
        self.sync = SyncState::sharing(sync_failed);
        self
    }

    /// Names where its acknowledged writes lie until a sync: in the caches of this boot, for this file or this attachment of a device,
    /// after so many failed syncs.
    pub(crate) fn instance(&self, boot: &Boot, failures: u64) -> Option<Instance> {
        let boot = boot.id()?;
        let meta = self.file.metadata().ok()?;
        let (device, number, since) = match self.kind {
            // A number of a device is used again, its sequence number is not (Linux 5.15; before that there is none).
            Kind::Block => (
                meta.rdev(),
                0,
                sys::get_ioctl(&self.file, sys::BLKGETDISKSEQ).unwrap_or(0),
            ),
            // That of a file is, too; not every file system knows since when.
            Kind::File => (meta.dev(), meta.ino(), created(&meta)),
        };
        let numbers = [u64::from(self.is_block()), device, number, since, failures];
        let numbers = numbers.map(u64::to_le_bytes);
        Some(Instance::of([boot, numbers.as_flattened()]))
    }

    /// Size, limits, abilities.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size.load(Relaxed),
            ..self.geometry
        }
    }

    /// The file system that its calls may wait for.
    pub fn file_system(&self) -> FileSystem {
        self.file_system
    }

    /// Returns its origin, for messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Whether reads and writes go round the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    pub(crate) fn direct(&self) -> Option<Alignment> {
        self.direct
    }

    pub(crate) fn traits(&self) -> Traits {
        self.traits
    }

    pub(crate) fn is_block(&self) -> bool {
        self.kind == Kind::Block
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// A line in the log, if there was none a moment ago.
    pub(crate) fn complain(&self, what: &str, offset: u64, len: u64, e: Errno) {
        if let Some(suppressed) = LOG.pass() {
            tracing::error!(image = self.label, offset, len, suppressed, "{what}: {e}");
        }
    }

    /// Complains of a file that is shorter than it was.
    pub(crate) fn truncated(&self, offset: u64, len: u64) -> Errno {
        let what = "the image was truncated while it is served";
        self.complain(what, offset, len, Errno::EIO);
        Errno::EIO
    }

    /// Bytes of the file or the device, as of the look.
    fn bytes(&self, look: &mut Look) -> Result<u64, Errno> {
        let measure = || match self.kind {
            Kind::File => sys::known_size(&self.file),
            Kind::Block => sys::get_ioctl(&self.file, sys::BLKGETSIZE64),
        };
        *look.0.get_or_insert_with(measure)
    }

    /// Before every access: inside the device.
    pub(crate) fn check_range(&self, offset: u64, len: u64, look: &mut Look) -> Result<(), Errno> {
        if !self.geometry().contains(offset, len) && !self.resized(look).contains(offset, len) {
            self.complain("access beyond the end of the device", offset, len, Errno::EIO);
            return Err(Errno::EIO);
        }
        Ok(())
    }

    /// The geometry after another look at the size.
    fn resized(&self, look: &mut Look) -> Geometry {
        if let Ok(bytes) = self.bytes(look) {
            let size = geometry::whole(bytes, self.geometry.logical_block_size);
            self.size.store(size, Relaxed);
        }
        self.geometry()
    }

    /// Looks at the size. Waits for the file system.
    pub fn look_at_size(&self) {
        let asked = (self.kind == Kind::File).then(|| sys::stat(&self.file).map(|st| st.st_size.unsigned_abs()));
        self.resized(&mut Look(asked));
    }

    /// Before a change: allowed, inside the device, and the file still reaches that far. A write beyond the end of a
    /// file that was cut would make it grow again around the data that is gone.
    pub(crate) fn check_change(&self, offset: u64, len: u64, look: &mut Look) -> Result<(), Errno> {
        if self.geometry.read_only {
            return Err(Errno::EROFS);
        }
        self.check_range(offset, len, look)?;
        if self.kind == Kind::File && offset + len > self.bytes(look)? {
            return Err(self.truncated(offset, len));
        }
        Ok(())
    }

    /// Returns the state of writes through it.
    pub(crate) fn sync(&self) -> &SyncState {
        &self.sync
    }

    /// Syncs what no flush has covered, as the kernel does at the last close of a block device. Waits for the disk.
    pub(crate) fn make_durable(&self) {
        while self.sync.wants_sync() {
            let covered = self.sync.sync_begins();
            match sys::sync(self.file.as_raw_fd()) {
                Err(Errno::EINTR) => {}
                Err(e) => return self.sync_has_failed(e),
                Ok(()) => return self.sync.sync_ends(covered),
            }
        }
    }

    /// A sync has failed.
    pub(crate) fn sync_has_failed(&self, e: Errno) {
        self.sync.sync_failed();
        tracing::error!(image = self.label, "flush failed, acknowledged writes may be lost: {e}");
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.make_durable();
    }
}

/// When a file was created, nanoseconds; 0: not known.
fn created(meta: &Metadata) -> u64 {
    let since = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_nanos() as u64)
}

fn kind_of(file: &File) -> Result<Kind, Errno> {
    let meta = file.metadata()?;
    if meta.file_type().is_block_device() {
        Ok(Kind::Block)
    } else if meta.is_file() {
        Ok(Kind::File)
    } else {
        Err(Errno::ENOTBLK)
    }
}

/// Opens for direct I/O, where the file can do that.
fn open_direct(handle: &OwnedFd, writable: bool) -> Result<Option<(File, Kind, Alignment)>, Errno> {
    let file = match lookup::reopen(handle, writable, libc::O_DIRECT) {
        // The file system does not know it.
        Err(Errno::EINVAL) => return Ok(None),
        file => file?,
    };
    let kind = kind_of(&file)?;
    Ok(Alignment::of(&file, kind)?.map(|alignment| (file, kind, alignment)))
}
