//! Threads that wait for a descriptor.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use roce::{EventFd, Thread};

use crate::ret::Result;

/// When a worker works again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// When its descriptor is readable or somebody wakes it.
    Ready,
    /// The same, and at this time at the latest.
    At(Instant),
    /// Never.
    End,
}

/// State that a worker's thread shares with its owner.
struct Control {
    /// Readable when there is something to look at besides the descriptor.
    wake: EventFd,
    ends: AtomicBool,
}

/// A thread that works whenever a descriptor is readable. It ends with this.
pub(crate) struct Worker {
    control: Arc<Control>,
    thread: Mutex<Option<Thread>>,
}

impl Worker {
    /// `work` returns when to go on.
    pub(crate) fn start(name: &str, watched: OwnedFd, mut work: impl FnMut() -> Next + Send + 'static) -> Result<Self> {
        let control = Arc::new(Control {
            wake: EventFd::new()?,
            ends: AtomicBool::new(false),
        });
        let shared = Arc::clone(&control);
        let thread = Thread::start(name, move || {
            let mut next = Next::Ready;
            while wait(&watched, &shared, next) {
                next = work();
            }
        })?;
        Ok(Self {
            control,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Makes it work soon.
    pub(crate) fn wake(&self) {
        self.control.wake.raise();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.control.ends.store(true, Ordering::Release);
        self.wake();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.finish();
        }
    }
}

/// Sleeps until there is something to do. False: it shall end.
fn wait(watched: &OwnedFd, control: &Control, next: Next) -> bool {
    let timeout = match next {
        Next::End => return false,
        Next::Ready => -1,
        Next::At(at) => {
            let left = at.saturating_duration_since(Instant::now()).as_millis() + 1;
            i32::try_from(left).unwrap_or(i32::MAX)
        }
    };
    let entry = |fd: std::os::fd::BorrowedFd<'_>| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [entry(watched.as_fd()), entry(control.wake.as_fd())];
    // SAFETY: two entries on the stack.
    unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout) };
    control.wake.clear();
    !control.ends.load(Ordering::Acquire)
}
