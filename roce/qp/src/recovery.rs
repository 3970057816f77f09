//! What has become of the packets in flight, as far as a peer that keeps packets beyond a gap has said, and which of them are to be
//! sent again.
//!
//! The reference is IRN (Mittal et al., SIGCOMM 2018) for what is sent again, and RFC 9002 for when a packet is taken for lost: when one
//! that was sent so many packets later has arrived. Unlike there, the distance grows with reordering that is seen, and a packet that was
//! sent again counts by what was sent after that, so that it may be lost more than once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::seq::Seq;

/// Packets sent later that have to arrive before one is taken for lost (kPacketThreshold of RFC 9002).
const TOLERANCE: u64 = 3;
/// The most that reordering makes of it.
const MAX_TOLERANCE: u64 = 512;

/// What has become of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mark {
    /// In flight, as far as is known.
    Flying,
    /// The peer has it.
    Arrived,
    /// Taken for lost; to be sent again.
    Lost,
    /// In flight once more.
    Again,
}

impl Mark {
    /// Whether it counts as in flight.
    pub(crate) const fn in_flight(self) -> bool {
        matches!(self, Self::Flying | Self::Again)
    }
}

/// A change that the owner books.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    pub(crate) seq: Seq,
    pub(crate) from: Mark,
    pub(crate) to: Mark,
}

/// The packets from the oldest that is not acknowledged on. Empty as long as nothing is known of any of them.
#[derive(Debug, Default)]
pub(crate) struct Recovery {
    base: Option<Seq>,
    /// From `base` on; those beyond are flying.
    marks: VecDeque<Mark>,
    lost: BTreeSet<Seq>,
    /// Sent again, with the number that was next to be sent then.
    again: BTreeMap<Seq, Seq>,
    /// One past the highest number that has arrived.
    high: Option<Seq>,
    /// Those before have arrived or were taken for lost.
    judged: Option<Seq>,
    tolerance: u64,
}

impl Recovery {
    /// Whether anything is known.
    pub(crate) fn is_active(&self) -> bool {
        self.base.is_some()
    }

    pub(crate) fn clear(&mut self) {
        let tolerance = self.tolerance;
        *self = Self {
            tolerance,
            ..Self::default()
        };
    }

    /// What is known of a packet.
    pub(crate) fn mark(&self, seq: Seq) -> Mark {
        let Some(base) = self.base.filter(|base| *base <= seq) else {
            return Mark::Flying;
        };
        self.marks
            .get(seq.since(base) as usize)
            .copied()
            .unwrap_or(Mark::Flying)
    }

    fn set(&mut self, seq: Seq, to: Mark, changed: &mut impl FnMut(Change)) {
        let Some(base) = self.base else { return };
        let index = seq.since(base) as usize;
        if self.marks.len() <= index {
            self.marks.resize(index + 1, Mark::Flying);
        }
        let from = core::mem::replace(&mut self.marks[index], to);
        if from == to {
            return;
        }
        match from {
            Mark::Lost => drop(self.lost.remove(&seq)),
            Mark::Again => drop(self.again.remove(&seq)),
            Mark::Flying | Mark::Arrived => {}
        }
        if to == Mark::Lost {
            self.lost.insert(seq);
        }
        changed(Change { seq, from, to });
    }

    /// Everything before `una` is acknowledged. To be called after the weight of that has been taken by [`Recovery::mark`].
    pub(crate) fn acked(&mut self, una: Seq) {
        let Some(base) = self.base.filter(|base| *base < una) else {
            return;
        };
        let gone = (una.since(base) as usize).min(self.marks.len());
        self.marks.drain(..gone);
        self.base = Some(una);
        self.lost = self.lost.split_off(&una);
        self.again = self.again.split_off(&una);
        // Nothing is known of the rest: it is as if it had just been sent.
        if self.high.is_none_or(|high| high <= una) && self.lost.is_empty() && self.again.is_empty() {
            self.clear();
        }
    }

    /// The peer has told which packets it has: all before `from`, and beyond that those of which `has` says so, before `upto`. `una..next`
    /// is what is outstanding. `sure`: the newest packet was sent once more for that, and what is not there is lost.
    pub(crate) fn told(
        &mut self,
        (una, next): (Seq, Seq),
        (from, upto): (Seq, Seq),
        has: impl Fn(Seq) -> bool,
        sure: bool,
        mut changed: impl FnMut(Change),
    ) {
        let upto = upto.min(next);
        if una >= next || (upto <= una && from <= una) {
            return;
        }
        self.base.get_or_insert(una);
        let tolerance = self.tolerance.max(TOLERANCE);
        let mut seq = una;
        let mut high = self.high.unwrap_or(una).max(una);
        let mut late = 0;
        while seq < upto.max(from.min(next)) {
            if seq < from || has(seq) {
                // It was only late: packets come out of order by so much.
                if self.mark(seq) == Mark::Lost {
                    late = late.max(high.since(seq) + 1);
                }
                self.set(seq, Mark::Arrived, &mut changed);
                high = high.max(seq.plus(1));
            }
            seq = seq.plus(1);
        }
        // It was there, but could not be executed: a receive is missing.
        if from >= una && from < next && self.mark(from) == Mark::Arrived {
            self.set(from, Mark::Lost, &mut changed);
        }
        self.high = Some(high);
        self.tolerance = tolerance.max(late).min(MAX_TOLERANCE);
        self.judge(una, sure, &mut changed);
    }

    /// Takes packets for lost.
    fn judge(&mut self, una: Seq, sure: bool, changed: &mut impl FnMut(Change)) {
        let Some(high) = self.high else { return };
        let tolerance = if sure { 0 } else { self.tolerance };
        let mut seq = self.judged.unwrap_or(una).max(una);
        while seq.plus(tolerance) < high {
            if self.mark(seq) == Mark::Flying {
                self.set(seq, Mark::Lost, changed);
            }
            seq = seq.plus(1);
        }
        self.judged = Some(seq);
        let lost_again = |(seq, after): (&Seq, &Seq)| (sure || after.plus(tolerance) < high).then_some(*seq);
        let lost: Vec<Seq> = self.again.iter().filter_map(lost_again).collect();
        lost.into_iter().for_each(|seq| self.set(seq, Mark::Lost, changed));
    }

    /// Takes a packet for lost, whatever is known of it.
    pub(crate) fn lose(&mut self, una: Seq, seq: Seq, mut changed: impl FnMut(Change)) {
        self.base.get_or_insert(una);
        self.set(seq, Mark::Lost, &mut changed);
    }

    /// The oldest packet from a number on that is to be sent again.
    pub(crate) fn next_lost(&self, from: Seq) -> Option<Seq> {
        self.lost.range(from..).next().copied()
    }

    /// A packet was sent again, when `next` was the next one to be sent for the first time.
    pub(crate) fn resent(&mut self, seq: Seq, next: Seq) {
        self.set(seq, Mark::Again, &mut |_| ());
        self.again.insert(seq, next);
    }
}
