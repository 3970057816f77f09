//! Threads that do disk I/O where io_uring can't.

use std::{
    io, mem,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use rnbd::Errno;

use crate::{
    job::{Job, Outcome},
    sys,
    workers::{Work, Workers},
};

/// Outcomes that the disk has not taken, and the eventfd that reports them.
#[derive(Debug)]
struct Outcomes {
    list: Mutex<Vec<Outcome>>,
    /// The eventfd is raised. Both change under the lock of the list: otherwise a wakeup for an outcome that is added at the same time
    /// could be lost.
    raised: AtomicBool,
    eventfd: OwnedFd,
}

/// A job and the place of its outcome.
struct DiskWork {
    job: Job,
    outcomes: Arc<Outcomes>,
}

impl Work for DiskWork {
    fn run(self) {
        let key = self.job.key;
        let result = run(self.job);
        self.outcomes.add(Outcome { key, result });
    }
}

/// Threads that run jobs in the order in which they come, started on demand. The queue is not bounded here: the disk bounds its
/// operations in flight. Dropping it runs what is queued, then ends the threads.
#[derive(Debug)]
pub(crate) struct Pool {
    outcomes: Arc<Outcomes>,
    workers: Workers<(), DiskWork>,
}

impl Pool {
    /// A pool of at most so many threads, at least one.
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub(crate) fn new(limit: usize) -> io::Result<Self> {
        Ok(Self {
            outcomes: Arc::new(Outcomes::new()?),
            workers: Workers::new("rnbd-io", limit),
        })
    }

    /// Eventfd that is readable when there are outcomes.
    pub(crate) fn eventfd(&self) -> &OwnedFd {
        &self.outcomes.eventfd
    }

    /// Queues a job.
    ///
    /// # Errors
    /// ENOMEM when there is no thread, and the system gives none.
    pub(crate) fn start(&self, job: Job) -> Result<(), Errno> {
        let work = DiskWork {
            job,
            outcomes: self.outcomes.clone(),
        };
        self.workers.start((), work).map_err(|_| Errno::ENOMEM)
    }

    /// Moves the outcomes to `out`.
    pub(crate) fn take(&self, out: &mut Vec<Outcome>) {
        self.outcomes.take(out);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.workers.finish();
    }
}

impl Outcomes {
    fn new() -> Result<Self, Errno> {
        Ok(Self {
            list: Mutex::default(),
            raised: AtomicBool::new(false),
            eventfd: sys::eventfd()?,
        })
    }

    fn add(&self, outcome: Outcome) {
        let mut list = self.list.lock();
        list.push(outcome);
        if !self.raised.swap(true, SeqCst) {
            sys::raise(&self.eventfd);
        }
    }

    fn take(&self, out: &mut Vec<Outcome>) {
        // Usually there are none, and the lock is not needed.
        if self.raised.load(SeqCst) {
            let mut list = self.list.lock();
            self.raised.store(false, SeqCst);
            sys::lower(&self.eventfd);
            out.append(&mut list);
        }
    }
}

/// Runs a job, and releases its file and its memory.
fn run(mut job: Job) -> Result<(), Errno> {
    let result = catch_unwind(AssertUnwindSafe(|| job.task.run(&job.image)));
    mem::drop(job);
    result.unwrap_or_else(|_| {
        tracing::error!("an I/O job panicked; its request fails");
        Err(Errno::EIO)
    })
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsRawFd, thread};

    use super::*;

    const EACH: usize = 20_000;
    const THREADS: usize = 4;

    #[test]
    fn the_eventfd_reports_every_outcome() {
        let outcomes = Outcomes::new().unwrap();
        let mut all = Vec::new();
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for key in 0..EACH {
                        outcomes.add(Outcome { key, result: Ok(()) });
                    }
                });
            }
            while all.len() < THREADS * EACH {
                let mut poll = libc::pollfd {
                    fd: outcomes.eventfd.as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one descriptor to poll.
                let ready = unsafe { libc::poll(&raw mut poll, 1, 60_000) };
                assert!(ready == 1, "no wakeup after {} of {}", all.len(), THREADS * EACH);
                outcomes.take(&mut all);
            }
        });
        let mut none = Vec::new();
        outcomes.take(&mut none);
        assert!(none.is_empty() && !outcomes.raised.load(SeqCst));
    }
}
