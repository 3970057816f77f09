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
    /// There are outcomes, and the bell has been rung for them. It and the bell change under the lock of the outcomes: else the bell
    /// could be silenced for what has come since, and would not ring for what comes next.
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
        let shared = Shared::new()?;
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
        self.shared.take(out);
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
    fn new() -> Result<Self, Errno> {
        Ok(Self {
            state: Mutex::default(),
            wanted: Condvar::new(),
            ended: Condvar::new(),
            outcomes: Mutex::default(),
            rung: AtomicBool::new(false),
            bell: sys::eventfd()?,
        })
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            let key = job.key;
            let result = run(job);
            self.over(Outcome { key, result });
        }
    }

    fn over(&self, outcome: Outcome) {
        let mut outcomes = self.outcomes.lock();
        outcomes.push(outcome);
        if !self.rung.swap(true, SeqCst) {
            sys::raise(&self.bell);
        }
    }

    fn take(&self, out: &mut Vec<Outcome>) {
        // Most often there is nothing, and no lock to take.
        if self.rung.load(SeqCst) {
            let mut outcomes = self.outcomes.lock();
            self.rung.store(false, SeqCst);
            sys::lower(&self.bell);
            out.append(&mut outcomes);
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    const EACH: usize = 20_000;
    const THREADS: usize = 4;

    /// Who has nothing else to do than to wait for the bell misses nothing.
    #[test]
    fn the_bell_rings_for_whatever_is_over() {
        let shared = Shared::new().unwrap();
        let mut all = Vec::new();
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for key in 0..EACH {
                        shared.over(Outcome { key, result: Ok(()) });
                    }
                });
            }
            while all.len() < THREADS * EACH {
                let mut poll = libc::pollfd {
                    fd: shared.bell.as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one descriptor to poll.
                let ready = unsafe { libc::poll(&raw mut poll, 1, 60_000) };
                assert!(ready == 1, "silent after {} of {}", all.len(), THREADS * EACH);
                shared.take(&mut all);
            }
        });
        let mut none = Vec::new();
        shared.take(&mut none);
        assert!(none.is_empty() && !shared.rung.load(SeqCst));
    }
}
