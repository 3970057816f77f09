//! Descriptors of memory that the peer writes into.

use super::{
    error::ProtoError,
    order::{ByteOrder, Reader, Writer},
};

/// Fragments of a descriptor at most (`IBLND_MAX_RDMA_FRAGS`).
pub const MAX_FRAGS: u32 = 257;
/// Bytes of a fragment on the wire.
const FRAGMENT_LEN: usize = 12;

/// Piece of memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fragment {
    /// Bytes.
    pub nob: u32,
    /// Address.
    pub addr: u64,
}

/// Fragments of a descriptor: as they came, or of a program.
#[derive(Clone, Copy, Debug)]
pub enum Fragments<'a> {
    /// Bytes of a message.
    Wire(ByteOrder, &'a [u8]),
    /// Values.
    List(&'a [Fragment]),
}

impl<'a> Fragments<'a> {
    /// Number of fragments.
    pub fn len(&self) -> usize {
        match self {
            Self::Wire(_, bytes) => bytes.len() / FRAGMENT_LEN,
            Self::List(list) => list.len(),
        }
    }

    /// Returns whether there is none. No parsed descriptor is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fragment `index`.
    pub fn get(&self, index: usize) -> Option<Fragment> {
        match self {
            Self::List(list) => list.get(index).copied(),
            Self::Wire(order, bytes) => {
                let from = index.checked_mul(FRAGMENT_LEN)?;
                let mut fields = Reader::new("fragment", *order, bytes.get(from..)?);
                Some(Fragment {
                    nob: fields.u32().ok()?,
                    addr: fields.u64().ok()?,
                })
            }
        }
    }

    /// Fragments in their order.
    pub fn iter(&self) -> impl Iterator<Item = Fragment> + use<'a> {
        let all = *self;
        (0..self.len()).filter_map(move |index| all.get(index))
    }
}

impl PartialEq for Fragments<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Fragments<'_> {}

/// Descriptor (`struct kib_rdma_desc`): one key for all fragments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RdmaDesc<'a> {
    /// Remote key.
    pub key: u32,
    /// Fragments, 1 to [`MAX_FRAGS`].
    pub frags: Fragments<'a>,
}

impl<'a> RdmaDesc<'a> {
    /// Bytes of all fragments.
    pub fn nob(&self) -> u64 {
        self.frags.iter().map(|f| u64::from(f.nob)).sum()
    }

    /// Bytes of a descriptor with so many fragments.
    pub const fn len_for(frags: usize) -> usize {
        8 + frags * FRAGMENT_LEN
    }

    pub(crate) fn read(order: ByteOrder, fields: &mut Reader<'a>) -> Result<Self, ProtoError> {
        let (key, count) = (fields.u32()?, fields.u32()?);
        if count == 0 || count > MAX_FRAGS {
            return Err(ProtoError::Field {
                field: "fragments of a descriptor",
                value: count.into(),
                why: "1 to 257",
            });
        }
        let bytes = fields.take(count as usize * FRAGMENT_LEN)?;
        let frags = Fragments::Wire(order, bytes);
        Ok(Self { key, frags })
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.u32(self.key);
        out.u32(u32::try_from(self.frags.len()).unwrap_or(u32::MAX));
        for fragment in self.frags.iter() {
            out.u32(fragment.nob);
            out.u64(fragment.addr);
        }
    }
}
