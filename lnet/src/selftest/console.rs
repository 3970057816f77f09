//! Console: makes sessions on nodes, and has them test each other.

use roce_verbs::Instant;

use super::{
    client::{CallError, CallId, Client, Data},
    proto::{Body, Features, Message, Parameters, Sid, destinations_to_bytes},
    wire::Name,
};
use crate::{
    buffer::Buffer,
    event::{Failure, Output},
    node::Node,
    proto::{ByteOrder, Nid},
};

/// Test of nodes by another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TestPlan {
    /// The batch that it belongs to, from 1 on.
    pub batch: u64,
    /// The service, and the parameters.
    pub parameters: Parameters,
    /// Requests of each unit; `None`: until the batch is stopped.
    pub loops: Option<u32>,
    /// Units for each node.
    pub concurrency: u32,
    /// A unit ends with the first error.
    pub stop_on_error: bool,
    /// The nodes.
    pub nodes: Vec<Nid>,
}

/// Console of one session. Its requests end as those of a [`Client`].
#[derive(Debug)]
pub struct Console {
    client: Client,
    sid: Sid,
    name: Name,
    features: Features,
}

impl Console {
    /// Returns the console of a session that is on no node yet. `stamp`: as of a [`Client`], and part of the session's number.
    pub fn new(client: Client, nid: Nid, stamp: u64, name: &str) -> Self {
        Self {
            client,
            sid: Sid { nid, stamp },
            name: Name::new(name),
            features: Features::all(),
        }
    }

    /// Number of the session.
    pub const fn sid(&self) -> Sid {
        self.sid
    }

    /// Handles a report of the node. Returns whether it is about a request of this console.
    pub fn output(&mut self, node: &mut Node, output: &Output) -> bool {
        self.client.output(node, output)
    }

    /// Takes the next request that has ended, with its reply.
    pub fn poll(&mut self) -> Option<(CallId, Result<Message, CallError>)> {
        self.client.poll()
    }

    /// Gives up what has waited too long.
    pub fn timeout(&mut self, node: &mut Node, now: Instant) {
        self.client.timeout(node, now);
    }

    /// When to call [`timeout`](Self::timeout).
    pub fn next_timeout(&self) -> Option<Instant> {
        self.client.next_timeout()
    }

    /// Requests that have not ended.
    pub fn pending(&self) -> usize {
        self.client.len()
    }

    /// Makes the session on a node. `force`: ends another one that is there.
    ///
    /// # Errors
    /// As of [`Client::call`]; so of all requests.
    pub fn make_session(&mut self, node: &mut Node, now: Instant, peer: Nid, force: bool) -> Result<CallId, Failure> {
        let body = Body::MakeSession {
            reply_bits: 0,
            sid: self.sid,
            force: force.into(),
            name: self.name,
        };
        self.call(node, now, peer, body)
    }

    /// Ends the session on a node.
    ///
    /// # Errors
    /// See [`make_session`](Self::make_session).
    pub fn remove_session(&mut self, node: &mut Node, now: Instant, peer: Nid) -> Result<CallId, Failure> {
        let (reply_bits, sid) = (0, self.sid);
        self.call(node, now, peer, Body::RemoveSession { reply_bits, sid })
    }

    /// Asks which session a node has.
    ///
    /// # Errors
    /// See [`make_session`](Self::make_session).
    pub fn debug(&mut self, node: &mut Node, now: Instant, peer: Nid) -> Result<CallId, Failure> {
        let body = Body::Debug {
            reply_bits: 0,
            sid: self.sid,
            flags: 0,
        };
        self.call(node, now, peer, body)
    }

    /// Asks for a node's counters.
    ///
    /// # Errors
    /// See [`make_session`](Self::make_session).
    pub fn stat(&mut self, node: &mut Node, now: Instant, peer: Nid) -> Result<CallId, Failure> {
        let body = Body::Stat {
            reply_bits: 0,
            sid: self.sid,
            kind: 0,
        };
        self.call(node, now, peer, body)
    }

    /// Prepares a node for tests by others: `requests` at a time.
    ///
    /// # Errors
    /// See [`make_session`](Self::make_session).
    pub fn add_server(
        &mut self,
        node: &mut Node,
        now: Instant,
        peer: Nid,
        (plan, requests): (&TestPlan, u32),
    ) -> Result<CallId, Failure> {
        let body = self.test(plan, requests, false);
        self.call(node, now, peer, body)
    }

    /// Adds a test of other nodes to a batch of a node.
    ///
    /// # Errors
    /// See [`make_session`](Self::make_session).
    pub fn add_client(&mut self, node: &mut Node, now: Instant, peer: Nid, plan: &TestPlan) -> Result<CallId, Failure> {
        let data = destinations_to_bytes(&plan.nodes);
        let source = Buffer::allocate(data.len()).ok_or_else(|| Failure::Local("no memory".into()))?;
        source.write(&data);
        let body = self.client_test(plan);
        let request = (self.features, body);
        self.client.call(node, now, peer, request, Data::Source(source))
    }

    /// Runs, stops or asks for a batch of a node: [`Body::RUN`], [`Body::STOP`], [`Body::QUERY`]. `argument`: the test that is asked for,
    /// or whether requests under way are canceled.
    ///
    /// # Errors
    /// See [`make_session`](Self::make_session).
    pub fn batch(
        &mut self,
        node: &mut Node,
        now: Instant,
        peer: Nid,
        (batch, operation, argument): (u64, u32, u32),
    ) -> Result<CallId, Failure> {
        let is_query = operation == Body::QUERY;
        let body = Body::Batch {
            reply_bits: 0,
            sid: self.sid,
            batch,
            operation,
            test: if is_query { argument } else { 0 },
            argument: if is_query { 0 } else { argument },
        };
        self.call(node, now, peer, body)
    }

    /// Returns the request for a test of other nodes.
    pub(super) fn client_test(&self, plan: &TestPlan) -> Body {
        self.test(plan, plan.loops.unwrap_or(u32::MAX), true)
    }

    fn test(&self, plan: &TestPlan, loops: u32, is_client: bool) -> Body {
        Body::Test {
            reply_bits: 0,
            bulk_bits: 0,
            sid: self.sid,
            batch: plan.batch,
            service: plan.parameters.service().number(),
            loops,
            concurrency: plan.concurrency,
            is_client: is_client.into(),
            stop_on_error: plan.stop_on_error.into(),
            nodes: if is_client { plan.nodes.len() as u32 } else { 0 },
            parameters: plan.parameters.to_bytes(ByteOrder::Little, self.features),
        }
    }

    fn call(&mut self, node: &mut Node, now: Instant, peer: Nid, body: Body) -> Result<CallId, Failure> {
        self.client.call(node, now, peer, (self.features, body), Data::None)
    }
}
