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

/// Whose a job is.
struct Asker<R> {
    under_way: AtomicUsize,
    deliver: Box<dyn Fn(JobResult<R>) + Send + Sync>,
}

struct Job<R> {
    ticket: JobTicket,
    work: Work<R>,
    asker: Arc<Asker<R>>,
}

/// Where a loop asks for jobs. They are done one after the other; each result comes to
/// [`Service::job_done`](crate::Service::job_done).
pub struct Jobs<R> {
    line: Sender<Job<R>>,
    asker: Arc<Asker<R>>,
}

/// The other end: whoever runs it does the jobs.
pub struct Helper<R> {
    line: Receiver<Job<R>>,
}

/// Where loops line up for a helper.
pub(crate) struct Line<R>(Sender<Job<R>>);

/// Both ends, for any number of loops.
pub(crate) fn line<R>() -> (Line<R>, Helper<R>) {
    let (sender, receiver) = channel();
    (Line(sender), Helper { line: receiver })
}

impl<R> Line<R> {
    /// For one loop. `deliver` is given the results, in the helper's thread.
    pub(crate) fn jobs(&self, deliver: impl Fn(JobResult<R>) + Send + Sync + 'static) -> Jobs<R> {
        Jobs {
            line: self.0.clone(),
            asker: Arc::new(Asker {
                under_way: AtomicUsize::new(0),
                deliver: Box::new(deliver),
            }),
        }
    }
}

impl<R> Jobs<R> {
    /// Asks for a job. It never waits.
    ///
    /// # Errors
    /// When too many are under way, or the helper is gone; the job is dropped.
    pub fn start(&self, ticket: JobTicket, work: impl FnOnce() -> R + Send + 'static) -> Result<(), JobError> {
        let one_more = |n| (n < MAX_JOBS).then_some(n + 1);
        let room = self.asker.under_way.fetch_update(SeqCst, SeqCst, one_more);
        room.map_err(|_| JobError::Full)?;
        let job = Job {
            ticket,
            work: Box::new(work),
            asker: self.asker.clone(),
        };
        self.line.send(job).map_err(|_| {
            self.asker.under_way.fetch_sub(1, SeqCst);
            JobError::Gone
        })
    }

    /// Jobs that are not done.
    pub fn under_way(&self) -> usize {
        self.asker.under_way.load(SeqCst)
    }
}

impl<R> Helper<R> {
    /// Does jobs until the loops that ask for them are gone.
    pub fn run(&self) {
        while let Ok(job) = self.line.recv() {
            self.work(job);
        }
    }

    /// Does jobs for so long, for a thread that has something else to do now and then. False: the loops that ask for them are
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

    fn work(&self, job: Job<R>) {
        let Job { ticket, work, asker } = job;
        let result = catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
            tracing::error!("a job panicked");
            Panicked
        });
        asker.under_way.fetch_sub(1, SeqCst);
        (asker.deliver)(JobResult { ticket, result });
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

    fn jobs<R>(deliver: impl Fn(JobResult<R>) + Send + Sync + 'static) -> (Jobs<R>, Helper<R>) {
        let (line, helper) = line();
        (line.jobs(deliver), helper)
    }

    #[test]
    fn results_come_to_the_loop_that_asked() {
        let (line, helper) = line();
        let (results, delivered) = mpsc::channel();
        let loops = ["first", "second"].map(|name| {
            let results = results.clone();
            line.jobs(move |r: JobResult<u8>| results.send((name, r.ticket.0, r.result)).unwrap())
        });
        loops[1].start(JobTicket(7), || 1).unwrap();
        loops[0].start(JobTicket(7), || 2).unwrap();
        assert_eq!([loops[0].under_way(), loops[1].under_way()], [1, 1]);
        assert!(helper.run_for(Duration::ZERO));
        while loops.iter().any(|l| l.under_way() > 0) {
            helper.run_for(Duration::from_millis(1));
        }
        let all: Vec<_> = delivered.try_iter().collect();
        assert_eq!(all, [("second", 7, Ok(1)), ("first", 7, Ok(2))]);
        drop((line, loops));
        assert!(!helper.run_for(Duration::ZERO), "nobody asks any more");
    }

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
