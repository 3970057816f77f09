//! Registered memory for the data of requests.
//!
//! Buffers come in powers of two from 4 KiB up, cut from slabs that are registered when first needed and kept until the
//! session goes. Data read from a socket straight into a buffer goes from there onto the wire without another copy.
//!
//! A buffer is a value that belongs to whoever holds it. It has to be given back: there is no drop that does.

use std::sync::Arc;

use roce_mem::Pages;
use roce_verbs::{
    AccessFlags, RKey, Sge,
    provider::{DeviceIx, MrInfo, PdId, RangeError, Registration, VerbsError},
};
use smallvec::SmallVec;

use crate::{Error, cx::Cx};

/// Smallest buffer, bytes.
pub const MIN_BYTES: usize = 4096;
/// Slabs are this large, or one buffer if that is larger.
const SLAB_BYTES: usize = 256 << 10;

/// A piece of registered memory, its content left over from earlier use.
#[derive(Debug)]
#[must_use = "a buffer that is not given back is lost to its session"]
pub struct Buffer {
    slab: u32,
    offset: u32,
    class: u8,
    len: u32,
}

impl Buffer {
    /// Bytes that a request with this buffer moves.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that [`Buffer::set_len`] can make of it.
    pub fn capacity(&self) -> usize {
        MIN_BYTES << self.class
    }

    /// Changes the length, at most to the capacity; more is cut.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity()) as u32;
    }
}

/// A piece of a slab that nobody holds.
#[derive(Clone, Copy, Debug)]
struct Piece {
    slab: u32,
    offset: u32,
}

#[derive(Debug)]
struct Slab {
    pages: Arc<Pages>,
    /// One registration for each device that has a path.
    mrs: SmallVec<[(DeviceIx, MrInfo); 1]>,
}

/// A device that buffers are registered with.
#[derive(Clone, Copy, Debug)]
struct Domain {
    device: DeviceIx,
    pd: PdId,
    access: AccessFlags,
}

/// The buffers of a session.
#[derive(Debug)]
pub struct Buffers {
    limit: usize,
    /// Registered bytes.
    total: usize,
    /// Pieces that are lent.
    lent: usize,
    slabs: Vec<Slab>,
    /// Free pieces per class: `MIN_BYTES << class`.
    free: Vec<Vec<Piece>>,
    domains: SmallVec<[Domain; 1]>,
}

impl Buffers {
    /// None yet; `limit` bytes at most.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            total: 0,
            lent: 0,
            slabs: Vec::new(),
            free: Vec::new(),
            domains: SmallVec::new(),
        }
    }

    /// Bytes that `count` buffers of `len` bytes take, in whole slabs, with a slab for each smaller size on top.
    pub fn bytes_for(len: usize, count: usize) -> usize {
        let size = len.max(MIN_BYTES).next_power_of_two();
        let slabs = (size * count).next_multiple_of(SLAB_BYTES.max(size));
        slabs + (size / MIN_BYTES).trailing_zeros() as usize * SLAB_BYTES
    }

    /// Bytes of memory at most.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The limit is another one: what is there stays.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Buffers that somebody holds.
    pub fn lent(&self) -> usize {
        self.lent
    }

    /// A path leads through this device: all buffers are registered with it, those that are lent as well. `access` is
    /// [`AccessFlags::REMOTE_WRITE`] when the buffers stay open for the server.
    ///
    /// # Errors
    /// When the device can't register so much; then it has nothing of them.
    pub fn add_device(
        &mut self,
        cx: &mut Cx<'_>,
        device: DeviceIx,
        pd: PdId,
        access: AccessFlags,
    ) -> Result<(), VerbsError> {
        if self.domains.iter().any(|d| d.device == device) {
            return Ok(());
        }
        let domain = Domain { device, pd, access };
        for i in 0..self.slabs.len() {
            match register(cx, &domain, &self.slabs[i].pages) {
                Ok(mr) => self.slabs[i].mrs.push((device, mr)),
                Err(e) => {
                    self.deregister(cx, device);
                    return Err(e);
                }
            }
        }
        self.domains.push(domain);
        Ok(())
    }

    fn deregister(&mut self, cx: &mut Cx<'_>, device: DeviceIx) {
        for slab in &mut self.slabs {
            slab.mrs.retain(|(of, mr)| {
                let stays = *of != device;
                if !stays {
                    cx.provider.deregister(mr.id);
                }
                stays
            });
        }
    }

    /// A buffer of `len` bytes.
    ///
    /// # Errors
    /// [`Error::NoBuffer`] when as much is lent as may be; or when the system has no memory, or a device can't register it.
    pub fn take(&mut self, cx: &mut Cx<'_>, len: usize) -> Result<Buffer, Error> {
        let no_buffer = || Error::NoBuffer { len, limit: self.limit };
        let size = len
            .max(MIN_BYTES)
            .checked_next_power_of_two()
            .filter(|s| *s <= self.limit.max(MIN_BYTES) && u32::try_from(*s).is_ok());
        let size = size.ok_or_else(no_buffer)?;
        let class = (size / MIN_BYTES).trailing_zeros() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        let piece = match self.free[class].pop() {
            Some(piece) => piece,
            None => self.grow(cx, len, size, class)?,
        };
        self.lent += 1;
        Ok(Buffer {
            slab: piece.slab,
            offset: piece.offset,
            class: class as u8,
            len: len as u32,
        })
    }

    /// Registers another slab, whose first piece is returned.
    fn grow(&mut self, cx: &mut Cx<'_>, len: usize, size: usize, class: usize) -> Result<Piece, Error> {
        let bytes = size.max(SLAB_BYTES);
        if self.total.saturating_add(bytes) > self.limit.max(bytes) {
            return Err(Error::NoBuffer { len, limit: self.limit });
        }
        let pages = Pages::allocate(bytes).map_err(|e| Error::Verbs(VerbsError::Invalid(e.to_string())))?;
        let mut mrs = SmallVec::new();
        for domain in &self.domains {
            match register(cx, domain, &pages) {
                Ok(mr) => mrs.push((domain.device, mr)),
                Err(e) => {
                    for (_, mr) in &mrs {
                        let mr: &MrInfo = mr;
                        cx.provider.deregister(mr.id);
                    }
                    return Err(e.into());
                }
            }
        }
        let slab = self.slabs.len() as u32;
        self.slabs.push(Slab { pages, mrs });
        self.total += bytes;
        let pieces = (1..bytes / size).rev().map(|i| Piece {
            slab,
            offset: (i * size) as u32,
        });
        self.free[class].extend(pieces);
        Ok(Piece { slab, offset: 0 })
    }

    /// Takes a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let Buffer {
            slab, offset, class, ..
        } = buffer;
        debug_assert!(
            !self.free[usize::from(class)]
                .iter()
                .any(|p| p.slab == slab && p.offset == offset)
        );
        self.lent -= 1;
        self.free[usize::from(class)].push(Piece { slab, offset });
    }

    /// The memory of a buffer, and where in it the buffer begins: for system calls, valid for [`Buffer::capacity`] bytes
    /// while the buffer is not given back. The server may write into it at any time: never make a reference from it.
    pub fn pages(&self, buffer: &Buffer) -> (&Arc<Pages>, usize) {
        (&self.slabs[buffer.slab as usize].pages, buffer.offset as usize)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside the buffer.
    pub fn read(&self, buffer: &Buffer, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        check(buffer, offset, out.len())?;
        let (pages, start) = self.pages(buffer);
        pages.read(start + offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside the buffer.
    pub fn write(&self, buffer: &Buffer, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        check(buffer, offset, data.len())?;
        let (pages, start) = self.pages(buffer);
        pages.write(start + offset, data)
    }

    /// Registration and offset in it, for a device; `None` when it has none of the buffers.
    pub fn region(&self, buffer: &Buffer, device: DeviceIx) -> Option<(&MrInfo, usize)> {
        let slab = &self.slabs[buffer.slab as usize];
        let (_, mr) = slab.mrs.iter().find(|(of, _)| *of == device)?;
        Some((mr, buffer.offset as usize))
    }

    /// The scatter/gather element of a buffer's bytes, and the key that opens its whole slab.
    pub fn sge(&self, buffer: &Buffer, device: DeviceIx) -> Option<(Sge, RKey)> {
        let (mr, offset) = self.region(buffer, device)?;
        let sge = Sge {
            addr: mr.addr + offset as u64,
            length: buffer.len,
            lkey: mr.lkey,
        };
        Some((sge, mr.rkey))
    }

    /// Ends all registrations. Buffers that are still lent are of no use any more, but their memory stays readable until they
    /// are given back and this value goes.
    pub fn close(&mut self, cx: &mut Cx<'_>) {
        for slab in &mut self.slabs {
            for (_, mr) in slab.mrs.drain(..) {
                cx.provider.deregister(mr.id);
            }
        }
        self.domains.clear();
    }
}

fn check(buffer: &Buffer, offset: usize, len: usize) -> Result<(), RangeError> {
    if offset.checked_add(len).is_none_or(|end| end > buffer.len()) {
        return Err(RangeError {
            offset,
            len,
            size: buffer.len(),
        });
    }
    Ok(())
}

fn register(cx: &mut Cx<'_>, domain: &Domain, pages: &Arc<Pages>) -> Result<MrInfo, VerbsError> {
    cx.provider.register(
        domain.pd,
        &Registration {
            memory: pages.clone(),
            offset: 0,
            len: pages.len(),
            iova: None,
            access: domain.access,
        },
    )
}
