//! FLUSH in progress.

use std::sync::Arc;

use roce_verbs::mem::{FlushError, Span};

use crate::{reorder::BufferedPacket, seq::Seq};

/// Pending request to make memory persistent.
#[derive(Debug)]
pub struct PersistJob {
    pub(super) span: Span,
    pub(super) ticket: Arc<()>,
}

impl PersistJob {
    /// Makes the memory persistent.
    ///
    /// # Errors
    /// The memory was revoked, or can't be made persistent.
    pub fn run(&self) -> Result<(), FlushError> {
        self.span.flush(true)
    }
}

/// Progress of a FLUSH to persistence.
#[derive(Debug)]
pub(super) enum Flush {
    None,
    /// Its job runs: execute nothing behind it.
    Running(Box<Flushing>),
    /// Its job has finished, and it now resumes with the result.
    Finished(Result<(), FlushError>),
}

impl Flush {
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Self::Running(_))
    }
}

/// FLUSH whose job is in progress.
#[derive(Debug)]
pub(super) struct Flushing {
    /// Identifies the job.
    pub(super) ticket: Arc<()>,
    /// The job, until the driver takes it.
    pub(super) job: Option<PersistJob>,
    pub(super) packet: BufferedPacket,
    /// The packet received last.
    pub(super) last: Seq,
}
