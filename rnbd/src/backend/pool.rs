//! Threads for blocking I/O.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// Jobs queued or running.
#[derive(Debug, Default)]
struct Load {
    jobs: Mutex<usize>,
    idle: Condvar,
}

impl Load {
    fn leave(&self) {
        let mut n = self.jobs.lock();
        *n -= 1;
        if *n == 0 {
            self.idle.notify_all();
        }
    }
}

/// A fixed number of threads that run jobs in no particular order. The queue is not bounded here: callers bound what
/// they have in flight (a session by its queue depth). Dropping it runs what is queued, then ends.
#[derive(Debug)]
pub struct Pool {
    queue: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    load: Arc<Load>,
}

impl Pool {
    /// Starts `threads` threads, at least one.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(threads: usize) -> io::Result<Self> {
        let (queue, jobs) = unbounded::<Job>();
        let load = Arc::new(Load::default());
        let threads = (0..threads.max(1))
            .map(|i| {
                let (jobs, load) = (jobs.clone(), load.clone());
                thread::Builder::new()
                    .name(format!("rnbd-io-{i}"))
                    .spawn(move || work(&jobs, &load))
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            queue: Some(queue),
            threads,
            load,
        })
    }

    /// Twice the processors, at least 8: threads wait for disks, and a flush occupies one for long.
    pub fn default_threads() -> usize {
        thread::available_parallelism().map_or(8, |n| (2 * n.get()).max(8))
    }

    /// Queues a job.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The channel is open as long as `self`: the workers hold its other end until `queue` is dropped.
        if let Some(q) = &self.queue {
            *self.load.jobs.lock() += 1;
            if q.send(Box::new(job)).is_err() {
                self.load.leave();
            }
        }
    }

    /// Waits until nothing is queued or running; `false` when that takes longer than `timeout`. Not to be called from a
    /// job.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut n = self.load.jobs.lock();
        while *n > 0 {
            if self.load.idle.wait_until(&mut n, until).timed_out() {
                return *n == 0;
            }
        }
        true
    }
}

fn work(jobs: &Receiver<Job>, load: &Load) {
    while let Ok(job) = jobs.recv() {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("an I/O job panicked; its request fails");
        }
        load.leave();
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
