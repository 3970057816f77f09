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
pub(super) struct Flight {
    pub(super) request: Submission,
    /// Index of the path.
    pub(super) path: u16,
    /// Its connection's place among the path's.
    pub(super) place: u16,
    /// The processor that it was sent on.
    pub(super) cpu: u16,
    /// The key under which the server may write the buffer of a read, if it ends with the request.
    pub(super) key: Option<RKey>,
    pub(super) waits: Waits,
    /// It went by paths before that are lost: what its permit has to wait for when it ends.
    pub(super) rest: Option<Rest<u16>>,
}

impl Flight {
    pub(super) fn new(request: Submission, path: u16, place: u16, cpu: u16, rest: Option<Rest<u16>>) -> Self {
        Self {
            request,
            path,
            place,
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
pub(super) struct Orphan {
    pub(super) permit: u16,
    pub(super) flight: Flight,
}

/// A request that is to be sent by another path. It still has its permit.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) permit: u16,
    pub(super) request: Submission,
    /// Quarantine of its permit after its end.
    pub(super) rest: Option<Rest<u16>>,
}
