//! An image file or a block device, by positioned reads and writes on raw memory.

use std::{
    fs::{self, File},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
    },
};

use super::{lookup, throttle::Throttle};
use crate::{block::Geometry, errno::Errno, proto::SECTOR};

// `linux/fs.h`; libc has them for some targets only.
const BLKROGET: u64 = 0x125e;
const BLKSSZGET: u64 = 0x1268;
const BLKDISCARD: u64 = 0x1277;
const BLKPBSZGET: u64 = 0x127b;
const BLKZEROOUT: u64 = 0x127f;
const BLKGETSIZE64: u64 = 0x8008_1272;

/// Zeroes for where neither file system nor device can make them.
static ZEROES: [u8; 256 * 1024] = [0; 256 * 1024];

/// Longest discard told to clients for an image file: one call, short enough not to hold a thread for long.
const MAX_FILE_DISCARD: u64 = 1 << 30;

/// For all images: a peer can have one opened again and again, so a throttle of each would let a line through each time.
static LOG: LazyLock<Throttle> = LazyLock::new(Throttle::new);
static ODD_SIZE_LOG: LazyLock<Throttle> = LazyLock::new(Throttle::new);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    File,
    Block,
}

/// An open image file or block device. Operations block and may be called from many threads. Dropping a written one
/// makes its data durable.
#[derive(Debug)]
pub struct Image {
    file: File,
    kind: Kind,
    label: String,
    geometry: Geometry,
    /// Bytes. Looked at again when a request reaches beyond: a device may grow while it is open.
    size: AtomicU64,
    /// Something was written through this descriptor.
    dirty: AtomicBool,
    /// Data was lost after it was acknowledged: the kernel drops dirty pages after a failed sync, and a second sync
    /// would report success. From then on every flush fails.
    sync_failed: AtomicBool,
    no_dsync: AtomicBool,
    no_zero_range: AtomicBool,
    no_punch: AtomicBool,
}

impl Image {
    /// Opens a path that the operator named.
    ///
    /// # Errors
    /// ENOTBLK when it is neither a regular file nor a block device, EACCES when a read-only device is to be written,
    /// and those of `open`.
    pub fn open(path: &Path, writable: bool) -> Result<Self, Errno> {
        Self::from_handle(&lookup::open_path(path)?, writable, path.display().to_string())
    }

    /// An image of a file that is already open, an anonymous one for instance.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_file(file: File, writable: bool, label: impl Into<String>) -> Result<Self, Errno> {
        let meta = file.metadata()?;
        let (kind, mut geometry) = if meta.file_type().is_block_device() {
            (Kind::Block, block_geometry(&file)?)
        } else if meta.is_file() {
            (Kind::File, file_geometry(meta.len()))
        } else {
            return Err(Errno::ENOTBLK);
        };
        let label = label.into();
        if writable && geometry.read_only {
            return Err(Errno::EACCES);
        }
        if kind == Kind::File
            && meta.len() != geometry.size
            && let Some(suppressed) = ODD_SIZE_LOG.pass()
        {
            tracing::warn!(
                image = label,
                bytes = meta.len(),
                suppressed,
                "size is no multiple of 512; the last bytes are left out"
            );
        }
        geometry.read_only = !writable;
        if !writable {
            geometry.max_discard = 0;
        } else if kind == Kind::File && !can_punch(&file, meta.len()) {
            geometry.max_discard = 0;
            geometry.fast_zeroes = false;
        }
        Ok(Self {
            file,
            kind,
            label,
            no_punch: AtomicBool::new(geometry.max_discard == 0),
            size: AtomicU64::new(geometry.size),
            geometry,
            dirty: AtomicBool::new(false),
            sync_failed: AtomicBool::new(false),
            no_dsync: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
        })
    }

    pub(crate) fn from_handle(handle: &OwnedFd, writable: bool, label: String) -> Result<Self, Errno> {
        Self::from_file(lookup::reopen(handle, writable)?, writable, label)
    }

    /// Size, limits, abilities.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size.load(Relaxed),
            ..self.geometry
        }
    }

    /// Where it came from, for messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    fn complain(&self, what: &str, offset: u64, len: u64, e: Errno) {
        if let Some(suppressed) = LOG.pass() {
            tracing::error!(image = self.label, offset, len, suppressed, "{what}: {e}");
        }
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if !self.geometry().contains(offset, len) && !self.grown().contains(offset, len) {
            self.complain("access beyond the end of the device", offset, len, Errno::EIO);
            return Err(Errno::EIO);
        }
        Ok(())
    }

    /// The geometry after another look at the size.
    fn grown(&self) -> Geometry {
        let bytes = match self.kind {
            Kind::File => lookup::stat(&self.file).map(|st| u64::try_from(st.st_size).unwrap_or(0)),
            Kind::Block => get_ioctl(&self.file, BLKGETSIZE64),
        };
        let unit = u64::from(self.geometry.logical_block_size);
        self.size.fetch_max(bytes.unwrap_or(0) / unit * unit, Relaxed);
        self.geometry()
    }

    /// Before a change: allowed, inside the device, and the file still reaches that far. A write beyond the end of a
    /// file that was cut would make it grow again around the data that is gone.
    fn check_change(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if self.geometry.read_only {
            return Err(Errno::EROFS);
        }
        self.check_range(offset, len)?;
        if self.kind == Kind::File {
            let now = u64::try_from(lookup::stat(&self.file)?.st_size).unwrap_or(0);
            if offset + len > now {
                self.complain("the image was truncated while it is served", offset, len, Errno::EIO);
                return Err(Errno::EIO);
            }
        }
        Ok(())
    }

    /// Fills `len` bytes at `ptr` from `offset`.
    ///
    /// # Errors
    /// EIO beyond the end of the device or of a file that was truncated meanwhile, and those of `pread`.
    ///
    /// # Safety
    /// `ptr` is valid for writes of `len` bytes.
    pub unsafe fn read(&self, offset: u64, ptr: *mut u8, len: usize) -> Result<(), Errno> {
        self.check_range(offset, len as u64)?;
        let mut done = 0;
        while done < len {
            // SAFETY: the caller's memory from `done` on; `offset` fits because the device's size does.
            let n = unsafe {
                libc::pread64(
                    self.file.as_raw_fd(),
                    ptr.add(done).cast(),
                    len - done,
                    (offset + done as u64) as i64,
                )
            };
            match usize::try_from(n) {
                Ok(0) => {
                    self.complain(
                        "the image was truncated while it is served",
                        offset,
                        len as u64,
                        Errno::EIO,
                    );
                    return Err(Errno::EIO);
                }
                Ok(n) => done += n,
                Err(_) => match Errno::last() {
                    Errno::EINTR => {}
                    e => {
                        self.complain("read failed", offset, len as u64, e);
                        return Err(e);
                    }
                },
            }
        }
        Ok(())
    }

    /// Writes `len` bytes at `ptr` to `offset`; with `fua` they are on stable storage when it returns.
    ///
    /// # Errors
    /// EROFS, EIO beyond the end of the device or of a file that was truncated meanwhile, ENOSPC when the disk below a
    /// sparse image is full, and those of `pwrite`. Part of the bytes may have been written.
    ///
    /// # Safety
    /// `ptr` is valid for reads of `len` bytes.
    pub unsafe fn write(&self, offset: u64, ptr: *const u8, len: usize, fua: bool) -> Result<(), Errno> {
        self.check_change(offset, len as u64)?;
        if fua {
            self.check_synced()?;
        }
        // SAFETY: passed on.
        let r = unsafe { self.write_all(offset, ptr, len, fua) };
        self.dirty.store(true, SeqCst);
        r.inspect_err(|e| self.complain("write failed", offset, len as u64, *e))
    }

    /// # Safety
    /// As [`write`](Self::write).
    unsafe fn write_all(&self, offset: u64, ptr: *const u8, len: usize, fua: bool) -> Result<(), Errno> {
        let mut done = 0;
        let mut dsync = fua && !self.no_dsync.load(Relaxed);
        while done < len {
            let at = (offset + done as u64) as i64;
            // SAFETY: the caller's memory from `done` on.
            let rest = unsafe { ptr.add(done) };
            let iov = libc::iovec {
                iov_base: rest.cast_mut().cast(),
                iov_len: len - done,
            };
            // SAFETY: one element that describes readable memory.
            let n = unsafe {
                if dsync {
                    libc::pwritev2(self.file.as_raw_fd(), &raw const iov, 1, at, libc::RWF_DSYNC)
                } else {
                    libc::pwrite64(self.file.as_raw_fd(), iov.iov_base, iov.iov_len, at)
                }
            };
            match usize::try_from(n) {
                Ok(0) => return Err(Errno::EIO),
                Ok(n) => done += n,
                Err(_) => match Errno::last() {
                    Errno::EINTR => {}
                    Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL if dsync => {
                        self.no_dsync.store(true, Relaxed);
                        dsync = false;
                    }
                    e => {
                        // The system call can have failed in its sync: then other data may be lost as well.
                        if dsync && e == Errno::EIO {
                            self.sync_failed.store(true, SeqCst);
                        }
                        return Err(e);
                    }
                },
            }
        }
        if fua && !dsync { self.sync() } else { Ok(()) }
    }

    fn check_synced(&self) -> Result<(), Errno> {
        if self.sync_failed.load(SeqCst) {
            Err(Errno::EIO)
        } else {
            Ok(())
        }
    }

    fn sync(&self) -> Result<(), Errno> {
        loop {
            // SAFETY: a plain call on an open descriptor.
            if unsafe { libc::fdatasync(self.file.as_raw_fd()) } == 0 {
                return Ok(());
            }
            match Errno::last() {
                Errno::EINTR => {}
                e => {
                    self.sync_failed.store(true, SeqCst);
                    tracing::error!(image = self.label, "flush failed, acknowledged writes may be lost: {e}");
                    return Err(e);
                }
            }
        }
    }

    /// Makes every write that has returned durable.
    ///
    /// # Errors
    /// Those of `fdatasync`; EIO for ever after one of them.
    pub fn flush(&self) -> Result<(), Errno> {
        if self.geometry.read_only {
            return Ok(());
        }
        self.check_synced()?;
        self.sync()
    }

    /// Gives the space of a range back. In an image file it reads as zeroes afterwards.
    ///
    /// # Errors
    /// EOPNOTSUPP when file system or device can't, EROFS, EIO as for writes.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.check_change(offset, len)?;
        if self.geometry.max_discard == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if len == 0 {
            return Ok(());
        }
        let r = match self.kind {
            Kind::File => self.fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len),
            Kind::Block => self.range_ioctl(BLKDISCARD, offset, len),
        };
        self.dirty.store(true, SeqCst);
        r.inspect_err(|e| self.complain("discard failed", offset, len, *e))
    }

    /// Makes a range zero, with a hole when `may_unmap` allows one, as the file system or device can, else by writing.
    ///
    /// # Errors
    /// As for writes.
    pub fn write_zeroes(&self, offset: u64, len: u64, fua: bool, may_unmap: bool) -> Result<(), Errno> {
        self.check_change(offset, len)?;
        if fua {
            self.check_synced()?;
        }
        if len == 0 {
            return Ok(());
        }
        let r = if self.zero_range(offset, len, may_unmap)? {
            Ok(())
        } else {
            self.zero_by_writing(offset, len)
        };
        self.dirty.store(true, SeqCst);
        r.inspect_err(|e| self.complain("writing zeroes failed", offset, len, *e))?;
        if fua { self.sync() } else { Ok(()) }
    }

    /// `false` when there is no short way.
    fn zero_range(&self, offset: u64, len: u64, may_unmap: bool) -> Result<bool, Errno> {
        if self.kind == Kind::Block {
            return match self.range_ioctl(BLKZEROOUT, offset, len) {
                Ok(()) => Ok(true),
                Err(Errno::EOPNOTSUPP | Errno::EINVAL) => Ok(false),
                Err(e) => Err(e),
            };
        }
        let punch = (&self.no_punch, libc::FALLOC_FL_PUNCH_HOLE);
        let zero = (&self.no_zero_range, libc::FALLOC_FL_ZERO_RANGE);
        for (missing, mode) in if may_unmap {
            [Some(punch), Some(zero)]
        } else {
            [Some(zero), None]
        }
        .into_iter()
        .flatten()
        {
            if missing.load(Relaxed) {
                continue;
            }
            match self.fallocate(mode | libc::FALLOC_FL_KEEP_SIZE, offset, len) {
                Ok(()) => return Ok(true),
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => missing.store(true, Relaxed),
                Err(e) => return Err(e),
            }
        }
        Ok(false)
    }

    fn zero_by_writing(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let mut at = offset;
        while at < offset + len {
            let n = (offset + len - at).min(ZEROES.len() as u64) as usize;
            // SAFETY: `n` bytes of a static.
            unsafe { self.write_all(at, ZEROES.as_ptr(), n, false)? };
            at += n as u64;
        }
        Ok(())
    }

    fn fallocate(&self, mode: i32, offset: u64, len: u64) -> Result<(), Errno> {
        loop {
            // SAFETY: a plain call on an open descriptor.
            if unsafe { libc::fallocate64(self.file.as_raw_fd(), mode, offset as i64, len as i64) } == 0 {
                return Ok(());
            }
            match Errno::last() {
                Errno::EINTR => {}
                e => return Err(e),
            }
        }
    }

    fn range_ioctl(&self, request: u64, offset: u64, len: u64) -> Result<(), Errno> {
        let range = [offset, len];
        // SAFETY: these requests read two 64-bit numbers.
        if unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, range.as_ptr()) } == 0 {
            return Ok(());
        }
        Err(Errno::last())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // As the kernel does at the last close of a block device: nobody may be able to flush these writes later.
        if *self.dirty.get_mut() && !*self.sync_failed.get_mut() {
            let _ = self.sync();
        }
    }
}

/// Whether the file system makes holes: asked with one beyond the end, where it changes nothing.
fn can_punch(file: &File, size: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: a plain call on an open descriptor.
    unsafe { libc::fallocate64(file.as_raw_fd(), mode, size as i64, 4096) == 0 }
}

fn file_geometry(bytes: u64) -> Geometry {
    Geometry {
        size: bytes / SECTOR * SECTOR,
        logical_block_size: SECTOR as u32,
        physical_block_size: 4096,
        max_transfer: 1 << 20,
        max_discard: MAX_FILE_DISCARD,
        discard_granularity: 4096,
        read_only: false,
        write_cache: true,
        fua: true,
        fast_zeroes: true,
        queue_depth: 128,
    }
}

fn block_geometry(file: &File) -> Result<Geometry, Errno> {
    let size: u64 = get_ioctl(file, BLKGETSIZE64)?;
    let logical: u32 = get_ioctl(file, BLKSSZGET)?;
    let physical: u32 = get_ioctl(file, BLKPBSZGET)?;
    let read_only: u32 = get_ioctl(file, BLKROGET)?;
    if !logical.is_power_of_two() || u64::from(logical) < SECTOR {
        return Err(Errno::EINVAL);
    }
    let queue = queue_folder(file)?;
    let attr = |name: &str| -> u64 {
        queue
            .as_ref()
            .and_then(|q| fs::read_to_string(q.join(name)).ok())
            .and_then(|s| s.trim().parse().ok())
            .unwrap_or(0)
    };
    let max_discard = attr("discard_max_bytes");
    let granularity = u32::try_from(attr("discard_granularity")).unwrap_or(0);
    Ok(Geometry {
        size: size / u64::from(logical) * u64::from(logical),
        logical_block_size: logical,
        physical_block_size: physical.max(logical),
        max_transfer: 1 << 20,
        max_discard: max_discard / u64::from(logical) * u64::from(logical),
        discard_granularity: granularity,
        read_only: read_only != 0,
        write_cache: true,
        fua: true,
        fast_zeroes: attr("write_zeroes_max_bytes") != 0,
        queue_depth: 128,
    })
}

/// The device's request queue in sysfs; a partition uses its disk's.
fn queue_folder(file: &File) -> Result<Option<std::path::PathBuf>, Errno> {
    let rdev = lookup::stat(file)?.st_rdev;
    let device = format!("/sys/dev/block/{}:{}", libc::major(rdev), libc::minor(rdev));
    Ok(["queue", "../queue"]
        .iter()
        .map(|q| Path::new(&device).join(q))
        .find(|p| p.is_dir()))
}

/// A request that stores a number.
fn get_ioctl<T: Default>(file: &File, request: u64) -> Result<T, Errno> {
    let mut v = T::default();
    // SAFETY: the callers pair each request with the type that it stores.
    if unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw mut v) } == 0 {
        Ok(v)
    } else {
        Err(Errno::last())
    }
}
