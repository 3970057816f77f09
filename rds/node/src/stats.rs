//! Numbers of the node at one moment.

use rds::{ConnectionInfo, Counters};
use roce::reactor::LoopStats;

/// Numbers of the node at one moment.
#[derive(Clone, Debug, Default)]
pub struct NodeStats {
    /// Counters of the protocol, of all addresses together.
    pub counters: Counters,
    /// Counters of what programs do.
    pub own_counters: Vec<(&'static str, u64)>,
    /// Sockets of programs.
    pub sockets: usize,
    /// Connections to peers.
    pub connections: Vec<ConnectionInfo>,
    /// Bytes that sockets have not read.
    pub unread: usize,
    /// The loop.
    pub turns: LoopStats,
}

impl NodeStats {
    /// All counters by name, those of the kernel first.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let own = self.counters.own().chain(self.own_counters.iter().copied());
        self.counters.of_kernel().chain(own)
    }
}
