//! Flushes to persistence for peers, which may take long: the driver does them when it holds no lock.

use std::panic::{self, AssertUnwindSafe};

use roce_bth::Qpn;
use roce_mem::FlushError;
use roce_qp::PersistJob;
use roce_verbs::Instant;

use crate::port::Port;

/// Memory that is to be made persistent for a queue pair.
#[derive(Debug)]
pub struct Persisting {
    pub(crate) qpn: Qpn,
    pub(crate) job: PersistJob,
}

/// Such work that is done: for [`Port::persisted`].
#[derive(Debug)]
pub struct Persisted {
    of: Persisting,
    result: Result<(), FlushError>,
}

impl Persisting {
    /// Does it. Memory that was taken back is left alone. What panics has failed.
    pub fn run(self) -> Persisted {
        let result = panic::catch_unwind(AssertUnwindSafe(|| self.job.run()));
        Persisted {
            of: self,
            result: result.unwrap_or(Err(FlushError::Failed)),
        }
    }
}

impl Port {
    /// Takes the next such work.
    pub fn poll_persist(&mut self) -> Option<Persisting> {
        self.persists.pop_front()
    }

    /// It is done: the queue pair goes on, if it still waits for that.
    pub fn persisted(&mut self, now: Instant, done: Persisted) {
        self.now = now;
        if let Some(slot) = self.qpns.get(done.of.qpn) {
            self.with_qp(now, slot, |qp, ctx| qp.persisted(ctx, &done.of.job, done.result));
        }
    }

    /// Does all of it here, for who drives the port alone.
    pub fn persist_here(&mut self, now: Instant) {
        while let Some(next) = self.poll_persist() {
            self.persisted(now, next.run());
        }
    }
}
