//! An image as a [`BlockDevice`] in this process, without a network.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::Arc,
};

use parking_lot::{Condvar, Mutex};

use super::{Image, Pool};
use crate::{
    block::{BlockDevice, BlockRequest, Done, Geometry, IoBuffer},
    errno::Errno,
};

/// Page-aligned memory of one allocation.
struct Page {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Page {}

impl Page {
    fn new(len: usize) -> Result<Self, Errno> {
        let layout = Layout::from_size_align(len.max(1), 4096).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the layout has at least one byte.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Errno::ENOMEM)?;
        Ok(Self { ptr, layout })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}

/// Buffers of one size, at most so many at a time.
struct Buffers {
    state: Mutex<BufferState>,
    freed: Condvar,
}

struct BufferState {
    /// Buffers that may still be given out.
    credit: usize,
    idle: Vec<Page>,
}

/// A buffer of a [`LocalDevice`].
pub struct LocalBuffer {
    page: Option<Page>,
    len: usize,
    home: Arc<Buffers>,
}

// SAFETY: the allocation lives and stays as long as the value, and has at least `len` bytes.
unsafe impl IoBuffer for LocalBuffer {
    fn as_ptr(&self) -> *mut u8 {
        self.page.as_ref().map_or(std::ptr::null_mut(), |p| p.ptr.as_ptr())
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for LocalBuffer {
    fn drop(&mut self) {
        let mut s = self.home.state.lock();
        s.credit += 1;
        s.idle.extend(self.page.take());
        self.home.freed.notify_one();
    }
}

impl std::fmt::Debug for LocalBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalBuffer")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A block device that is an [`Image`] of this process: for tests, benchmarks, and NBD without a network.
pub struct LocalDevice {
    image: Arc<Image>,
    geometry: Geometry,
    pool: Arc<Pool>,
    buffers: Arc<Buffers>,
}

impl LocalDevice {
    /// Serves `image` with the threads of `pool`.
    pub fn new(image: Image, pool: Arc<Pool>) -> Self {
        let depth = image.geometry().queue_depth;
        Self::with_queue_depth(image, pool, depth)
    }

    /// Lends at most `depth` buffers at a time, at least one.
    pub fn with_queue_depth(image: Image, pool: Arc<Pool>, depth: u32) -> Self {
        let geometry = Geometry {
            queue_depth: depth.max(1),
            ..image.geometry()
        };
        let state = Mutex::new(BufferState {
            credit: geometry.queue_depth as usize,
            idle: Vec::new(),
        });
        let buffers = Arc::new(Buffers {
            state,
            freed: Condvar::new(),
        });
        Self {
            image: Arc::new(image),
            geometry,
            pool,
            buffers,
        }
    }

    fn take(&self, len: usize, wait: bool) -> Result<Option<LocalBuffer>, Errno> {
        let max = self.geometry.max_transfer as usize;
        if len == 0 || len > max {
            return Err(Errno::EINVAL);
        }
        let mut s = self.buffers.state.lock();
        while s.credit == 0 {
            if !wait {
                return Ok(None);
            }
            self.buffers.freed.wait(&mut s);
        }
        let page = match s.idle.pop() {
            Some(p) => p,
            None => Page::new(max)?,
        };
        s.credit -= 1;
        drop(s);
        Ok(Some(LocalBuffer {
            page: Some(page),
            len,
            home: self.buffers.clone(),
        }))
    }
}

impl std::fmt::Debug for LocalDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalDevice")
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

impl BlockDevice for LocalDevice {
    type Buffer = LocalBuffer;

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn buffer(&self, len: usize) -> Result<LocalBuffer, Errno> {
        self.take(len, true)?.ok_or(Errno::EAGAIN)
    }

    fn try_buffer(&self, len: usize) -> Result<Option<LocalBuffer>, Errno> {
        self.take(len, false)
    }

    fn submit(&self, request: BlockRequest<LocalBuffer>, done: Done<LocalBuffer>) {
        let image = self.image.clone();
        self.pool.run(move || match request {
            BlockRequest::Read { offset, buffer } => {
                // SAFETY: the buffer is ours and `len` bytes long.
                let r = unsafe { image.read(offset, buffer.as_ptr(), buffer.len()) };
                done(r, Some(buffer));
            }
            BlockRequest::Write { offset, buffer, fua } => {
                // SAFETY: as above.
                let r = unsafe { image.write(offset, buffer.as_ptr(), buffer.len(), fua) };
                done(r, Some(buffer));
            }
            BlockRequest::Flush => done(image.flush(), None),
            BlockRequest::Discard { offset, len } => done(image.discard(offset, len), None),
            BlockRequest::WriteZeroes {
                offset,
                len,
                fua,
                may_unmap,
            } => {
                done(image.write_zeroes(offset, len, fua, may_unmap), None);
            }
        });
    }
}
