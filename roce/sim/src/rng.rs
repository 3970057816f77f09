//! Random choices of a run, all from its seed.

use rand::{Rng as _, RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Stream of choices. Separate concerns have separate streams, so that a change to one leaves the others alone.
#[derive(Clone, Debug)]
pub struct Rng(ChaCha8Rng);

impl Rng {
    /// Creates one of the streams of a run's seed.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Self(rng)
    }

    /// Creates a stream from a seed of its own.
    pub fn from_seed(seed: [u8; 32]) -> Self {
        Self(ChaCha8Rng::from_seed(seed))
    }

    /// Returns true with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.0.random::<f64>() < p
    }

    /// Draws a number from `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        self.0.random_range(low..=high.max(low))
    }

    /// Draws a number below `len`.
    pub fn index(&mut self, len: usize) -> usize {
        self.0.random_range(0..len.max(1))
    }

    /// Draws one of some values.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// Draws a number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws a number from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        self.0.random()
    }

    /// Draws the seed of another generator.
    pub fn seed(&mut self) -> [u8; 32] {
        self.0.random()
    }

    /// Returns a source of random bytes for machines, with a seed of this one's.
    pub fn source(&mut self) -> impl FnMut(&mut [u8]) + use<> {
        let mut rng = Self::from_seed(self.seed());
        move |out: &mut [u8]| out.copy_from_slice(&rng.bytes(out.len()))
    }

    /// Draws bytes that are unlikely to be found anywhere else.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut state = self.number();
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            out.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
        }
        out.truncate(len);
        out
    }
}
