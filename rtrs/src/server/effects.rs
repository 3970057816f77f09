//! Effects of handling an event, apart from work requests.

use std::collections::VecDeque;

use roce_verbs::Instant;

use crate::{
    PathError,
    admission::PathKey,
    server::{
        counters::ServerCounters,
        request::{Output, SessionKey},
    },
};

/// A connection of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// The session.
    pub(crate) session: SessionKey,
    /// The path.
    pub(crate) path: PathKey,
    /// The connection's number; 0 is the service connection.
    pub(crate) cid: u16,
}

/// Reports and actions for the end of the call or of the turn.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// For the user.
    pub(crate) outputs: VecDeque<Output>,
    /// Paths that can't go on, and why.
    pub(crate) broken: VecDeque<(SessionKey, PathKey, PathError)>,
    /// Connections with receives to give back or work to post at the end of the turn, each once.
    pub(crate) dirty: Vec<Place>,
    /// Events so far.
    pub(crate) counters: ServerCounters,
    /// Sessions with a path that has asked for the chunks and waits for no earlier request any longer.
    pub(crate) settled: Vec<SessionKey>,
    /// When sessions are to be looked at.
    pub(crate) wake: Option<Instant>,
}

impl Effects {
    /// Sessions are to be looked at, at this time at the latest.
    pub(crate) fn wake(&mut self, at: Instant) {
        self.wake = self.wake.into_iter().chain([at]).min();
    }

    /// Whether [`Server::settle`](super::Server::settle) has something to do.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.wake.is_some() || !self.broken.is_empty() || !self.settled.is_empty()
    }
}
