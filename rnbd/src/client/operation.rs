//! Operations: block requests of a front end, each of which may take several requests of RTRS.

use rtrs::{
    Direction,
    client::{buffers::Buffer, request::SessionId},
};
use smallvec::SmallVec;

use super::{
    losses::Stake,
    memory::{self, SessionBuffers},
    state::DeviceKey,
};
use crate::{
    block::{BlockOp, BlockRequest, Extent},
    errno::Errno,
    proto::IoOp,
};

/// Requests in flight of one operation; the next follow as they end.
const MAX_PARTS: u32 = 16;
/// The same of an operation that takes a buffer for each.
const MAX_BUFFERS: u32 = 4;

/// Range of a part on the device: first byte, and bytes.
pub(super) type Part = (u64, u64);

/// A message that is no block request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Message {
    /// Version exchange.
    Version(SessionId),
    /// Open a device.
    Open(DeviceKey),
    /// Close one.
    Close(DeviceKey),
}

/// RNBD's part of a request in RTRS's in-flight table. `F` is the front end's part.
#[derive(Debug)]
pub struct Request<F>(pub(super) Kind<F>);

/// Content of a [`Request`].
#[derive(Debug)]
pub(super) enum Kind<F> {
    /// A message, by its number.
    Message(u64, Message),
    /// The only request of an operation.
    Whole(Box<Operation<F>>, Sent),
    /// One of several requests of the operation of this number.
    Part(u64, Sent),
}

/// A part of an operation in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) op: IoOp,
    pub(super) part: Part,
    /// How often its device had been opened.
    pub(super) opened: u32,
    /// Acknowledged writes that a flush covers.
    pub(super) covers: u64,
}

impl Sent {
    /// Direction of the data. The kernel's client sends a flush as a read without data.
    pub(super) fn direction(&self) -> Direction {
        match self.op {
            IoOp::Read | IoOp::Flush | IoOp::BlockStatus => Direction::Read,
            _ => Direction::Write,
        }
    }
}

/// Request for a part of an operation: the part, the message and the buffer.
pub(super) type Prepared = (Sent, SmallVec<[u8; 64]>, Option<Buffer>);

/// In which order a range is worked on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    /// One part, which moves nothing from or to the range.
    Empty,
    /// One part after the other, from the first byte. All are sent from the beginning of one buffer: a part's data is moved there
    /// over that of earlier parts, so a part is no longer than all before it.
    Forward,
    /// One part after the other, from the last byte. All are received at the beginning of one buffer, and moved to their place.
    Backward,
    /// Parts as they come.
    Any,
}

/// A range that is worked on in parts.
#[derive(Debug)]
pub(super) struct Span {
    order: Order,
    begin: u64,
    /// No part has been begun from here to the end.
    next: u64,
    end: u64,
    /// The empty part has not been begun.
    empty: bool,
    /// Parts that were lost on the way.
    again: SmallVec<[Part; 1]>,
    /// Parts under way.
    parts: u32,
    error: Option<Errno>,
}

impl Span {
    fn new(order: Order, offset: u64, len: u64) -> Self {
        Self {
            order,
            begin: offset,
            next: offset,
            end: offset.saturating_add(len),
            empty: order == Order::Empty,
            again: SmallVec::new(),
            parts: 0,
            error: None,
        }
    }

    /// Returns the parts that an operation needs. Of one whose data is `lent` parts have buffers of their own.
    pub(super) fn of(op: BlockOp, offset: u64, len: u64, lent: bool) -> Self {
        match op {
            BlockOp::Read | BlockOp::Write { .. } if lent => Self::new(Order::Any, offset, len),
            BlockOp::Read => Self::new(Order::Backward, offset, len),
            BlockOp::Write { .. } => Self::new(Order::Forward, offset, len),
            BlockOp::Flush | BlockOp::BlockStatus { .. } => Self::new(Order::Empty, 0, 0),
            BlockOp::Discard | BlockOp::WriteZeroes { .. } => Self::new(Order::Any, offset, len),
        }
    }

    /// Whether another part is to be begun. None is after one has failed.
    pub(super) fn has_more(&self) -> bool {
        self.error.is_none() && (self.empty || self.next < self.end || !self.again.is_empty())
    }

    /// Bytes of the next part at most.
    pub(super) fn left(&self) -> u64 {
        self.again.last().map_or(self.end - self.next, |(_, len)| *len)
    }

    /// Returns the first byte of the next part, of those that may come in any order.
    fn next(&self) -> u64 {
        self.again.last().map_or(self.next, |(at, _)| *at)
    }

    /// Parts under way.
    pub(super) fn parts(&self) -> u32 {
        self.parts
    }

    /// Whether it takes one part after the other.
    fn is_sequence(&self) -> bool {
        self.order != Order::Any
    }

    /// Begins the next part, of which there [is one](Self::has_more), `step` bytes at most.
    pub(super) fn take(&mut self, step: u64) -> Part {
        debug_assert!(self.has_more());
        self.parts += 1;
        let step = step.max(1);
        if core::mem::take(&mut self.empty) {
            return (self.begin, 0);
        }
        if let Some((at, len)) = self.again.pop() {
            let first = len.min(step);
            if first < len {
                self.again.push((at + first, len - first));
            }
            return (at, first);
        }
        let left = self.end - self.next;
        match self.order {
            Order::Backward => {
                let len = left.min(step);
                self.end -= len;
                (self.end, len)
            }
            Order::Forward | Order::Any | Order::Empty => {
                let done = self.next - self.begin;
                let most = if self.order == Order::Forward && done > 0 {
                    step.min(done)
                } else {
                    step
                };
                let part = (self.next, left.min(most));
                self.next += part.1;
                part
            }
        }
    }

    /// Begins with all of it again. False: its data is not as it was.
    pub(super) fn restart(&mut self) -> bool {
        let restarts = self.order == Order::Any && self.parts == 0;
        if restarts {
            self.next = self.begin;
            self.again.clear();
        }
        restarts
    }

    /// A part has ended.
    pub(super) fn ended(&mut self, result: Result<(), Errno>) {
        self.parts = self.parts.saturating_sub(1);
        if let Err(e) = result {
            self.fail(e);
        }
    }

    /// A part has to be begun again.
    pub(super) fn lost(&mut self, (at, len): Part) {
        self.parts = self.parts.saturating_sub(1);
        match self.order {
            Order::Empty => self.empty = true,
            Order::Forward => self.next = at,
            Order::Backward => self.end = at + len,
            Order::Any => self.again.push((at, len)),
        }
    }

    /// The rest is not begun. The first error is the one that counts.
    pub(super) fn fail(&mut self, e: Errno) {
        self.error.get_or_insert(e);
    }

    /// How it went, once all parts have ended.
    pub(super) fn over(&self) -> Option<Result<(), Errno>> {
        let over = self.parts == 0 && !self.has_more();
        over.then(|| self.error.map_or(Ok(()), Err))
    }
}

/// An operation of a user.
#[derive(Debug)]
pub(super) struct Operation<F> {
    /// Numbers follow the order of submission.
    pub(super) number: u64,
    pub(super) device: DeviceKey,
    /// How often the device had been opened when the operation was [checked](super::device::Device::check): it may have changed since.
    pub(super) opened: u32,
    /// The front end's request. Its buffer is here while no request of RTRS has it; one of lent memory stays here, and requests have
    /// parts of it.
    pub(super) request: BlockRequest<F>,
    /// Rest of the range.
    pub(super) span: Span,
    /// Zeroes are written as data.
    pub(super) zeroes: bool,
    /// Buffers of zeroes that no request has.
    pub(super) spare: Vec<Buffer>,
    /// Extents that a block status found.
    pub(super) extents: Vec<Extent>,
    /// It has parts in flight, and is in the queue of operations that can be sent.
    pub(super) queued: bool,
    /// It waits for its device, at the latest when it has no part in flight.
    pub(super) waits: bool,
    /// Record of lost writes.
    pub(super) stake: Stake,
}

impl<F> Operation<F> {
    /// Whether its next part may be sent at once.
    pub(super) fn wants_turn(&self) -> bool {
        let most = match self.zeroes {
            _ if self.span.is_sequence() => 1,
            true => MAX_BUFFERS,
            false => MAX_PARTS,
        };
        self.span.has_more() && self.span.parts() < most
    }

    /// Whether its data is lent memory.
    pub(super) fn is_lent(&self) -> bool {
        self.request.data.as_ref().is_some_and(Buffer::is_lent)
    }

    /// The buffer of its next part, of at most `step` bytes, from lent memory, on a device with such blocks.
    ///
    /// # Errors
    /// EINVAL when a block is in too many pieces.
    pub(super) fn lent_part(&self, step: u64, block: usize) -> Result<Buffer, Errno> {
        let at = (self.span.next() - self.request.offset) as usize;
        let len = step.min(self.span.left()) as usize;
        let part = self.request.data.as_ref().and_then(|data| data.part(at, len, block));
        part.ok_or(Errno::EINVAL)
    }

    /// Gives back the buffers of zeroes that it has no use for any more.
    pub(super) fn give_spare(&mut self, memory: &mut dyn SessionBuffers, session: SessionId) {
        if !self.span.has_more() {
            self.give_all_spare(memory, session);
        }
    }

    /// Gives back all buffers of zeroes that no request has.
    pub(super) fn give_all_spare(&mut self, memory: &mut dyn SessionBuffers, session: SessionId) {
        for buffer in self.spare.drain(..) {
            memory::give(memory, session, buffer);
        }
    }

    /// Bytes that its buffer has.
    fn data_len(&self) -> usize {
        self.request.len as usize
    }

    /// Makes its buffer what goes with a part: of a write that has the part's data at the beginning.
    ///
    /// # Errors
    /// ECONNABORTED when the session is gone.
    pub(super) fn prepare(
        &self,
        memory: &mut dyn SessionBuffers,
        session: SessionId,
        buffer: &mut Buffer,
        (at, len): Part,
    ) -> Result<(), Errno> {
        if len < self.request.len && !buffer.is_lent() {
            buffer.set_len(self.data_len());
            if self.span.order == Order::Forward {
                let from = (at - self.request.offset) as usize;
                memory::shift(memory, session, buffer, from, 0, len as usize)?;
            }
            buffer.set_len(len as usize);
        }
        Ok(())
    }

    /// Takes the buffer back that has been with a part: of a read it has the part's data at the beginning.
    ///
    /// # Errors
    /// ECONNABORTED when the session is gone.
    pub(super) fn take_back(
        &mut self,
        memory: &mut dyn SessionBuffers,
        session: SessionId,
        buffer: Option<Buffer>,
        (at, len): Part,
    ) -> Result<(), Errno> {
        let Some(mut buffer) = buffer.filter(|buffer| !buffer.is_lent()) else {
            return Ok(());
        };
        let mut moved = Ok(());
        if len < self.request.len {
            buffer.set_len(self.data_len());
            if self.span.order == Order::Backward {
                let to = (at - self.request.offset) as usize;
                moved = memory::shift(memory, session, &buffer, 0, to, len as usize);
            }
        }
        self.request.data = Some(buffer);
        moved
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Parts in flight end in any order, some with errors, some are lost, against a model that knows only the range.
        #[test]
        fn a_range_is_covered_once_and_the_first_error_ends_it(
            offset in 0u64..1 << 40,
            len in 0u64..500,
            step in 1u64..40,
            kind in 0usize..4,
            ends in prop::collection::vec((any::<bool>(), prop::option::weighted(0.05, 1..100i32), prop::bool::weighted(0.1)), 1200),
        ) {
            let op = [BlockOp::Discard, BlockOp::Read, BlockOp::Write { fua: false }, BlockOp::Read][kind];
            let mut span = Span::of(op, offset, len, kind == 3);
            let mut covered = vec![false; len as usize];
            let mut in_flight: Vec<Part> = Vec::new();
            let mut first_error = None;
            for (begin, error, lost) in ends {
                let sequence = matches!(kind, 1 | 2) && !in_flight.is_empty();
                if begin && span.has_more() && !sequence {
                    prop_assert_eq!(first_error, None, "begun after an error");
                    let (at, part) = span.take(step);
                    prop_assert!((1..=step).contains(&part));
                    // What is moved over belongs to earlier parts.
                    prop_assert!(kind != 2 || at == offset || part <= at - offset);
                    in_flight.push((at, part));
                } else if !in_flight.is_empty() {
                    let (at, part) = in_flight.remove(in_flight.len() / 2);
                    if lost {
                        span.lost((at, part));
                    } else {
                        let error = error.map(Errno::from_wire);
                        first_error = first_error.or(error);
                        span.ended(error.map_or(Ok(()), Err));
                        for done in &mut covered[(at - offset) as usize..(at - offset + part) as usize] {
                            prop_assert!(!core::mem::replace(done, true), "twice");
                        }
                    }
                }
                prop_assert_eq!(span.parts() as usize, in_flight.len());
                let over = in_flight.is_empty() && (first_error.is_some() || covered.iter().all(|done| *done));
                let result = over.then(|| first_error.map_or(Ok(()), Err));
                prop_assert_eq!(span.over(), result);
            }
        }
    }

    #[test]
    fn a_flush_is_one_part() {
        let mut span = Span::of(BlockOp::Flush, 512, 512, false);
        for _ in 0..2 {
            assert_eq!(span.over(), None);
            assert_eq!(span.take(512), (0, 0));
            assert_eq!((span.has_more(), span.over()), (false, None));
            span.lost((0, 0));
        }
        span.take(512);
        span.ended(Ok(()));
        assert_eq!(span.over(), Some(Ok(())));
        assert_eq!(Span::of(BlockOp::Discard, 512, 0, false).over(), Some(Ok(())));
    }
}
