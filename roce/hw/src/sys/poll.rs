//! Descriptors: those of all devices behind one, and the folder of device files.

use std::{
    fs::File,
    io::{self, Read as _},
    mem::MaybeUninit,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

/// Folder of the device files.
pub(crate) const NODES: &str = "/dev/infiniband";

/// A set of descriptors that is one itself (epoll): what is in it may change while somebody watches it.
#[derive(Debug)]
pub(crate) struct Watched(OwnedFd);

impl Watched {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        match fd {
            0.. => {
                // SAFETY: the descriptor is new, and nobody else's.
                Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Watches one more, for reading. It leaves the set when it is closed.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: token,
        };
        // SAFETY: the structure is read during the call.
        let done = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
        (done == 0).then_some(()).ok_or_else(io::Error::last_os_error)
    }

    /// The tokens of those that can be read, or have failed. Does not wait.
    pub(crate) fn ready(&self, into: &mut Vec<u64>) -> io::Result<()> {
        const ROOM: usize = 32;
        let mut events = [const { MaybeUninit::<libc::epoll_event>::uninit() }; ROOM];
        // SAFETY: room for so many events.
        let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr().cast(), ROOM as i32, 0) };
        into.clear();
        let Ok(count) = usize::try_from(count) else {
            return match io::Error::last_os_error() {
                // Next time.
                e if e.kind() == io::ErrorKind::Interrupted => Ok(()),
                e => Err(e),
            };
        };
        // SAFETY: as many are filled in as the call says.
        into.extend(
            events[..count]
                .iter()
                .map(|event| unsafe { event.assume_init_ref().u64 }),
        );
        Ok(())
    }
}

/// Tells that device files come or go (inotify).
#[derive(Debug)]
pub(crate) struct Nodes(File);

impl Nodes {
    /// `None` where there is no such folder.
    pub(crate) fn watch() -> Option<Self> {
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the descriptor is new, and nobody else's.
        let file = unsafe { File::from_raw_fd(fd) };
        let folder = std::ffi::CString::new(NODES).ok()?;
        // A file may be made before everybody may use it.
        let what = libc::IN_CREATE | libc::IN_DELETE | libc::IN_ATTRIB | libc::IN_MOVED_TO;
        // SAFETY: the text lives during the call.
        let watched = unsafe { libc::inotify_add_watch(file.as_raw_fd(), folder.as_ptr(), what) };
        (watched >= 0).then_some(Self(file))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Forgets what has been told.
    pub(crate) fn drain(&self) {
        let mut buffer = [0; 4096];
        while matches!((&self.0).read(&mut buffer), Ok(n) if n > 0) {}
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn what_is_watched_may_change() {
        let watched = Watched::new().unwrap();
        let mut ready = vec![1];
        watched.ready(&mut ready).unwrap();
        assert!(ready.is_empty());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        watched.add(ours.as_fd(), 7).unwrap();
        theirs.write_all(b"x").unwrap();
        watched.ready(&mut ready).unwrap();
        assert_eq!(ready, [7]);
        drop(ours);
        watched.ready(&mut ready).unwrap();
        assert!(ready.is_empty(), "it was closed");
    }
}
