//! Identity of file systems, for queues of work that can hang together.

use std::os::fd::AsRawFd;

use rnbd::Errno;

use crate::sys;

/// A file system (`st_dev`), or a block device, which can hang by itself. A key for work that may wait for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FileSystem {
    block: bool,
    device: u64,
}

impl FileSystem {
    /// The file system of an open file, or the block device itself.
    pub(crate) fn of(fd: &impl AsRawFd) -> Result<Self, Errno> {
        let st = sys::stat(fd)?;
        let block = st.st_mode & libc::S_IFMT == libc::S_IFBLK;
        Ok(Self {
            block,
            device: if block { st.st_rdev } else { st.st_dev },
        })
    }
}
