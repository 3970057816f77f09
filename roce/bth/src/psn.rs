//! 24-bit sequence numbers.

use crate::{ids::number24, wire::Wire};

const MASK: u32 = 0x00ff_ffff;
const HALF: u32 = 0x0080_0000;

macro_rules! seq24 {
    ($(#[$doc:meta])* $name:ident) => {
        number24! {
            $(#[$doc])*
            $name
        }

        impl $name {
            /// `self + n`, modulo 2^24.
            #[must_use]
            #[allow(clippy::should_implement_trait)]
            pub const fn add(self, n: u32) -> Self {
                Self::new(self.0.wrapping_add(n))
            }

            /// `self - n`, modulo 2^24.
            #[must_use]
            #[allow(clippy::should_implement_trait)]
            pub const fn sub(self, n: u32) -> Self {
                Self::new(self.0.wrapping_sub(n))
            }

            /// The next number.
            #[must_use]
            pub const fn next(self) -> Self {
                self.add(1)
            }

            /// How far `self` is ahead of `base` going upwards, in `0..2^24`.
            pub const fn offset_from(self, base: Self) -> u32 {
                self.0.wrapping_sub(base.0) & MASK
            }

            /// Signed distance to `other` on the circle, in `-2^23..2^23`; positive when `self` is ahead.
            pub const fn diff(self, other: Self) -> i32 {
                let d = self.offset_from(other);
                if d < HALF { d as i32 } else { d as i32 - (MASK as i32 + 1) }
            }

            /// Whether `self` comes before `other` on the circle.
            pub const fn is_before(self, other: Self) -> bool {
                self.diff(other) < 0
            }

            /// Whether `self` comes after `other` on the circle.
            pub const fn is_after(self, other: Self) -> bool {
                self.diff(other) > 0
            }
        }
    };
}

seq24! {
    /// A packet sequence number: 24 bits, compared on the circle (IBTA 9.7.1).
    Psn
}
seq24! {
    /// A message sequence number: 24 bits, as the AETH carries it (IBTA 9.7.7.1).
    Msn
}
