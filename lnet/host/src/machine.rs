//! Node, and the operations and events that programs wait for.

use std::collections::{HashMap, VecDeque};

use lnet::{
    Entry, EntryId, Failure, JobId, Node, Output, Served,
    selftest::{Run, RunEvent, Target, proto::RpcCounters},
};
use roce_host::Machine;
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

use crate::{counts::EntryCounts, queue::Queue};

/// Part of a node that threads and tasks wait for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Key {
    /// The end of an operation.
    Job(JobId),
    /// The events of an entry.
    Entry(EntryId),
    /// The events of the node.
    Events,
    /// The reports of the test of other nodes.
    Reports,
}

/// End of a peer's operation.
pub(crate) type End = (Served, Result<u32, Failure>);

/// Entry of a program.
#[derive(Debug, Default)]
pub(crate) struct EntryState {
    pub(crate) events: Queue<End>,
    pub(crate) counts: EntryCounts,
    /// The entry is gone.
    pub(crate) is_unlinked: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct LnetMachine {
    pub(crate) node: Node,
    /// Services of lnet_selftest, if this node has them.
    target: Option<Target>,
    /// Operations that a program wants to know the end of, with that.
    jobs: HashMap<JobId, Option<Result<u32, Failure>>>,
    entries: HashMap<EntryId, EntryState>,
    pub(crate) events: Queue<Output>,
    /// Test of other nodes, and its reports: they come when they are asked for.
    pub(crate) run: Option<Run>,
    pub(crate) reports: VecDeque<RunEvent>,
}

impl LnetMachine {
    pub(crate) fn new(node: Node, target: Option<Target>) -> Self {
        Self {
            node,
            target,
            jobs: HashMap::new(),
            entries: HashMap::new(),
            events: Queue::default(),
            run: None,
            reports: VecDeque::new(),
        }
    }

    /// Begins an operation.
    ///
    /// # Errors
    /// Errors of `begin`.
    pub(crate) fn begin(
        &mut self,
        begin: impl FnOnce(&mut Node, Instant) -> Result<JobId, Failure>,
    ) -> Result<JobId, Failure> {
        let job = begin(&mut self.node, roce::now())?;
        self.jobs.insert(job, None);
        Ok(job)
    }

    /// Takes the end of an operation, if it has ended.
    pub(crate) fn take_end(&mut self, job: JobId) -> Option<Result<u32, Failure>> {
        self.jobs.get_mut(&job)?.take()
    }

    /// Forgets an operation, ended or not.
    pub(crate) fn forget_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    pub(crate) fn attach(&mut self, entry: Entry) -> EntryId {
        let id = self.node.attach(entry);
        self.entries.insert(id, EntryState::default());
        id
    }

    pub(crate) fn entry(&mut self, id: EntryId) -> Option<&mut EntryState> {
        self.entries.get_mut(&id)
    }

    /// Takes away an entry. Operations under way go on.
    pub(crate) fn detach(&mut self, id: EntryId) {
        self.node.detach(id);
        self.entries.remove(&id);
    }

    /// Counters of lnet_selftest, if this node has its services.
    pub(crate) fn selftest(&self) -> Option<RpcCounters> {
        self.target.as_ref().map(Target::counters)
    }

    fn take_report(&mut self, output: Output, changed: &mut dyn FnMut(Key)) {
        match &output {
            Output::Done(job, result) => {
                if let Some(end) = self.jobs.get_mut(job) {
                    *end = Some(result.clone());
                    changed(Key::Job(*job));
                }
                return;
            }
            Output::Served(served, result) => {
                if let Some(entry) = self.entries.get_mut(&served.entry) {
                    entry.counts.add(result);
                    entry.events.push((*served, result.clone()));
                    changed(Key::Entry(served.entry));
                }
            }
            Output::Unlinked(id) => {
                if let Some(entry) = self.entries.get_mut(id) {
                    entry.is_unlinked = true;
                    changed(Key::Entry(*id));
                }
                return;
            }
            Output::Up(peer, negotiated) => {
                let (depth, frags) = (negotiated.depth, negotiated.frags);
                tracing::info!("LNet: connected to {peer}, queue depth {depth}, {frags} fragments");
            }
            Output::Down(peer, why) => tracing::info!("LNet: not connected to {peer}: {why}"),
            Output::Refused(peer, why) => tracing::debug!("LNet: a request of {peer} was refused: {why}"),
            Output::Pinged(peer) => tracing::debug!("LNet: {peer} has pinged"),
            Output::Pushed(peer) => tracing::debug!("LNet: {peer} has sent its interfaces"),
        }
        self.events.push(output);
        changed(Key::Events);
    }
}

impl Machine for LnetMachine {
    type Key = Key;

    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.node.timeout(cx);
        if let Some(target) = &mut self.target {
            target.timeout(&mut self.node, cx.now);
        }
        if let Some(run) = &mut self.run {
            run.timeout(&mut self.node, cx.now);
        }
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let target = self.target.as_ref().and_then(Target::next_timeout);
        let run = self.run.as_ref().and_then(Run::next_timeout);
        [self.node.next_timeout(), target, run].into_iter().flatten().min()
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

    fn take_reports(&mut self, changed: &mut dyn FnMut(Key)) {
        while let Some(output) = self.node.poll_output() {
            let (node, now) = (&mut self.node, roce::now());
            let run = self.run.as_mut();
            let is_taken = run.is_some_and(|run| run.output(node, now, &output)) || {
                let target = self.target.as_mut();
                target.is_some_and(|target| target.output(node, now, &output))
            };
            if !is_taken {
                self.take_report(output, changed);
            }
        }
        while let Some(report) = self.run.as_mut().and_then(Run::poll) {
            self.reports.push_back(report);
            changed(Key::Reports);
        }
    }
}
