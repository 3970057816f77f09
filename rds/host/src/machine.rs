//! Node, with the operations that programs wait for.

use std::collections::HashMap;

use rds::{Node, Output, RdmaStatus, SocketId};
use roce_host::Machine;
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

/// Node and operations of its sockets.
#[derive(Debug)]
pub(crate) struct RdsMachine {
    pub(crate) node: Node,
    /// Operations that a program wants to know the end of, with that.
    operations: HashMap<u64, Option<RdmaStatus>>,
    next_operation: u64,
}

impl RdsMachine {
    pub(crate) fn new(node: Node) -> Self {
        Self {
            node,
            operations: HashMap::new(),
            next_operation: 0,
        }
    }

    /// Returns the number of a new operation.
    pub(crate) fn new_operation(&mut self) -> u64 {
        let token = self.next_operation;
        self.next_operation += 1;
        self.operations.insert(token, None);
        token
    }

    /// Forgets an operation, ended or not.
    pub(crate) fn forget_operation(&mut self, token: u64) {
        self.operations.remove(&token);
    }

    /// Returns the end of an operation, if it has ended.
    pub(crate) fn operation(&self, token: u64) -> Option<RdmaStatus> {
        self.operations.get(&token).copied().flatten()
    }

    /// Takes the ends of a socket's operations. From then on its changes are reported again.
    fn socket_changed(&mut self, id: SocketId) {
        let _ = self.node.poll(id);
        while let Ok(notice) = self.node.notice(id) {
            if let Some(end) = self.operations.get_mut(&notice.token) {
                *end = Some(notice.status);
            }
        }
    }
}

impl Machine for RdsMachine {
    type Key = SocketId;

    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.node.timeout(cx);
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.node.next_timeout()
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

    fn take_reports(&mut self, changed: &mut dyn FnMut(SocketId)) {
        while let Some(output) = self.node.poll_output() {
            match output {
                Output::Changed(id) => {
                    self.socket_changed(id);
                    changed(id);
                }
                Output::Up(key) => tracing::info!("RDS: connected, {key}"),
                Output::Down(key, why) => tracing::info!("RDS: not connected, {key}: {why}"),
                Output::Restarted(key) => tracing::info!("RDS: the peer was started again, {key}"),
                Output::Congested(addr) => tracing::debug!("RDS: the port {addr} is congested"),
                Output::PeerCongested(peer) => tracing::debug!("RDS: {peer} has congested ports"),
                Output::Refused { peer, why } => tracing::debug!("RDS: a request of {peer} was refused: {why}"),
            }
        }
    }
}
