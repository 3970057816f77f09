//! The node, its operations and the memory of its portals.

use std::collections::{BTreeMap, BTreeSet};

use lnet::{
    Buffer, Config, Entry, EntryId, EntryOptions, JobId, Node, Output,
    proto::{MAX_PAYLOAD, Nid},
    selftest::{Target, TargetConfig},
};
use roce_host::Machine;
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

use super::names::{NODE, STAMP};

/// Bytes on either side of an entry's memory, which stay zero.
const GUARD: usize = 64;
/// Entries at a time.
const MAX_ENTRIES: usize = 8;
/// Byte of all data that the node sends.
pub(super) const DATA: u8 = 0x5a;

/// Memory of an entry within more.
struct Guarded {
    whole: Buffer,
    len: usize,
}

impl Guarded {
    fn check(&self) {
        let bytes = self.whole.to_vec();
        let (front, back) = (&bytes[..GUARD], &bytes[GUARD + self.len..]);
        assert!(
            front.iter().chain(back).all(|byte| *byte == 0),
            "memory beside an entry"
        );
    }
}

/// See the module.
pub(super) struct LnetMachine {
    pub(super) node: Node,
    target: Option<Target>,
    now: Instant,
    /// Operations that have not ended.
    jobs: BTreeSet<JobId>,
    entries: BTreeMap<EntryId, Guarded>,
    /// Operations of the node and of its peers that have ended well, and connections that came to stand.
    pub(super) done: usize,
    pub(super) served: usize,
    pub(super) up: usize,
}

impl LnetMachine {
    pub(super) fn listen(cx: &mut Cx<'_>, config: Config, has_target: bool) -> Self {
        let mut node = Node::listen(cx, config, Nid::o2ib(NODE.into()), STAMP).expect("a node");
        let limits = TargetConfig {
            slots: (2, 3),
            max_requests: 4,
            max_bulk: 64 << 10,
            max_units: 8,
            max_unit_bytes: 64 << 10,
            ..TargetConfig::default()
        };
        let attach = || Target::attach(&mut node, limits, STAMP).expect("memory");
        Self {
            target: has_target.then(attach),
            node,
            now: cx.now,
            jobs: BTreeSet::new(),
            entries: BTreeMap::new(),
            done: 0,
            served: 0,
            up: 0,
        }
    }

    /// Begins an operation, which may be refused.
    pub(super) fn begin(&mut self, begin: impl FnOnce(&mut Node) -> Result<JobId, lnet::Failure>) {
        if let Ok(job) = begin(&mut self.node) {
            assert!(self.jobs.insert(job), "a number that an operation has");
        }
    }

    /// Attaches an entry with this much memory.
    pub(super) fn attach(&mut self, len: usize, entry: impl FnOnce(Buffer) -> Entry) {
        if self.entries.len() >= MAX_ENTRIES {
            return;
        }
        let whole = Buffer::allocate(len + 2 * GUARD).expect("memory");
        let entry = entry(whole.part(GUARD, len).expect("within"));
        if entry.options.contains(EntryOptions::GET) {
            entry.memory.write(&vec![DATA; len]);
        }
        let id = self.node.attach(entry);
        self.entries.insert(id, Guarded { whole, len });
    }

    /// Detaches one of the entries.
    pub(super) fn detach(&mut self, index: usize) {
        let count = self.entries.len().max(1);
        if let Some(id) = self.entries.keys().nth(index % count) {
            self.node.detach(*id);
        }
    }

    fn report(&mut self, output: &Output) {
        match output {
            Output::Done(job, result) => {
                assert!(
                    self.jobs.remove(job),
                    "an operation that has not begun, or ended before"
                );
                self.done += usize::from(result.is_ok());
                assert!(result.as_ref().is_ok_and(|len| *len <= MAX_PAYLOAD) || result.is_err());
            }
            Output::Served(served, result) => {
                let entry = self.entries.get(&served.entry).expect("an entry");
                let len = result.clone().unwrap_or(0) as usize;
                assert!(served.offset + len <= entry.len, "more than the entry's memory");
                self.served += usize::from(result.is_ok());
            }
            Output::Unlinked(id) => self.entries.remove(id).expect("an entry").check(),
            Output::Up(..) => self.up += 1,
            Output::Pinged(_) | Output::Pushed(_) | Output::Down(..) | Output::Refused(..) => {}
        }
    }

    /// What holds of a node that has ended.
    pub(super) fn check_stopped(&self) {
        let left = (self.jobs.len(), self.node.jobs());
        assert_eq!(left, (0, 0), "operations that have not ended: ours, all");
        self.entries.values().for_each(Guarded::check);
    }
}

impl Machine for LnetMachine {
    type Key = ();

    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.now = cx.now;
        self.node.timeout(cx);
        if let Some(target) = &mut self.target {
            target.timeout(&mut self.node, cx.now);
        }
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.now = cx.now;
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let target = self.target.as_ref().and_then(Target::next_timeout);
        self.node.next_timeout().into_iter().chain(target).min()
    }

    fn wants_turn(&self) -> bool {
        self.node.wants_turn()
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        self.node.stop(cx);
    }

    fn is_stopped(&self) -> bool {
        self.node.is_stopped()
    }

    fn take_reports(&mut self, changed: &mut dyn FnMut(())) {
        while let Some(output) = self.node.poll_output() {
            let target = self.target.as_mut();
            if !target.is_some_and(|target| target.output(&mut self.node, self.now, &output)) {
                self.report(&output);
            }
            changed(());
        }
    }
}
