//! Identifiers on the wire.

use crate::wire::{Wire, wire};

macro_rules! number24 {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(u32);

        impl $name {
            /// The number's low 24 bits.
            pub const fn new(value: u32) -> Self {
                Self(value & 0x00ff_ffff)
            }

            /// The value, below 2^24.
            pub const fn value(self) -> u32 {
                self.0
            }
        }

        $crate::ids::shown!($name, "{:#08x}");
        $crate::wire::wire! { $name = u32[3]: Self::new, Self::value; }
    };
}
pub(crate) use number24;

/// Shows a number in hexadecimal; `Debug` with its type.
macro_rules! shown {
    ($name:ident, $format:literal) => {
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, concat!(stringify!($name), "(", $format, ")"), self.0)
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, $format, self.0)
            }
        }
    };
}
pub(crate) use shown;

number24! {
    /// A queue pair number, 24 bits.
    #[derive(PartialOrd, Ord)]
    Qpn
}
number24! {
    /// A shared receive queue's number, 24 bits (IBTA Annex A14).
    #[derive(PartialOrd, Ord)]
    Srqn
}

impl Qpn {
    /// QP0, subnet management; RoCE drops it (IBTA A17.9).
    pub const SMI: Self = Self(0);
    /// QP1, general services: connection management.
    pub const GSI: Self = Self(1);
    /// The destination of multicast packets.
    pub const MULTICAST: Self = Self(0x00ff_ffff);
}

macro_rules! key {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(pub $int);

        shown!($name, "{:#x}");
    };
}

key! {
    /// A remote key: 24 bits of index, 8 bits of changing key (IBTA 10.6.3.3).
    RKey(u32)
}
key! {
    /// A local key.
    LKey(u32)
}
key! {
    /// A queue key, checked on datagrams (IBTA 10.2.5).
    QKey(u32)
}
key! {
    /// A partition key; the top bit says full membership.
    PKey(u16)
}

wire! {
    RKey = u32[4]: Self, |key: Self| key.0;
    QKey = u32[4]: Self, |key: Self| key.0;
}

impl PKey {
    /// The default partition, full member: the only one on RoCE.
    pub const DEFAULT: Self = Self(0xffff);
}

impl RKey {
    /// The part that the owner may change at each registration.
    pub const fn key_byte(self) -> u8 {
        (self.0 & 0xff) as u8
    }

    /// Returns the same index with another key byte.
    #[must_use]
    pub const fn with_key_byte(self, key: u8) -> Self {
        Self((self.0 & 0xffff_ff00) | key as u32)
    }

    /// Returns the same index with the next key byte, wrapping (`ib_inc_rkey`).
    #[must_use]
    pub const fn next(self) -> Self {
        self.with_key_byte(self.key_byte().wrapping_add(1))
    }
}

impl QKey {
    /// The well-known Q_Key of QP1 (IBTA 10.2.5).
    pub const GSI: Self = Self(0x8001_0000);

    /// Whether it is a privileged key: as a work request's it stands for the queue pair's own (IBTA 10.2.5).
    pub const fn is_controlled(self) -> bool {
        self.0 >> 31 != 0
    }
}
