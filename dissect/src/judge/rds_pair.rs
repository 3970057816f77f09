//! Sequence numbers of two RDS nodes, over all their connections.

/// Sequence numbers of one node.
#[derive(Clone, Copy, Default, Debug)]
struct Node {
    /// Last sequence number since the node was started.
    last: Option<u64>,
    /// Highest one ever.
    highest: Option<u64>,
}

/// Two nodes and a type of service. Their sequence numbers go on over a new connection.
#[derive(Default, Debug)]
pub(super) struct RdsPair {
    nodes: [Node; 2],
}

impl RdsPair {
    /// Last sequence number of a node, the one with the lower address being 0.
    pub(super) const fn last(&self, node: usize) -> Option<u64> {
        self.nodes[node].last
    }

    /// Highest sequence number that a node ever sent.
    pub(super) const fn highest(&self, node: usize) -> Option<u64> {
        self.nodes[node].highest
    }

    /// Notes a message of a node that its peer may have kept while one before it was missing: it may acknowledge it over a later connection.
    pub(super) fn early(&mut self, node: usize, sequence: u64) {
        let highest = &mut self.nodes[node].highest;
        *highest = Some(sequence.max(highest.unwrap_or(0)));
    }

    /// Notes a message of a node. `begins`: it is the first on its connection, and new.
    pub(super) fn sent(&mut self, node: usize, sequence: u64, begins: bool) {
        let node = &mut self.nodes[node];
        node.highest = Some(sequence.max(node.highest.unwrap_or(0)));
        node.last = match node.last {
            Some(last) if !begins => Some(last.max(sequence)),
            _ => Some(sequence),
        };
    }
}
