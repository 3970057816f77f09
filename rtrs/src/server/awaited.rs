//! Requests that paths wait for before they get the chunks.
//!
//! A client whose session was lost may have given up all that it had in the chunks, and the server may not have heard of it: a path of
//! it may seem to live, with a request that the disk is at work on. So a path is told of the chunks when all requests are over that
//! were at work when it asked, but for those of paths whose clients have shown since that they have not given them up. Nothing that
//! its client writes then gets into one of them, or is done before it.

use std::collections::{BTreeMap, BTreeSet};

use roce_verbs::Instant;

use crate::admission::PathKey;

/// A request that is waited for: its chunk and its path.
pub(crate) type AtWork = (u16, PathKey);

/// By path that asks. One that waits for nothing is not here.
#[derive(Debug, Default)]
pub(crate) struct Awaited(BTreeMap<PathKey, BTreeSet<AtWork>>);

impl Awaited {
    /// These requests are at work. True if there are any.
    pub(crate) fn begin(&mut self, asker: PathKey, requests: impl Iterator<Item = AtWork>) -> bool {
        let requests: BTreeSet<AtWork> = requests.collect();
        let any = !requests.is_empty();
        if any {
            self.0.insert(asker, requests);
        }
        any
    }

    /// Whether no path waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the path waits.
    pub(crate) fn has(&self, asker: PathKey) -> bool {
        self.0.contains_key(&asker)
    }

    /// Removes requests that are not `at_work` any more. Returns the paths that wait for nothing any more.
    pub(crate) fn keep(&mut self, at_work: impl Fn(AtWork) -> bool) -> Vec<PathKey> {
        let mut settled = Vec::new();
        self.0.retain(|asker, requests| {
            requests.retain(|request| at_work(*request));
            if requests.is_empty() {
                settled.push(*asker);
            }
            !requests.is_empty()
        });
        settled
    }

    /// The client of a path has not given up its requests. True: there were some, and now the asker waits for nothing any more.
    pub(crate) fn alive(&mut self, asker: PathKey, path: PathKey) -> bool {
        let Some(requests) = self.0.get_mut(&asker) else {
            return false;
        };
        requests.retain(|(_, of)| *of != path);
        let settled = requests.is_empty();
        if settled {
            self.0.remove(&asker);
        }
        settled
    }

    /// The path is gone.
    pub(crate) fn forget(&mut self, asker: PathKey) {
        self.0.remove(&asker);
    }
}

/// The question to the clients of the other paths whether they live.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Probe {
    /// Nothing is waited for.
    #[default]
    None,
    /// It is asked at this time, when nothing of before can be under way any more.
    Due(Instant),
    /// It was asked.
    Asked,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths<const N: usize>() -> [PathKey; N] {
        core::array::from_fn(|n| PathKey::of(n as u64 + 1))
    }

    #[test]
    fn a_path_waits_for_what_was_at_work_when_it_asked() {
        let [a, b, c, d] = paths();
        let mut awaited = Awaited::default();
        assert!(!awaited.begin(a, [].into_iter()) && awaited.is_empty());
        assert!(awaited.begin(a, [(1, d), (2, c)].into_iter()));
        assert!(awaited.begin(b, [(2, c)].into_iter()));
        assert!(awaited.begin(c, [(7, d)].into_iter()));
        assert_eq!(awaited.keep(|_| true), []);
        assert_eq!(awaited.keep(|(chunk, _)| chunk != 2), [b]);
        assert!(awaited.has(a) && !awaited.has(b));
        awaited.forget(c);
        assert_eq!(awaited.keep(|(chunk, _)| chunk == 1), []);
        assert_eq!(awaited.keep(|_| false), [a]);
        assert!(awaited.is_empty());
    }

    #[test]
    fn requests_that_their_client_has_not_given_up_are_not_waited_for() {
        let [a, b, c] = paths();
        let mut awaited = Awaited::default();
        awaited.begin(a, [(1, b), (2, c)].into_iter());
        assert!(!awaited.alive(a, b) && !awaited.alive(b, c));
        assert!(awaited.alive(a, c));
        assert!(!awaited.has(a));
    }
}
