//! Registered memory for the data of requests.
//!
//! Buffers come in powers of two from 4 KiB up, cut from slabs of one size each that are registered when first needed. A slab of
//! which nothing is lent gives way when another size is needed and there may be no more slabs: a server that comes back with other
//! chunks makes for other sizes. Data read from a socket straight into a buffer goes from there onto the wire without another copy.
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
    /// Its pieces are `MIN_BYTES << class`.
    class: usize,
    /// Pieces that are lent.
    lent: usize,
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
    /// `None`: it has given way.
    slabs: Vec<Option<Slab>>,
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
        let mut failed = None;
        for slab in self.slabs.iter_mut().flatten() {
            match register(cx, &domain, &slab.pages) {
                Ok(mr) => slab.mrs.push((device, mr)),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        if let Some(e) = failed {
            self.deregister(cx, device);
            return Err(e);
        }
        self.domains.push(domain);
        Ok(())
    }

    fn deregister(&mut self, cx: &mut Cx<'_>, device: DeviceIx) {
        for slab in self.slabs.iter_mut().flatten() {
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
        self.slab_mut(piece.slab).lent += 1;
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
        self.make_room(cx, bytes);
        if !self.has_room(bytes) {
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
        let made = Slab {
            pages,
            class,
            lent: 0,
            mrs,
        };
        let vacant = self.slabs.iter().position(Option::is_none);
        let slab = vacant.unwrap_or(self.slabs.len()) as u32;
        match vacant {
            Some(index) => self.slabs[index] = Some(made),
            None => self.slabs.push(Some(made)),
        }
        self.total += bytes;
        let pieces = (1..bytes / size).rev().map(|i| Piece {
            slab,
            offset: (i * size) as u32,
        });
        self.free[class].extend(pieces);
        Ok(Piece { slab, offset: 0 })
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.total.saturating_add(bytes) <= self.limit.max(bytes)
    }

    /// Lets go of slabs of which nothing is lent, as many as it takes for `bytes` more.
    fn make_room(&mut self, cx: &mut Cx<'_>, bytes: usize) {
        for index in 0..self.slabs.len() {
            if self.has_room(bytes) {
                return;
            }
            let idle = self.slabs[index].take_if(|slab| slab.lent == 0);
            let Some(slab) = idle else { continue };
            for (_, mr) in &slab.mrs {
                cx.provider.deregister(mr.id);
            }
            self.total -= slab.pages.len();
            self.free[slab.class].retain(|piece| piece.slab as usize != index);
        }
    }

    fn slab_mut(&mut self, index: u32) -> &mut Slab {
        self.slabs[index as usize]
            .as_mut()
            .expect("a slab stays while a piece of it is lent or free")
    }

    fn slab(&self, index: u32) -> &Slab {
        self.slabs[index as usize]
            .as_ref()
            .expect("a slab stays while a piece of it is lent or free")
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
        self.slab_mut(slab).lent -= 1;
        self.free[usize::from(class)].push(Piece { slab, offset });
    }

    /// The memory of a buffer, and where in it the buffer begins: for system calls, valid for [`Buffer::capacity`] bytes
    /// while the buffer is not given back. The server may write into it at any time: never make a reference from it.
    pub fn pages(&self, buffer: &Buffer) -> (&Arc<Pages>, usize) {
        (&self.slab(buffer.slab).pages, buffer.offset as usize)
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
        let slab = self.slab(buffer.slab);
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
        for slab in self.slabs.iter_mut().flatten() {
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

#[cfg(test)]
mod tests {
    use roce_verbs::{Instant, provider::Provider};

    use super::*;
    use crate::provider::{Keys, Scripted};

    struct Bed {
        provider: Scripted,
        buffers: Buffers,
    }

    impl Bed {
        fn new(limit: usize) -> Self {
            let mut bed = Self {
                provider: Scripted::new(&[Keys::INSTANT]),
                buffers: Buffers::new(limit),
            };
            let pd = bed.provider.alloc_pd(DeviceIx(0)).unwrap();
            let access = AccessFlags::LOCAL_WRITE;
            bed.with(|buffers, cx| buffers.add_device(cx, DeviceIx(0), pd, access).unwrap());
            bed
        }

        fn with<T>(&mut self, f: impl FnOnce(&mut Buffers, &mut Cx<'_>) -> T) -> T {
            let mut cx = Cx {
                now: Instant::ZERO,
                provider: &mut self.provider,
                random: &mut |_| (),
            };
            f(&mut self.buffers, &mut cx)
        }

        fn take(&mut self, len: usize) -> Result<Buffer, Error> {
            self.with(|buffers, cx| buffers.take(cx, len))
        }

        fn take_all(&mut self, len: usize) -> Vec<Buffer> {
            std::iter::from_fn(|| self.take(len).ok()).collect()
        }

        fn give(&mut self, buffers: Vec<Buffer>) {
            buffers.into_iter().for_each(|buffer| self.buffers.give(buffer));
        }
    }

    const KIB: usize = 1024;

    #[test]
    fn a_session_that_comes_back_with_smaller_chunks_has_buffers_of_their_size() {
        let mut bed = Bed::new(Buffers::bytes_for(256 * KIB, 16));
        let large = bed.take_all(256 * KIB);
        assert!(large.len() >= 16);
        let smaller = Buffers::bytes_for(32 * KIB, 16);
        bed.buffers.set_limit(smaller);
        bed.give(large);
        let small = bed.take_all(32 * KIB);
        assert!(small.len() >= 16, "{}", small.len());
        assert!(bed.buffers.total <= smaller, "{}", bed.buffers.total);
        let regions = small.iter().map(|b| bed.buffers.sge(b, DeviceIx(0)).unwrap().0.addr);
        let mut regions: Vec<u64> = regions.collect();
        regions.sort_unstable();
        regions.dedup();
        assert_eq!(regions.len(), small.len(), "each has memory of its own");
        // And with larger ones again.
        bed.give(small);
        bed.buffers.set_limit(Buffers::bytes_for(256 * KIB, 16));
        let large = bed.take_all(256 * KIB);
        assert!(large.len() >= 16, "{}", large.len());
        bed.give(large);
    }
}
