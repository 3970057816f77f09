//! Lengths of headers, and the form of their fields on the wire.

/// UDP destination port of RoCEv2 (IBTA A17.9.2).
pub const ROCE_UDP_PORT: u16 = 4791;
/// Bytes of the invariant CRC behind every packet.
pub const ICRC_LEN: usize = 4;
/// Bytes of the base transport header.
pub const BTH_LEN: usize = 12;
/// The most bytes of transport headers before the payload of any opcode in the table.
pub const MAX_HEADER_LEN: usize = BTH_LEN + 4 + 28;

/// Header, or field of one, with its form on the wire: `N` bytes, big-endian.
pub(crate) trait Wire<const N: usize> {
    fn read(b: &[u8; N]) -> Self;
    fn write(&self) -> [u8; N];
}

/// Number with a constructor `$from` from an unsigned integer, which `$to` returns.
macro_rules! wire {
    ($( $type:ty = $int:ty[$len:literal]: $from:expr, $to:expr; )*) => {$(
        impl Wire<$len> for $type {
            #[inline]
            fn read(b: &[u8; $len]) -> Self {
                let mut bytes = [0; size_of::<$int>()];
                bytes[size_of::<$int>() - $len..].copy_from_slice(b);
                $from(<$int>::from_be_bytes(bytes))
            }

            #[inline]
            fn write(&self) -> [u8; $len] {
                let mut b = [0; $len];
                b.copy_from_slice(&$to(*self).to_be_bytes()[size_of::<$int>() - $len..]);
                b
            }
        }
    )*};
}
pub(crate) use wire;

wire! {
    u8 = u8[1]: core::convert::identity, core::convert::identity;
    u32 = u32[4]: core::convert::identity, core::convert::identity;
    u64 = u64[8]: core::convert::identity, core::convert::identity;
}

/// Extended header of fields that fill whole bytes, each with its length.
macro_rules! header {
    ($(#[$meta:meta])* $name:ident[$len:literal] { $( $(#[$doc:meta])* $field:ident: $type:ty[$size:literal], )* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub struct $name {
            $( $(#[$doc])* pub $field: $type, )*
        }

        impl $name {
            /// Bytes on the wire.
            pub const LEN: usize = $len;
        }

        impl Wire<$len> for $name {
            #[inline]
            fn read(b: &[u8; $len]) -> Self {
                let mut at = 0;
                Self { $( $field: Wire::read(&$crate::wire::next::<$size>(b, &mut at)), )* }
            }

            #[inline]
            fn write(&self) -> [u8; $len] {
                let (mut b, mut at) = ([0; $len], 0);
                $( $crate::wire::put::<$size>(&mut b, &mut at, self.$field.write()); )*
                b
            }
        }
    };
}
pub(crate) use header;

/// Returns the next `N` bytes of a header.
#[inline]
pub(crate) fn next<const N: usize>(b: &[u8], at: &mut usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&b[*at..*at + N]);
    *at += N;
    field
}

/// Writes the next `N` bytes of a header.
#[inline]
pub(crate) fn put<const N: usize>(b: &mut [u8], at: &mut usize, field: [u8; N]) {
    b[*at..*at + N].copy_from_slice(&field);
    *at += N;
}
