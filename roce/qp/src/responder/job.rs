//! Data that the parts of the responder share: a FLUSH in progress, and hidden receive queues.

use std::sync::Arc;

use roce_mem::{FlushError, Span};

use crate::{recvq::ReceiveQueue, reorder::BufferedPacket, seq::Seq, srq::SharedReceiveQueue};

/// Receive queues that a queue pair does not see for the time of one packet.
#[derive(Debug)]
pub struct HiddenReceives {
    pub(super) own: Arc<ReceiveQueue>,
    pub(super) shared: Option<Arc<SharedReceiveQueue>>,
}

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
