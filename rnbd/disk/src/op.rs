//! An operation on its way through the disk: it owns its file and its memory, whichever thread makes its calls.

use std::sync::Arc;

use rnbd::{Errno, server::disk::Op};

use crate::{image::Image, probe::Way, task::Task};

/// An operation of a disk.
pub(crate) type Io = Box<Op<Part>>;

/// The disk's part of an operation.
#[derive(Debug)]
pub struct Part {
    pub(crate) way: Way,
    /// It is among the store's writes in flight.
    pub(crate) entered: bool,
    /// It writes parts of blocks, so it must be the only write.
    pub(crate) alone: bool,
    /// Its calls, from its turn to its end.
    pub(crate) work: Option<Work>,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            way: Way::Pool,
            entered: false,
            alone: false,
            work: None,
        }
    }
}

/// The calls of an operation, and the file that they are made on.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) image: Arc<Image>,
    pub(crate) task: Task,
}

impl Work {
    /// Takes a call's result. `None`: there is another call to make.
    pub(crate) fn returned(&mut self, result: Result<usize, Errno>) -> Option<Result<(), Errno>> {
        self.task.returned(&self.image, result)
    }
}
