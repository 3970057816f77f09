//! Numbers of a provider's objects.

/// A device of a provider, in the order of [`Provider::devices`](super::Provider::devices).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceIx(pub u16);

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// A slot and its generation: the number of an object that is gone is nobody's for long.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub u32);

        impl $name {
            /// Bits of the slot, the lowest; the others are the generation's.
            pub const SLOT_BITS: u32 = 20;

            /// The slot.
            pub const fn slot(self) -> u32 {
                self.0 & ((1 << Self::SLOT_BITS) - 1)
            }
        }

        impl From<u32> for $name {
            fn from(number: u32) -> Self {
                Self(number)
            }
        }

        impl From<$name> for u32 {
            fn from(number: $name) -> Self {
                number.0
            }
        }
    )*};
}

ids! {
    /// A protection domain.
    PdId;
    /// A registration of memory.
    MrId;
    /// A remote key that can be granted and taken back.
    KeyId;
    /// A completion queue.
    CqId;
    /// A queue pair.
    QpId;
    /// A connection or a listener.
    CmRef;
}
