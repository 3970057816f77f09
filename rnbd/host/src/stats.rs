//! What a loop has done.

use roce::{DeviceStats, Usage};
use roce_reactor::{Counters, TurnCx};

/// Numbers of a loop.
#[derive(Clone, Debug, Default)]
pub struct LoopStats {
    /// Of the devices.
    pub device: DeviceStats,
    /// Objects of verbs that there are.
    pub usage: Usage,
    /// Of the loop itself.
    pub turns: Counters,
}

impl LoopStats {
    /// Those of this loop, all its devices together.
    pub(crate) fn of<J>(turn: &mut TurnCx<'_, J>) -> Self {
        let mut device = DeviceStats::default();
        for stats in (0..).map_while(|index| turn.device.stats(index)) {
            device.add(&stats);
        }
        Self {
            device,
            usage: turn.device.usage(),
            turns: *turn.counters,
        }
    }

    /// Adds those of another loop.
    pub fn add(&mut self, other: &Self) {
        self.device.add(&other.device);
        self.usage.add(&other.usage);
        self.turns.add(&other.turns);
    }
}
