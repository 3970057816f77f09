//! Registered memory for the data of requests.
//!
//! Buffers come in powers of two from 4 KiB up, cut from slabs of one size each that are registered when first needed. A slab of
//! which nothing is lent gives way when another size is needed and there may be no more slabs: a server that comes back with other
//! chunks makes for other sizes. Data read from a socket straight into a buffer goes from there onto the wire without another copy.
//!
//! A buffer is a value that belongs to whoever holds it. It has to be given back: there is no drop that does.
//!
//! Memory of somebody else can be lent to a session ([`Buffers::lend`]): pieces of it are buffers as well, which cost nothing, and of
//! which the owner keeps account.

use core::ops::Range;
use std::{collections::BTreeMap, sync::Arc};

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags,
    provider::{DeviceIx, MrInfo, PdId, RangeError, VerbsError},
};
use smallvec::SmallVec;

use crate::{Cx, Error, client::memory::Memory};

/// Smallest buffer, bytes.
pub const MIN_BYTES: usize = 4096;
/// Slabs are this large, or one buffer if that is larger.
const SLAB_BYTES: usize = 256 << 10;

/// Pieces of lent memory that a buffer of one request has at most. With the request's header they fit a work request of any device.
pub const MAX_PIECES: usize = 31;

/// Registered memory for a request, its content left over from earlier use: a part of the session's own, or pieces of what was lent
/// to it, in the order of the data.
#[derive(Debug)]
#[must_use = "a buffer that is not given back is lost to its session"]
pub struct Buffer {
    place: Place,
    len: u32,
}

/// Memory of a buffer.
#[derive(Debug)]
enum Place {
    Own { slab: u32, offset: u32, class: u8 },
    Lent(Box<[LentPiece]>),
}

/// Memory that was lent to a session. No other has had the number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LentId(u32);

/// Bytes of lent memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LentPiece {
    /// The lent memory.
    pub memory: LentId,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub len: u32,
}

impl Buffer {
    /// Pieces of lent memory, as many as there may be; of what is one piece in it makes one. Only [`part`](Self::part)s of
    /// [`MAX_PIECES`] go with a request. `None`: they are more than 4 GiB.
    pub fn of_lent(pieces: impl IntoIterator<Item = LentPiece>) -> Option<Self> {
        let mut joined: Vec<LentPiece> = Vec::new();
        let mut len = 0u32;
        for piece in pieces.into_iter().filter(|piece| piece.len > 0) {
            len = len.checked_add(piece.len)?;
            match joined.last_mut() {
                Some(last) if last.memory == piece.memory && last.offset + last.len as usize == piece.offset => {
                    last.len += piece.len;
                }
                _ => joined.push(piece),
            }
        }
        let place = Place::Lent(joined.into());
        Some(Self { place, len })
    }

    /// Whether it is made of lent memory: then [parts](Self::part) of it may be under way together.
    pub fn is_lent(&self) -> bool {
        matches!(self.place, Place::Lent(_))
    }

    /// A buffer of a part of lent memory: bytes from `at` on, at most `len` and what [`MAX_PIECES`] have, in multiples of `unit`
    /// bytes. `None`: it is no lent memory, or a unit lies in more pieces than that, or outside.
    pub fn part(&self, at: usize, len: usize, unit: usize) -> Option<Self> {
        let Place::Lent(all) = &self.place else { return None };
        let mut pieces: Vec<LentPiece> = Vec::new();
        let (mut skipped, mut taken) = (0, 0);
        for piece in all {
            let bytes = piece.len as usize;
            if skipped + bytes > at && taken < len && pieces.len() < MAX_PIECES {
                let within = at.saturating_sub(skipped);
                let n = (bytes - within).min(len - taken);
                pieces.push(LentPiece {
                    memory: piece.memory,
                    offset: piece.offset + within,
                    len: n as u32,
                });
                taken += n;
            }
            skipped += bytes;
        }
        let whole = taken - taken % unit.max(1);
        let mut over = (taken - whole) as u32;
        while let Some(last) = pieces.last_mut().filter(|_| over > 0) {
            let cut = over.min(last.len);
            (last.len, over) = (last.len - cut, over - cut);
            if last.len == 0 {
                pieces.pop();
            }
        }
        let place = Place::Lent(pieces.into());
        (whole > 0).then_some(Self {
            place,
            len: whole as u32,
        })
    }

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
        match self.place {
            Place::Own { class, .. } => MIN_BYTES << class,
            Place::Lent(_) => self.len(),
        }
    }

    /// Changes the length of a buffer of the session's own memory, at most to the capacity; more is cut. One of lent memory stays as it is.
    pub fn set_len(&mut self, len: usize) {
        if !self.is_lent() {
            self.len = len.min(self.capacity()) as u32;
        }
    }
}

/// Parts of registrations that make up a buffer: each with its first byte and its length in bytes.
pub(super) type Regions<'a> = SmallVec<[(&'a MrInfo, usize, u32); 1]>;

/// A piece of a slab that nobody holds.
#[derive(Clone, Copy, Debug)]
struct Piece {
    slab: u32,
    offset: u32,
}

#[derive(Debug)]
struct Slab {
    memory: Memory,
    /// Its pieces are `MIN_BYTES << class`.
    class: usize,
    /// Pieces that are lent.
    lent: usize,
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
    /// Memory of others.
    foreign: BTreeMap<LentId, Memory>,
    next_foreign: u32,
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
            foreign: BTreeMap::new(),
            next_foreign: 0,
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
        if let Err(e) = self.register_all(cx, &domain) {
            self.deregister(cx, Some(device));
            return Err(e);
        }
        self.domains.push(domain);
        Ok(())
    }

    /// No path leads through this device any more: nothing of the buffers stays registered with it.
    pub fn remove_device(&mut self, cx: &mut Cx<'_>, device: DeviceIx) {
        self.domains.retain(|d| d.device != device);
        self.deregister(cx, Some(device));
    }

    fn register_all(&mut self, cx: &mut Cx<'_>, domain: &Domain) -> Result<(), VerbsError> {
        for slab in self.slabs.iter_mut().flatten() {
            register(cx, domain, &mut slab.memory)?;
        }
        for lent in self.foreign.values_mut() {
            register_lent(cx, domain, lent)?;
        }
        Ok(())
    }

    fn memories(&mut self) -> impl Iterator<Item = &mut Memory> {
        let own = self.slabs.iter_mut().flatten().map(|slab| &mut slab.memory);
        own.chain(self.foreign.values_mut())
    }

    fn deregister(&mut self, cx: &mut Cx<'_>, device: Option<DeviceIx>) {
        self.memories().for_each(|memory| memory.deregister(cx, device));
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
            place: Place::Own {
                slab: piece.slab,
                offset: piece.offset,
                class: class as u8,
            },
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
        let made = Slab {
            memory: self.registered(cx, pages, register)?,
            class,
            lent: 0,
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

    /// Registers memory with all devices.
    fn registered(
        &self,
        cx: &mut Cx<'_>,
        pages: Arc<Pages>,
        register: fn(&mut Cx<'_>, &Domain, &mut Memory) -> Result<(), VerbsError>,
    ) -> Result<Memory, VerbsError> {
        let mut memory = Memory::new(pages);
        for domain in &self.domains {
            if let Err(e) = register(cx, domain, &mut memory) {
                memory.deregister(cx, None);
                return Err(e);
            }
        }
        Ok(memory)
    }

    /// Registers memory of somebody else, until it is [taken back](Self::take_back): pieces of it may be
    /// [buffers](Buffer::of_lent). Its registration opens nothing to the server; what a request needs is opened for that request.
    ///
    /// # Errors
    /// When a device can't register it, or has no keys for pieces of memory.
    pub fn lend(&mut self, cx: &mut Cx<'_>, pages: Arc<Pages>) -> Result<LentId, VerbsError> {
        let memory = self.registered(cx, pages, register_lent)?;
        let id = LentId(self.next_foreign);
        self.next_foreign += 1;
        self.foreign.insert(id, memory);
        Ok(id)
    }

    /// Ends the registration of lent memory. Buffers of it are of no use from here on: a request that is still under way with one
    /// ends with its path.
    pub fn take_back(&mut self, cx: &mut Cx<'_>, id: LentId) {
        if let Some(mut lent) = self.foreign.remove(&id) {
            lent.deregister(cx, None);
        }
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
            let Some(mut slab) = idle else { continue };
            slab.memory.deregister(cx, None);
            self.total -= slab.memory.pages.len();
            self.free[slab.class].retain(|piece| piece.slab as usize != index);
        }
    }

    fn slab_mut(&mut self, index: u32) -> &mut Slab {
        self.slabs[index as usize]
            .as_mut()
            .expect("a slab stays while a piece of it is lent or free")
    }

    /// Memory of a buffer.
    fn own(&self, slab: u32) -> &Memory {
        let slab = self.slabs[slab as usize].as_ref();
        &slab.expect("a slab stays while a piece of it is lent or free").memory
    }

    /// Takes a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let Place::Own { slab, offset, class } = buffer.place else {
            return;
        };
        debug_assert!(
            !self.free[usize::from(class)]
                .iter()
                .any(|p| p.slab == slab && p.offset == offset)
        );
        self.lent -= 1;
        self.slab_mut(slab).lent -= 1;
        self.free[usize::from(class)].push(Piece { slab, offset });
    }

    /// The memory of a buffer of the session's own, and where in it the buffer begins: for system calls, valid for
    /// [`Buffer::capacity`] bytes while the buffer is not given back. The server may write into it at any time: never make a reference
    /// from it. `None` for one of lent memory.
    pub fn pages(&self, buffer: &Buffer) -> Option<(&Arc<Pages>, usize)> {
        match buffer.place {
            Place::Own { slab, offset, .. } => Some((&self.own(slab).pages, offset as usize)),
            Place::Lent(_) => None,
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside the buffer.
    pub fn read(&self, buffer: &Buffer, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        check(buffer, offset, out.len())?;
        self.for_pages(buffer, offset, out.len(), |pages, at, part| {
            pages.read(at, &mut out[part])
        })
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside the buffer.
    pub fn write(&self, buffer: &Buffer, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        check(buffer, offset, data.len())?;
        self.for_pages(buffer, offset, data.len(), |pages, at, part| {
            pages.write(at, &data[part])
        })
    }

    /// Calls `f` for where a range of a buffer lies, which is within it: memory, first byte there, and which bytes of the range.
    fn for_pages(
        &self,
        buffer: &Buffer,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&Pages, usize, Range<usize>) -> Result<(), RangeError>,
    ) -> Result<(), RangeError> {
        let pieces = match &buffer.place {
            Place::Own { slab, offset: at, .. } => {
                let pages = &self.own(*slab).pages;
                return f(pages, *at as usize + offset, 0..len);
            }
            Place::Lent(pieces) => pieces,
        };
        let (mut begin, mut done) = (0, 0);
        for piece in pieces {
            let within = (offset + done).saturating_sub(begin);
            let n = (piece.len as usize).saturating_sub(within).min(len - done);
            begin += piece.len as usize;
            if n == 0 {
                continue;
            }
            let lent = self.foreign.get(&piece.memory);
            let size = 0;
            let lent = lent.ok_or(RangeError { offset, len, size })?;
            f(&lent.pages, piece.offset + within, done..done + n)?;
            done += n;
        }
        Ok(())
    }

    /// Parts of a device's registrations that a request with the buffer uses. `None`: the device has none of the buffers, or lent memory
    /// was taken back.
    pub(super) fn regions(&self, buffer: &Buffer, device: DeviceIx) -> Option<Regions<'_>> {
        match &buffer.place {
            Place::Own { slab, offset, .. } => {
                let mr = self.own(*slab).on(device)?;
                Some(SmallVec::from_elem((mr, *offset as usize, buffer.len), 1))
            }
            Place::Lent(pieces) => {
                let region = |piece: &LentPiece| {
                    let mr = self.foreign.get(&piece.memory)?.on(device)?;
                    Some((mr, piece.offset, piece.len))
                };
                pieces.iter().map(region).collect()
            }
        }
    }

    /// Ends all registrations. Buffers that are still lent are of no use any more, but their memory stays readable until they
    /// are given back and this value goes.
    pub fn close(&mut self, cx: &mut Cx<'_>) {
        self.deregister(cx, None);
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

fn register(cx: &mut Cx<'_>, domain: &Domain, memory: &mut Memory) -> Result<(), VerbsError> {
    memory.register(cx, domain.device, domain.pd, domain.access)
}

/// Registers memory that only keys of its requests may open.
fn register_lent(cx: &mut Cx<'_>, domain: &Domain, memory: &mut Memory) -> Result<(), VerbsError> {
    let caps = cx.provider.devices().get(usize::from(domain.device.0));
    let fit = caps.is_some_and(|caps| caps.scattered_keys && caps.limits.max_sge as usize > MAX_PIECES);
    let open = domain.access.intersects(AccessFlags::REMOTE_WRITE);
    if !fit || open {
        return Err(VerbsError::Unsupported("memory of others as buffers"));
    }
    register(cx, domain, memory)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lens(buffer: &Buffer) -> Vec<u32> {
        match &buffer.place {
            Place::Lent(pieces) => pieces.iter().map(|piece| piece.len).collect(),
            Place::Own { .. } => panic!("it is no lent memory"),
        }
    }

    fn piece(memory: u32, offset: usize, len: u32) -> LentPiece {
        let memory = LentId(memory);
        LentPiece { memory, offset, len }
    }

    #[test]
    fn what_is_one_piece_in_memory_is_one() {
        let pieces = [
            piece(0, 0, 10),
            piece(0, 10, 5),
            piece(0, 15, 0),
            piece(1, 15, 5),
            piece(1, 30, 1),
        ];
        let buffer = Buffer::of_lent(pieces).unwrap();
        assert_eq!((lens(&buffer), buffer.len()), (vec![15, 5, 1], 21));
        assert!(Buffer::of_lent([piece(0, 0, u32::MAX), piece(1, 0, 1)]).is_none());
    }

    proptest! {
        /// However a buffer is cut, its parts are its bytes in order, in whole units and not too many pieces.
        #[test]
        fn parts_cover_a_buffer(
            sizes in prop::collection::vec(prop_oneof![1u32..20, 500u32..600, Just(4096u32)], 1..80),
            len in 1usize..100_000,
            unit in prop_oneof![Just(1usize), Just(16), Just(512)],
        ) {
            let mut bytes: usize = sizes.iter().map(|n| *n as usize).sum();
            let mut sizes = sizes;
            // The whole is whole units.
            let rest = bytes.next_multiple_of(unit) - bytes;
            sizes.push(rest as u32);
            bytes += rest;
            let pieces = sizes.iter().enumerate().map(|(i, len)| piece(i as u32, 7, *len));
            let buffer = Buffer::of_lent(pieces).unwrap();
            prop_assert_eq!(buffer.len(), bytes);
            let mut at = 0;
            while at < bytes {
                let Some(part) = buffer.part(at, len, unit) else {
                    // A unit in too many pieces, or one that is longer than what is asked for.
                    let left = buffer.part(at, unit, 1).unwrap();
                    prop_assert!(len < unit || left.len() < unit);
                    return Ok(());
                };
                prop_assert!(part.len() <= len && part.len() % unit == 0 && !part.is_empty());
                let lens = lens(&part);
                prop_assert!(lens.len() <= MAX_PIECES && lens.iter().all(|len| *len > 0));
                prop_assert_eq!(lens.iter().map(|len| *len as usize).sum::<usize>(), part.len());
                at += part.len();
            }
            prop_assert!(buffer.part(bytes, len, unit).is_none());
        }
    }
}

#[cfg(test)]
mod sizes {
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
        let regions = small.iter().map(|b| {
            bed.buffers
                .regions(b, DeviceIx(0))
                .map(|r| r[0].0.addr + r[0].1 as u64)
                .unwrap()
        });
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
