//! What a loop has done.

use roce::DeviceStats;
use roce_reactor::Counters;

/// Numbers of a loop.
#[derive(Clone, Debug, Default)]
pub struct LoopStats {
    /// Of the devices.
    pub device: DeviceStats,
    /// Of the loop itself.
    pub turns: Counters,
}

impl LoopStats {
    /// Adds those of another loop.
    pub fn add(&mut self, other: &Self) {
        self.device.add(&other.device);
        self.turns.add(&other.turns);
    }
}
