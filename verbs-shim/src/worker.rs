//! Threads that wait for a descriptor.

use std::{
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{Mutex, PoisonError},
};

use roce::Thread;

use crate::ret::{Errno, Result};

/// A thread that works whenever a descriptor is readable. It ends with this.
pub(crate) struct Worker {
    stop: OwnedFd,
    thread: Mutex<Option<Thread>>,
}

impl Worker {
    /// `work` returns whether to go on.
    pub(crate) fn start(name: &str, watched: OwnedFd, mut work: impl FnMut() -> bool + Send + 'static) -> Result<Self> {
        // SAFETY: makes a descriptor, or fails.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if stop < 0 {
            return Err(Errno::last());
        }
        // SAFETY: just made and ours alone.
        let stop = unsafe { OwnedFd::from_raw_fd(stop) };
        let end = stop.try_clone()?;
        let thread = Thread::start(name, move || while wait(&watched, &end) && work() {})?;
        Ok(Self {
            stop,
            thread: Mutex::new(Some(thread)),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let one = 1u64;
        // SAFETY: writes eight bytes of a local.
        unsafe { libc::write(self.stop.as_raw_fd(), (&raw const one).cast(), 8) };
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.finish();
        }
    }
}

/// Sleeps until there is something to do. False: it shall end.
fn wait(watched: &OwnedFd, stop: &OwnedFd) -> bool {
    let entry = |fd: &OwnedFd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [entry(watched), entry(stop)];
    // SAFETY: two entries on the stack.
    let got = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
    got < 0 || fds[1].revents == 0
}
