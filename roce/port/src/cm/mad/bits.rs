//! Bit fields of a MAD as data, and the types of their values.

use core::net::IpAddr;

use roce_bth::{PKey, Psn, QKey, Qpn};

/// Size of a MAD, bytes.
pub const MAD_LEN: usize = 256;
/// Size of the common MAD header, bytes.
pub const HEADER_LEN: usize = 24;

/// Transport service type of a REQ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Transport {
    /// Reliable connection.
    Rc = 0,
    /// Unreliable connection.
    Uc = 1,
    /// Reliable datagram.
    Rd = 2,
    /// Named by the extended transport type (XRC).
    Extended = 3,
}

impl Transport {
    /// All, by their number.
    const ALL: [Self; 4] = [Self::Rc, Self::Uc, Self::Rd, Self::Extended];
}

/// Which message an MRA or REJ answers (`enum cm_msg_response`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Subject {
    /// A REQ.
    Req = 0,
    /// A REP.
    Rep = 1,
    /// MRA: a LAP. REJ: no particular one.
    Other = 2,
    /// Never parsed.
    Reserved = 3,
}

impl Subject {
    /// All, by their number.
    const ALL: [Self; 4] = [Self::Req, Self::Rep, Self::Other, Self::Reserved];
}

/// Returns the GID of an address: on RoCEv2 the IPv6 address, or the IPv4-mapped one (IBTA A17.9.1).
pub(crate) fn gid(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Position of a field. Bits count from the most significant one, as in the specification's tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FieldSpec {
    /// Name of the struct's field.
    pub name: &'static str,
    /// Byte from the start of the MAD.
    pub byte: usize,
    /// Bit within that byte, 0 = most significant.
    pub bit: usize,
    /// Bits.
    pub width: usize,
}

impl FieldSpec {
    /// First bit from the start of the MAD.
    pub const fn first_bit(&self) -> usize {
        self.byte * 8 + self.bit
    }
}

/// A value that a field can hold.
pub(crate) trait Field: Sized {
    fn read(buf: &[u8; MAD_LEN], f: &FieldSpec) -> Self;
    fn write(&self, buf: &mut [u8; MAD_LEN], f: &FieldSpec);
}

/// Reads up to 64 bits.
fn get(buf: &[u8; MAD_LEN], f: &FieldSpec) -> u64 {
    let end = f.first_bit() + f.width;
    let last = end.div_ceil(8);
    let word = buf[f.byte..last].iter().fold(0u128, |w, b| (w << 8) | u128::from(*b));
    let value = word >> (last * 8 - end);
    (value & ((1u128 << f.width) - 1)) as u64
}

/// Writes up to 64 bits; higher bits of the value are cut off.
fn put(buf: &mut [u8; MAD_LEN], f: &FieldSpec, value: u64) {
    let end = f.first_bit() + f.width;
    let last = end.div_ceil(8);
    let shift = last * 8 - end;
    let mask = ((1u128 << f.width) - 1) << shift;
    let mut word = (u128::from(value) << shift) & mask;
    let mut keep = !mask;
    for byte in buf[f.byte..last].iter_mut().rev() {
        *byte = (*byte & keep as u8) | word as u8;
        word >>= 8;
        keep >>= 8;
    }
}

macro_rules! bits {
    ($($t:ty: $from:expr, $to:expr;)*) => {$(
        impl Field for $t {
            fn read(buf: &[u8; MAD_LEN], f: &FieldSpec) -> Self {
                let from: fn(u64) -> $t = $from;
                from(get(buf, f))
            }

            fn write(&self, buf: &mut [u8; MAD_LEN], f: &FieldSpec) {
                let to: fn($t) -> u64 = $to;
                put(buf, f, to(*self));
            }
        }
    )*};
}

bits! {
    bool: |v| v != 0, u64::from;
    u8: |v| v as u8, u64::from;
    u16: |v| v as u16, u64::from;
    u32: |v| v as u32, u64::from;
    u64: |v| v, |v| v;
    Qpn: |v| Qpn::new(v as u32), |v| u64::from(v.value());
    Psn: |v| Psn::new(v as u32), |v| u64::from(v.value());
    PKey: |v| PKey(v as u16), |v| u64::from(v.0);
    QKey: |v| QKey(v as u32), |v| u64::from(v.0);
    Transport: |v| Transport::ALL[v as usize & 3], |v| v as u64;
    Subject: |v| Subject::ALL[v as usize & 3], |v| v as u64;
}

impl<const N: usize> Field for [u8; N] {
    fn read(buf: &[u8; MAD_LEN], f: &FieldSpec) -> Self {
        let mut out = [0; N];
        out.copy_from_slice(&buf[f.byte..f.byte + N]);
        out
    }

    fn write(&self, buf: &mut [u8; MAD_LEN], f: &FieldSpec) {
        buf[f.byte..f.byte + N].copy_from_slice(self);
    }
}

/// An address is a GID.
impl Field for IpAddr {
    fn read(buf: &[u8; MAD_LEN], f: &FieldSpec) -> Self {
        Self::from(<[u8; 16]>::read(buf, f)).to_canonical()
    }

    fn write(&self, buf: &mut [u8; MAD_LEN], f: &FieldSpec) {
        gid(*self).write(buf, f);
    }
}

/// Declares a message: a struct with one field per line, its place given as byte behind the common MAD header, bit
/// (0 = most significant) and width in bits, the form that the specification's tables have.
macro_rules! message {
    (
        $(#[$doc:meta])*
        pub struct $name:ident {
            $( $(#[$fdoc:meta])* $field:ident: $ty:ty = ($byte:expr, $bit:expr, $width:expr), )*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name {
            $( $(#[$fdoc])* pub $field: $ty, )*
        }

        impl $name {
            /// Every field's place, in the order of the struct.
            pub const FIELDS: &'static [FieldSpec] = &[
                $( FieldSpec { name: stringify!($field), byte: HEADER_LEN + $byte, bit: $bit, width: $width }, )*
            ];

            /// Reads the fields; reserved bits are ignored.
            pub(crate) fn read(buf: &[u8; MAD_LEN]) -> Self {
                let mut specs = Self::FIELDS.iter();
                let mut next = || specs.next().expect("one place per field");
                Self { $( $field: Field::read(buf, next()), )* }
            }

            /// Writes the fields over a zeroed body. Values wider than their field are cut off.
            pub(crate) fn write(&self, buf: &mut [u8; MAD_LEN]) {
                let mut specs = Self::FIELDS.iter();
                let mut next = || specs.next().expect("one place per field");
                $( Field::write(&self.$field, buf, next()); )*
            }
        }

        impl Default for $name {
            /// All fields zero.
            fn default() -> Self {
                Self::read(&[0; MAD_LEN])
            }
        }
    };
}
pub(crate) use message;
