//! Work that waits for the system, done by other threads than the loop's.

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

/// Jobs of a loop that may wait for the [`Helper`]; [`Jobs::start`] refuses further ones.
pub const MAX_JOBS: usize = 64;

/// Identifies a job to the service that started it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobTicket(pub u64);

/// The job panicked; its data is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the job panicked")]
pub struct Panicked;

/// Result of a job.
#[derive(Debug)]
pub struct JobResult<R> {
    /// The job.
    pub ticket: JobTicket,
    /// Its return value.
    pub result: Result<R, Panicked>,
}

/// Reason to reject a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JobError {
    /// [`MAX_JOBS`] are not done.
    #[error("too many jobs wait")]
    Full,
    /// The helper was dropped.
    #[error("the helper is gone")]
    Gone,
}

type Work<R> = Box<dyn FnOnce() -> R + Send>;

/// The loop that starts jobs.
struct JobOwner<R> {
    under_way: AtomicUsize,
    deliver: Box<dyn Fn(JobResult<R>) + Send + Sync>,
}

struct Job<R> {
    work: Work<R>,
    started: StartedJob<R>,
}

/// A job that was started and is not done. Dropping it without a result, as a panic does, reports [`Panicked`].
pub struct StartedJob<R> {
    ticket: JobTicket,
    /// `None` after the result was delivered.
    owner: Option<Arc<JobOwner<R>>>,
}

impl<R> StartedJob<R> {
    /// Delivers the result to the loop that started the job.
    pub fn finish(mut self, result: R) {
        self.deliver(Ok(result));
    }

    fn deliver(&mut self, result: Result<R, Panicked>) {
        if let Some(owner) = self.owner.take() {
            owner.under_way.fetch_sub(1, SeqCst);
            let ticket = self.ticket;
            (owner.deliver)(JobResult { ticket, result });
        }
    }
}

impl<R> Drop for StartedJob<R> {
    fn drop(&mut self) {
        self.deliver(Err(Panicked));
    }
}

impl<R> fmt::Debug for StartedJob<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartedJob")
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}

/// A loop's jobs. The [`Helper`] does them one after the other, or the service has them [done elsewhere](Self::begin); each result comes
/// to [`Service::job_done`](crate::Service::job_done).
pub struct Jobs<R> {
    line: Sender<Job<R>>,
    owner: Arc<JobOwner<R>>,
}

/// Does the jobs of loops, in the thread that runs it.
pub struct Helper<R> {
    line: Receiver<Job<R>>,
}

/// The loops' end of the queue to a helper.
pub(crate) struct Line<R>(Sender<Job<R>>);

/// A helper, and the queue to it for any number of loops.
pub(crate) fn line<R>() -> (Line<R>, Helper<R>) {
    let (sender, receiver) = channel();
    (Line(sender), Helper { line: receiver })
}

impl<R> Line<R> {
    /// The jobs of a loop. `deliver` gets the results, in the thread that did the job.
    pub(crate) fn jobs(&self, deliver: impl Fn(JobResult<R>) + Send + Sync + 'static) -> Jobs<R> {
        Jobs {
            line: self.0.clone(),
            owner: Arc::new(JobOwner {
                under_way: AtomicUsize::new(0),
                deliver: Box::new(deliver),
            }),
        }
    }
}

impl<R> Jobs<R> {
    /// Starts a job in the helper. Never waits.
    ///
    /// # Errors
    /// When [`MAX_JOBS`] are in flight, or the helper is gone; the job is dropped here.
    pub fn start(&self, ticket: JobTicket, work: impl FnOnce() -> R + Send + 'static) -> Result<(), JobError> {
        if self.under_way() >= MAX_JOBS {
            return Err(JobError::Full);
        }
        let job = Job {
            work: Box::new(work),
            started: self.begin(ticket),
        };
        self.line.send(job).map_err(|refused| {
            let mut started = refused.0.started;
            started.owner = None;
            self.owner.under_way.fetch_sub(1, SeqCst);
            JobError::Gone
        })
    }

    /// Starts a job that another thread does, which [delivers](StartedJob::finish) its result. There is no limit.
    pub fn begin(&self, ticket: JobTicket) -> StartedJob<R> {
        self.owner.under_way.fetch_add(1, SeqCst);
        StartedJob {
            ticket,
            owner: Some(self.owner.clone()),
        }
    }

    /// Returns the number of jobs that are not done.
    pub fn under_way(&self) -> usize {
        self.owner.under_way.load(SeqCst)
    }
}

impl<R> Helper<R> {
    /// Does jobs until the loops are gone.
    pub fn run(&self) {
        while let Ok(job) = self.line.recv() {
            self.work(job);
        }
    }

    /// Does jobs for so long, for a thread with other duties. False: the loops are gone.
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
        let Job { work, started } = job;
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(result) => started.finish(result),
            // Dropping it reports the panic.
            Err(_) => tracing::error!("a job panicked"),
        }
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
        assert!(!helper.run_for(Duration::ZERO), "the loops are gone");
    }

    #[test]
    fn results_come_in_order_and_a_panic_is_one() {
        let (results, delivered) = mpsc::channel();
        let (jobs, helper) = jobs(move |r| results.send(r).unwrap());
        let thread = thread::spawn(move || helper.run());
        jobs.start(JobTicket(1), || 7).unwrap();
        jobs.start(JobTicket(2), || panic!("as intended")).unwrap();
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
        assert!(helper.run_for(Duration::ZERO), "there are jobs");
        while jobs.under_way() > 0 {
            helper.run_for(Duration::from_millis(1));
        }
        assert_eq!(delivered.try_iter().count(), MAX_JOBS);
        jobs.start(JobTicket(100), || 0).unwrap();
        drop(helper);
        assert_eq!(jobs.start(JobTicket(101), || 0), Err(JobError::Gone));
    }

    #[test]
    fn jobs_of_other_threads_have_no_limit() {
        let (results, delivered) = mpsc::channel();
        let (jobs, helper) = jobs(move |r| results.send(r).unwrap());
        let started: Vec<_> = (0..=MAX_JOBS as u64).map(|n| jobs.begin(JobTicket(n))).collect();
        assert_eq!(jobs.under_way(), MAX_JOBS + 1);
        drop(helper);
        for (n, job) in started.into_iter().enumerate() {
            if n > 0 {
                job.finish(n);
            }
        }
        assert_eq!(jobs.under_way(), 0);
        let all: Vec<_> = delivered.try_iter().map(|r| r.result).collect();
        assert_eq!(all[0], Err(Panicked), "it was dropped");
        assert_eq!(all[MAX_JOBS], Ok(MAX_JOBS));
    }
}
