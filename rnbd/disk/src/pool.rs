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
    op::Io,
    sys,
    workers::{Work, Workers},
};

/// Operations that have ended and that the disk has not taken, and the eventfd that reports them.
#[derive(Debug)]
struct Ended {
    list: Mutex<Vec<Io>>,
    /// The eventfd is raised. Both change under the lock of the list: otherwise a wakeup for an operation that is added at the same time
    /// could be lost.
    raised: AtomicBool,
    eventfd: OwnedFd,
}

/// An operation, and where it goes when it has ended.
struct DiskWork {
    op: Io,
    ended: Arc<Ended>,
}

impl Work for DiskWork {
    fn run(mut self) {
        self.op.result = run(&mut self.op);
        self.ended.add(self.op);
    }
}

/// Threads that run operations in the order in which they come, started on demand. The queue is not bounded here: the disk bounds its
/// operations in flight. Dropping it runs what is queued, then ends the threads.
#[derive(Debug)]
pub(crate) struct Pool {
    ended: Arc<Ended>,
    workers: Workers<(), DiskWork>,
}

impl Pool {
    /// A pool of at most so many threads, at least one.
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub(crate) fn new(limit: usize) -> io::Result<Self> {
        Ok(Self {
            ended: Arc::new(Ended::new()?),
            workers: Workers::new("rnbd-io", limit),
        })
    }

    /// Eventfd that is readable when operations have ended.
    pub(crate) fn eventfd(&self) -> &OwnedFd {
        &self.ended.eventfd
    }

    /// Queues an operation.
    ///
    /// # Errors
    /// When there is no thread, and the system gives none: the operation, with ENOMEM.
    pub(crate) fn start(&self, op: Io) -> Result<(), Io> {
        let work = DiskWork {
            op,
            ended: self.ended.clone(),
        };
        self.workers.start((), work).map_err(|mut work| {
            work.op.result = Err(Errno::ENOMEM);
            work.op
        })
    }

    /// Moves operations that have ended to `out`.
    pub(crate) fn take(&self, out: &mut Vec<Io>) {
        self.ended.take(out);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.workers.finish();
    }
}

impl Ended {
    fn new() -> Result<Self, Errno> {
        Ok(Self {
            list: Mutex::default(),
            raised: AtomicBool::new(false),
            eventfd: sys::eventfd()?,
        })
    }

    fn add(&self, op: Io) {
        let mut list = self.list.lock();
        list.push(op);
        if !self.raised.swap(true, SeqCst) {
            sys::raise(&self.eventfd);
        }
    }

    fn take(&self, out: &mut Vec<Io>) {
        // Usually there are none, and the lock is not needed.
        if self.raised.load(SeqCst) {
            let mut list = self.list.lock();
            self.raised.store(false, SeqCst);
            sys::lower(&self.eventfd);
            out.append(&mut list);
        }
    }
}

/// Makes the calls of an operation, and releases its file.
fn run(op: &mut Io) -> Result<(), Errno> {
    let mut task = op.part.task.take().ok_or(Errno::EIO)?;
    let result = catch_unwind(AssertUnwindSafe(|| task.run()));
    mem::drop(task);
    result.unwrap_or_else(|_| {
        tracing::error!("a disk operation panicked; its request fails");
        Err(Errno::EIO)
    })
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsRawFd, thread};

    use rnbd::{
        block::BlockOp,
        server::disk::{DiskOp, Op, StoreId},
    };
    use rtrs::server::request::{RequestKey, SessionKey};

    use super::*;

    fn op() -> Io {
        let id = RequestKey {
            session: SessionKey(1),
            chunk: 0,
            serial: 0,
        };
        let disk = DiskOp {
            store: StoreId(0),
            op: BlockOp::Flush,
            offset: 0,
            len: 0,
            data: 0,
        };
        Box::new(Op::new(id, disk, None))
    }

    const EACH: usize = 20_000;
    const THREADS: usize = 4;

    #[test]
    fn the_eventfd_reports_every_operation() {
        let ended = Ended::new().unwrap();
        let mut all = Vec::new();
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        ended.add(op());
                    }
                });
            }
            while all.len() < THREADS * EACH {
                let mut poll = libc::pollfd {
                    fd: ended.eventfd.as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one descriptor to poll.
                let ready = unsafe { libc::poll(&raw mut poll, 1, 60_000) };
                assert!(ready == 1, "no wakeup after {} of {}", all.len(), THREADS * EACH);
                ended.take(&mut all);
            }
        });
        let mut none = Vec::new();
        ended.take(&mut none);
        assert!(none.is_empty() && !ended.raised.load(SeqCst));
    }
}
