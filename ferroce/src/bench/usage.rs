//! Loops of RTRS: context, processor time and system calls.

use ::rtrs::Cx;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use rand::{RngCore, SeedableRng, rngs::StdRng};
use roce::reactor::TurnCx;

use crate::output::Failure;

/// Source of random bytes.
pub(crate) type Random = Box<dyn FnMut(&mut [u8]) + Send>;

pub(crate) fn random() -> Result<Random, Failure> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(Failure::of)?;
    let mut rng = StdRng::from_seed(seed);
    Ok(Box::new(move |out| rng.fill_bytes(out)))
}

/// Returns the context of a call in this turn.
pub(crate) fn cx<'a, J>(turn: &'a mut TurnCx<'_, J>, random: &'a mut Random) -> Cx<'a> {
    Cx {
        now: turn.now,
        provider: turn.device.provider(),
        random,
    }
}

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
