//! Communication IDs: unpredictable, and none is repeated before all others have been used.
//!
//! Peers keep answers and ended connections for a while and recognize repetitions by these numbers, so that one that is reused early
//! would be taken for a repetition. A process that shares its address has 2^21 of them: drawn at random, two of 2,000 would be equal
//! more often than not.

use rand_chacha::{ChaCha8Rng, rand_core::RngCore};

/// Rounds of the permutation: four of keyed functions look random.
const ROUNDS: usize = 4;

/// Pseudorandom permutation of a range of numbers.
pub(super) struct IdSequence {
    first: u32,
    /// Numbers of the range.
    span: u64,
    /// Bits of half a number of the permutation, which covers the range.
    half: u32,
    keys: [u64; ROUNDS],
    next: u64,
}

impl IdSequence {
    /// Creates the sequence of all numbers from `range.0` to `range.1`.
    pub(super) fn new(range: (u32, u32), rng: &mut ChaCha8Rng) -> Self {
        let span = u64::from(range.1.saturating_sub(range.0)) + 1;
        let bits = span.next_power_of_two().trailing_zeros().max(2);
        Self {
            first: range.0,
            span,
            half: bits.div_ceil(2),
            keys: std::array::from_fn(|_| rng.next_u64()),
            next: 0,
        }
    }

    /// Applies a Feistel network, which is a permutation with any round function.
    fn permute(&self, n: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (n >> self.half, n & mask);
        for key in self.keys {
            let mixed = (right ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mixed = (mixed ^ (mixed >> 29) ^ key.rotate_left(17)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (left, right) = (right, left ^ (mixed >> 40) & mask);
        }
        left << self.half | right
    }

    /// Returns the next number.
    pub(super) fn draw(&mut self) -> u32 {
        loop {
            let n = self.permute(self.next);
            self.next = (self.next + 1) & ((1u64 << (2 * self.half)) - 1);
            // The permutation covers at most four times the range; numbers outside are skipped.
            if n < self.span {
                return self.first.wrapping_add(n as u32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    fn sequence(range: (u32, u32), seed: u8) -> IdSequence {
        IdSequence::new(range, &mut ChaCha8Rng::from_seed([seed; 32]))
    }

    #[test]
    fn every_number_comes_before_one_comes_again() {
        for range in [(1, 1000), (0x4f80_0000, 0x4f80_ffff), (7, 7), (u32::MAX - 4, u32::MAX)] {
            let mut s = sequence(range, 1);
            let count = u64::from(range.1 - range.0) + 1;
            let seen: BTreeSet<u32> = (0..count).map(|_| s.draw()).collect();
            assert_eq!(seen.len() as u64, count, "{range:?}");
            assert!(seen.iter().all(|n| (range.0..=range.1).contains(n)), "{range:?}");
        }
    }

    #[test]
    fn the_order_depends_on_the_seed_and_does_not_show() {
        let draw = |seed| {
            let mut s = sequence((1, u32::MAX), seed);
            (0..1000).map(|_| s.draw()).collect::<Vec<_>>()
        };
        let (a, b) = (draw(1), draw(2));
        assert_ne!(a, b);
        // Steps from one to the next are all different, as with random numbers.
        let steps: BTreeSet<u32> = a.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
        assert!(steps.len() > 990, "{} steps", steps.len());
    }
}
