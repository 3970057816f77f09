//! Random bytes for state machines.

use std::io;

use rand::{RngCore, SeedableRng, rngs::StdRng};

/// Bytes that nobody can guess, seeded by the system.
#[derive(Debug)]
pub(crate) struct Dice(StdRng);

impl Dice {
    /// # Errors
    /// When the system gives no random bytes.
    pub(crate) fn new() -> io::Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(io::Error::other)?;
        Ok(Self(StdRng::from_seed(seed)))
    }

    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        self.0.fill_bytes(out);
    }
}
