//! Threads that wait for the disk, where io_uring can't.

use std::{
    collections::VecDeque,
    io, mem,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rnbd::Errno;

use crate::{
    job::{Job, Outcome},
    sys,
};

/// A thread that has had nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Of these so many wait for a job.
    idle: usize,
    closing: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// There is a job, or the end has come.
    wanted: Condvar,
    /// A thread has ended.
    ended: Condvar,
    outcomes: Mutex<Vec<Outcome>>,
    /// There are outcomes, and the bell has been rung for them.
    rung: AtomicBool,
    bell: OwnedFd,
}

/// Threads that run jobs in the order in which they came, begun when they are needed. The queue is not bounded here: the
/// disk bounds what it has under way. Dropping it runs what is queued, then ends.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    limit: usize,
    /// Started in all, for their names.
    started: usize,
}

impl Pool {
    /// Of at most so many threads, at least one.
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub(crate) fn new(limit: usize) -> io::Result<Self> {
        let shared = Shared {
            state: Mutex::default(),
            wanted: Condvar::new(),
            ended: Condvar::new(),
            outcomes: Mutex::default(),
            rung: AtomicBool::new(false),
            bell: sys::eventfd()?,
        };
        Ok(Self {
            shared: Arc::new(shared),
            limit: limit.max(1),
            started: 0,
        })
    }

    /// Readable when there are outcomes.
    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.shared.bell
    }

    /// Queues a job.
    ///
    /// # Errors
    /// When there is no thread, and the system gives none.
    pub(crate) fn start(&mut self, job: Job) -> Result<(), Errno> {
        let mut state = self.shared.state.lock();
        state.jobs.push_back(job);
        if state.jobs.len() <= state.idle {
            self.shared.wanted.notify_one();
            return Ok(());
        }
        if state.threads == self.limit {
            return Ok(());
        }
        let shared = self.shared.clone();
        let name = format!("rnbd-io-{}", self.started);
        match thread::Builder::new().name(name).spawn(move || shared.work()) {
            Ok(_) => {
                state.threads += 1;
                self.started += 1;
                Ok(())
            }
            // One of those that are there takes it.
            Err(_) if state.threads > 0 => Ok(()),
            Err(e) => {
                tracing::error!("no thread for the disk: {e}");
                state.jobs.pop_back();
                Err(Errno::ENOMEM)
            }
        }
    }

    /// Takes the jobs that are over.
    pub(crate) fn take(&self, out: &mut Vec<Outcome>) {
        if self.shared.rung.swap(false, SeqCst) {
            sys::lower(&self.shared.bell);
            out.append(&mut self.shared.outcomes.lock());
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closing = true;
        self.shared.wanted.notify_all();
        while state.threads > 0 {
            self.shared.ended.wait(&mut state);
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(job) = self.next() {
            let key = job.key;
            let result = run(job);
            self.outcomes.lock().push(Outcome { key, result });
            if !self.rung.swap(true, SeqCst) {
                sys::raise(&self.bell);
            }
        }
    }

    /// The next job; `None`: the thread ends.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let mut late = state.closing;
            if !late {
                state.idle += 1;
                late = self.wanted.wait_for(&mut state, IDLE).timed_out();
                state.idle -= 1;
            }
            if late && state.jobs.is_empty() {
                state.threads -= 1;
                self.ended.notify_all();
                return None;
            }
        }
    }
}

/// Runs a job, and lets go of its file and its memory.
fn run(mut job: Job) -> Result<(), Errno> {
    let result = catch_unwind(AssertUnwindSafe(|| job.task.run(&job.image)));
    mem::drop(job);
    result.unwrap_or_else(|_| {
        tracing::error!("an I/O job panicked; its request fails");
        Err(Errno::EIO)
    })
}
