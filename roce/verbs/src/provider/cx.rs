//! Context of a call into a state machine.

use core::fmt;

use super::context::Provider;
use crate::time::Instant;

/// Time, devices and random bytes: all that a state machine over a [`Provider`] knows of the world.
pub struct Cx<'a> {
    /// Current time. It never goes back.
    pub now: Instant,
    /// Devices of the loop.
    pub provider: &'a mut dyn Provider,
    /// Fills with random bytes that nobody can guess.
    pub random: &'a mut dyn FnMut(&mut [u8]),
}

impl Cx<'_> {
    /// Returns a random number below `n`, nearly even; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let mut bytes = [0; 8];
        (self.random)(&mut bytes);
        u64::from_le_bytes(bytes).checked_rem(n).unwrap_or(0)
    }
}

impl fmt::Debug for Cx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx").field("now", &self.now).finish_non_exhaustive()
    }
}
