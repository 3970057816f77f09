//! Descriptors: those of all devices behind one, and the folder of device files.

use std::{
    fs::File,
    io::{self, Read as _},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::{
    event::{Timespec, epoll},
    fs::inotify,
};

/// Set of descriptors that is one itself (epoll): its members may change while it is polled.
pub(crate) struct Watched(OwnedFd);

impl Watched {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Watches one more, for reading. It leaves the set when it is closed.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.0, fd, data, epoll::EventFlags::IN)?)
    }

    /// Replaces the tokens by those of descriptors that can be read, or have failed. Does not wait.
    pub(crate) fn ready(&self, tokens: &mut Vec<u64>) -> io::Result<()> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 32];
        tokens.clear();
        match epoll::wait(&self.0, &mut events, Some(&Timespec::default())) {
            Ok(count) => tokens.extend(events[..count].iter().map(|event| event.data.u64())),
            // Next time.
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }
}

/// Reports that files come or go in a folder (inotify).
pub(crate) struct Nodes(File);

impl Nodes {
    /// Watches a folder. `None` where there is no such folder.
    pub(crate) fn watch(folder: &str) -> Option<Self> {
        use inotify::{CreateFlags, WatchFlags};
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
        // A file may be made before everybody may use it.
        let what = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ATTRIB | WatchFlags::MOVED_TO;
        inotify::add_watch(&fd, folder, what).ok()?;
        Some(Self(File::from(fd)))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Discards what was reported.
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

    #[test]
    fn a_folder_reports_files_that_come() {
        let folder = std::env::temp_dir().join(format!("roce-hw-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let (watched, nodes) = (Watched::new().unwrap(), Nodes::watch(folder.to_str().unwrap()).unwrap());
        watched.add(nodes.fd(), 1).unwrap();
        let mut ready = Vec::new();
        File::create(folder.join("uverbs0")).unwrap();
        watched.ready(&mut ready).unwrap();
        assert_eq!(ready, [1]);
        nodes.drain();
        watched.ready(&mut ready).unwrap();
        assert!(ready.is_empty());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(Nodes::watch(folder.to_str().unwrap()).is_none());
    }
}
