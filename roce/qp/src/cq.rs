//! Completion queues.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use roce_verbs::{AsyncEvent, Completion, Qpn};

/// Receiver of notifications by armed completion queues.
pub trait Notify: Send + Sync {
    /// Reports that `cq_handle` has a completion. Called at most once per arming, with no lock of the queue held.
    fn notify(&self, cq_handle: u32);
}

/// Error of a queue that was too small and lost completions. It stays unusable (IBA C11-30).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the completion queue overflowed")]
pub struct CqOverflow;

/// Error of a resize below the number of completions in the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a completion queue that holds {held} completions can't be made {asked} long")]
pub struct CqResizeError {
    /// Completions in it.
    pub held: u32,
    /// Size asked for.
    pub asked: u32,
}

/// Completions that wake the consumer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    Solicited,
    Next,
}

#[derive(Debug)]
struct Inner {
    entries: VecDeque<Completion>,
    capacity: usize,
    overflowed: bool,
    armed: Armed,
}

/// Completion queue. Any thread may poll it; queue pairs under any lock may fill it.
pub struct CompletionQueue {
    handle: u32,
    inner: Mutex<Inner>,
    notifier: Option<Arc<dyn Notify>>,
}

impl core::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("handle", &self.handle)
            .field("inner", &self.inner)
            .finish()
    }
}

impl CompletionQueue {
    /// Creates a queue for `capacity` completions. Memory grows with use.
    pub fn new(handle: u32, capacity: u32, notifier: Option<Arc<dyn Notify>>) -> Arc<Self> {
        Arc::new(Self {
            handle,
            inner: Mutex::new(Inner {
                entries: VecDeque::new(),
                capacity: capacity as usize,
                overflowed: false,
                armed: Armed::No,
            }),
            notifier,
        })
    }

    /// Returns the number that names the queue in events.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Returns the number of completions in it.
    pub fn len(&self) -> usize {
        self.inner.lock().entries.len()
    }

    /// Returns whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends at most `max` completions to `out`, oldest first, and returns how many.
    ///
    /// # Errors
    /// If the queue has overflowed and all completions that it still had are taken.
    pub fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, CqOverflow> {
        let mut inner = self.inner.lock();
        let n = inner.entries.len().min(max);
        let (first, wrapped) = inner.entries.as_slices();
        let first = &first[..n.min(first.len())];
        out.extend_from_slice(first);
        out.extend_from_slice(&wrapped[..n - first.len()]);
        inner.entries.drain(..n);
        match n == 0 && inner.overflowed {
            true => Err(CqOverflow),
            false => Ok(n),
        }
    }

    /// Returns the number of completions that it has room for.
    pub fn capacity(&self) -> u32 {
        self.inner.lock().capacity as u32
    }

    /// Changes the number of completions that it has room for. Those in it stay.
    ///
    /// # Errors
    /// If it has more than that. Then nothing changes.
    pub fn resize(&self, capacity: u32) -> Result<(), CqResizeError> {
        let mut inner = self.inner.lock();
        let held = inner.entries.len() as u32;
        if capacity < held || capacity == 0 {
            return Err(CqResizeError { held, asked: capacity });
        }
        inner.capacity = capacity as usize;
        Ok(())
    }

    /// Returns the number of completions in it, at most `max` (`ib_peek_cq`).
    pub fn peek(&self, max: usize) -> usize {
        self.len().min(max)
    }

    /// Drops the completions of a queue pair that is reset.
    pub fn forget(&self, qpn: Qpn) {
        self.inner.lock().entries.retain(|c| c.qpn != qpn);
    }

    /// Requests one notification at the next completion (or the next solicited or failed one).
    pub fn arm(&self, solicited_only: bool) {
        let mut inner = self.inner.lock();
        // Arming for any completion includes the solicited ones, and is not weakened by a later call (IBA 11.4.2.2).
        inner.armed = match (inner.armed, solicited_only) {
            (Armed::Next, _) | (_, false) => Armed::Next,
            (_, true) => Armed::Solicited,
        };
    }

    /// Adds a completion.
    ///
    /// # Errors
    /// If the queue is full or has been: the completion is lost. The event to raise comes with the first one lost.
    pub fn push(&self, completion: Completion) -> Result<(), Option<AsyncEvent>> {
        let mut inner = self.inner.lock();
        if inner.overflowed || inner.entries.len() >= inner.capacity {
            let is_first = !core::mem::replace(&mut inner.overflowed, true);
            return Err(is_first.then_some(AsyncEvent::CqError(self.handle)));
        }
        inner.entries.push_back(completion);
        let wakes = match inner.armed {
            Armed::No => false,
            Armed::Next => true,
            Armed::Solicited => completion.solicited || !completion.is_ok(),
        };
        if wakes {
            inner.armed = Armed::No;
        }
        drop(inner);
        if wakes && let Some(notifier) = &self.notifier {
            notifier.notify(self.handle);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_return_completions_in_their_order_across_the_rings_end() {
        let cq = CompletionQueue::new(0, 8, None);
        let (mut out, mut pushed) = (Vec::new(), 0);
        for (more, max) in [(5, 3), (6, 4), (4, 1), (1, 8), (0, 8)] {
            for _ in 0..more {
                let wr_id = pushed;
                cq.push(Completion {
                    wr_id,
                    ..Completion::default()
                })
                .expect("room");
                pushed += 1;
            }
            let (held, before) = (cq.len(), out.len());
            assert_eq!(cq.poll(&mut out, max), Ok(held.min(max)));
            assert_eq!((cq.len(), out.len() - before), (held - held.min(max), held.min(max)));
        }
        assert!(out.iter().map(|c| c.wr_id).eq(0..pushed));
    }
}
