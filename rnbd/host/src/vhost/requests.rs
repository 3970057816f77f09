//! The requests of a front end, from the ring to the device and back.

use rnbd::{
    Errno,
    block::{BlockOp, BlockRequest, Geometry},
    client::Parts,
    virtio_blk::{self, RANGE, Request, Status},
};
use rtrs::client::{Buffer, LentPiece};
use slab::Slab;
use smallvec::SmallVec;
use vm_memory::{Bytes as _, GuestAddress};

use super::{
    chain::{Chain, copy_from, copy_to},
    memory::GuestMemory,
};

/// Request to a device, by its slot.
pub(crate) type FrontRequest = BlockRequest<usize>;

/// Durability that the driver has chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cache {
    /// It flushes.
    WriteBack,
    /// Answered writes are durable: every write is forced.
    WriteThrough,
}

/// A request that is under way.
#[derive(Debug)]
struct UnderWay {
    ring: usize,
    head: u16,
    status: GuestAddress,
    /// Bytes that a read leaves in the guest's memory.
    read: u32,
    /// Operations that have not ended.
    left: usize,
    error: Option<Errno>,
    /// A flush follows.
    flush: bool,
    losses: Parts,
}

/// A request that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) ring: usize,
    pub(crate) head: u16,
    pub(crate) status: GuestAddress,
    pub(crate) outcome: Status,
    /// Bytes in the guest's memory, the status included.
    pub(crate) written: u32,
}

/// Result of beginning a chain.
#[derive(Debug)]
pub(crate) enum Begun {
    /// These operations.
    Operations(SmallVec<[FrontRequest; 1]>),
    /// It is answered at once.
    Ended(Ended),
}

/// All that is under way for a front end.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    under_way: Slab<UnderWay>,
}

impl Requests {
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Begins with a request that has come by a ring.
    pub(crate) fn begin(
        &mut self,
        ring: usize,
        chain: &Chain,
        memory: &GuestMemory,
        geometry: &Geometry,
        name: &str,
        cache: Cache,
    ) -> Begun {
        let ended = |outcome, written| {
            Begun::Ended(Ended {
                ring,
                head: chain.head,
                status: chain.status,
                outcome,
                written,
            })
        };
        let (output, input) = chain.lengths();
        let header = chain.header.as_ref().ok_or(Status::IoErr);
        let request = match header.and_then(|header| Request::parse(header, output, input)) {
            Ok(request) => request,
            Err(status) => return ended(status, 1),
        };
        let through = cache == Cache::WriteThrough && geometry.write_cache;
        let operations = match request {
            Request::Id => {
                let id = virtio_blk::id(name);
                return match copy_to(memory.view(), &chain.input, &id) {
                    true => ended(Status::Ok, id.len() as u32 + 1),
                    false => ended(Status::IoErr, 1),
                };
            }
            Request::Flush => Ok(SmallVec::from_iter([(BlockOp::Flush, 0, 0, None)])),
            Request::Io { op, offset, len } => data(memory, chain).map(|data| {
                let op = match op {
                    BlockOp::Write { .. } => BlockOp::Write {
                        fua: through && geometry.fua,
                    },
                    op => op,
                };
                SmallVec::from_iter([(op, offset, len, Some(data))])
            }),
            Request::Ranges(ranges) => read_ranges(memory, chain, ranges),
        };
        match operations {
            Ok(operations) => {
                let forced = |op: &BlockOp| matches!(op, BlockOp::Write { fua: true });
                let plain = operations.iter().any(|(op, ..)| op.writes() && !forced(op));
                Begun::Operations(self.add(ring, chain, input as u32, operations, through && plain))
            }
            Err(status) => ended(status, 1),
        }
    }

    fn add(
        &mut self,
        ring: usize,
        chain: &Chain,
        read: u32,
        operations: SmallVec<[Operation; 1]>,
        flush: bool,
    ) -> SmallVec<[FrontRequest; 1]> {
        let slot = self.under_way.insert(UnderWay {
            ring,
            head: chain.head,
            status: chain.status,
            read,
            left: operations.len(),
            error: None,
            flush,
            losses: Parts::default(),
        });
        let request = |(op, offset, len, data)| FrontRequest {
            hint: ring,
            ..FrontRequest::new(slot, op, offset, len).with_data(data)
        };
        operations.into_iter().map(request).collect()
    }

    /// An operation has ended. With it the request may have, or a flush follows.
    pub(crate) fn done(&mut self, slot: usize, result: Result<(), Errno>, losses: u64) -> Option<Begun> {
        let under_way = self.under_way.get_mut(slot)?;
        under_way.left = under_way.left.saturating_sub(1);
        if let Err(e) = under_way.losses.ended(result, losses) {
            under_way.error.get_or_insert(e);
        }
        if under_way.left > 0 {
            return None;
        }
        if core::mem::take(&mut under_way.flush) && under_way.error.is_none() {
            under_way.left = 1;
            let flush = FrontRequest {
                hint: under_way.ring,
                forces: true,
                ..FrontRequest::flush(slot)
            };
            return Some(Begun::Operations(SmallVec::from_iter([flush])));
        }
        let over = self.under_way.remove(slot);
        let outcome = Status::from(over.error.map_or(Ok(()), Err));
        Some(Begun::Ended(Ended {
            ring: over.ring,
            head: over.head,
            status: over.status,
            outcome,
            written: match outcome {
                Status::Ok => over.read.saturating_add(1),
                _ => 1,
            },
        }))
    }
}

/// Operation, first byte, bytes, data.
type Operation = (BlockOp, u64, u64, Option<Buffer>);

/// Returns the data of a read or write.
fn data(memory: &GuestMemory, chain: &Chain) -> Result<Buffer, Status> {
    let mut pieces: Vec<LentPiece> = Vec::new();
    for (at, len) in chain.output.iter().chain(&chain.input) {
        if !memory.pieces(*at, *len, &mut pieces) {
            return Err(Status::IoErr);
        }
    }
    Buffer::of_lent(pieces).ok_or(Status::IoErr)
}

fn read_ranges(
    memory: &GuestMemory,
    chain: &Chain,
    ranges: virtio_blk::Ranges,
) -> Result<SmallVec<[Operation; 1]>, Status> {
    let mut bytes = vec![[0; RANGE]; ranges.count];
    if !copy_from(memory.view(), &chain.output, bytes.as_flattened_mut()) {
        return Err(Status::IoErr);
    }
    let range = |bytes: &[u8; RANGE]| {
        let (op, offset, len) = ranges.range(bytes)?;
        Ok((op, offset, len, None))
    };
    bytes.iter().map(range).collect()
}

/// Writes a request's status; `false` when its place is not in the memory any more.
pub(crate) fn write_status(memory: &GuestMemory, ended: &Ended) -> bool {
    memory.view().write_obj(ended.outcome as u8, ended.status).is_ok()
}
