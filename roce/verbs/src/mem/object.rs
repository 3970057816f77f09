//! The objects that programs hold.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use crate::{AccessFlags, provider::RangeError};
use roce_bth::{LKey, RKey};

use crate::mem::{
    error::KeyError,
    span::{Mapping, Span},
};

/// Protection domain. Objects of different ones do not work together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PdHandle(pub(crate) u32);

/// Memory that a key opens at the moment.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    pub(crate) mapping: Arc<Mapping>,
    /// Address of the first byte.
    pub(crate) iova: u64,
    pub(crate) access: AccessFlags,
}

impl Open {
    /// Memory whose first byte has the address `iova`, or zero with [`AccessFlags::ZERO_BASED`].
    pub(crate) fn new(mapping: Arc<Mapping>, iova: u64, access: AccessFlags) -> Self {
        let zero_based = access.contains(AccessFlags::ZERO_BASED);
        Self {
            mapping,
            iova: if zero_based { 0 } else { iova },
            access,
        }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Whether the addresses wrap around.
    pub(crate) fn wraps(&self) -> bool {
        self.len() > 0 && self.iova.checked_add(self.len() - 1).is_none()
    }

    /// Checks an access to a range of addresses.
    pub(crate) fn span(&self, addr: u64, len: u64, need: AccessFlags) -> Result<Span, KeyError> {
        if !self.access.contains(need) {
            return Err(KeyError::Access);
        }
        let (offset, len) = self.offset(addr, len)?;
        Span::new(self.mapping.clone(), offset, len).ok_or(KeyError::Range)
    }

    /// Opens a part with an end of its own.
    pub(crate) fn view(&self, addr: u64, len: u64) -> Result<Arc<Mapping>, KeyError> {
        let (offset, len) = self.offset(addr, len)?;
        self.mapping.derive(offset, len).ok_or(KeyError::Range)
    }

    /// Offset and length within the mapping of a range of addresses.
    fn offset(&self, addr: u64, len: u64) -> Result<(usize, usize), KeyError> {
        let offset = addr.checked_sub(self.iova).ok_or(KeyError::Range)?;
        if offset > self.len() || len > self.len() - offset {
            return Err(KeyError::Range);
        }
        // Both are at most the mapping's length, which is a usize.
        Ok((offset as usize, len as usize))
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Region {
    pub(crate) pd: PdHandle,
    pub(crate) key: u32,
    pub(crate) open: Open,
}

impl Region {
    /// Address of the first byte, for SGEs and for peers.
    pub fn addr(&self) -> u64 {
        self.open.iova
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.open.mapping.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The protection domain.
    pub fn pd(&self) -> PdHandle {
        self.pd
    }

    /// The rights.
    pub fn access(&self) -> AccessFlags {
        self.open.access
    }

    /// Local key.
    pub fn lkey(&self) -> LKey {
        LKey(self.key)
    }

    /// Remote key; peers can use it as far as the rights go.
    pub fn rkey(&self) -> RKey {
        RKey(self.key)
    }

    /// First byte, for system calls. Valid while the region lives; never make a reference from it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.open.mapping.as_ptr()
    }

    /// Copies bytes out, also after deregistration if the region owns its memory.
    ///
    /// # Errors
    /// When the range is outside the region, or all of it is: memory that was lent and is deregistered. Nothing is copied then. Or when
    /// memory that was lent is missing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        self.open.mapping.read(offset, out)
    }

    /// Copies bytes in, as [`Region::read`].
    ///
    /// # Errors
    /// As [`Region::read`].
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.open.mapping.write(offset, data)
    }
}

/// A target of fast registration: closed until a fast registration is executed, and again after an invalidation.
#[derive(Debug)]
pub struct FastRegion {
    pub(crate) key: AtomicU32,
}

impl FastRegion {
    /// The key as last executed; a work request that has been posted but not executed does not show here.
    pub fn rkey(&self) -> RKey {
        RKey(self.key.load(Ordering::Acquire))
    }
}

/// The kinds of memory window (IBA 10.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WindowKind {
    /// Open to every queue pair of the protection domain; may be bound again without invalidation.
    Type1,
    /// Type 2B, which is what `IBV_MW_TYPE_2` is on rdma_rxe and ConnectX: open to the queue pair that bound it, which must
    /// be of the window's protection domain; can be invalidated.
    Type2,
    /// Type 2A: open to the queue pair that bound it, whatever the window's protection domain; can be invalidated.
    Type2A,
}

impl WindowKind {
    /// Whether it belongs to the queue pair that binds it.
    pub const fn is_type2(self) -> bool {
        matches!(self, Self::Type2 | Self::Type2A)
    }
}

/// A memory window: closed until it is bound.
#[derive(Debug)]
pub struct Window {
    pub(crate) kind: WindowKind,
    pub(crate) key: AtomicU32,
}

impl Window {
    /// The key as last executed.
    pub fn rkey(&self) -> RKey {
        RKey(self.key.load(Ordering::Acquire))
    }

    /// The kind.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }
}
