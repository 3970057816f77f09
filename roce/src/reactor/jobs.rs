//! Work that waits for the system, done by other threads than the loop's.

use std::sync::Arc;

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

/// Delivers results to the loop that started the jobs.
type Deliver<R> = Arc<dyn Fn(JobResult<R>) + Send + Sync>;

/// A job that was started and is not done. Dropping it without a result, as a panic does, reports [`Panicked`].
pub struct StartedJob<R> {
    ticket: JobTicket,
    /// `None` after the result was delivered.
    deliver: Option<Deliver<R>>,
}

impl<R> StartedJob<R> {
    /// Delivers the result to the loop that started the job.
    pub fn finish(mut self, result: R) {
        self.deliver(Ok(result));
    }

    fn deliver(&mut self, result: Result<R, Panicked>) {
        let ticket = self.ticket;
        if let Some(deliver) = self.deliver.take() {
            deliver(JobResult { ticket, result });
        }
    }
}

impl<R> Drop for StartedJob<R> {
    fn drop(&mut self) {
        self.deliver(Err(Panicked));
    }
}

debug!(StartedJob<R>, "StartedJob" [R], |this| ticket: this.ticket);

/// A loop's jobs. The service has them done by threads of the program, and each result comes to
/// [`Service::job_done`](crate::reactor::Service::job_done).
pub struct Jobs<R>(Deliver<R>);

impl<R> Jobs<R> {
    /// Creates the jobs of a loop. `deliver` gets the results, in the thread that did the job.
    pub(crate) fn new(deliver: impl Fn(JobResult<R>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(deliver))
    }

    /// Starts a job that another thread does, which [delivers](StartedJob::finish) its result. There is no limit.
    pub fn begin(&self, ticket: JobTicket) -> StartedJob<R> {
        StartedJob {
            ticket,
            deliver: Some(self.0.clone()),
        }
    }
}

debug!(Jobs<R>, "Jobs"[R]);

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn results_come_to_the_loop_that_asked() {
        let (results, delivered) = mpsc::channel();
        let loops = ["first", "second"].map(|name| {
            let results = results.clone();
            Jobs::new(move |r: JobResult<u8>| results.send((name, r.ticket.0, r.result)).unwrap())
        });
        loops[1].begin(JobTicket(7)).finish(1);
        loops[0].begin(JobTicket(7)).finish(2);
        let all: Vec<_> = delivered.try_iter().collect();
        assert_eq!(all, [("second", 7, Ok(1)), ("first", 7, Ok(2))]);
    }

    #[test]
    fn results_come_in_the_order_in_which_jobs_are_done_and_a_panic_is_one() {
        let (results, delivered) = mpsc::channel();
        let jobs = Jobs::new(move |r| results.send(r).unwrap());
        let [first, panics, last, dropped] = [1, 2, 3, 4].map(|n| jobs.begin(JobTicket(n)));
        first.finish(7);
        let thread = thread::spawn(move || {
            let _job = panics;
            panic!("as intended");
        });
        assert!(thread.join().is_err());
        last.finish(8);
        drop(dropped);
        let all: Vec<_> = delivered.try_iter().map(|r| (r.ticket.0, r.result)).collect();
        assert_eq!(all, [(1, Ok(7)), (2, Err(Panicked)), (3, Ok(8)), (4, Err(Panicked))]);
    }
}
