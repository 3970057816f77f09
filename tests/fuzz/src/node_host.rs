//! Node of a protocol on the scripted provider: all that there is to do is done at once, and time goes by when the input says so.

use std::time::Duration;

use roce_host::Machine;
use roce_verbs::{
    Instant,
    provider::{CmRef, Cx, Provider as _},
};

use crate::provider::{Keys, Scripted, Usage};

/// See the module.
pub(crate) struct NodeHost<M> {
    pub(crate) provider: Scripted,
    pub(crate) machine: M,
    pub(crate) listener: CmRef,
    pub(crate) now: Instant,
}

/// Random numbers only spread a node's attempts to connect.
fn random(out: &mut [u8]) {
    out.fill(7);
}

impl<M: Machine<Key = ()>> NodeHost<M> {
    /// Makes a node, which listens once, and what else comes of that.
    pub(crate) fn new<T>(make: impl FnOnce(&mut Cx<'_>) -> (M, T)) -> (Self, T) {
        let mut provider = Scripted::new(&[Keys::INSTANT]);
        let now = Instant::ZERO + Duration::from_secs(1);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        let (machine, made) = make(&mut cx);
        let listener = *provider.cms.keys().next().expect("a listener");
        let host = Self {
            provider,
            machine,
            listener,
            now,
        };
        (host, made)
    }

    pub(crate) fn with<T>(&mut self, f: impl FnOnce(&mut M, &mut Cx<'_>) -> T) -> T {
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut random,
        };
        f(&mut self.machine, &mut cx)
    }

    /// A turn of the node's loop; returns whether there was anything to do.
    pub(crate) fn turn(&mut self) -> bool {
        let mut wcs = Vec::new();
        self.provider.poll_completions(&mut wcs, 64).expect("completions");
        let event = self.provider.poll_event();
        self.with(|machine, cx| {
            for (qp, wc) in &wcs {
                machine.completion(cx, *qp, wc);
            }
            if let Some(event) = &event {
                machine.event(cx, event);
            }
            let mut moved = !wcs.is_empty() || event.is_some() || machine.wants_turn();
            machine.take_reports(&mut |()| moved = true);
            machine.end_batch(cx);
            moved
        })
    }

    /// Goes on to the next timer until `end`, and handles it; false: there is none.
    pub(crate) fn advance(&mut self, end: Instant) -> bool {
        let Some(due) = self.machine.next_timeout().filter(|due| *due <= end) else {
            return false;
        };
        self.now = due.max(self.now);
        self.with(|machine, cx| machine.timeout(cx));
        true
    }

    /// Nothing that was due is still due.
    pub(crate) fn check_timers(&self) {
        let next = self.machine.next_timeout();
        assert!(next.is_none_or(|next| next > self.now), "timers stand still");
    }

    /// The node has ended, and nothing is left of it.
    pub(crate) fn check_stopped(&self) {
        assert!(self.machine.is_stopped(), "the node does not end");
        let left = self.provider.usage();
        assert_eq!(left, Usage::default(), "objects are left of a node that has ended");
    }
}
