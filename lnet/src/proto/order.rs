//! Fields in the sender's byte order.

use super::error::ProtoError;

/// Byte order of a sender.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ByteOrder {
    /// Least significant byte first: x86 and Arm.
    #[default]
    Little,
    /// Most significant byte first.
    Big,
}

impl ByteOrder {
    /// Byte order in which four bytes are this magic number.
    pub(crate) fn of(magic: u32, bytes: [u8; 4]) -> Option<Self> {
        match () {
            () if u32::from_le_bytes(bytes) == magic => Some(Self::Little),
            () if u32::from_be_bytes(bytes) == magic => Some(Self::Big),
            () => None,
        }
    }
}

/// Reader of fields, one behind the other.
pub(crate) struct Reader<'a> {
    what: &'static str,
    order: ByteOrder,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(what: &'static str, order: ByteOrder, bytes: &'a [u8]) -> Self {
        let at = 0;
        Self { what, order, bytes, at }
    }

    /// Takes the next `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], ProtoError> {
        let need = self.at.saturating_add(len);
        let short = ProtoError::Short {
            what: self.what,
            len: self.bytes.len(),
            need,
        };
        let bytes = self.bytes.get(self.at..need).ok_or(short)?;
        self.at = need;
        Ok(bytes)
    }

    /// Returns all that is left.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    fn number(&mut self, len: usize) -> Result<u64, ProtoError> {
        let bytes = self.take(len)?;
        let add = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        Ok(match self.order {
            ByteOrder::Little => bytes.iter().rev().fold(0, add),
            ByteOrder::Big => bytes.iter().fold(0, add),
        })
    }

    pub(crate) fn u8(&mut self) -> Result<u8, ProtoError> {
        Ok(self.number(1)? as u8)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, ProtoError> {
        Ok(self.number(2)? as u16)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, ProtoError> {
        Ok(self.number(4)? as u32)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, ProtoError> {
        self.number(8)
    }
}

/// Writer of fields, one behind the other.
pub(crate) struct Writer {
    order: ByteOrder,
    pub(crate) out: Vec<u8>,
}

impl Writer {
    pub(crate) const fn new(order: ByteOrder) -> Self {
        let out = Vec::new();
        Self { order, out }
    }

    fn number(&mut self, value: u64, len: usize) {
        match self.order {
            ByteOrder::Little => self.out.extend_from_slice(&value.to_le_bytes()[..len]),
            ByteOrder::Big => self.out.extend_from_slice(&value.to_be_bytes()[8 - len..]),
        }
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.out.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.number(value.into(), 2);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.number(value.into(), 4);
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.number(value, 8);
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }
}
