//! Operations of a user: ranges that may take several requests, with one end.

use rtrs::client::{buffers::Buffer, request::SessionId};

use super::{
    memory::{self, SessionBuffers},
    output::DeviceKey,
};
use crate::{block::BlockOp, errno::Errno};

/// Requests of one operation that are under way at a time; the next follow as they end.
const MAX_PARTS: u32 = 16;
/// The same of one that takes a buffer for each.
const MAX_BUFFERS: u32 = 4;

/// A range that is worked on in parts.
#[derive(Debug)]
pub(super) struct Span {
    next: u64,
    end: u64,
    /// One part does it all, also if it is empty; it has not been taken yet.
    whole: bool,
    /// Parts under way.
    parts: u32,
    error: Option<Errno>,
}

impl Span {
    /// A range that is one part.
    pub(super) fn whole(offset: u64, len: u64) -> Self {
        Self {
            whole: true,
            ..Self::split(offset, len)
        }
    }

    /// A range of as many parts as it takes: none if it is empty.
    pub(super) fn split(offset: u64, len: u64) -> Self {
        Self {
            next: offset,
            end: offset.saturating_add(len),
            whole: false,
            parts: 0,
            error: None,
        }
    }

    /// Whether another part is to be begun. None is after one has failed.
    pub(super) fn has_more(&self) -> bool {
        self.error.is_none() && (self.whole || self.next < self.end)
    }

    /// Bytes that no part has been begun of.
    pub(super) fn left(&self) -> u64 {
        self.end - self.next
    }

    /// Parts under way.
    pub(super) fn parts(&self) -> u32 {
        self.parts
    }

    /// Begins the next part, of which there [is one](Self::has_more): its first byte, and how many it has, `step` at most if
    /// the range may be split.
    pub(super) fn take(&mut self, step: u64) -> (u64, u64) {
        debug_assert!(self.has_more());
        let len = match core::mem::take(&mut self.whole) {
            true => self.left(),
            false => self.left().min(step.max(1)),
        };
        let offset = self.next;
        self.next += len;
        self.parts += 1;
        (offset, len)
    }

    /// A part has ended.
    pub(super) fn ended(&mut self, result: Result<(), Errno>) {
        self.parts = self.parts.saturating_sub(1);
        if let Err(e) = result {
            self.fail(e);
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
pub(super) struct Operation {
    /// On this device,
    pub(super) device: DeviceKey,
    /// which has been opened so often: what was asked for before is not for what was opened after.
    pub(super) opened: u32,
    /// The user's name for it.
    pub(super) user: u64,
    /// Chooses the connection.
    pub(super) hint: usize,
    /// What is done,
    pub(super) op: BlockOp,
    /// and where.
    pub(super) span: Span,
    /// The buffer of a read or write, when no request has it.
    pub(super) data: Option<Buffer>,
    /// Zeroes are written as data.
    pub(super) zeroes: bool,
    /// Buffers of zeroes that are back from a part.
    pub(super) spare: Vec<Buffer>,
    /// It stands in a queue.
    pub(super) queued: bool,
}

impl Operation {
    /// Whether a part of it may be begun at once.
    pub(super) fn wants_turn(&self) -> bool {
        let most = if self.zeroes { MAX_BUFFERS } else { MAX_PARTS };
        self.span.has_more() && self.span.parts() < most
    }

    /// Gives back the buffers of zeroes that it has no use for any more.
    pub(super) fn give_spare(&mut self, memory: &mut dyn SessionBuffers, session: SessionId) {
        if !self.span.has_more() {
            for buffer in self.spare.drain(..) {
                memory::give(memory, session, buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Parts in flight end in any order, some with errors, against a model that knows only the range.
        #[test]
        fn a_range_is_covered_once_and_the_first_error_ends_it(
            offset in 0u64..1 << 40,
            len in 0u64..500,
            step in 1u64..40,
            ends in prop::collection::vec((any::<bool>(), prop::option::weighted(0.05, 1..100i32)), 1200),
        ) {
            let mut span = Span::split(offset, len);
            let mut covered = offset;
            let mut in_flight = 0;
            let mut first_error = None;
            for (begin, error) in ends {
                if begin && span.has_more() {
                    prop_assert_eq!(first_error, None, "begun after an error");
                    let (at, part) = span.take(step);
                    prop_assert_eq!(at, covered);
                    prop_assert!((1..=step).contains(&part));
                    covered += part;
                    in_flight += 1;
                } else if in_flight > 0 {
                    let error = error.map(Errno::from_wire);
                    first_error = first_error.or(error);
                    span.ended(error.map_or(Ok(()), Err));
                    in_flight -= 1;
                }
                prop_assert_eq!(span.parts(), in_flight);
                let over = in_flight == 0 && (first_error.is_some() || covered == offset + len);
                let result = over.then(|| first_error.map_or(Ok(()), Err));
                prop_assert_eq!(span.over(), result);
            }
            prop_assert!(covered <= offset + len);
        }
    }

    #[test]
    fn a_whole_range_is_one_part_even_if_it_is_empty() {
        for len in [0, 1 << 30] {
            let mut span = Span::whole(512, len);
            assert_eq!(span.over(), None);
            assert_eq!(span.take(512), (512, len));
            assert_eq!((span.has_more(), span.over()), (false, None));
            span.ended(Ok(()));
            assert_eq!(span.over(), Some(Ok(())));
        }
        assert_eq!(Span::split(512, 0).over(), Some(Ok(())));
    }
}
