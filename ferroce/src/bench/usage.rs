//! Processor time and system calls of a loop and its process.

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use roce::reactor::TurnCx;

/// Returns the system calls of the loop so far, as it counts them.
pub(crate) fn calls<J>(turn: &mut TurnCx<'_, J>) -> u64 {
    let device = turn.device.total_stats();
    let c = turn.counters;
    device.path.tx_calls + device.path.rx_calls + c.sleeps + c.looks + c.yields + c.interests
}

/// Returns the CPU time of this process so far, in nanoseconds.
pub(crate) fn cpu() -> u64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| {
        let spent = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
        spent.unsigned_abs() * 1000
    })
}
