//! The objects that programs hold.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use roce_bth::{LKey, RKey};
use roce_verbs::{AccessFlags, provider::RangeError};

use crate::span::Mapping;

/// Protection domain. Objects of different ones do not work together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PdHandle(pub(crate) u32);

impl PdHandle {
    /// Returns its number.
    pub const fn value(self) -> u32 {
        self.0
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Region {
    pub(crate) pd: PdHandle,
    pub(crate) key: u32,
    pub(crate) iova: u64,
    pub(crate) access: AccessFlags,
    pub(crate) mapping: Arc<Mapping>,
}

impl Region {
    /// Address of the first byte, for SGEs and for peers.
    pub fn addr(&self) -> u64 {
        self.iova
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.mapping.len()
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
        self.access
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
        self.mapping.as_ptr()
    }

    fn range_error(&self, offset: usize, len: usize) -> RangeError {
        RangeError {
            offset,
            len,
            size: self.len(),
        }
    }

    /// Copies bytes out, also after deregistration if the region owns its memory.
    ///
    /// # Errors
    /// When the range is outside the region, or all of it is: memory that was lent and is deregistered. Nothing is copied then. Or when
    /// memory that was lent is missing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        match !self.mapping.is_returned() && self.mapping.copy_out(offset, out).is_ok() {
            true => Ok(()),
            false => Err(self.range_error(offset, out.len())),
        }
    }

    /// Copies bytes in, as [`Region::read`].
    ///
    /// # Errors
    /// As [`Region::read`].
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        match !self.mapping.is_returned() && self.mapping.copy_in(offset, data).is_ok() {
            true => Ok(()),
            false => Err(self.range_error(offset, data.len())),
        }
    }
}

/// A target of fast registration: closed until a fast registration is executed, and again after an invalidation.
#[derive(Debug)]
pub struct FastRegion {
    pub(crate) pd: PdHandle,
    pub(crate) key: AtomicU32,
}

impl FastRegion {
    /// The key as last executed; a work request that has been posted but not executed does not show here.
    pub fn rkey(&self) -> RKey {
        RKey(self.key.load(Ordering::Acquire))
    }

    /// The key for local use.
    pub fn lkey(&self) -> LKey {
        LKey(self.rkey().0)
    }

    /// The protection domain.
    pub fn pd(&self) -> PdHandle {
        self.pd
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
    pub(crate) pd: PdHandle,
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

    /// The protection domain.
    pub fn pd(&self) -> PdHandle {
        self.pd
    }
}
