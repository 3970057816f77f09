//! Statistics of loops.

use std::net::IpAddr;

use super::counters::Counters;
use crate::{DeviceStats, Usage};

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
