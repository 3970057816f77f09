//! Host's part in selftest: it serves, and in some runs is the console of a test of others.

use core::time::Duration;
use std::collections::BTreeMap;

use lnet::{
    Failure, Node, Output,
    proto::Nid,
    selftest::{
        CallError, CallId, Client, Console, Target, TargetConfig, TestPlan,
        proto::{Body, Message, Parameters, Pattern},
    },
};
use roce_sim::{Check, Coverage, MS, Rng, SEC};
use roce_verbs::Instant;

/// Questions whether the batch runs, and the time between two.
const QUESTIONS: u32 = 5;
const PAUSE: u64 = 10 * MS;
/// Time in which a session can't have ended for want of requests.
const FRESH: u64 = 90 * SEC;
/// Operations of selftest at most: requests of three peers, units of tests, and what is left of those that were canceled.
const MAX_JOBS: usize = 150;

/// Settings of targets: as many requests of a peer, and tests, as a stranger reaches.
fn target_config() -> TargetConfig {
    TargetConfig {
        max_requests: 16,
        max_bulk: 1 << 20,
        max_units: 64,
        max_unit_bytes: 4 << 20,
        ..TargetConfig::default()
    }
}

/// Strangers of a run, and what they must not reach.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules {
    /// Stranger with a node.
    pub(crate) intruder: Option<Nid>,
    /// Nobody can end a session but its console.
    pub(crate) sessions_are_safe: bool,
}

/// Step of a console.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Make(Nid),
    Debug(Nid),
    AddServer,
    AddClient,
    Run,
    /// Questions that are left.
    Query(u32),
    Stop,
    Stat(Nid),
    Remove(Nid),
}

/// Plan of a console.
#[derive(Clone, Debug)]
pub(crate) struct TesterPlan {
    client: Nid,
    server: Nid,
    test: TestPlan,
    stops: bool,
    force: bool,
}

impl TesterPlan {
    /// `None`: the host is no console. A client tests another node.
    pub(crate) fn draw(own: usize, hosts: &[Nid], intruder: Option<Nid>, rng: &mut Rng) -> Option<Self> {
        let client = hosts[(own + 1 + rng.index(hosts.len() - 1)) % hosts.len()];
        let others: Vec<Nid> = hosts.iter().copied().filter(|nid| *nid != client).collect();
        let mut server = others[rng.index(others.len())];
        if let Some(intruder) = intruder.filter(|_| rng.chance(0.2)) {
            server = intruder;
        }
        let parameters = match rng.chance(0.3) {
            true => Parameters::Ping { size: 0, flags: 0 },
            false => Parameters::Bulk {
                operation: rng.pick(&[Body::READ, Body::WRITE]),
                pattern: rng.pick(&[Pattern::None, Pattern::Simple, Pattern::Full]) as u32,
                len: rng.pick(&[8, 512, 3976, 3977, 4096, 65_536]),
                offset: 0,
            },
        };
        let test = TestPlan {
            batch: rng.range(1, 3),
            parameters,
            // One without an end would go on until the session times out when the console's requests are lost.
            loops: Some(rng.pick(&[1, 3, 20])),
            concurrency: rng.pick(&[1, 2, 5]),
            stop_on_error: rng.chance(0.5),
            nodes: core::iter::once(server)
                .chain(intruder.filter(|_| rng.chance(0.3)))
                .collect(),
        };
        let plan = Self {
            client,
            server,
            test,
            stops: rng.chance(0.5),
            force: rng.chance(0.3),
        };
        rng.chance(0.3).then_some(plan)
    }

    /// Node that a step is for.
    const fn peer(&self, step: Step) -> Nid {
        match step {
            Step::Make(peer) | Step::Debug(peer) | Step::Stat(peer) | Step::Remove(peer) => peer,
            Step::AddServer => self.server,
            Step::AddClient | Step::Run | Step::Query(_) | Step::Stop => self.client,
        }
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = vec![
            Step::Make(self.client),
            Step::Make(self.server),
            Step::Debug(self.client),
            Step::AddServer,
            Step::AddClient,
            Step::Run,
            Step::Query(QUESTIONS),
        ];
        if self.stops {
            steps.extend([Step::Stop, Step::Query(QUESTIONS)]);
        }
        steps.extend([Step::Stat(self.client), Step::Stat(self.server)]);
        steps.extend([Step::Remove(self.client), Step::Remove(self.server)]);
        // The last one is the next.
        steps.reverse();
        steps
    }
}

/// See the module.
pub(crate) struct Tester {
    target: Target,
    console: Console,
    plan: Option<TesterPlan>,
    own: Nid,
    steps: Vec<Step>,
    waits: Option<(CallId, Step)>,
    /// Nodes that have joined the session, and when they answered last.
    joined: BTreeMap<Nid, u64>,
    rules: Rules,
    goes_on_at: u64,
}

impl Tester {
    pub(crate) fn start(node: &mut Node, now: Instant, (plan, rules): (Option<TesterPlan>, Rules)) -> Self {
        let stamp = now.as_nanos() >> 16 & ((1 << 14) - 1);
        let client = Client::new(Duration::from_secs(20), stamp | 1 << 15);
        let nid = node.nid();
        Self {
            target: Target::attach(node, target_config(), stamp | 1 << 14).expect("memory"),
            console: Console::new(client, nid, stamp, "sim"),
            // The console itself may be the server, which has no connection to itself.
            steps: plan.as_ref().map(TesterPlan::steps).unwrap_or_default(),
            plan,
            own: nid,
            waits: None,
            joined: BTreeMap::new(),
            rules,
            goes_on_at: now.as_nanos(),
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.steps.is_empty() && self.waits.is_none()
    }

    /// Handles a report of the node. Returns whether it is about selftest.
    pub(crate) fn output(&mut self, node: &mut Node, now: Instant, output: &Output) -> bool {
        self.console.output(node, output) || self.target.output(node, now, output)
    }

    pub(crate) fn timeout(&mut self, node: &mut Node, now: Instant) {
        self.console.timeout(node, now);
        self.target.timeout(node, now);
    }

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let goes_on = !self.steps.is_empty() && self.waits.is_none();
        let goes_on = goes_on.then(|| Instant::from_nanos(self.goes_on_at));
        let timeouts = [goes_on, self.console.next_timeout(), self.target.next_timeout()];
        timeouts.into_iter().flatten().min()
    }

    /// Checks that strangers have not got at more than they may.
    pub(crate) fn check(&self, jobs: usize, hosts: &[Nid], coverage: &mut Coverage) -> Check {
        let limits = target_config();
        for peer in hosts.iter().copied().chain(self.rules.intruder) {
            let (requests, bytes) = self.target.load(peer);
            if requests > limits.max_requests || bytes > limits.max_bulk {
                return Err(format!("{requests} requests of {peer} with {bytes} bytes"));
            }
            coverage.note_if(
                "selftest: as many requests of a peer as may be",
                requests == limits.max_requests,
            );
            coverage.note_if("selftest: as much data of a peer as may be", bytes == limits.max_bulk);
        }
        match jobs <= MAX_JOBS {
            true => Ok(()),
            false => Err(format!("{jobs} operations of selftest")),
        }
    }

    /// Returns whether no request is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.target.is_idle() && self.console.pending() == 0
    }

    /// Goes on with the test.
    pub(crate) fn work(&mut self, node: &mut Node, now: Instant, coverage: &mut Coverage) -> Check {
        while let Some((id, result)) = self.console.poll() {
            let Some((_, step)) = self.waits.take_if(|(waits, _)| *waits == id) else {
                return Err(format!("{id:?} ends, which was not begun: {result:?}"));
            };
            self.replied(now, step, &result, coverage)?;
        }
        while self.waits.is_none() && self.goes_on_at <= now.as_nanos() {
            let Some(step) = self.steps.pop() else { break };
            match self.begin(node, now, step) {
                Some(Ok(id)) => self.waits = Some((id, step)),
                Some(Err(Failure::Full)) | None => {}
                Some(Err(why)) => return Err(format!("{step:?}: {why}")),
            }
        }
        Ok(())
    }

    fn begin(&mut self, node: &mut Node, now: Instant, step: Step) -> Option<Result<CallId, Failure>> {
        let TesterPlan {
            client, test, force, ..
        } = self.plan.as_ref()?;
        let (console, client) = (&mut self.console, *client);
        let own = self.own;
        let other = |peer: Nid| (peer != own).then_some(peer);
        let batch = |operation| (test.batch, operation, 0);
        Some(match step {
            Step::Make(peer) => console.make_session(node, now, other(peer)?, *force),
            Step::Debug(peer) => console.debug(node, now, other(peer)?),
            Step::AddServer => {
                let server = other(self.plan.as_ref()?.server)?;
                console.add_server(node, now, server, (test, test.concurrency))
            }
            Step::AddClient => console.add_client(node, now, client, test),
            Step::Run => console.batch(node, now, client, batch(Body::RUN)),
            Step::Query(_) => console.batch(node, now, client, batch(Body::QUERY)),
            Step::Stop => console.batch(node, now, client, (test.batch, Body::STOP, 1)),
            Step::Stat(peer) => console.stat(node, now, other(peer)?),
            Step::Remove(peer) => console.remove_session(node, now, other(peer)?),
        })
    }

    fn replied(
        &mut self,
        now: Instant,
        step: Step,
        result: &Result<Message, CallError>,
        coverage: &mut Coverage,
    ) -> Check {
        let peer = self.plan.as_ref().map_or(self.own, |plan| plan.peer(step));
        let is_stranger = self.rules.intruder == Some(peer);
        let is_joined = |at: &u64| now.as_nanos() < at + FRESH;
        let is_joined = self.joined.get(&peer).is_some_and(is_joined);
        let reply = match result {
            Ok(reply) if reply.body.status() == Some(0) => reply,
            Ok(reply) => {
                coverage.note("selftest: refused");
                return match reply.body.status() {
                    _ if is_stranger => {
                        self.leave(step);
                        Ok(())
                    }
                    _ if is_joined && self.rules.sessions_are_safe => {
                        Err(format!("{step:?} is refused after {peer} has joined: {reply:?}"))
                    }
                    // EINVAL, EPROTO, EBADMSG: never for what is right, but in a session that another console has made.
                    Some(22 | 71 | 74) if self.rules.intruder.is_none() => Err(format!("{step:?}: {reply:?}")),
                    _ => {
                        self.leave(step);
                        Ok(())
                    }
                };
            }
            Err(CallError::Timeout | CallError::Failed(_)) => {
                coverage.note("selftest: no reply");
                self.leave(step);
                return Ok(());
            }
            Err(_) if is_stranger => {
                coverage.note("selftest: wrong reply of a stranger");
                self.leave(step);
                return Ok(());
            }
            Err(why) => return Err(format!("{step:?}: {why}")),
        };
        let is_member = matches!(step, Step::Make(_)) || is_joined;
        if is_member && !matches!(step, Step::Remove(_)) {
            self.joined.insert(peer, now.as_nanos());
        }
        match (step, reply.body) {
            (Step::Query(left), Body::BatchReply { active: 1.., .. }) if left > 1 => {
                coverage.note("selftest: batch runs");
                self.steps.push(Step::Query(left - 1));
                self.goes_on_at = now.as_nanos() + PAUSE;
            }
            (Step::Stat(_), Body::StatReply { rpc, .. }) => {
                coverage.note_if("selftest: data sent", rpc.bulk_put > 0);
                coverage.note_if("selftest: data fetched", rpc.bulk_get > 0);
            }
            (Step::Remove(_), _) => coverage.note("selftest: session removed"),
            _ => {}
        }
        Ok(())
    }

    /// A step has failed: only leaving is left.
    fn leave(&mut self, step: Step) {
        if !matches!(step, Step::Remove(_)) {
            self.steps.retain(|step| matches!(step, Step::Remove(_)));
        }
    }

    /// The host dies: another console begins later, or none.
    pub(crate) fn into_plan(self) -> Option<TesterPlan> {
        self.plan.filter(|_| !self.steps.is_empty() || self.waits.is_some())
    }
}
