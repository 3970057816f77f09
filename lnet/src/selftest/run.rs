//! Test of other nodes by this one, which is its console and its client.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use roce_verbs::Instant;
use thiserror::Error;

use super::{
    client::{CallError, CallId, Client},
    console::{Console, TestPlan},
    proto::{Body, Features, FrameworkCounters, LnetCounters, Message, Parameters, RpcCounters, Sid},
    session::{Session, bulk_len},
    wire::Name,
};
use crate::{
    event::{Failure, Output},
    node::Node,
    proto::Nid,
};

/// The only batch of the session.
const BATCH: u64 = 1;
/// Requests that a server of the kernel prepares for, at least.
const MIN_SERVER_REQUESTS: u32 = 16;
/// Most units, and bytes of their data.
const LIMITS: (usize, usize) = (4096, 1 << 30);

/// Plan of a test by this node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunPlan {
    /// Nodes to test.
    pub nodes: Vec<Nid>,
    /// The service, and the parameters.
    pub parameters: Parameters,
    /// Requests to each node at a time.
    pub concurrency: u32,
    /// Requests of each unit; `None`: until the test is stopped.
    pub loops: Option<u32>,
    /// Name of the session.
    pub name: String,
    /// End another session that a node has.
    pub force: bool,
    /// Longest time until a reply.
    pub timeout: Duration,
}

impl RunPlan {
    /// Checks the plan.
    ///
    /// # Errors
    /// Names what is not possible.
    pub fn check(&self) -> Result<(), &'static str> {
        let len = bulk_len(&self.parameters).map_err(|_| "data: 1 byte to 1 MiB")?;
        let units = self.nodes.len().saturating_mul(self.concurrency as usize);
        match () {
            () if units == 0 => Err("no node, or no requests at a time"),
            () if units > LIMITS.0 => Err("nodes times requests at a time: at most 4096"),
            () if units.saturating_mul(len) > LIMITS.1 => Err("data of all requests at a time: at most 1 GiB"),
            () if self.loops.is_some_and(|loops| !(1..=i32::MAX as u32).contains(&loops)) => {
                Err("requests: 1 to 2147483647")
            }
            () => Ok(()),
        }
    }
}

/// Reason for which a node takes no part in a test.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RunError {
    /// It could not be asked, or did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
    /// It has a session of another console.
    #[error("it has the session {1:?} of the console at {0}")]
    Busy(Nid, String),
    /// It refuses, with an error number of Linux.
    #[error("it refuses, with error {0}")]
    Refused(u32),
}

/// Counters of a node that is tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeCounters {
    /// Of the session.
    pub framework: FrameworkCounters,
    /// Of messages.
    pub rpc: RpcCounters,
    /// Of LNet.
    pub lnet: LnetCounters,
}

/// Report of a test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RunEvent {
    /// A node takes no part, or no longer.
    Lost(Nid, RunError),
    /// The nodes that take part are ready, and requests are sent.
    Begun,
    /// A node's counters.
    Counters(Nid, Box<NodeCounters>),
    /// All nodes have left the session.
    Ended,
}

/// Requests of a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunCounts {
    /// Requests whose reply and data were right.
    pub done: u64,
    /// Others that have ended.
    pub failed: u64,
    /// Bytes of data of those that were right.
    pub bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Nodes join the session.
    Preparing,
    Running,
    /// Nodes leave the session.
    Leaving,
    Ended,
}

/// Request of the console.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Join,
    Prepare,
    /// Counters; with the last ones the node leaves.
    Counters(bool),
    Leave,
    /// Leave of a node that may have joined, of which no reply has come.
    Forget,
}

/// See the module.
#[derive(Debug)]
pub struct Run {
    plan: RunPlan,
    console: Console,
    client: Client,
    session: Session,
    phase: Phase,
    /// Nodes that have joined, and whether they are ready.
    joined: BTreeMap<Nid, bool>,
    steps: BTreeMap<CallId, (Nid, Step)>,
    out: VecDeque<RunEvent>,
}

impl Run {
    /// Has nodes join a session for a test. `stamp`: microseconds since 1970, for example: a number that no other session of this NID has.
    ///
    /// # Errors
    /// The part of the plan that is not possible.
    pub fn start(node: &mut Node, now: Instant, plan: RunPlan, stamp: u64) -> Result<Self, &'static str> {
        plan.check()?;
        let sid = Sid { nid: node.nid(), stamp };
        let client = |bit| Client::new(plan.timeout, stamp & !1 | bit);
        let mut run = Self {
            console: Console::new(client(0), sid.nid, stamp, &plan.name),
            client: client(1),
            // It ends with the test.
            session: Session::new((sid, Name::new(&plan.name), Features::all()), now, now),
            phase: Phase::Preparing,
            joined: BTreeMap::new(),
            steps: BTreeMap::new(),
            out: VecDeque::new(),
            plan,
        };
        for peer in run.plan.nodes.clone() {
            run.step(node, now, peer, Step::Join);
        }
        run.go_on(node, now);
        Ok(run)
    }

    /// Takes the next report.
    pub fn poll(&mut self) -> Option<RunEvent> {
        self.out.pop_front()
    }

    /// Returns whether all nodes have left the session, and nothing of the test is left in the node.
    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Requests that have ended.
    pub fn counts(&self) -> RunCounts {
        let (done, failed) = self.session.requests();
        let len = match self.plan.parameters {
            Parameters::Bulk { len, .. } => len,
            Parameters::Ping { .. } => 0,
        };
        RunCounts {
            done,
            failed,
            bytes: done * u64::from(len),
        }
    }

    /// Asks all nodes for their counters.
    pub fn ask(&mut self, node: &mut Node, now: Instant) {
        if self.phase == Phase::Running {
            for peer in self.joined.keys().copied().collect::<Vec<_>>() {
                self.step(node, now, peer, Step::Counters(false));
            }
        }
    }

    /// Ends the test: after the requests that are under way, or with `force` at once.
    pub fn stop(&mut self, node: &mut Node, now: Instant, force: bool) {
        match self.phase {
            // Whoever joins leaves.
            Phase::Preparing => self.phase = Phase::Leaving,
            // There is the batch.
            Phase::Running => {
                let _ = self.session.stop((node, &mut self.client), BATCH, force);
            }
            Phase::Leaving | Phase::Ended => {}
        }
        self.go_on(node, now);
    }

    /// Handles a report of the node. Returns whether it is about this test.
    pub fn output(&mut self, node: &mut Node, now: Instant, output: &Output) -> bool {
        let is_ours = self.console.output(node, output) || self.client.output(node, output);
        if is_ours {
            self.go_on(node, now);
        }
        is_ours
    }

    /// Gives up what has waited too long.
    pub fn timeout(&mut self, node: &mut Node, now: Instant) {
        self.console.timeout(node, now);
        self.client.timeout(node, now);
        self.go_on(node, now);
    }

    /// When to call [`timeout`](Self::timeout).
    pub fn next_timeout(&self) -> Option<Instant> {
        let timeouts = [self.console.next_timeout(), self.client.next_timeout()];
        timeouts.into_iter().flatten().min()
    }

    /// The test, of these nodes.
    fn test(&self, nodes: Vec<Nid>) -> TestPlan {
        TestPlan {
            batch: BATCH,
            parameters: self.plan.parameters,
            loops: self.plan.loops,
            concurrency: self.plan.concurrency,
            stop_on_error: false,
            nodes,
        }
    }

    fn step(&mut self, node: &mut Node, now: Instant, peer: Nid, step: Step) {
        let plan = self.test(Vec::new());
        let console = &mut self.console;
        let asked = match step {
            Step::Join => console.make_session(node, now, peer, self.plan.force),
            Step::Prepare => {
                let requests = self.plan.concurrency.max(MIN_SERVER_REQUESTS);
                console.add_server(node, now, peer, (&plan, requests))
            }
            Step::Counters(_) => console.stat(node, now, peer),
            Step::Leave | Step::Forget => console.remove_session(node, now, peer),
        };
        match asked {
            Ok(id) => {
                self.steps.insert(id, (peer, step));
            }
            Err(_) if step == Step::Forget => {}
            Err(why) => self.lost(peer, step, CallError::from(why).into()),
        }
    }

    fn lost(&mut self, peer: Nid, step: Step, why: RunError) {
        self.out.push_back(RunEvent::Lost(peer, why));
        match step {
            // It has no session, or none that could be ended.
            Step::Join | Step::Leave | Step::Forget => {
                self.joined.remove(&peer);
            }
            Step::Prepare | Step::Counters(_) => {}
        }
    }

    fn replied(&mut self, node: &mut Node, now: Instant, (peer, step): (Nid, Step), result: Result<Body, CallError>) {
        match (step, judged(result)) {
            (Step::Forget, _) => {}
            (Step::Join, Err(why)) => {
                let is_late = why == RunError::Call(CallError::Timeout);
                self.lost(peer, step, why);
                // It may have got the request. One that is not connected has not.
                if is_late && node.connections().any(|conn| conn.peer == peer && conn.is_established) {
                    self.step(node, now, peer, Step::Forget);
                }
            }
            (step, Err(why)) => self.lost(peer, step, why),
            (Step::Join, Ok(_)) => {
                self.joined.insert(peer, false);
                if self.phase == Phase::Preparing {
                    self.step(node, now, peer, Step::Prepare);
                }
            }
            (Step::Prepare, Ok(_)) => {
                self.joined.insert(peer, true);
            }
            (
                Step::Counters(_),
                Ok(Body::StatReply {
                    framework, rpc, lnet, ..
                }),
            ) => {
                let counters = NodeCounters { framework, rpc, lnet };
                self.out.push_back(RunEvent::Counters(peer, counters.into()));
            }
            (Step::Counters(_), Ok(_)) => {}
            (Step::Leave, Ok(_)) => {
                self.joined.remove(&peer);
            }
        }
        if step == Step::Counters(true) {
            self.step(node, now, peer, Step::Leave);
        }
    }

    /// Continues with what the replies allow.
    fn go_on(&mut self, node: &mut Node, now: Instant) {
        while let Some((id, result)) = self.console.poll() {
            if let Some(step) = self.steps.remove(&id) {
                self.replied(node, now, step, result.map(|reply| reply.body));
            }
        }
        while let Some((id, result)) = self.client.poll() {
            self.session.called((node, &mut self.client), now, id, &result);
        }
        let is_asking = !self.steps.is_empty();
        match self.phase {
            Phase::Preparing if self.steps.values().all(|(_, step)| *step == Step::Forget) => self.begin(node, now),
            Phase::Running if self.session.query(BATCH, 0) == Ok(0) && self.client.is_empty() => self.leave(node, now),
            Phase::Leaving if !is_asking && !self.joined.is_empty() => self.leave(node, now),
            Phase::Leaving if !is_asking => {
                self.phase = Phase::Ended;
                self.out.push_back(RunEvent::Ended);
            }
            _ => {}
        }
    }

    /// Begins the test of the nodes that are ready.
    fn begin(&mut self, node: &mut Node, now: Instant) {
        let ready = |(peer, is_ready): (&Nid, &bool)| is_ready.then_some(*peer);
        let nodes: Vec<Nid> = self.joined.iter().filter_map(ready).collect();
        if nodes.is_empty() {
            self.phase = Phase::Leaving;
            return self.go_on(node, now);
        }
        let plan = self.test(nodes);
        let request = Message::new(Features::all(), self.console.client_test(&plan));
        let added = self.session.add_client(&request, &plan.nodes, LIMITS);
        let begun = added.and_then(|()| self.session.run((node, &mut self.client), now, BATCH));
        match begun {
            Ok(()) => {
                self.phase = Phase::Running;
                self.out.push_back(RunEvent::Begun);
            }
            Err(status) => {
                // Without memory here.
                let why = |peer| RunEvent::Lost(peer, CallError::from(local(status)).into());
                self.out.extend(plan.nodes.into_iter().map(why));
                self.leave(node, now);
            }
        }
    }

    /// Has all nodes leave the session. Their last counters come before that.
    fn leave(&mut self, node: &mut Node, now: Instant) {
        self.phase = Phase::Leaving;
        self.steps.retain(|_, (_, step)| *step != Step::Counters(false));
        let asked: Vec<Nid> = self.steps.values().map(|(peer, _)| *peer).collect();
        for peer in self.joined.keys().copied().collect::<Vec<_>>() {
            if !asked.contains(&peer) {
                self.step(node, now, peer, Step::Counters(true));
            }
        }
    }
}

fn local(status: u32) -> Failure {
    Failure::Local(format!("error {status}"))
}

/// Returns a reply that is no refusal.
fn judged(result: Result<Body, CallError>) -> Result<Body, RunError> {
    let body = result?;
    match (body, body.status()) {
        (_, Some(0)) => Ok(body),
        (Body::SessionMade { sid, name, .. }, Some(super::errno::BUSY)) => {
            Err(RunError::Busy(sid.nid, name.to_string()))
        }
        (_, status) => Err(RunError::Refused(status.unwrap_or_default())),
    }
}
