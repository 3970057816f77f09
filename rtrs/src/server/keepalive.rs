//! Keepalive state of paths and sessions, and requests that a new path waits for. [`liveness`](super::liveness) says what they are for.

use std::collections::{BTreeMap, BTreeSet};

use roce_verbs::Instant;

use crate::admission::PathKey;

/// As many comparisons find a path silent, and another not, before it is given up.
pub(super) const LOOKS: u32 = 8;

/// Keepalive state of a path.
#[derive(Debug, Default)]
pub(crate) struct Keepalive {
    /// A packet has come since the last comparison.
    pub(super) heard: bool,
    /// Heartbeats sent since a packet came.
    pub(super) owed: u32,
    /// Comparisons since then that found that something had come by another path.
    behind: u32,
}

impl Keepalive {
    /// Records that a packet has come.
    pub(crate) fn heard(&mut self) {
        *self = Self {
            heard: true,
            ..Self::default()
        };
    }

    /// A comparison, at which some path is alive or none is. True: this one is given up.
    pub(super) fn look(&mut self, alive: bool) -> bool {
        if !core::mem::take(&mut self.heard) && self.owed > 0 && alive {
            self.behind += 1;
        }
        self.behind >= LOOKS
    }
}

/// When the paths of a session are compared.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub(super) at: Option<Instant>,
    /// Requests have come recently.
    pub(super) busy_until: Instant,
}

/// A request that is waited for: its chunk and its path.
pub(crate) type AtWork = (u16, PathKey);

/// Requests that a path waits for before it gets the chunks.
#[derive(Debug)]
pub(super) struct Waiting {
    requests: BTreeSet<AtWork>,
    /// When the clients of the other paths are sent a heartbeat: nothing of before can be on its way any more. `None`: they were.
    probe_at: Option<Instant>,
}

/// By path that has asked for the chunks. One that waits for nothing is not here.
#[derive(Debug, Default)]
pub(crate) struct Awaited(BTreeMap<PathKey, Waiting>);

impl Awaited {
    /// A path has asked while these requests are executed. True if there are any.
    pub(super) fn begin(&mut self, asker: PathKey, requests: impl Iterator<Item = AtWork>, probe_at: Instant) -> bool {
        let requests: BTreeSet<AtWork> = requests.collect();
        let any = !requests.is_empty();
        if any {
            let probe_at = Some(probe_at);
            self.0.insert(asker, Waiting { requests, probe_at });
        }
        any
    }

    /// Whether the path waits.
    pub(crate) fn has(&self, asker: PathKey) -> bool {
        self.0.contains_key(&asker)
    }

    /// Removes requests of which `keep` is false; it gets whether the clients of the other paths were sent a heartbeat. Returns whether a path waits for nothing any more.
    pub(super) fn retain(&mut self, keep: impl Fn(bool, AtWork) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|_, waiting| {
            let probed = waiting.probe_at.is_none();
            waiting.requests.retain(|request| keep(probed, *request));
            !waiting.requests.is_empty()
        });
        self.0.len() < before
    }

    /// The client of a path lives: it has not given up its requests. True: a path waits for nothing any more.
    pub(super) fn alive(&mut self, path: PathKey) -> bool {
        self.retain(|probed, (_, of)| of != path || !probed)
    }

    /// Whether the other paths are to be sent a heartbeat now.
    pub(super) fn probe(&mut self, now: Instant) -> bool {
        let mut due = false;
        for waiting in self.0.values_mut() {
            due |= waiting.probe_at.take_if(|at| *at <= now).is_some();
        }
        due
    }

    /// Whether no path waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// When [`probe`](Self::probe) is due.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.0.values().filter_map(|waiting| waiting.probe_at).min()
    }

    /// The path is closing.
    pub(crate) fn forget(&mut self, asker: PathKey) {
        self.0.remove(&asker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that was sent a heartbeat.
    fn asked() -> Keepalive {
        Keepalive {
            owed: 1,
            ..Keepalive::default()
        }
    }

    #[test]
    fn comparisons_count_that_find_another_path_alive() {
        let mut path = asked();
        for _ in 1..LOOKS {
            assert!(!path.look(true));
            assert!(!path.look(false), "all are silent");
        }
        assert!(path.look(true));
    }

    #[test]
    fn any_packet_starts_over() {
        let mut path = asked();
        for _ in 0..10 {
            for _ in 1..LOOKS {
                assert!(!path.look(true));
            }
            path.heard();
            assert!(!path.look(true), "it is the one that is alive");
            path.owed += 1;
        }
    }

    #[test]
    fn without_a_heartbeat_nothing_is_owed() {
        let mut path = Keepalive::default();
        assert!((0..100).all(|_| !path.look(true)));
    }

    fn paths<const N: usize>() -> [PathKey; N] {
        core::array::from_fn(|n| PathKey::of(n as u64 + 1))
    }

    const NOW: Instant = Instant::ZERO;

    #[test]
    fn a_path_waits_for_requests_that_were_executed_when_it_asked() {
        let [a, b, c, d] = paths();
        let mut awaited = Awaited::default();
        assert!(!awaited.begin(a, [].into_iter(), NOW));
        assert!(awaited.begin(a, [(1, d), (2, c)].into_iter(), NOW));
        assert!(awaited.begin(b, [(2, c)].into_iter(), NOW));
        assert!(awaited.begin(c, [(7, d)].into_iter(), NOW));
        assert!(!awaited.retain(|_, _| true));
        assert!(awaited.retain(|_, (chunk, _)| chunk != 2));
        assert!(awaited.has(a) && !awaited.has(b));
        awaited.forget(c);
        assert!(!awaited.retain(|_, (chunk, _)| chunk == 1));
        assert!(awaited.retain(|_, _| false) && !awaited.has(a));
    }

    #[test]
    fn requests_that_their_client_has_not_given_up_are_not_waited_for() {
        let [a, b, c] = paths();
        let mut awaited = Awaited::default();
        awaited.begin(a, [(1, b), (2, c)].into_iter(), NOW);
        assert!(!awaited.alive(b) && !awaited.alive(c), "nobody was asked");
        assert!(awaited.probe(NOW) && !awaited.probe(NOW));
        assert!(!awaited.alive(b) && awaited.alive(c));
        assert!(!awaited.has(a));
    }
}
