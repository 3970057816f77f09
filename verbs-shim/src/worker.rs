//! Threads that wait for a descriptor.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use roce::{EventFd, Thread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::errno::Result;

/// When a worker works again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// When its descriptor is readable or it is woken.
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

/// A thread that works whenever a descriptor is readable. Dropping it ends the thread.
pub(crate) struct Worker {
    name: &'static str,
    control: Arc<Control>,
    thread: Mutex<Option<Thread>>,
}

impl Worker {
    /// `work` returns when to go on.
    pub(crate) fn start(
        name: &'static str,
        watched: OwnedFd,
        mut work: impl FnMut() -> Next + Send + 'static,
    ) -> Result<Self> {
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
            name,
            control,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Starts a worker on an object, which ends with the object.
    pub(crate) fn on<T: Send + Sync + 'static>(
        name: &'static str,
        watched: OwnedFd,
        object: &Arc<T>,
        mut work: impl FnMut(&T) -> Next + Send + 'static,
    ) -> Result<Self> {
        let weak = Arc::downgrade(object);
        Self::start(name, watched, move || {
            weak.upgrade().map_or(Next::End, |object| work(&object))
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
        if thread.is_some_and(|thread| !thread.finish()) {
            let name = self.name;
            tracing::error!("the thread {name:?} panicked, or does not end within 5 s: what it uses may stay open");
        }
    }
}

/// Sleeps until there is work. Returns false when the thread is to end.
fn wait(watched: &OwnedFd, control: &Control, next: Next) -> bool {
    let timeout = match next {
        Next::End => return false,
        Next::Ready => None,
        Next::At(at) => Some(at.saturating_duration_since(Instant::now())),
    };
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    let mut fds = [watched.as_fd(), control.wake.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let _ = poll(&mut fds, timeout.as_ref());
    control.wake.clear();
    !control.ends.load(Ordering::Acquire)
}
