//! Memory that peers use.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use lnet::{EntryId, Failure, Served};
use roce_host::Hosted;

use crate::{
    counts::EntryCounts,
    error::Error,
    machine::{Key, LnetMachine},
};

/// End of a peer's operation on an entry.
#[derive(Clone, Debug)]
pub struct EntryEvent {
    /// The operation: whose it is, its match bits, and where in the memory it began.
    pub served: Served,
    /// The number of bytes.
    pub result: Result<u32, Failure>,
}

/// Entry of a portal: memory that operations of peers find by their match bits. When it is dropped no operation begins on it any more; those
/// that are under way end with the memory.
pub struct Attached {
    node: Arc<Hosted<LnetMachine>>,
    id: EntryId,
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.node.forget(Key::Entry(self.id));
        // The node may have ended.
        let _ = self.node.call(|machine| machine.detach(self.id));
    }
}

impl Attached {
    pub(crate) fn new(node: Arc<Hosted<LnetMachine>>, id: EntryId) -> Self {
        Self { node, id }
    }

    /// Its number, which [operations on it](Served::entry) name.
    pub const fn id(&self) -> EntryId {
        self.id
    }

    /// Waits for the next end of an operation. `None`: the entry had [a number of uses](lnet::Entry::uses), and all have ended.
    ///
    /// The last 1024 are kept; [`lost_events`](Self::lost_events) counts those before.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn next(&self) -> Result<Option<EntryEvent>, Error> {
        Ok(self.node.wait(None, |machine| self.take(machine))?)
    }

    /// Waits for the next end of an operation, so long at most.
    ///
    /// # Errors
    /// As [`next`](Self::next), and `TimedOut`.
    pub fn next_timeout(&self, timeout: Duration) -> Result<Option<EntryEvent>, Error> {
        Ok(self.node.wait(Some(timeout), |machine| self.take(machine))?)
    }

    /// Waits for the next end of an operation, in a task of any runtime.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub async fn next_async(&self) -> Result<Option<EntryEvent>, Error> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&self, cx: &Context<'_>) -> Poll<Result<Option<EntryEvent>, Error>> {
        // First, so that no event between is missed.
        self.node.wake(Key::Entry(self.id), cx.waker());
        match self.node.call(|machine| self.take(machine)) {
            Ok(next) => next.map(Ok),
            Err(e) => Poll::Ready(Err(e.into())),
        }
    }

    fn take(&self, machine: &mut LnetMachine) -> Poll<Option<EntryEvent>> {
        let Some(entry) = machine.entry(self.id) else {
            return Poll::Ready(None);
        };
        match entry.events.pop() {
            Some((served, result)) => Poll::Ready(Some(EntryEvent { served, result })),
            None if entry.is_unlinked => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    /// Returns the counts of operations since it was attached, whether their events were read or not.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn counts(&self) -> Result<EntryCounts, Error> {
        let counts = |machine: &mut LnetMachine| machine.entry(self.id).map(|entry| entry.counts);
        Ok(self.node.call(counts)?.unwrap_or_default())
    }

    /// Events that were lost because nobody has read them.
    ///
    /// # Errors
    /// Why the node has ended.
    pub fn lost_events(&self) -> Result<u64, Error> {
        let lost = |machine: &mut LnetMachine| machine.entry(self.id).map_or(0, |entry| entry.events.lost());
        Ok(self.node.call(lost)?)
    }
}
