//! System calls on files that the standard library does not have.

use std::{
    fs::File,
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use rnbd::Errno;

// `linux/fs.h`; libc has them for some targets only.
pub(crate) const BLKROGET: u64 = 0x125e;
pub(crate) const BLKSSZGET: u64 = 0x1268;
pub(crate) const BLKDISCARD: u64 = 0x1277;
pub(crate) const BLKPBSZGET: u64 = 0x127b;
pub(crate) const BLKZEROOUT: u64 = 0x127f;
pub(crate) const BLKGETSIZE64: u64 = 0x8008_1272;
pub(crate) const BLKGETDISKSEQ: u64 = 0x8008_1280;

/// The last error of a system call on this thread.
pub(crate) fn last() -> Errno {
    io::Error::last_os_error().into()
}

/// Result of a call that returns a number of bytes.
pub(crate) fn counted(n: isize) -> Result<usize, Errno> {
    usize::try_from(n).map_err(|_| last())
}

/// Result of a call that returns 0.
pub(crate) fn checked(n: i32) -> Result<(), Errno> {
    if n == 0 { Ok(()) } else { Err(last()) }
}

/// `fstat`.
pub(crate) fn stat(fd: &impl AsRawFd) -> Result<libc::stat, Errno> {
    let mut st = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: `st` is writable and of the right type.
    checked(unsafe { libc::fstat(fd.as_raw_fd(), st.as_mut_ptr()) })?;
    // SAFETY: all-zero is a valid `stat`, and the call has filled it.
    Ok(unsafe { st.assume_init() })
}

/// The file system's magic number (`linux/magic.h`).
pub(crate) fn file_system(fd: &impl AsRawFd) -> Result<u32, Errno> {
    let mut st = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `st` is writable and of the right type.
    checked(unsafe { libc::fstatfs(fd.as_raw_fd(), st.as_mut_ptr()) })?;
    // SAFETY: all-zero is a valid `statfs`, and the call has filled it.
    let st = unsafe { st.assume_init() };
    // The magic numbers have 32 bits; the field is signed and wider on most targets.
    Ok(st.f_type as u32)
}

/// Returns the alignment of direct I/O on a file: memory, and offsets and lengths; (0, 0): it has none. `None` where the
/// system does not say (Linux before 6.1, and file systems that it has not reached).
pub(crate) fn direct_alignment(fd: &impl AsRawFd) -> Option<(u32, u32)> {
    let st = statx(fd, 0, libc::STATX_DIOALIGN).ok()?;
    (st.stx_mask & libc::STATX_DIOALIGN != 0).then_some((st.stx_dio_mem_align, st.stx_dio_offset_align))
}

/// A file's size as this machine knows it, bytes: a network file system does not ask its server.
pub(crate) fn known_size(fd: &impl AsRawFd) -> Result<u64, Errno> {
    statx(fd, libc::AT_STATX_DONT_SYNC, libc::STATX_SIZE).map(|st| st.stx_size)
}

fn statx(fd: &impl AsRawFd, flags: libc::c_int, mask: libc::c_uint) -> Result<libc::statx, Errno> {
    let mut st = MaybeUninit::<libc::statx>::zeroed();
    let flags = flags | libc::AT_EMPTY_PATH;
    // SAFETY: the path is NUL-terminated, and `st` is writable and of the right type.
    checked(unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, mask, st.as_mut_ptr()) })?;
    // SAFETY: all-zero is a valid `statx`, and the call has filled it.
    Ok(unsafe { st.assume_init() })
}

/// A request that stores a number.
pub(crate) fn get_ioctl<T: Default>(file: &File, request: u64) -> Result<T, Errno> {
    let mut v = T::default();
    // SAFETY: the callers pair each request with the type that it stores.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw mut v) })?;
    Ok(v)
}

/// A request that takes a range.
pub(crate) fn range_ioctl(fd: RawFd, request: u64, offset: u64, len: u64) -> Result<(), Errno> {
    let range = [offset, len];
    // SAFETY: these requests read two 64-bit numbers.
    checked(unsafe { libc::ioctl(fd, request as _, range.as_ptr()) })
}

/// `fallocate`.
pub(crate) fn allocate(fd: RawFd, mode: i32, offset: u64, len: u64) -> Result<(), Errno> {
    // SAFETY: a plain call.
    checked(unsafe { libc::fallocate64(fd, mode, offset as i64, len as i64) })
}

/// `lseek`. Nothing else goes by the position that it leaves behind.
pub(crate) fn seek(fd: RawFd, offset: u64, whence: i32) -> Result<usize, Errno> {
    // SAFETY: a plain call.
    let position = unsafe { libc::lseek64(fd, offset as i64, whence) };
    usize::try_from(position).map_err(|_| last())
}

/// `fdatasync`.
pub(crate) fn sync(fd: RawFd) -> Result<(), Errno> {
    // SAFETY: a plain call.
    checked(unsafe { libc::fdatasync(fd) })
}

/// `pread`.
///
/// # Safety
/// `to` is valid for writes of `len` bytes.
pub(crate) unsafe fn read(fd: RawFd, to: *mut u8, len: usize, offset: u64) -> Result<usize, Errno> {
    // SAFETY: the caller's memory.
    counted(unsafe { libc::pread64(fd, to.cast(), len, offset as i64) })
}

/// `preadv2` with RWF_NOWAIT: of what is in memory only.
///
/// # Safety
/// `to` is valid for writes of `len` bytes.
pub(crate) unsafe fn read_now(fd: RawFd, to: *mut u8, len: usize, offset: u64) -> Result<usize, Errno> {
    let iov = libc::iovec {
        iov_base: to.cast(),
        iov_len: len,
    };
    // SAFETY: one element that describes the caller's memory.
    counted(unsafe { libc::preadv2(fd, &raw const iov, 1, offset as i64, libc::RWF_NOWAIT) })
}

/// `pwrite`; with `dsync` the bytes are on stable storage when it returns.
///
/// # Safety
/// `from` is valid for reads of `len` bytes.
pub(crate) unsafe fn write(fd: RawFd, from: *const u8, len: usize, offset: u64, dsync: bool) -> Result<usize, Errno> {
    let iov = libc::iovec {
        iov_base: from.cast_mut().cast(),
        iov_len: len,
    };
    // SAFETY: the caller's memory, which is only read; one element describes it.
    counted(unsafe {
        if dsync {
            libc::pwritev2(fd, &raw const iov, 1, offset as i64, libc::RWF_DSYNC)
        } else {
            libc::pwrite64(fd, iov.iov_base, len, offset as i64)
        }
    })
}

/// A new epoll instance.
pub(crate) fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: a plain call.
    owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// A counter to wake a loop with.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: a plain call.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes an epoll instance readable when a descriptor is.
pub(crate) fn watch(epoll: &OwnedFd, fd: &impl AsRawFd) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 0,
    };
    // SAFETY: `event` is readable and of the right type.
    let done = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
    checked(done).map_err(io::Error::from)
}

/// Makes an eventfd readable.
pub(crate) fn raise(eventfd: &OwnedFd) {
    let one = 1u64;
    // SAFETY: eight bytes of a number. It fails only when the counter is full, and then it is readable.
    unsafe { libc::write(eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Makes an eventfd unreadable.
pub(crate) fn lower(eventfd: &OwnedFd) {
    let mut count = 0u64;
    // SAFETY: eight writable bytes. It fails only when the counter is 0.
    unsafe { libc::read(eventfd.as_raw_fd(), (&raw mut count).cast(), 8) };
}
