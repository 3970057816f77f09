//! Requests in flight.

use roce_verbs::RKey;

use crate::client::{permits::Rest, request::Submission};

/// Reason why a request in flight waits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Waits {
    /// Room in the send queue.
    Room,
    /// The server's answer.
    Answer,
    /// The end of its buffer's key, which the server has not revoked; then it ends with this error number.
    Revocation(u16),
}

/// A request that has a permit, and a path.
#[derive(Debug)]
pub(super) struct Flight<U> {
    pub(super) request: Submission<U>,
    /// Index of the path.
    pub(super) path: u16,
    /// Number of its connection.
    pub(super) cid: u16,
    /// The processor that it was sent on.
    pub(super) cpu: u16,
    /// The key under which the server may write the buffer of a read, if it ends with the request.
    pub(super) key: Option<RKey>,
    pub(super) waits: Waits,
    /// It went by paths before that are lost: what its permit has to wait for when it ends.
    pub(super) rest: Option<Rest<u16>>,
}

impl<U> Flight<U> {
    pub(super) fn new(request: Submission<U>, path: u16, cid: u16, cpu: u16, rest: Option<Rest<u16>>) -> Self {
        Self {
            request,
            path,
            cid,
            cpu,
            key: None,
            waits: Waits::Room,
            rest,
        }
    }

    /// The next thing that it waits for. It posts, then it is answered, then perhaps its key has to end.
    pub(super) fn turn(&mut self, next: Waits) {
        debug_assert!(
            matches!(
                (self.waits, next),
                (Waits::Room, Waits::Answer) | (Waits::Answer, Waits::Revocation(_))
            ),
            "{:?} to {next:?}",
            self.waits
        );
        self.waits = next;
    }
}

/// A request whose path is lost. It still has its permit.
#[derive(Debug)]
pub(super) struct Orphan<U> {
    pub(super) permit: u16,
    pub(super) flight: Flight<U>,
}

/// A request that is to be sent by another path. It still has its permit.
#[derive(Debug)]
pub(super) struct Again<U> {
    pub(super) permit: u16,
    pub(super) request: Submission<U>,
    /// Quarantine of its permit after its end.
    pub(super) rest: Option<Rest<u16>>,
}
