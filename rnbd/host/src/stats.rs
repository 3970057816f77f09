//! What a loop has done.

use std::net::IpAddr;

use roce::{DeviceStats, LocalDevice};
use roce_reactor::Counters;

/// Numbers of a loop.
#[derive(Clone, Debug, Default)]
pub struct LoopStats {
    /// Of each device, by its address as it was given.
    pub devices: Vec<(IpAddr, DeviceStats)>,
    /// Of the loop itself.
    pub turns: Counters,
}

impl LoopStats {
    pub(crate) fn of(device: &mut LocalDevice, turns: &Counters) -> Self {
        Self {
            devices: device.all_stats(),
            turns: *turns,
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
        self.turns.add(&other.turns);
    }
}
