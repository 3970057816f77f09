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
            /// Bits of the slot.
            pub const SLOT_BITS: u32 = 20;

            /// The number of a slot's object; of the generation what fits.
            pub const fn new(slot: u32, generation: u32) -> Self {
                Self(generation << Self::SLOT_BITS | (slot & ((1 << Self::SLOT_BITS) - 1)))
            }

            /// The slot.
            pub const fn slot(self) -> u32 {
                self.0 & ((1 << Self::SLOT_BITS) - 1)
            }

            /// The generation.
            pub const fn generation(self) -> u32 {
                self.0 >> Self::SLOT_BITS
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

#[cfg(test)]
mod tests {
    use super::QpId;

    #[test]
    fn slot_and_generation_are_apart() {
        let id = QpId::new(0xf_ffff, 0xfff);
        assert_eq!((id.slot(), id.generation()), (0xf_ffff, 0xfff));
        assert_ne!(QpId::new(7, 1), QpId::new(7, 2));
        assert_eq!(QpId::new(0, 0x1000).generation(), 0, "generations begin again");
    }
}
