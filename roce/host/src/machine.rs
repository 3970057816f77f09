//! State machines that a thread can run.

use core::hash::Hash;

use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

/// Sans-IO node of a protocol.
pub trait Machine: Send + 'static {
    /// Name of a part of it that threads and tasks wait for, for example a socket.
    type Key: Copy + Eq + Hash + Send + 'static;

    /// A work request has completed.
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion);

    /// Handles an event.
    fn event(&mut self, cx: &mut Cx<'_>, event: &Event);

    /// [`next_timeout`](Self::next_timeout) is due.
    fn timeout(&mut self, cx: &mut Cx<'_>);

    /// The turn of the loop ends: posts what it has brought.
    fn end_batch(&mut self, cx: &mut Cx<'_>);

    /// When to call [`timeout`](Self::timeout).
    fn next_timeout(&self) -> Option<Instant>;

    /// Returns whether a call of another thread has left something to post.
    fn wants_turn(&self) -> bool;

    /// Begins to end.
    fn stop(&mut self, cx: &mut Cx<'_>);

    /// Returns whether nothing is left of it in the provider.
    fn is_stopped(&self) -> bool;

    /// Takes the machine's reports. Calls `changed` with each part that somebody may wait for.
    fn take_reports(&mut self, changed: &mut dyn FnMut(Self::Key));
}
