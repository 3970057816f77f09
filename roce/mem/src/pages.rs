//! Memory to be registered, perhaps with several devices.

use std::sync::Arc;

use roce_verbs::provider::{Memory, RangeError};

use crate::{error::MemError, span::Mapping};

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
        let mapping = Mapping::share(memory, 0, memory.len());
        let mapping = mapping.ok_or(MemError::Range(memory.len() as u64))?;
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

    fn outside(&self, offset: usize, len: usize) -> RangeError {
        RangeError {
            offset,
            len,
            size: self.len(),
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside, and nothing is copied; or when memory of others is missing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        let done = self.mapping.copy_out(offset, out);
        done.map_err(|_| self.outside(offset, out.len()))
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside, and nothing is copied; or when memory of others is missing.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        let done = self.mapping.copy_in(offset, data);
        done.map_err(|_| self.outside(offset, data.len()))
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
}
