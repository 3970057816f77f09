//! Effects of handling an event, apart from work requests.

use std::collections::VecDeque;

use roce_verbs::Instant;

use crate::{
    PathError,
    admission::PathKey,
    server::{
        counters::ServerCounters,
        letter::{Letter, Message, Part},
        request::{Output, SessionKey},
        share::Share,
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
    /// For other shares.
    pub(crate) letters: VecDeque<(usize, Letter)>,
    /// Paths that have asked for the chunks, and wait for no request of before any more, here.
    pub(crate) settled: Vec<Part>,
    /// When sessions are to be looked at.
    pub(crate) wake: Option<Instant>,
}

impl Effects {
    /// Writes to a share.
    pub(crate) fn write(&mut self, to: usize, message: Message) {
        self.letters.push_back((to, Letter(message)));
    }

    /// A chunk is free that other shares wait for.
    pub(crate) fn free(&mut self, share: Share, session: SessionKey, chunk: u16) {
        for to in share.others() {
            self.write(to, Message::Free(session, chunk));
        }
    }
}
