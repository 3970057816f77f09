//! Jobs of a server: work that may wait for a file system or for memory, done by threads of their own.
//!
//! Jobs are not bounded here, and never refused. Clients bound them: each request that opens a device holds a chunk, each open device
//! is closed once, and each session has memory once.

use std::{
    io,
    sync::{Arc, Weak},
};

use rnbd::{
    proto::AccessMode,
    server::action::{Identity, OpenRefused, Ticket},
};
use rnbd_disk::{Closing, Exports, FileSystem, Image, OpenError, OpenExport};
use roce::reactor::StartedJob;
use roce_verbs::mem::{MemError, Pages};
use rtrs::server::request::Ticket as MemoryTicket;

/// Threads of a queue at most: so many files of one file system may hang before jobs of their kind wait.
const THREADS: usize = 8;

/// Queues of jobs, each with threads of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Queue {
    /// Allocation and release of the memory of sessions.
    Memory,
    /// Opening devices.
    Open(FileSystem),
    /// Closing devices, which syncs them.
    Close(FileSystem),
    /// Looking at the sizes of open devices.
    Sizes(FileSystem),
}

/// The threads that do the jobs of all loops of a server.
#[derive(Clone, Debug)]
pub(crate) struct Workers(Arc<rnbd_disk::Workers<Queue, Box<dyn FnOnce() + Send>>>);

impl Workers {
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(rnbd_disk::Workers::with_spare("ferroce-job", THREADS)?)))
    }

    /// Queues work. Never waits.
    pub(crate) fn start(&self, queue: Queue, work: impl FnOnce() + Send + 'static) {
        if self.0.start(queue, Box::new(work)).is_err() {
            // Its drop reports it as failed.
            tracing::error!("no thread for a job, not even the spare one");
        }
    }
}

/// Result of opening an export.
pub(crate) type OpenResult = Result<(Identity, Box<OpenExport>), OpenRefused>;

/// Results of jobs.
pub(crate) enum Done {
    Memory(MemoryTicket, Result<Arc<Pages>, MemError>),
    Opened(Ticket, OpenResult),
    Closed(Ticket),
    /// The images know their sizes.
    Sizes(FileSystem),
    Freed,
}

/// A device that a client opens.
pub(crate) struct Opening {
    pub(crate) exports: Arc<Exports>,
    pub(crate) workers: Workers,
    pub(crate) started: StartedJob<Done>,
    pub(crate) ticket: Ticket,
    pub(crate) session_name: String,
    pub(crate) name: Vec<u8>,
    pub(crate) mode: AccessMode,
}

impl Opening {
    /// Queues it.
    pub(crate) fn start(self) {
        let (workers, queue) = (self.workers.clone(), Queue::Open(self.exports.file_system(&self.name)));
        workers.start(queue, move || self.run());
    }

    /// Opens the device, or waits, without a thread, until the writer that is being closed is closed.
    fn run(self) {
        match self.open() {
            Ok(result) => self.started.finish(Done::Opened(self.ticket, result)),
            Err(closing) => {
                let exports = self.exports.clone();
                exports.when_closed(closing, move || self.start());
            }
        }
    }

    fn open(&self) -> Result<OpenResult, Closing> {
        let found = match self.exports.find(&self.session_name, &self.name) {
            Ok(found) => found,
            Err(e) => return Ok(Err(e.into())),
        };
        let identity = found.id().identity();
        match self.exports.try_open(found, self.mode) {
            Ok(export) => Ok(Ok((identity, Box::new(export)))),
            Err(OpenError::Closing(closing)) => Err(closing),
            Err(OpenError::Errno(errno)) => Ok(Err(OpenRefused {
                errno,
                identity: Some(identity),
            })),
        }
    }
}

/// Looks at the sizes of images of one file system.
pub(crate) fn look_at_sizes(images: &[Weak<Image>]) {
    for image in images.iter().filter_map(Weak::upgrade) {
        image.look_at_size();
    }
}
