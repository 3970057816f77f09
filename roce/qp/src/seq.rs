//! Packet sequence numbers that do not wrap.

use roce_bth::Psn;

/// PSN extended to 64 bits, so that ranges compare like plain numbers. Its low 24 bits are the PSN on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Seq(u64);

/// First value. Going back by half of the PSN circle never underflows.
const BASE: u64 = 1 << 40;

/// Largest number of outstanding PSNs: half of the circle (IBA 9.7.5.1.1 and table 39).
pub(crate) const MAX_OUTSTANDING: u64 = 1 << 23;

impl Seq {
    /// Returns the start of a queue with this first PSN.
    pub(crate) const fn start(psn: Psn) -> Self {
        Self(BASE | psn.value() as u64)
    }

    /// Returns the PSN on the wire.
    pub(crate) const fn psn(self) -> Psn {
        Psn::new((self.0 & 0x00ff_ffff) as u32)
    }

    /// Returns the value nearest to `self` with this PSN.
    pub(crate) const fn nearest(self, psn: Psn) -> Self {
        Self(self.0.wrapping_add_signed(psn.diff(self.psn()) as i64))
    }

    pub(crate) const fn plus(self, n: u64) -> Self {
        Self(self.0 + n)
    }

    /// Rounds down to a multiple of `n`, a power of two that divides the PSN circle.
    pub(crate) const fn round_down(self, n: u64) -> Self {
        Self(self.0 - self.0 % n)
    }

    pub(crate) const fn prev(self) -> Self {
        Self(self.0 - 1)
    }

    /// Returns how far `self` is ahead of `earlier`; zero if it is not.
    pub(crate) const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_nearest_number_with_a_psn_is_within_half_the_circle(start in 0u32..1 << 24, n in 0u64..1 << 40, d in -(1i64 << 23)..1 << 23) {
            let here = Seq::start(Psn::new(start)).plus(n);
            let there = Seq(here.0.wrapping_add_signed(d));
            prop_assert_eq!(here.nearest(there.psn()), there);
        }
    }

    #[test]
    fn numbers_wrap_on_the_wire_only() {
        let last = Seq::start(Psn::new(0xff_ffff));
        let next = last.plus(1);
        assert!(next > last);
        assert_eq!(next.psn(), Psn::new(0));
        assert_eq!(next.nearest(Psn::new(0xff_ffff)), last);
        assert_eq!(next.since(last), 1);
        assert_eq!(last.since(next), 0);
    }
}
