//! A task on its way to who makes its calls, and back.

use std::sync::Arc;

use rnbd::Errno;
use rtrs::server::request::SessionKey;

use crate::{image::Image, task::Task};

/// An operation for the ring or the pool. Whoever has it keeps its file and its memory alive.
#[derive(Debug)]
pub(crate) struct Job {
    /// Names the outcome.
    pub(crate) key: usize,
    /// Session that owns the memory.
    pub(crate) session: SessionKey,
    pub(crate) image: Arc<Image>,
    pub(crate) task: Task,
}

/// A job that is over; nothing of it is left.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) key: usize,
    pub(crate) result: Result<(), Errno>,
}
