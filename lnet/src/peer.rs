//! State that a node keeps of another one.

use std::collections::VecDeque;

use roce_verbs::Instant;

use crate::{
    config::Config,
    conn::{ConnId, Tx},
    handshake::Next,
};

/// Attempts to connect that follow each other at once. Later ones pause.
const QUICK: u32 = 10;
/// Pause before a later attempt.
const PAUSE: core::time::Duration = core::time::Duration::from_secs(1);
/// Requests of a lower peer that are refused in a row because both connect at once; it wins then.
const MAX_RACES: u32 = 20;

/// Another node.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Connections that are established.
    pub(crate) conns: Vec<ConnId>,
    /// Connections that it has begun, as it seems: anybody can send a request in its name.
    accepting: Vec<ConnId>,
    /// Connection that we begin.
    pub(crate) attempt: Option<ConnId>,
    /// When to begin another one.
    retry_at: Option<Instant>,
    /// Earliest entry of that among the node's timers.
    pub(crate) armed: Option<Instant>,
    /// Messages that wait for a connection.
    pub(crate) queue: VecDeque<Tx>,
    /// Incarnation to ask for; 0: any.
    stamp: u64,
    depth: u16,
    frags: u16,
    attempts: u32,
    races: u32,
}

impl Peer {
    /// Returns one of which nothing is known.
    pub(crate) const fn new(config: &Config) -> Self {
        Self {
            conns: Vec::new(),
            accepting: Vec::new(),
            attempt: None,
            retry_at: None,
            armed: None,
            queue: VecDeque::new(),
            stamp: 0,
            depth: config.peer_credits,
            frags: config.max_frags,
            attempts: 0,
            races: 0,
        }
    }

    /// Messages and fragments to ask for.
    pub(crate) const fn offer(&self) -> (u16, u16) {
        (self.depth, self.frags)
    }

    /// Incarnation to ask for.
    pub(crate) const fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Returns whether nothing would be lost with it.
    pub(crate) fn is_idle(&self) -> bool {
        let has_none = self.conns.is_empty() && self.accepting.is_empty() && self.attempt.is_none();
        has_none && self.queue.is_empty()
    }

    /// Connections that it has.
    pub(crate) fn connections(&self) -> usize {
        self.conns.len() + self.accepting.len()
    }

    /// Oldest connection that it seems to have begun, and that is not established.
    pub(crate) fn oldest_half_open(&self) -> Option<ConnId> {
        self.accepting.first().copied()
    }

    /// When to begin another connection, if that waits.
    pub(crate) const fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// We begin a connection.
    pub(crate) fn begun(&mut self, attempt: ConnId) {
        (self.attempt, self.retry_at) = (Some(attempt), None);
    }

    /// We have accepted a connection. Ours begins a while later, if this one has come to nothing by then.
    pub(crate) fn accepted(&mut self, conn: ConnId, now: Instant) {
        self.accepting.push(conn);
        self.retry_at.get_or_insert(now + PAUSE);
    }

    /// A connection stands.
    pub(crate) fn established(&mut self, conn: ConnId) {
        self.forget_connection(conn);
        self.conns.push(conn);
        self.connected();
    }

    /// A connection is gone. Returns whether we had begun it, and it did not stand.
    pub(crate) fn forget_connection(&mut self, conn: ConnId) -> bool {
        self.conns.retain(|of| *of != conn);
        self.accepting.retain(|of| *of != conn);
        let was_attempt = self.attempt == Some(conn);
        if was_attempt {
            self.attempt = None;
        }
        was_attempt
    }

    /// Returns whether a connection is to be begun now.
    pub(crate) fn wants_connection(&self, now: Instant) -> bool {
        let may = self.conns.is_empty() && self.attempt.is_none();
        may && !self.queue.is_empty() && self.retry_at.is_none_or(|at| at <= now)
    }

    fn connected(&mut self) {
        (self.attempts, self.races, self.retry_at) = (0, 0, None);
    }

    /// It has asked while we do, and is the lower one. Returns whether it has to wait.
    pub(crate) fn loses_race(&mut self) -> bool {
        let loses = self.races < MAX_RACES;
        self.races = if loses { self.races + 1 } else { 0 };
        loses
    }

    /// It has refused, but not for good.
    pub(crate) fn refused(&mut self, next: &Next, now: Instant) {
        match next {
            Next::Stamp(stamp) => self.stamp = *stamp,
            Next::Depth(depth) => self.depth = *depth,
            Next::Fragments(frags) => self.frags = *frags,
            Next::Again | Next::GiveUp(_) => {}
        }
        self.attempts += 1;
        let pause = (self.attempts > QUICK || !self.accepting.is_empty()).then_some(PAUSE);
        self.retry_at = Some(now + pause.unwrap_or_default());
    }

    /// An attempt has come to nothing for good: the next one begins with what is known from the start.
    pub(crate) fn forget(&mut self, config: &Config) {
        self.stamp = 0;
        (self.depth, self.frags) = (config.peer_credits, config.max_frags);
        self.connected();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_attempts_follow_at_once_and_then_one_a_second() {
        let mut peer = Peer::new(&Config::default());
        let now = Instant::ZERO + PAUSE;
        for attempt in 1..=12 {
            peer.refused(&Next::Again, now);
            let pause = if attempt > 10 {
                PAUSE
            } else {
                core::time::Duration::ZERO
            };
            assert_eq!(peer.retry_at, Some(now + pause), "{attempt}");
        }
        peer.established(1);
        assert_eq!(peer.retry_at, None);
    }

    #[test]
    fn a_connection_that_is_not_established_holds_ours_up_for_a_second_at_most() {
        let mut peer = Peer::new(&Config::default());
        let now = Instant::ZERO + PAUSE;
        for (conn, later) in [(1, 0), (2, 500)] {
            peer.accepted(conn, now + core::time::Duration::from_millis(later));
            assert_eq!(peer.retry_at, Some(now + PAUSE), "after each request");
        }
        assert_eq!((peer.connections(), peer.oldest_half_open()), (2, Some(1)));
        peer.begun(3);
        peer.refused(&Next::Again, now);
        assert_eq!(peer.retry_at, Some(now + PAUSE));
        assert!(peer.forget_connection(3) && !peer.forget_connection(1) && !peer.is_idle());
        peer.established(2);
        assert_eq!(
            (peer.connections(), peer.oldest_half_open(), peer.retry_at),
            (1, None, None)
        );
    }

    #[test]
    fn a_lower_peer_wins_the_race_after_twenty_refusals() {
        let mut peer = Peer::new(&Config::default());
        assert!((0..20).all(|_| peer.loses_race()) && !peer.loses_race() && peer.loses_race());
    }

    #[test]
    fn what_a_peer_would_accept_is_asked_for_next() {
        let mut peer = Peer::new(&Config::default());
        for next in [Next::Stamp(7), Next::Depth(4), Next::Fragments(128)] {
            peer.refused(&next, Instant::ZERO);
        }
        assert_eq!((peer.stamp(), peer.offer()), (7, (4, 128)));
        peer.forget(&Config::default());
        assert_eq!((peer.stamp(), peer.offer()), (0, (8, 257)));
    }
}
