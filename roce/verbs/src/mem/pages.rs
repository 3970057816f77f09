//! Memory to be registered, perhaps with several devices.

use std::sync::Arc;

use crate::provider::{Foreign, Memory, RangeError};

use crate::mem::{error::MemError, span::Mapping};

/// Zeroed memory on a page boundary, which the system gives out page by page as it is touched; or memory of somebody else. Peers may
/// change it at any time, so it is only ever copied.
#[derive(Debug)]
pub struct Pages {
    mapping: Arc<Mapping>,
}

impl Pages {
    /// Allocates.
    ///
    /// # Errors
    /// Without memory.
    pub fn allocate(len: usize) -> Result<Arc<Self>, MemError> {
        let mapping = Mapping::allocate(len)?;
        Ok(Arc::new(Self { mapping }))
    }

    /// Memory of somebody else, which lives as long as these pages.
    ///
    /// # Errors
    /// When it has no address.
    pub fn of(memory: &Arc<dyn Memory>) -> Result<Arc<Self>, MemError> {
        Self::part_of(memory, 0..memory.len())
    }

    /// A part of memory of somebody else, which lives as long as these pages.
    ///
    /// # Errors
    /// When it is outside the memory.
    pub fn part_of(memory: &Arc<dyn Memory>, range: core::ops::Range<usize>) -> Result<Arc<Self>, MemError> {
        let mapping = Mapping::share(memory, range.start, range.len()).ok_or(MemError::Range(range.len() as u64))?;
        Ok(Arc::new(Self { mapping }))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First byte, for system calls. Valid as long as the pages live; never make a reference from it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside, and nothing is copied; or when memory of others is missing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        self.mapping.read(offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside, and nothing is copied; or when memory of others is missing.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.mapping.write(offset, data)
    }
}

// SAFETY: the mapping was allocated for this, or keeps what it shares, stays where it is, and goes with the last reference to it.
unsafe impl Memory for Pages {
    fn as_ptr(&self) -> *mut u8 {
        Self::as_ptr(self)
    }

    fn len(&self) -> usize {
        Self::len(self)
    }

    fn foreign(&self) -> Option<&Foreign> {
        self.mapping.foreign()
    }
}
