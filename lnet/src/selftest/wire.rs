//! Fields of messages: read and written one behind the other, in the sender's byte order.

use core::fmt;

use crate::proto::{
    Nid, ProtoError,
    order::{Reader, Writer},
};

/// Type of a field.
pub(super) trait Field: Sized {
    fn read(at: &mut Reader<'_>) -> Result<Self, ProtoError>;
    fn write(&self, out: &mut Writer);
}

macro_rules! numbers {
    ($($number:ident)*) => {$(
        impl Field for $number {
            fn read(at: &mut Reader<'_>) -> Result<Self, ProtoError> {
                at.$number()
            }

            fn write(&self, out: &mut Writer) {
                out.$number(*self);
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64);

impl<const N: usize> Field for [u8; N] {
    fn read(at: &mut Reader<'_>) -> Result<Self, ProtoError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(at.take(N)?);
        Ok(bytes)
    }

    fn write(&self, out: &mut Writer) {
        out.bytes(self);
    }
}

impl Field for Nid {
    fn read(at: &mut Reader<'_>) -> Result<Self, ProtoError> {
        at.u64().map(Self)
    }

    fn write(&self, out: &mut Writer) {
        out.u64(self.0);
    }
}

/// Declares structures of fields.
macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl Field for $name {
            fn read(at: &mut Reader<'_>) -> Result<Self, ProtoError> {
                Ok(Self { $($field: Field::read(at)?,)* })
            }

            fn write(&self, out: &mut Writer) {
                $(self.$field.write(out);)*
            }
        }
    )*};
}

pub(super) use fields;

/// Name of a session: at most 31 bytes, and zeros.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Name([u8; Self::LEN]);

impl Name {
    const LEN: usize = 32;

    /// Returns a name, cut where it is too long.
    pub fn new(text: &str) -> Self {
        let mut bytes = [0; Self::LEN];
        let len = text.len().min(Self::LEN - 1);
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        Self(bytes)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.0.iter().position(|b| *b == 0).unwrap_or(Self::LEN);
        write!(f, "{}", self.0[..len].escape_ascii())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({self})")
    }
}

impl Field for Name {
    fn read(at: &mut Reader<'_>) -> Result<Self, ProtoError> {
        Field::read(at).map(Self)
    }

    fn write(&self, out: &mut Writer) {
        self.0.write(out);
    }
}
