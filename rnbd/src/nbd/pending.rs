//! Requests in flight: the parts that each was split into, and what it is answered with when the last of them is over.

use rtrs::client::buffers::Buffer;
use smallvec::SmallVec;

use crate::{
    block::{self, BlockOp, Extent, Geometry},
    client::Parts,
    errno::Errno,
    nbd::{
        copy::zeroes,
        framing::{Answer, Asked, extents, head},
        proto::{self, cmd},
        reply::{Data, Reply},
    },
};

/// Least bytes of a part, whatever the device says: so the parts of a request can be numbered.
const MIN_PART: u32 = 512;

/// Names a part of a request until it is over. A key of what is over names nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PendingKey {
    slot: u16,
    part: u16,
    generation: u32,
}

impl PendingKey {
    /// The key of another part of the same request.
    pub(crate) const fn part(self, index: u32) -> Self {
        Self {
            part: index as u16,
            ..self
        }
    }
}

/// Request to a device.
#[derive(Debug)]
pub struct NbdRequest {
    /// Comes back when it is over.
    pub key: PendingKey,
    /// Operation.
    pub op: BlockOp,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes; at most the device's largest transfer for reads and writes.
    pub len: u64,
    /// The data of a write, or the place for that of a read; as long as the request.
    pub data: Option<Buffer>,
    /// This flush stands for the FUA of a write.
    pub forces: bool,
}

/// Destination of the parts of a read.
#[derive(Debug)]
enum Landing {
    /// Not a read.
    Nowhere,
    /// Buffers in order; they are sent as they are.
    Buffers(SmallVec<[Option<Buffer>; 1]>),
    /// Copied as parts complete.
    Heap(Vec<u8>),
    /// Extents of the range.
    Extents(Vec<Extent>),
}

/// A request whose reply is still to come.
#[derive(Debug)]
pub(crate) struct Pending {
    asked: Asked,
    charge: u64,
    /// Bytes of the range that the client has named.
    span: u64,
    /// Bytes that are moved.
    len: u32,
    /// Bytes of each part but the last.
    step: u32,
    /// Parts in flight, and one as long as parts are still to be started.
    open: u32,
    /// The first error.
    error: Option<Errno>,
    /// A flush follows the parts.
    flush: bool,
    /// Losses of a write.
    losses: Parts,
    landing: Landing,
}

impl Pending {
    /// A request that counts for `charge`, and whose parts are still to be started. Of the `span` that it
    /// names `len` bytes are moved.
    pub(crate) fn new(asked: Asked, charge: u64, span: u64, len: u32, g: &Geometry) -> Self {
        Self {
            asked,
            charge,
            span,
            len,
            step: g.max_transfer.max(MIN_PART),
            open: 1,
            error: None,
            flush: false,
            losses: Parts::default(),
            landing: Landing::Nowhere,
        }
    }

    /// How many parts there are.
    pub(crate) fn parts(&self) -> u32 {
        self.len.div_ceil(self.step)
    }

    /// Start and length of a part within the request; no bytes beyond the last.
    pub(crate) fn range(&self, index: u32) -> (u32, u32) {
        let at = index.saturating_mul(self.step).min(self.len);
        (at, self.step.min(self.len - at))
    }

    /// Bytes of the request that lie behind a part.
    pub(crate) fn behind(&self, index: u32) -> usize {
        let (at, len) = self.range(index);
        (self.len - at - len) as usize
    }

    /// Records an error; the first one is the reply's.
    pub(crate) fn fail(&mut self, e: Errno) {
        self.error.get_or_insert(e);
    }

    /// A part has ended, when the device had lost writes so often.
    pub(crate) fn part_ended(&mut self, result: Result<(), Errno>, losses: u64) {
        let result = match self.landing {
            Landing::Nowhere => self.losses.ended(result, losses),
            _ => result,
        };
        if let Err(e) = result {
            self.fail(e);
        }
    }

    pub(crate) fn failed(&self) -> bool {
        self.error.is_some()
    }

    /// A part is started.
    pub(crate) fn open(&mut self) {
        self.open += 1;
    }

    /// Whether the parts are to be followed by a flush.
    pub(crate) fn set_flush(&mut self, flush: bool) {
        self.flush = flush;
    }

    /// A read whose buffers are sent as they are.
    pub(crate) fn expect_buffers(&mut self) {
        self.landing = Landing::Buffers((0..self.parts()).map(|_| None).collect());
    }

    /// A read that is collected in one piece.
    ///
    /// # Errors
    /// Without memory.
    pub(crate) fn expect_heap(&mut self) -> Result<(), Errno> {
        self.landing = Landing::Heap(zeroes(self.len as usize).ok_or(Errno::ENOMEM)?);
        Ok(())
    }

    /// A part has succeeded. A buffer that is to be copied from comes back; the part is not over before that is done.
    pub(crate) fn land(&mut self, part: u32, buffer: Option<Buffer>, free: &mut impl Extend<Buffer>) -> Option<Buffer> {
        let (_, len) = self.range(part);
        if self.failed() {
            free.extend(buffer);
            return None;
        }
        match (&mut self.landing, buffer) {
            (Landing::Nowhere | Landing::Extents(_), buffer) => free.extend(buffer),
            (_, None) => self.fail(Errno::EIO),
            (Landing::Buffers(places), Some(mut buffer)) => {
                buffer.set_len(len as usize);
                match places.get_mut(part as usize) {
                    Some(place) if place.is_none() => *place = Some(buffer),
                    _ => {
                        free.extend(Some(buffer));
                        self.fail(Errno::EIO);
                    }
                }
            }
            (Landing::Heap(_), Some(mut buffer)) => {
                buffer.set_len(len as usize);
                return Some(buffer);
            }
        }
        None
    }

    /// Takes the extents of the range that the client asks about, from its beginning on; without any, all is data.
    pub(crate) fn learn(&mut self, extents: &[Extent]) {
        let mut left = self.span;
        let mut within = Vec::new();
        for extent in extents {
            let len = extent.len.min(left);
            left -= len;
            if len > 0 {
                block::append(&mut within, Extent { len, ..*extent });
            }
        }
        if within.is_empty() {
            within.push(Extent::data(self.span));
        }
        self.landing = Landing::Extents(within);
    }

    /// Returns the destination of a part's data.
    pub(crate) fn heap(&mut self, part: u32) -> &mut [u8] {
        let (at, len) = self.range(part);
        match &mut self.landing {
            Landing::Heap(bytes) => bytes.get_mut(at as usize..(at + len) as usize).unwrap_or_default(),
            _ => Default::default(),
        }
    }

    /// The reply; buffers that it does not carry go to `free`.
    fn into_reply(self, free: &mut impl Extend<Buffer>) -> Reply {
        let mut data = SmallVec::new();
        let mut known = 0;
        match self.landing {
            Landing::Nowhere => {}
            Landing::Extents(found) if self.error.is_none() => {
                known = found.len();
                data.push(Data::Heap(extents(self.asked.framing, &found)));
            }
            Landing::Extents(_) => {}
            Landing::Buffers(buffers) if self.error.is_none() => {
                data.extend(buffers.into_iter().flatten().map(Data::Device));
            }
            Landing::Buffers(buffers) => free.extend(buffers.into_iter().flatten()),
            Landing::Heap(bytes) if self.error.is_none() => data.push(Data::Heap(bytes)),
            Landing::Heap(_) => {}
        }
        let len = self.span;
        let answer = match (self.error, self.asked.command) {
            (Some(e), _) => Answer::Failed(proto::error_code(e)),
            (None, cmd::READ) if len > 0 => Answer::Data { len },
            (None, cmd::BLOCK_STATUS) => Answer::Status { extents: known },
            (None, _) => Answer::Done,
        };
        Reply::new(head(self.asked, answer), data, self.charge)
    }
}

/// Consequence of a part's end.
#[derive(Debug)]
pub(crate) enum Release {
    /// Nothing yet.
    Open,
    /// A flush of this key is to be started.
    Flush(PendingKey),
    /// The request is over.
    Over(Reply),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    pending: Option<Pending>,
}

/// The requests in flight of a connection.
#[derive(Debug, Default)]
pub(crate) struct PendingTable {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl PendingTable {
    /// Adds a request; the key of its first part. `None` when there are as many as can be numbered.
    pub(crate) fn insert(&mut self, pending: Pending) -> Option<PendingKey> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u16::try_from(self.slots.len()).ok()?;
                self.slots.push(Slot {
                    generation: 0,
                    pending: None,
                });
                slot
            }
        };
        let place = self.slots.get_mut(usize::from(slot))?;
        place.pending = Some(pending);
        Some(PendingKey {
            slot,
            part: 0,
            generation: place.generation,
        })
    }

    /// Whether none is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// The request of a key, if it is not over.
    pub(crate) fn get_mut(&mut self, key: PendingKey) -> Option<&mut Pending> {
        let slot = self.slots.get_mut(usize::from(key.slot))?;
        slot.pending.as_mut().filter(|_| slot.generation == key.generation)
    }

    /// The request of a key and the part of it that the key names.
    pub(crate) fn part_mut(&mut self, key: PendingKey) -> Option<(&mut Pending, u32)> {
        Some((self.get_mut(key)?, key.part.into()))
    }

    /// Ends a part, or that parts are started.
    pub(crate) fn release(&mut self, key: PendingKey, free: &mut impl Extend<Buffer>) -> Release {
        let Some(pending) = self.get_mut(key) else {
            return Release::Open;
        };
        pending.open = pending.open.saturating_sub(1);
        if pending.open > 0 {
            return Release::Open;
        }
        if pending.flush && !pending.failed() {
            pending.flush = false;
            pending.open = 1;
            return Release::Flush(key);
        }
        let Some(slot) = self.slots.get_mut(usize::from(key.slot)) else {
            return Release::Open;
        };
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(key.slot);
        match slot.pending.take() {
            Some(pending) => Release::Over(pending.into_reply(free)),
            None => Release::Open,
        }
    }
}
