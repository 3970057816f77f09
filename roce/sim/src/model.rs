//! Model of the connections: for each end its outstanding work requests, the messages under way to
//! it, and the bytes that its memory must hold.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use roce_port::ConnId;
use roce_verbs::mem::{FastRegion, PdHandle, Region, Window};
use roce_verbs::{Qpn, RKey, Sge, WcOpcode, WcStatus};

use crate::scenario::ConnPlan;

/// Bytes of the region that the peer writes, reads and counts in.
pub(crate) const TARGET: usize = 96 << 10;
/// Bytes that sends come from and READs land in.
pub(crate) const LOCAL: usize = 256 << 10;
/// Bytes that receives land in.
pub(crate) const RECV: usize = 256 << 10;

/// Pages of the region whose first page is there and all others are missing.
pub(crate) const HOLE_PAGES: usize = 32;

/// Ranges of a region, taken and given back in order.
#[derive(Debug, Default)]
pub(crate) struct Ring<const SIZE: usize> {
    head: usize,
    used: VecDeque<Range<usize>>,
}

impl<const SIZE: usize> Ring<SIZE> {
    /// Takes a range of at least one byte that overlaps none taken; `None` when there is none.
    pub(crate) fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let len = len.max(1);
        let start = match self.used.front() {
            None => 0,
            Some(oldest) if oldest.start < self.head && self.head + len <= SIZE => self.head,
            Some(oldest) if oldest.start < self.head && len < oldest.start => 0,
            Some(oldest) if oldest.start >= self.head && self.head + len < oldest.start => self.head,
            Some(_) => return None,
        };
        (start + len <= SIZE).then(|| {
            let range = start..start + len;
            self.head = range.end;
            self.used.push_back(range.clone());
            range
        })
    }

    /// Takes the newest range back: it was not used.
    pub(crate) fn take_back(&mut self) {
        if let Some(range) = self.used.pop_back() {
            self.head = self.used.back().map_or(0, |r| r.end);
            debug_assert!(range.start == self.head || range.start == 0);
        }
    }

    /// Takes the oldest range back.
    pub(crate) fn give_back(&mut self) {
        self.used.pop_front();
        if self.used.is_empty() {
            self.head = 0;
        }
    }
}

/// Bytes of a region cut into scatter/gather elements, in the order of the message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    /// The whole range, gaps included.
    pub(crate) range: Range<usize>,
    /// Offsets and lengths in the region.
    pub(crate) parts: Vec<(usize, usize)>,
}

impl Pieces {
    pub(crate) fn sges(&self, region: &Region) -> Vec<Sge> {
        let base = region.addr();
        self.parts
            .iter()
            .map(|(offset, len)| Sge {
                addr: base + *offset as u64,
                length: *len as u32,
                lkey: region.lkey(),
            })
            .collect()
    }

    /// Puts the message's bytes where they belong in an image of the range.
    pub(crate) fn lay(&self, data: &[u8], image: &mut [u8]) {
        let mut rest = data;
        for (offset, len) in &self.parts {
            let (now, later) = rest.split_at((*len).min(rest.len()));
            let at = offset - self.range.start;
            image[at..at + now.len()].copy_from_slice(now);
            rest = later;
        }
    }
}

/// Allowed end of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Expect {
    #[default]
    Success,
    /// The peer or the own side refuses it with this status.
    Fails(WcStatus),
}

/// Change that a work request makes in the peer's target.
#[derive(Clone, Debug)]
pub(crate) struct Effect {
    pub(crate) at: usize,
    pub(crate) old: Vec<u8>,
    pub(crate) new: Vec<u8>,
}

impl Effect {
    pub(crate) fn new(at: usize, new: Vec<u8>) -> Self {
        let old = Vec::new();
        Self { at, old, new }
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.at..self.at + self.new.len()
    }
}

/// An outstanding send work request.
#[derive(Clone, Default, Debug)]
pub(crate) struct Sent {
    pub(crate) wr_id: u64,
    pub(crate) what: &'static str,
    pub(crate) opcode: WcOpcode,
    pub(crate) signaled: bool,
    pub(crate) expect: Expect,
    pub(crate) byte_len: u32,
    /// Its range of the local ring, which must hold `image` when it has succeeded (READ, atomics).
    pub(crate) local: Option<Range<usize>>,
    pub(crate) image: Option<Vec<u8>>,
    pub(crate) effect: Option<Effect>,
    /// Range that it reads of the peer's target.
    pub(crate) reads: Option<Range<usize>>,
    /// READ or atomic.
    pub(crate) rd_atomic: bool,
    /// The number of the message that it delivers.
    pub(crate) message: Option<u64>,
    /// The peer's fast key that it uses or ends.
    pub(crate) uses_fast: bool,
    /// Fast key state of this end that its success brings about.
    pub(crate) fast: Option<FastKey>,
}

/// A posted receive.
#[derive(Clone, Debug)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    pub(crate) pieces: Pieces,
    /// Content of the range when it was posted.
    pub(crate) before: Vec<u8>,
}

/// A message that a peer has posted and that is not delivered yet.
#[derive(Clone, Default, Debug)]
pub(crate) struct Message {
    /// `None`: RDMA WRITE with immediate data.
    pub(crate) data: Option<Vec<u8>>,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidates: Option<RKey>,
    pub(crate) solicited: bool,
    /// Longer than the receive that waits for it.
    pub(crate) too_long: bool,
    /// Error in which it ends on this side too, after its receive was taken.
    pub(crate) fails: Option<WcStatus>,
}

/// Means by which an end grants a part of its target for a time.
#[derive(Clone)]
pub(crate) enum Grant {
    Fast(Arc<FastRegion>),
    /// Window of type 2, which belongs to the queue pair.
    Window(Arc<Window>),
}

impl Grant {
    pub(crate) fn rkey(&self) -> RKey {
        match self {
            Self::Fast(fast) => fast.rkey(),
            Self::Window(window) => window.rkey(),
        }
    }
}

/// Whether an end's grant is open.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum FastKey {
    #[default]
    Closed,
    /// A registration or invalidation is under way.
    Changing,
    Open(RKey),
}

/// Errors that an end may see without having asked for them.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Allow {
    /// Its queue pair may go to error by itself.
    pub(crate) flush: bool,
    /// The peer may not answer.
    pub(crate) retry: bool,
    /// The peer may not have receives.
    pub(crate) rnr: bool,
    /// The peer's memory may be gone.
    pub(crate) access: bool,
}

impl Allow {
    /// The peer, or the own queue pair, is taken away.
    pub(crate) fn end(&mut self) {
        (self.flush, self.retry) = (true, true);
    }

    pub(crate) const ALL: Self = Self {
        flush: true,
        retry: true,
        rnr: true,
        access: true,
    };
}

/// State of an end in one life of its connection.
#[derive(Default)]
pub(crate) struct Session {
    /// Its program may post sends.
    pub(crate) up: bool,
    /// Its queue pair is in error, as far as completions have shown.
    pub(crate) failed: bool,
    /// Its send queue drains: no sends until it is raised again.
    pub(crate) draining: bool,
    pub(crate) fast: Option<Grant>,
    pub(crate) fast_key: FastKey,
    pub(crate) local_ring: Ring<LOCAL>,
    pub(crate) recv_ring: Ring<RECV>,
    /// Sends, and their bytes, since the last signalled one: they come back only with the next.
    pub(crate) unsignaled_run: u32,
    pub(crate) unsignaled_bytes: usize,
    /// Messages on their way to this end.
    pub(crate) incoming: VecDeque<Message>,
    /// Messages that the peer has posted, and that this end has received, since the connection began.
    pub(crate) messages_posted: u64,
    pub(crate) messages_received: u64,
    /// Bytes that receives take which no message has claimed yet.
    pub(crate) promised: VecDeque<usize>,
    /// Lengths of messages posted by the peer before the receives that they will find.
    pub(crate) unclaimed: VecDeque<usize>,
    /// Its program posts no receives any more: a peer that does not wait for ever must fail.
    pub(crate) mute: bool,
}

/// One end of a connection.
pub(crate) struct End {
    pub(crate) host: usize,
    pub(crate) pd: PdHandle,
    pub(crate) qpn: Option<Qpn>,
    pub(crate) cm: Option<ConnId>,
    pub(crate) session: Session,
    pub(crate) cq: usize,
    pub(crate) target: Arc<Region>,
    pub(crate) local: Arc<Region>,
    pub(crate) recv: Arc<Region>,
    /// A region with all rights, of which only the first page is there.
    pub(crate) hole: Arc<Region>,
    /// Content of `target` once everything that the peer has posted is done.
    pub(crate) shadow: Vec<u8>,
    pub(crate) sent: VecDeque<Sent>,
    pub(crate) posted: VecDeque<Posted>,
    pub(crate) next_wr: u64,
    pub(crate) operations_left: u32,
    pub(crate) allow: Allow,
    /// Changes in the peer's target of work requests that did not succeed, in order.
    pub(crate) undone: Vec<Effect>,
    /// `target` was deregistered; the next life gets another.
    pub(crate) target_gone: bool,
    /// Part of `target` that the open fast key covers: offset, bytes, address of the first byte.
    pub(crate) fast_view: (usize, usize, u64),
    pub(crate) app_scheduled: bool,
    /// Times in a row that it found its send queue full.
    pub(crate) looks_in_vain: u32,
    pub(crate) recv_scheduled: bool,
}

/// Phase of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Down,
    Connecting,
    Up,
    /// An error was seen; a repair is on its way.
    Broken,
}

/// A connection over all its lives.
pub(crate) struct Conn {
    pub(crate) plan: ConnPlan,
    pub(crate) ends: [End; 2],
    pub(crate) phase: Phase,
    /// Counts the lives.
    pub(crate) life: u32,
    pub(crate) repair_scheduled: bool,
}

/// Builds a work request ID: connection, end, life, send or receive, number.
pub(crate) fn wr_id(conn: usize, end: usize, life: u32, is_recv: bool, n: u64) -> u64 {
    (conn as u64) << 56
        | (end as u64) << 55
        | u64::from(is_recv) << 54
        | u64::from(life & 0xffff) << 38
        | n & 0x3f_ffff_ffff
}

/// Returns connection, end, life, and whether it is a receive.
pub(crate) fn wr_owner(id: u64) -> (usize, usize, u32, bool) {
    (
        (id >> 56) as usize,
        (id >> 55 & 1) as usize,
        (id >> 38 & 0xffff) as u32,
        id >> 54 & 1 == 1,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_ring_never_overlap() {
        let mut ring = Ring::<100>::default();
        let mut live: VecDeque<Range<usize>> = VecDeque::new();
        let mut rng = crate::rng::Rng::new(7, 0);
        let mut taken = 0;
        for _ in 0..5000 {
            if rng.chance(0.5) {
                if let Some(r) = ring.take(rng.range(0, 40) as usize) {
                    assert!(r.end <= 100 && !r.is_empty());
                    assert!(
                        live.iter().all(|l| l.end <= r.start || r.end <= l.start),
                        "{live:?} {r:?}"
                    );
                    live.push_back(r);
                    taken += 1;
                }
            } else if live.pop_front().is_some() {
                ring.give_back();
            }
        }
        assert!(taken > 1000);
    }

    #[test]
    fn marks_keep_their_owner() {
        assert_eq!(wr_owner(wr_id(5, 1, 77, true, 1234)), (5, 1, 77, true));
    }
}
