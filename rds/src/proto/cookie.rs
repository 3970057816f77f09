//! RDMA cookies.

use core::fmt;

/// Name of memory that a peer may use (`rds_rdma_cookie_t`): key in the low 32 bits, offset in the high ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RdmaCookie(pub u64);

impl RdmaCookie {
    /// Returns the cookie of a key and an offset.
    pub const fn new(rkey: u32, offset: u32) -> Self {
        Self((offset as u64) << 32 | rkey as u64)
    }

    /// Key.
    pub const fn rkey(self) -> u32 {
        self.0 as u32
    }

    /// Offset of the memory's first byte: the kernel's regions begin at address 0.
    pub const fn offset(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Virtual address on the wire of a byte of the memory.
    pub const fn address(self, byte: u64) -> u64 {
        (self.offset() as u64).wrapping_add(byte)
    }
}

impl fmt::Debug for RdmaCookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RdmaCookie({self})")
    }
}

impl fmt::Display for RdmaCookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rkey {:#x} offset {:#x}", self.rkey(), self.offset())
    }
}
