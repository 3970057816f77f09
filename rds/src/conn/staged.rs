//! Copies of the local memory of operations.

use core::ops::Range;
use std::sync::Arc;

use roce_verbs::{mem::Pages, provider::Memory};

use crate::rdma::Operation;

/// Bytes that are copied at a time.
const COPY: usize = 1 << 16;

/// Bytes of an operation, in order, in memory of the node. A process may unmap its own memory at any time: that fails its operation, and
/// not the queue pair.
#[derive(Debug)]
pub(crate) struct Staged {
    pages: Arc<Pages>,
    memory: Arc<dyn Memory>,
    pieces: Vec<Range<usize>>,
    fetches: bool,
}

impl Staged {
    /// Copies what an operation sends, or allocates memory for what it fetches; `None` without memory, or when some of the operation's
    /// is missing.
    pub(crate) fn new(operation: &Operation) -> Option<Self> {
        let this = Self {
            pages: Pages::allocate(operation.bytes()).ok()?,
            memory: operation.memory.clone(),
            pieces: operation.pieces.clone(),
            fetches: operation.kind.fetches(),
        };
        (this.fetches || this.copy().is_some()).then_some(this)
    }

    /// The copy.
    pub(crate) fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// Copies what was fetched to the operation's memory; `None` when some of that is missing.
    pub(crate) fn finish(&self) -> Option<()> {
        if self.fetches { self.copy() } else { Some(()) }
    }

    fn copy(&self) -> Option<()> {
        let (mut at, mut buffer) = (0, vec![0; COPY.min(self.pages.len())]);
        for piece in &self.pieces {
            let theirs = Pages::part_of(&self.memory, piece.clone()).ok()?;
            for from in (0..piece.len()).step_by(COPY) {
                let bytes = &mut buffer[..(piece.len() - from).min(COPY)];
                match self.fetches {
                    true => self.pages.read(at, bytes).and_then(|()| theirs.write(from, bytes)),
                    false => theirs.read(from, bytes).and_then(|()| self.pages.write(at, bytes)),
                }
                .ok()?;
                at += bytes.len();
            }
        }
        Some(())
    }
}
