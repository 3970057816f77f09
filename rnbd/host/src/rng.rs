//! Random numbers for state machines, and the context of calls into them.

use std::io;

use rand::{RngCore, SeedableRng, rngs::StdRng};
use roce::{LocalDevice, reactor::TurnCx};
use roce_verbs::Instant;
use rtrs::Cx;

/// Fills with random bytes, as [`Cx::random`] does.
type Fill = dyn FnMut(&mut [u8]) + Send;

/// Random number generator whose numbers nobody can guess, seeded by the system.
pub(crate) struct Rng(Box<Fill>);

impl Rng {
    /// # Errors
    /// When the system gives no random bytes.
    pub(crate) fn new() -> io::Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(io::Error::other)?;
        let mut rng = StdRng::from_seed(seed);
        Ok(Self(Box::new(move |out| rng.fill_bytes(out))))
    }

    /// Returns the context of a call into the machines.
    pub(crate) fn context<'a>(&'a mut self, now: Instant, device: &'a mut LocalDevice) -> Cx<'a> {
        Cx {
            now,
            provider: device.provider(),
            random: &mut *self.0,
        }
    }

    /// Returns the context of a call into the machines in a turn of the loop.
    pub(crate) fn cx<'a, J>(&'a mut self, turn: &'a mut TurnCx<'_, J>) -> Cx<'a> {
        self.context(turn.now, turn.device)
    }
}
