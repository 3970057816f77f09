//! Shared receive queues, and the domains in which extended reliable connections find them.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    sync::{Arc, Weak},
};

use parking_lot::{Mutex, RwLock};
use roce_verbs::mem::PdHandle;
use roce_verbs::{AsyncEvent, NumberHasher, RecvWr, SrqAttr, SrqModify, SrqType, Srqn, wr::PostError};

use crate::{
    cq::CompletionQueue,
    recvq::{RecvQueue, RecvWqe},
};

/// Configuration of a new shared receive queue.
#[derive(Clone, Debug)]
pub struct SrqConfig {
    /// The number that names it in events.
    pub handle: u32,
    /// The number that peers of extended reliable connections name it by; unique in its domain.
    pub number: Srqn,
    /// Its protection domain: its elements are checked against it, and the keys of peers whose messages name it (XRC).
    pub pd: PdHandle,
    /// Its kind.
    pub srq_type: SrqType,
    /// Sizes, and the limit to begin with.
    pub attr: SrqAttr,
    /// Completion queue for receives of an XRC queue; a basic one's complete where the queue pair's do.
    pub cq: Option<Arc<CompletionQueue>>,
}

/// Error of a change of a shared receive queue's attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SrqError {
    /// The size is 0, or smaller than the number of work requests in it.
    #[error("a shared receive queue that holds {held} work requests can't be made {asked} long")]
    Size {
        /// Work requests in it.
        held: u32,
        /// Size asked for.
        asked: u32,
    },
    /// The limit is above the size.
    #[error("a limit of {limit} is more than the shared receive queue's size of {size}")]
    Limit {
        /// Limit asked for.
        limit: u32,
        /// The size.
        size: u32,
    },
}

#[derive(Debug)]
struct Inner {
    wqes: RecvQueue,
    max_wr: u32,
    /// Armed while above 0.
    limit: u32,
}

impl Inner {
    /// Returns whether the limit is armed and passed, and disarms it then (IBA 10.2.9).
    fn passes_limit(&mut self) -> bool {
        let passed = (self.wqes.len() as u64) < u64::from(self.limit);
        if passed {
            self.limit = 0;
        }
        passed
    }
}

/// Receive queue that many queue pairs take from, in the order in which their messages begin. Any thread may post; queue
/// pairs under any lock may take.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    config: SrqConfig,
    inner: Mutex<Inner>,
}

impl SharedReceiveQueue {
    /// Creates a queue. Memory grows with use.
    pub fn new(config: SrqConfig) -> Arc<Self> {
        let inner = Mutex::new(Inner {
            wqes: RecvQueue::default(),
            max_wr: config.attr.max_wr,
            limit: config.attr.limit,
        });
        Arc::new(Self { config, inner })
    }

    /// Returns its settings.
    pub fn config(&self) -> &SrqConfig {
        &self.config
    }

    /// Returns the number that names it in events.
    pub fn handle(&self) -> u32 {
        self.config.handle
    }

    /// Returns the number that peers name it by.
    pub fn number(&self) -> Srqn {
        self.config.number
    }

    /// Returns its protection domain.
    pub fn pd(&self) -> PdHandle {
        self.config.pd
    }

    /// Returns the number of receive work requests that no message has taken.
    pub fn len(&self) -> usize {
        self.inner.lock().wqes.len()
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sizes, and the limit as it is armed (0: it is not).
    pub fn query(&self) -> SrqAttr {
        let inner = self.inner.lock();
        SrqAttr {
            max_wr: inner.max_wr,
            max_sge: self.config.attr.max_sge,
            limit: inner.limit,
        }
    }

    /// Resizes the queue, or arms its limit. Returns the event of a limit that is passed already.
    ///
    /// # Errors
    /// If size, limit and the number of work requests in the queue don't fit together. Then nothing changes.
    pub fn modify(&self, attr: &SrqModify) -> Result<Option<AsyncEvent>, SrqError> {
        let mut inner = self.inner.lock();
        let size = attr.max_wr.unwrap_or(inner.max_wr);
        let limit = attr.limit.unwrap_or(inner.limit);
        let held = inner.wqes.len() as u32;
        if size < held || size == 0 {
            return Err(SrqError::Size { held, asked: size });
        }
        if limit > size {
            return Err(SrqError::Limit { limit, size });
        }
        inner.max_wr = size;
        inner.limit = limit;
        let passed = attr.limit.is_some() && inner.passes_limit();
        Ok(passed.then_some(AsyncEvent::SrqLimitReached(self.config.handle)))
    }

    /// Queues a receive work request.
    ///
    /// # Errors
    /// If it does not fit. Then nothing is queued.
    pub fn post(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let (given, max) = (wr.sges.len(), self.config.attr.max_sge as usize);
        if given > max {
            return Err(PostError::TooManySges { given, max });
        }
        let mut inner = self.inner.lock();
        if inner.wqes.len() >= inner.max_wr as usize {
            return Err(PostError::QueueFull);
        }
        inner.wqes.push(wr);
        Ok(())
    }

    /// Takes the oldest receive work request. Returns also whether that passed the limit.
    pub(crate) fn take(&self) -> Option<(RecvWqe, bool)> {
        let mut inner = self.inner.lock();
        let wqe = inner.wqes.pop()?;
        let passed = inner.limit > 0 && inner.passes_limit();
        Some((wqe, passed))
    }
}

/// Domain of extended reliable connections (IBTA Annex A14): its target queue pairs deliver to its shared receive queues,
/// which they find by number.
#[derive(Debug, Default)]
pub struct XrcDomain {
    queues: RwLock<HashMap<Srqn, Weak<SharedReceiveQueue>, BuildHasherDefault<NumberHasher>>>,
}

impl XrcDomain {
    /// Creates an empty domain.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Adds a queue. Returns false if it is not an XRC queue with a completion queue, or its number is taken.
    pub fn attach(&self, queue: &Arc<SharedReceiveQueue>) -> bool {
        if queue.config.srq_type != SrqType::Xrc || queue.config.cq.is_none() {
            return false;
        }
        let mut queues = self.queues.write();
        match queues.get(&queue.number()).is_some_and(|q| q.strong_count() > 0) {
            true => false,
            false => {
                queues.insert(queue.number(), Arc::downgrade(queue));
                true
            }
        }
    }

    /// Removes a queue. Messages that name it are refused from now on.
    pub fn detach(&self, number: Srqn) {
        self.queues.write().remove(&number);
    }

    /// Returns the number of queues in it.
    pub fn len(&self) -> usize {
        self.queues.read().values().filter(|q| q.strong_count() > 0).count()
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the queue with this number.
    pub fn find(&self, number: Srqn) -> Option<Arc<SharedReceiveQueue>> {
        self.queues.read().get(&number)?.upgrade()
    }
}
