//! Statistics of mappings and servers.

use rnbd::{client::device::DeviceCounters, server::ServerCounters};
use roce::reactor::LoopStats;

/// Statistics of a mapping.
#[derive(Clone, Debug, Default)]
pub struct MapStats {
    /// The loop.
    pub turns: LoopStats,
    /// Its devices together, those included that are unmapped.
    pub device: DeviceCounters,
    /// NBD clients connected now.
    pub clients: usize,
    /// NBD clients that were rejected, or evicted before they had chosen a device.
    pub turned_away: u64,
    /// Front ends of virtual machines connected now.
    pub front_ends: usize,
    /// Malformed requests of virtual machines.
    pub malformed: u64,
}

/// Statistics of a server.
#[derive(Clone, Debug, Default)]
pub struct ServeStats {
    /// The loop.
    pub turns: LoopStats,
    /// Block devices.
    pub rnbd: ServerCounters,
    /// Sessions, by name.
    pub rtrs: Vec<(&'static str, u64)>,
    /// Open sessions of each loop.
    pub sessions: Vec<usize>,
    /// Block requests that each loop has answered.
    pub requests: Vec<u64>,
}

impl ServeStats {
    /// Adds those of another loop.
    pub(crate) fn add(&mut self, other: &Self) {
        self.turns.add(&other.turns);
        self.rnbd.add(&other.rnbd);
        match self.rtrs.is_empty() {
            true => self.rtrs.clone_from(&other.rtrs),
            // Each loop has the same, in the same order.
            false => self.rtrs.iter_mut().zip(&other.rtrs).for_each(|(a, b)| a.1 += b.1),
        }
        self.sessions.extend(&other.sessions);
        self.requests.extend(&other.requests);
    }
}
