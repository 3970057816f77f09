//! Geometry of a file or a block device.

use std::{
    fs::{self, File},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use rnbd::{Errno, block::Geometry, proto::SECTOR};

use crate::{probe, sys};

/// Longest discard and range of zeroes told to clients for an image file: short enough not to occupy the disk for long.
const MAX_FILE_DISCARD: u64 = 1 << 30;
/// Largest alignment of direct I/O that is passed on to clients as their block size: Linux takes no larger one than a page.
const MAX_ALIGNMENT: u32 = 4096;

/// Kind of file that an image is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    File,
    Block,
}

/// Alignment of direct I/O, bytes, powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Alignment {
    /// Memory.
    pub(crate) memory: u32,
    /// Offsets and lengths; at least 512.
    pub(crate) offset: u32,
}

impl Alignment {
    /// Alignment of a file that was opened with O_DIRECT. `None`: the page cache is the better way, or the only one.
    pub(crate) fn of(file: &File, kind: Kind) -> Result<Option<Self>, Errno> {
        if kind == Kind::File && probe::is_in_memory(file) {
            return Ok(None);
        }
        let (memory, offset) = match (sys::direct_alignment(file), kind) {
            (Some(told), _) => told,
            (None, Kind::Block) => {
                let block: u32 = sys::get_ioctl(file, sys::BLKSSZGET)?;
                (block, block)
            }
            // Whatever the disk below has for blocks.
            (None, Kind::File) => (MAX_ALIGNMENT, MAX_ALIGNMENT),
        };
        Ok(Self::new(memory, offset))
    }

    fn new(memory: u32, offset: u32) -> Option<Self> {
        let usable = |n: u32| n.is_power_of_two() && n <= MAX_ALIGNMENT;
        (usable(memory) && usable(offset)).then(|| Self {
            memory,
            offset: offset.max(SECTOR as u32),
        })
    }

    /// Whether an operation can go straight to the device.
    pub(crate) fn fits(self, offset: u64, len: u64, memory: usize) -> bool {
        (offset | len) & u64::from(self.offset - 1) == 0 && memory & (self.memory as usize - 1) == 0
    }
}

/// Rounds down to whole units.
pub(crate) fn whole(bytes: u64, unit: u32) -> u64 {
    let unit = u64::from(unit.max(1));
    bytes / unit * unit
}

/// Returns the geometry of a regular file of so many bytes.
pub(crate) fn of_file(bytes: u64, direct: Option<Alignment>) -> Geometry {
    let logical = direct.map_or(SECTOR as u32, |a| a.offset);
    Geometry {
        size: whole(bytes, logical),
        logical_block_size: logical,
        physical_block_size: logical.max(4096),
        max_transfer: 1 << 20,
        max_discard: MAX_FILE_DISCARD,
        discard_granularity: 4096,
        read_only: false,
        write_cache: true,
        fua: true,
        max_write_zeroes: MAX_FILE_DISCARD,
        queue_depth: 128,
    }
}

/// Returns the geometry of a block device.
pub(crate) fn of_block(file: &File, direct: Option<Alignment>) -> Result<Geometry, Errno> {
    let size: u64 = sys::get_ioctl(file, sys::BLKGETSIZE64)?;
    let logical: u32 = sys::get_ioctl(file, sys::BLKSSZGET)?;
    let physical: u32 = sys::get_ioctl(file, sys::BLKPBSZGET)?;
    let read_only: u32 = sys::get_ioctl(file, sys::BLKROGET)?;
    if !logical.is_power_of_two() || u64::from(logical) < SECTOR {
        return Err(Errno::EINVAL);
    }
    let logical = direct.map_or(logical, |a| a.offset.max(logical));
    let queue = queue_folder(file)?;
    let attr = |name: &str| -> u64 {
        queue
            .as_ref()
            .and_then(|q| fs::read_to_string(q.join(name)).ok())
            .and_then(|s| s.trim().parse().ok())
            .unwrap_or(0)
    };
    let granularity = u32::try_from(attr("discard_granularity")).unwrap_or(0);
    Ok(Geometry {
        size: whole(size, logical),
        logical_block_size: logical,
        physical_block_size: physical.max(logical),
        max_transfer: 1 << 20,
        max_discard: whole(attr("discard_max_bytes"), logical),
        discard_granularity: granularity,
        read_only: read_only != 0,
        write_cache: true,
        fua: true,
        max_write_zeroes: whole(attr("write_zeroes_max_bytes"), logical),
        queue_depth: 128,
    })
}

/// The device's request queue in sysfs; a partition uses its disk's.
fn queue_folder(file: &File) -> Result<Option<PathBuf>, Errno> {
    let rdev = sys::stat(file)?.st_rdev;
    let device = format!("/sys/dev/block/{}:{}", libc::major(rdev), libc::minor(rdev));
    Ok(["queue", "../queue"]
        .iter()
        .map(|q| Path::new(&device).join(q))
        .find(|p| p.is_dir()))
}

/// Whether the file system makes holes: asked with one beyond the end, where it changes nothing.
pub(crate) fn can_punch(file: &File, size: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    sys::allocate(file.as_raw_fd(), mode, size, 4096).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_io_makes_the_blocks_that_clients_see() {
        let a = Alignment::new(4, 4096).unwrap();
        let g = of_file(10_000, Some(a));
        assert_eq!(
            (g.size, g.logical_block_size, g.physical_block_size),
            (8192, 4096, 4096)
        );
        assert!(a.fits(8192, 4096, 0x1004));
        for (offset, len, memory) in [(512, 4096, 0), (0, 512, 0), (0, 4096, 2)] {
            assert!(!a.fits(offset, len, memory), "{offset}, {len}, {memory}");
        }
    }

    #[test]
    fn alignments_that_nobody_could_keep_to_are_refused() {
        assert_eq!(Alignment::new(0, 0), None, "no direct I/O");
        assert_eq!(Alignment::new(512, 65_536), None, "more than a page");
        assert_eq!(Alignment::new(512, 768), None);
        // A sector at least.
        assert_eq!(Alignment::new(1, 1).map(|a| a.offset), Some(512));
    }
}
