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
    /// Connections that it has begun, or that are established.
    pub(crate) conns: Vec<ConnId>,
    /// Connection that we begin.
    pub(crate) attempt: Option<ConnId>,
    /// When to begin another one.
    pub(crate) retry_at: Option<Instant>,
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
            attempt: None,
            retry_at: None,
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
        self.conns.is_empty() && self.attempt.is_none() && self.queue.is_empty()
    }

    /// Returns whether a connection is to be begun now.
    pub(crate) fn wants_connection(&self, now: Instant) -> bool {
        let may = self.conns.is_empty() && self.attempt.is_none();
        may && !self.queue.is_empty() && self.retry_at.is_none_or(|at| at <= now)
    }

    /// A connection stands.
    pub(crate) fn connected(&mut self) {
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
        let pause = (self.attempts > QUICK).then_some(PAUSE);
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
        peer.connected();
        assert_eq!(peer.retry_at, None);
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
