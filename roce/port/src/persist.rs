//! Flushes to persistence for peers. They may take long: the driver runs them without the port's lock.

use std::panic::{self, AssertUnwindSafe};

use roce_bth::Qpn;
use roce_qp::PersistJob;
use roce_verbs::mem::FlushError;

/// FLUSH job of a queue pair: memory to make persistent.
#[derive(Debug)]
pub struct Persisting {
    pub(crate) qpn: Qpn,
    pub(crate) job: PersistJob,
}

/// Finished [`Persisting`], for [`Port::persisted`](crate::Port::persisted).
#[derive(Debug)]
pub struct Persisted {
    pub(crate) of: Persisting,
    pub(crate) result: Result<(), FlushError>,
}

impl Persisting {
    /// Makes the memory persistent. Revoked memory is left alone. A panic is a failure.
    pub fn run(self) -> Persisted {
        let result = panic::catch_unwind(AssertUnwindSafe(|| self.job.run()));
        Persisted {
            of: self,
            result: result.unwrap_or(Err(FlushError::Failed)),
        }
    }
}
