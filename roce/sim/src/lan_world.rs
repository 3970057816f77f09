//! Runs of worlds on a [`Lan`], to their ends.

use core::fmt::Debug;

use crate::{
    Check, SEC,
    lan::{Lan, LanEvent},
};

/// Events without progress of the clock after which something spins.
const SPIN: u32 = 100_000;
/// Events of a whole run.
const MAX_EVENTS: u64 = 5_000_000;
/// Longest time of a run once nothing disturbs it, nanoseconds.
const TIMEOUT: u64 = 600 * SEC;

/// Hosts on a network with all that happens to them.
pub trait LanWorld {
    /// Events that are none of the network's.
    type Event: Debug;

    /// Returns the network.
    fn lan(&mut self) -> &mut Lan<Self::Event>;
    /// Returns whether nothing goes wrong any more.
    fn is_quiet(&self) -> bool;
    /// Returns whether everybody is done.
    fn is_done(&self) -> bool;
    /// Returns what they wait for, for the report of a failure.
    fn situation(&self) -> String;

    /// Does what happens now.
    ///
    /// # Errors
    /// When a rule is broken.
    fn step(&mut self, what: LanEvent<Self::Event>) -> Check;

    /// Runs until everybody is done.
    ///
    /// # Errors
    /// When a rule is broken, something spins, or somebody is stuck.
    fn run_until_done(&mut self) -> Check {
        let (mut at_once, mut events, mut last) = (0, 0, 0);
        let mut quiet_since = None;
        while !self.is_done() {
            let Some(what) = self.lan().pop() else {
                return Err(format!("nothing left to happen, but not done: {}", self.situation()));
            };
            let now = self.lan().now;
            at_once = if now > last { 0 } else { at_once + 1 };
            last = now;
            events += 1;
            if at_once > SPIN || events > MAX_EVENTS {
                return Err(format!("it spins at {what:?}: {}", self.situation()));
            }
            if self.is_quiet() && now > *quiet_since.get_or_insert(now) + TIMEOUT {
                return Err(format!("stuck in the quiet phase: {}", self.situation()));
            }
            self.step(what)?;
        }
        Ok(())
    }

    /// Lets time go by, nanoseconds.
    ///
    /// # Errors
    /// When a rule is broken.
    fn pass(&mut self, time: u64) -> Check {
        let end = self.lan().now + time;
        while let Some(what) = self.lan().pop() {
            self.step(what)?;
            if self.lan().now > end {
                break;
            }
        }
        Ok(())
    }
}
