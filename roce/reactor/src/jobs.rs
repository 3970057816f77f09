//! Work that waits for the system, done by a thread beside the loop.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

/// Jobs that may be asked for and not done at a time.
pub const MAX_JOBS: usize = 64;

/// Names a job to who asked for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobTicket(pub u64);

/// The job panicked; what it had is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the job panicked")]
pub struct Panicked;

/// What has become of a job.
#[derive(Debug)]
pub struct JobResult<R> {
    /// Which one.
    pub ticket: JobTicket,
    /// What it returned.
    pub result: Result<R, Panicked>,
}

/// Why a job is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JobError {
    /// [`MAX_JOBS`] are not done.
    #[error("too many jobs wait")]
    Full,
    /// Nobody does jobs any more.
    #[error("the helper is gone")]
    Gone,
}

type Work<R> = Box<dyn FnOnce() -> R + Send>;
type Job<R> = (JobTicket, Work<R>);

/// Where a loop asks for jobs. They are done one after the other; each result comes to
/// [`Service::job_done`](crate::Service::job_done).
pub struct Jobs<R> {
    line: Sender<Job<R>>,
    under_way: Arc<AtomicUsize>,
}

/// The other end: whoever runs it does the jobs.
pub struct Helper<R> {
    line: Receiver<Job<R>>,
    under_way: Arc<AtomicUsize>,
    deliver: Box<dyn Fn(JobResult<R>) + Send>,
}

/// Both ends. `deliver` is given the results, in the helper's thread.
pub(crate) fn jobs<R>(deliver: impl Fn(JobResult<R>) + Send + 'static) -> (Jobs<R>, Helper<R>) {
    let (sender, receiver) = channel();
    let under_way = Arc::new(AtomicUsize::new(0));
    let jobs = Jobs {
        line: sender,
        under_way: under_way.clone(),
    };
    let helper = Helper {
        line: receiver,
        under_way,
        deliver: Box::new(deliver),
    };
    (jobs, helper)
}

impl<R> Jobs<R> {
    /// Asks for a job. It never waits.
    ///
    /// # Errors
    /// When too many are under way, or the helper is gone; the job is dropped.
    pub fn start(&self, ticket: JobTicket, work: impl FnOnce() -> R + Send + 'static) -> Result<(), JobError> {
        let one_more = |n| (n < MAX_JOBS).then_some(n + 1);
        let room = self.under_way.fetch_update(SeqCst, SeqCst, one_more);
        room.map_err(|_| JobError::Full)?;
        self.line.send((ticket, Box::new(work))).map_err(|_| {
            self.under_way.fetch_sub(1, SeqCst);
            JobError::Gone
        })
    }

    /// Jobs that are not done.
    pub fn under_way(&self) -> usize {
        self.under_way.load(SeqCst)
    }
}

impl<R> Helper<R> {
    /// Does jobs until the loop that asks for them is gone.
    pub fn run(&self) {
        while let Ok(job) = self.line.recv() {
            self.work(job);
        }
    }

    /// Does jobs for so long, for a thread that has something else to do now and then. False: the loop that asks for them is
    /// gone.
    pub fn run_for(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            match self.line.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(job) => self.work(job),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    fn work(&self, (ticket, work): Job<R>) {
        let result = catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
            tracing::error!("a job panicked");
            Panicked
        });
        self.under_way.fetch_sub(1, SeqCst);
        (self.deliver)(JobResult { ticket, result });
    }
}

impl<R> fmt::Debug for Jobs<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs")
            .field("under_way", &self.under_way())
            .finish_non_exhaustive()
    }
}

impl<R> fmt::Debug for Helper<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn results_come_in_order_and_a_panic_is_one() {
        let (results, delivered) = mpsc::channel();
        let (jobs, helper) = jobs(move |r| results.send(r).unwrap());
        let thread = thread::spawn(move || helper.run());
        jobs.start(JobTicket(1), || 7).unwrap();
        jobs.start(JobTicket(2), || panic!("as it is to be")).unwrap();
        jobs.start(JobTicket(3), || 8).unwrap();
        let all: Vec<_> = delivered.iter().take(3).map(|r| (r.ticket.0, r.result)).collect();
        assert_eq!(all, [(1, Ok(7)), (2, Err(Panicked)), (3, Ok(8))]);
        drop(jobs);
        thread.join().unwrap();
    }

    #[test]
    fn jobs_are_bounded() {
        let (results, delivered) = mpsc::channel();
        let (jobs, helper) = jobs(move |r| results.send(r).unwrap());
        for n in 0..MAX_JOBS as u64 {
            jobs.start(JobTicket(n), move || n).unwrap();
        }
        assert_eq!(jobs.start(JobTicket(99), || 0), Err(JobError::Full));
        assert!(helper.run_for(Duration::ZERO), "it does what waits");
        while jobs.under_way() > 0 {
            helper.run_for(Duration::from_millis(1));
        }
        assert_eq!(delivered.try_iter().count(), MAX_JOBS);
        jobs.start(JobTicket(100), || 0).unwrap();
        drop(helper);
        assert_eq!(jobs.start(JobTicket(101), || 0), Err(JobError::Gone));
    }
}
