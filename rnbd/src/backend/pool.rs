//! Threads for blocking I/O.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, unbounded};

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads that run jobs in no particular order. The queue is not bounded here: callers bound what
/// they have in flight (a session by its queue depth). Dropping it runs what is queued, then ends.
#[derive(Debug)]
pub struct Pool {
    queue: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads` threads, at least one.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(threads: usize) -> io::Result<Self> {
        let (queue, jobs) = unbounded::<Job>();
        let threads = (0..threads.max(1))
            .map(|i| {
                let jobs = jobs.clone();
                thread::Builder::new()
                    .name(format!("rnbd-io-{i}"))
                    .spawn(move || work(&jobs))
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            queue: Some(queue),
            threads,
        })
    }

    /// Twice the processors, at least 4: threads wait for disks, and a flush occupies one for long.
    pub fn default_threads() -> usize {
        thread::available_parallelism().map_or(4, |n| (2 * n.get()).max(4))
    }

    /// Queues a job.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The channel is open as long as `self`: the workers hold its other end until `queue` is dropped.
        if let Some(q) = &self.queue {
            let _ = q.send(Box::new(job));
        }
    }
}

fn work(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("an I/O job panicked; its request fails");
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue = None;
        let me = thread::current().id();
        for t in self.threads.drain(..) {
            // The last owner may be a job of the pool itself.
            if t.thread().id() != me {
                let _ = t.join();
            }
        }
    }
}
