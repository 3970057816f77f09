//! Address with its node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{SystemTime, UNIX_EPOCH},
};

use rds::{Node, Output, PairKey, PairState, Refused, SocketId};
use roce_verbs::{
    Instant,
    provider::{Cx, VerbsError},
};

use crate::{
    event::{Events, NodeEvent},
    state::StateFile,
};

/// Address that is open.
#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) node: Node,
    /// Programs' sockets by the node's.
    pub(crate) sockets: BTreeMap<SocketId, usize>,
    state: StateFile,
    /// Interface of an address that means nothing without.
    interface: Option<u32>,
    /// Connections that are up.
    up: BTreeSet<PairKey>,
    /// Connections that may have received since they were recorded.
    unrecorded: BTreeSet<PairKey>,
    /// The pages of its sockets say that a port is congested.
    pub(crate) is_congested: bool,
}

/// Sequence numbers grow over restarts: a peer drops what seems to have come before.
fn first_sequence() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_millis() as u64) << 20
}

impl Address {
    /// Listens at an address whose device is open.
    ///
    /// # Errors
    /// When another process has a node there; the state file comes back.
    pub(crate) fn listen(
        cx: &mut Cx<'_>,
        addr: IpAddr,
        config: &rds::Config,
        (state, former): (StateFile, BTreeMap<PairKey, PairState>),
        interface: Option<u32>,
    ) -> Result<Self, VerbsError> {
        let config = rds::Config {
            first_sequence: first_sequence(),
            ..config.clone()
        };
        Ok(Self {
            node: Node::listen(cx, config, &[addr], former)?,
            sockets: BTreeMap::new(),
            state,
            interface,
            up: BTreeSet::new(),
            unrecorded: BTreeSet::new(),
            is_congested: false,
        })
    }

    /// Returns whether it is at the interface that a name of it says.
    pub(crate) fn is_on(&self, named: SocketAddr) -> bool {
        match (named, self.interface) {
            (SocketAddr::V6(named), Some(own)) => named.scope_id() == own,
            _ => true,
        }
    }

    /// Records the numbers that this turn uses, before it does.
    pub(crate) fn record(&mut self) {
        // `end_batch` may have taken messages after the last call.
        for key in std::mem::take(&mut self.unrecorded) {
            if let Some(state) = self.node.pair_state(key) {
                self.state.record(key, state);
            }
        }
        for (key, state) in self.node.touched() {
            self.state.record(key, state);
            self.unrecorded.insert(key);
        }
    }

    /// Takes what the node reports, and events for the user. Returns the sockets that have changed.
    pub(crate) fn take_outputs(&mut self, now: Instant, events: &mut Events) -> Vec<usize> {
        let mut changed = Vec::new();
        while let Some(output) = self.node.poll_output() {
            let event = match output {
                Output::Changed(id) => {
                    changed.extend(self.sockets.get(&id));
                    continue;
                }
                Output::Up(key) => {
                    self.up.insert(key);
                    NodeEvent::Up(key)
                }
                Output::Down(key, why) => match self.up.remove(&key) {
                    true => NodeEvent::Down(key, why),
                    false => NodeEvent::ConnectFailed(key, why),
                },
                Output::Refused { why: Refused::Race, .. } => continue,
                Output::Refused { peer, why } => NodeEvent::Refused { peer, why },
                Output::Restarted(key) => NodeEvent::PeerRestarted(key),
                Output::Congested(addr) => NodeEvent::Congested(addr),
                Output::PeerCongested(peer) => NodeEvent::PeerCongested(peer),
            };
            events.report(now, event);
        }
        if let Some(why) = self.state.take_trouble() {
            let addr = self.node.addrs()[0];
            events.report(now, NodeEvent::StateFile { addr, why });
        }
        changed
    }
}
