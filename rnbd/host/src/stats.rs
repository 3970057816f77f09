//! Statistics of loops, mappings and servers.

use std::net::IpAddr;

use rnbd::{client::device::DeviceCounters, server::ServerCounters};
use roce::{
    DeviceStats, Usage,
    reactor::{Counters, TurnCx},
};

/// Numbers of a loop.
#[derive(Clone, Debug, Default)]
pub struct LoopStats {
    /// Statistics of each device, by its address as it was given.
    pub devices: Vec<(IpAddr, DeviceStats)>,
    /// Objects of verbs that there are.
    pub usage: Usage,
    /// Counters of the loop itself.
    pub turns: Counters,
}

impl LoopStats {
    /// Returns the statistics of this loop.
    pub(crate) fn of<J>(turn: &mut TurnCx<'_, J>) -> Self {
        Self {
            devices: turn.device.all_stats(),
            usage: turn.device.usage(),
            turns: *turn.counters,
        }
    }

    /// All devices together.
    pub fn device(&self) -> DeviceStats {
        let mut all = DeviceStats::default();
        self.devices.iter().for_each(|(_, stats)| all.add(stats));
        all
    }

    /// Adds those of another loop.
    pub fn add(&mut self, other: &Self) {
        for (addr, stats) in &other.devices {
            match self.devices.iter_mut().find(|(of, _)| of == addr) {
                Some((_, sum)) => sum.add(stats),
                None => self.devices.push((*addr, *stats)),
            }
        }
        self.usage.add(&other.usage);
        self.turns.add(&other.turns);
    }
}

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
