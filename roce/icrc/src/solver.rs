//! From a difference of two ICRCs back to the Identification bits that caused it.

use crate::gf2;

const SLOTS: usize = 64;

/// A cache of the factor that each packet length needs, for a port to own: 512 bytes.
///
/// A transfer has a handful of packet lengths; each solve with a cached one is a single 32-step multiplication.
#[derive(Clone, Debug)]
pub struct IdSolver {
    /// Length (0: empty) and factor, at the length's low bits.
    slots: [(u32, u32); SLOTS],
}

impl Default for IdSolver {
    fn default() -> Self {
        Self::new()
    }
}

impl IdSolver {
    /// An empty cache.
    pub const fn new() -> Self {
        Self { slots: [(0, 0); SLOTS] }
    }

    /// The 16-bit difference of two Identifications that makes two ICRCs differ by `difference` when `trailing` bytes
    /// follow the Identification, or `None` when there is none.
    pub(crate) fn solve(&mut self, difference: u32, trailing: u32) -> Option<u16> {
        // Packet lengths are multiples of 4.
        let slot = &mut self.slots[trailing as usize / 4 % SLOTS];
        if slot.0 != trailing {
            *slot = (trailing, factor(trailing));
        }
        preimage(difference, slot.1)
    }

    pub(crate) fn solve_uncached(difference: u32, trailing: u32) -> Option<u16> {
        preimage(difference, factor(trailing))
    }
}

/// Returns the factor that takes the CRC register back over the trailing bytes and the two of the Identification.
const fn factor(trailing: u32) -> u32 {
    gf2::inverse_of_zero_bytes(trailing.saturating_add(2))
}

/// Message bytes enter the register's low end: before the Identification was shifted in, its difference stood in the low 16 bits, first
/// byte lowest, and nothing above.
const fn preimage(difference: u32, factor: u32) -> Option<u16> {
    let state = gf2::mul(difference, factor);
    if state <= 0xffff {
        Some((state as u16).swap_bytes())
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The difference that a register state just before the Identification turns into, byte by byte.
    fn difference_of(mut state: u32, trailing: u32) -> u32 {
        for _ in 0..8 * (trailing + 2) {
            state = (state >> 1) ^ if state & 1 != 0 { 0xedb8_8320 } else { 0 };
        }
        state
    }

    #[test]
    fn only_sixteen_bits_are_an_identification() {
        let mut solver = IdSolver::new();
        for trailing in [38, 54, 1078, 4150] {
            for bit in 0..32 {
                let difference = difference_of(1 << bit, trailing);
                let want = (bit < 16).then(|| (1u16.wrapping_shl(bit)).swap_bytes());
                assert_eq!(
                    IdSolver::solve_uncached(difference, trailing),
                    want,
                    "bit {bit}, {trailing} bytes"
                );
                assert_eq!(solver.solve(difference, trailing), want, "bit {bit}, {trailing} bytes");
            }
        }
    }

    #[test]
    fn lengths_that_share_a_slot_do_not_share_a_factor() {
        let mut solver = IdSolver::new();
        let (short, long) = (100, 100 + 4 * SLOTS as u32);
        for trailing in [short, long, short, long] {
            assert_eq!(solver.solve(difference_of(0x2301, trailing), trailing), Some(0x0123));
        }
    }
}
