//! Scoreboard: states of the packets in flight, as far as the peer's reports show them, and which to retransmit.
//!
//! The rules are those of IRN (Mittal et al., SIGCOMM 2018) for what is retransmitted, and of RFC 9002 for when a packet
//! is lost: when a packet sent so many packets later has arrived. Unlike there, that distance grows with the reordering
//! observed. A retransmission is judged by what was sent after it, so that it can be lost again.

use std::collections::VecDeque;

use roce_bth::Psn;

use crate::{
    replies::EXPECTED_LEN,
    ring::{SeqRing, WORD},
    seq::Seq,
};

/// Packets sent later that must arrive before a packet is lost (kPacketThreshold of RFC 9002).
const TOLERANCE: u64 = 3;
/// Largest tolerance that reordering leads to, packets.
const MAX_TOLERANCE: u64 = 512;
/// Entries of a retransmission queue that are not worth a compaction.
const FEW: usize = 64;

/// State of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mark {
    /// In flight, or nothing is known of it.
    InFlight,
    /// The peer has it.
    Arrived,
    /// Lost; to be retransmitted.
    Lost,
    /// Retransmitted and in flight.
    Resent,
    /// Its response has arrived.
    Answered,
}

impl Mark {
    /// Returns whether the packet counts as in flight. A READ or atomic (`answered`) does until its response arrives.
    pub(super) fn is_in_flight(self, answered: bool) -> bool {
        matches!(self, Self::InFlight | Self::Resent) || answered && self == Self::Arrived
    }
}

/// Change of a packet's state, which the owner accounts for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Change {
    pub(super) seq: Seq,
    pub(super) from: Mark,
    pub(super) to: Mark,
}

/// Contents of a selective ACK: all PSNs before `expected` have arrived, and those beyond with a bit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report<'a> {
    expected: Seq,
    /// First PSN of the bitmap, a multiple of [`WORD`].
    base: Seq,
    bitmap: &'a [u8],
}

impl<'a> Report<'a> {
    /// Parses the payload of a selective ACK. `una`: oldest outstanding PSN.
    pub(super) fn parse(una: Seq, payload: &'a [u8]) -> Option<Self> {
        let (psn, bitmap) = payload.split_first_chunk::<EXPECTED_LEN>()?;
        let expected = una.nearest(Psn::new(u32::from_be_bytes(*psn) & 0x00ff_ffff));
        let base = expected.round_down(WORD);
        Some(Self { expected, base, bitmap })
    }

    /// Returns the PSN that the peer expects.
    pub(super) fn expected(&self) -> Seq {
        self.expected
    }

    /// Returns the end of what it reports.
    fn end(&self) -> Seq {
        self.base.plus(self.bitmap.len() as u64 * 8).max(self.expected)
    }

    /// Returns which of the [`WORD`] PSNs from `at` on have arrived, the first in the lowest bit.
    fn word(&self, at: Seq) -> u64 {
        let before = low_bits(self.expected.since(at));
        if at < self.base {
            return before;
        }
        let start = (at.since(self.base) / 8) as usize;
        let mut bytes = [0; 8];
        let found = self.bitmap.get(start..).unwrap_or_default();
        let len = found.len().min(bytes.len());
        bytes[..len].copy_from_slice(&found[..len]);
        // A bit for the expected packet means that it lacks a receive: it must be resent.
        let beyond = !low_bits(self.expected.plus(1).since(at));
        before | u64::from_le_bytes(bytes) & beyond
    }
}

/// Returns a word with the `n` lowest bits set.
fn low_bits(n: u64) -> u64 {
    if n >= WORD { u64::MAX } else { (1 << n) - 1 }
}

/// Entry of one packet.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Slot {
    #[default]
    InFlight,
    Arrived,
    /// Lost because packets sent from `sent` on have arrived. `None`: for another reason, such as a timeout. If the packet
    /// arrives after all, that shows no reordering.
    Lost {
        sent: Option<Seq>,
    },
    Resent(Resent),
    Answered,
}

impl Slot {
    fn mark(self) -> Mark {
        match self {
            Self::InFlight => Mark::InFlight,
            Self::Arrived => Mark::Arrived,
            Self::Lost { .. } => Mark::Lost,
            Self::Resent(_) => Mark::Resent,
            Self::Answered => Mark::Answered,
        }
    }
}

/// Retransmission of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Resent {
    /// PSN that was to be sent next for the first time.
    after: Seq,
    /// Number of retransmissions before.
    order: u64,
    /// It waits for a response, which arrives later than the report of an arrival.
    answered: bool,
    /// It was sent after a probe timeout.
    probe: bool,
}

/// Newest retransmission that has arrived, or whose response has.
#[derive(Clone, Copy, Default, Debug)]
struct Returns {
    /// One past its order.
    newest: u64,
    /// One past the order of the newest probe: what was sent before it and is missing is lost. With the PSN that was to be
    /// sent next then, or the oldest outstanding one once that is judged.
    probe: Option<(u64, Seq)>,
    /// Nothing has been judged by it yet.
    is_new: bool,
}

/// States of the packets from the oldest unacknowledged one on. Empty while nothing is known of any of them.
#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    /// Slots; those beyond the end are in flight. Bits are set for packets that are `Arrived` or `Answered`.
    ring: SeqRing<Slot>,
    /// Numbers of packets that are `Lost` and `Resent`.
    lost: u64,
    resent: u64,
    /// Oldest lost packet.
    first_lost: Option<Seq>,
    /// Retransmissions in order, of packets without a response and of those with one. An entry is void unless the packet's
    /// slot has the same order. What makes an entry lost makes those before it lost.
    queues: [VecDeque<(Seq, u64)>; 2],
    /// One past the highest PSN that has arrived.
    high: Option<Seq>,
    /// One past the highest PSN whose response has arrived.
    answers: Option<Seq>,
    /// Packets before it have arrived or were declared lost.
    judged: Option<Seq>,
    /// Responses to packets before it have arrived or were declared lost.
    heard: Option<Seq>,
    tolerance: u64,
    /// Number of retransmissions so far.
    order: u64,
    /// Returned retransmissions, of packets without a response and of those with one.
    returns: [Returns; 2],
    /// Expected PSN in the peer's last report, until it is retransmitted.
    wanted: Option<Seq>,
    /// Changes that the owner has not accounted for.
    changes: Vec<Change>,
}

impl Scoreboard {
    /// Returns whether anything is known.
    pub(super) fn is_active(&self) -> bool {
        self.ring.base().is_some()
    }

    /// Takes the changes. Return the buffer with [`Scoreboard::reuse`], so that it is not allocated again.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        core::mem::take(&mut self.changes)
    }

    pub(super) fn reuse(&mut self, mut changes: Vec<Change>) {
        changes.clear();
        self.changes = changes;
    }

    /// Returns the state of a packet.
    pub(super) fn mark(&self, seq: Seq) -> Mark {
        self.slot(seq).mark()
    }

    fn slot(&self, seq: Seq) -> Slot {
        self.ring.get(seq).copied().unwrap_or_default()
    }

    /// Returns the end, at most `to`, of the run of packets with such marks that begins at `from`.
    pub(super) fn run_end(&self, from: Seq, to: Seq, is: impl Fn(Mark) -> bool) -> Seq {
        // From here on all are in flight.
        let unknown = self.ring.end().unwrap_or(from);
        let mut seq = from;
        while seq < to && is(self.mark(seq)) {
            if seq >= unknown {
                return to;
            }
            seq = seq.plus(1);
        }
        seq
    }

    /// Returns the oldest lost packet from `from` on.
    pub(super) fn next_lost(&self, from: Seq) -> Option<Seq> {
        let first = self.first_lost?;
        if from <= first {
            Some(first)
        } else {
            self.find_lost(from)
        }
    }

    fn find_lost(&self, from: Seq) -> Option<Seq> {
        if self.lost == 0 {
            return None;
        }
        self.ring.find(from, |slot| matches!(slot, Slot::Lost { .. }))
    }

    /// Returns the packet to retransmit next: the one that the peer expects if `may` permits it, else the oldest.
    pub(super) fn next_resend(&self, una: Seq, may: impl Fn(Seq) -> bool) -> Option<Seq> {
        let first = self.next_lost(una)?;
        let wanted = self.wanted.filter(|seq| self.mark(*seq) == Mark::Lost && may(*seq));
        Some(wanted.unwrap_or(first))
    }

    /// Returns whether the peer's last report expects this packet, and it has not been retransmitted since.
    pub(super) fn is_wanted(&self, seq: Seq) -> bool {
        self.wanted == Some(seq)
    }

    /// Records the acknowledgement of everything before `una`. Account for the packets' marks before.
    pub(super) fn on_acked(&mut self, una: Seq) {
        if self.ring.base().is_none_or(|base| base >= una) {
            return;
        }
        while let Some(slot) = self.ring.pop_before(una) {
            match slot {
                Slot::Lost { .. } => self.lost -= 1,
                Slot::Resent(resent) => {
                    self.resent -= 1;
                    self.on_returned(resent);
                }
                Slot::InFlight | Slot::Arrived | Slot::Answered => {}
            }
        }
        self.ring.advance(una);
        for queue in &mut self.queues {
            while queue.front().is_some_and(|(seq, _)| *seq < una) {
                queue.pop_front();
            }
        }
        if self.first_lost.is_some_and(|first| first < una) {
            self.first_lost = self.find_lost(una);
        }
        // Nothing is known of the rest: it is as if it had just been sent.
        if self.high.is_none_or(|high| high <= una) && self.lost == 0 && self.resent == 0 {
            self.clear();
        }
    }

    fn clear(&mut self) {
        *self = Self {
            tolerance: self.tolerance,
            wanted: self.wanted,
            changes: core::mem::take(&mut self.changes),
            ..Self::default()
        };
    }

    /// Sets a packet's state. Returns the change, if any.
    fn set(&mut self, seq: Seq, to: Slot) -> Option<Change> {
        self.ring.base()?;
        let slot = self.ring.entry(seq);
        let from = *slot;
        if from.mark() == to.mark() && !matches!(to, Slot::Resent(_)) {
            return None;
        }
        *slot = to;
        match from {
            Slot::Lost { .. } => {
                self.lost -= 1;
                if self.first_lost == Some(seq) {
                    self.first_lost = self.find_lost(seq.plus(1));
                }
            }
            Slot::Resent(_) => self.resent -= 1,
            Slot::InFlight | Slot::Arrived | Slot::Answered => {}
        }
        match to {
            Slot::Lost { .. } => {
                self.lost += 1;
                self.first_lost = Some(self.first_lost.map_or(seq, |first| first.min(seq)));
            }
            Slot::Resent(_) => self.resent += 1,
            Slot::InFlight | Slot::Arrived | Slot::Answered => {}
        }
        self.ring
            .set_bits(seq, seq.plus(1), matches!(to, Slot::Arrived | Slot::Answered));
        if let Slot::Resent(resent) = from
            && !matches!(to, Slot::Lost { .. } | Slot::Resent(_))
        {
            self.on_returned(resent);
        }
        let (from, to) = (from.mark(), to.mark());
        Some(Change { seq, from, to })
    }

    fn change(&mut self, seq: Seq, to: Slot) {
        let change = self.set(seq, to);
        self.changes.extend(change);
    }

    /// Declares a packet lost because later ones have arrived.
    fn lose_overtaken(&mut self, seq: Seq) {
        let sent = match self.slot(seq) {
            Slot::Resent(resent) => resent.after,
            _ => seq,
        };
        self.change(seq, Slot::Lost { sent: Some(sent) });
    }

    /// Declares a packet lost for another reason than the order of arrivals.
    pub(super) fn lose(&mut self, una: Seq, seq: Seq) {
        self.ring.begin(una);
        self.change(seq, Slot::Lost { sent: None });
    }

    /// Declares all of `una..next` lost: the peer drops everything behind a gap.
    pub(super) fn lose_all(&mut self, una: Seq, next: Seq) {
        let order = self.order;
        self.clear();
        self.order = order;
        if una < next {
            self.lost = next.since(una);
            self.ring.fill(una, self.lost as usize, Slot::Lost { sent: None });
            self.first_lost = Some(una);
        }
    }

    /// Returns lost packets of `from..to` to the state in flight: they were only late.
    pub(super) fn resume(&mut self, from: Seq, to: Seq) {
        let mut seq = from;
        while seq < to {
            if self.mark(seq) == Mark::Lost {
                self.set(seq, Slot::InFlight);
            }
            seq = seq.plus(1);
        }
    }

    /// Records a selective ACK. `una..next` is outstanding.
    ///
    /// `sure`: the newest packet was sent again to cause this report, so that what is missing is lost. Of packets that have
    /// a response, as `answered` shows, a report tells that the request has arrived, but not that a response was lost.
    pub(super) fn on_report(
        &mut self,
        (una, next): (Seq, Seq),
        report: &Report<'_>,
        answered: impl Fn(Seq) -> bool,
        sure: bool,
    ) {
        self.wanted = Some(report.expected);
        let (from, upto) = (report.expected, report.end().min(next));
        if una >= next || (upto <= una && from <= una) {
            return;
        }
        self.ring.begin(una);
        let end = upto.max(from.min(next));
        let mut high = self.high.unwrap_or(una).max(una);
        let mut late = 0;
        let mut at = una.round_down(WORD);
        while at < end {
            let mut news = report.word(at) & low_bits(end.since(at)) & !low_bits(una.since(at)) & !self.ring.word(at);
            while news != 0 {
                let seq = at.plus(u64::from(news.trailing_zeros()));
                news &= news - 1;
                high = high.max(seq.plus(1));
                late = late.max(self.on_arrival(seq, high, &answered));
            }
            at = at.plus(WORD);
        }
        // It arrived, but could not be executed: a receive is missing.
        if from >= una && from < next && self.mark(from) == Mark::Arrived {
            self.lose(una, from);
        }
        self.high = Some(high);
        self.tolerance = self.tolerance.max(TOLERANCE).max(late).min(MAX_TOLERANCE);
        self.judge(una, sure);
    }

    /// Records the arrival of a packet. Returns how many packets late it is if it was declared lost.
    fn on_arrival(&mut self, seq: Seq, high: Seq, answered: &impl Fn(Seq) -> bool) -> u64 {
        let slot = self.slot(seq);
        let missing = matches!(slot, Slot::Lost { .. } | Slot::Resent(_)) && !answered(seq);
        if missing || slot == Slot::InFlight {
            self.change(seq, Slot::Arrived);
        }
        match slot {
            // It was only late: packets are reordered that far.
            Slot::Lost { sent: Some(sent) } if missing => high.since(sent),
            _ => 0,
        }
    }

    /// Records a response beyond the oldest missing one: all packets sent before its request have been executed.
    /// `answered` returns which packets have a response.
    pub(super) fn on_response(&mut self, una: Seq, seq: Seq, answered: impl Fn(Seq) -> bool) {
        self.ring.begin(una);
        self.change(seq, Slot::Answered);
        let end = seq.plus(1);
        self.high = Some(self.high.map_or(end, |high| high.max(end)));
        self.answers = Some(self.answers.map_or(end, |answers| answers.max(end)));
        self.tolerance = self.tolerance.max(TOLERANCE);
        let mut at = self.heard.unwrap_or(una).max(una);
        while at.plus(self.tolerance) < end {
            match (self.mark(at), answered(at)) {
                (Mark::InFlight | Mark::Arrived, true) => self.lose_overtaken(at),
                (Mark::InFlight | Mark::Lost | Mark::Resent, false) => self.change(at, Slot::Arrived),
                _ => {}
            }
            at = at.plus(1);
        }
        self.heard = Some(at);
        self.judge_resent(false);
    }

    /// Declares packets lost by the highest one that has arrived.
    fn judge(&mut self, una: Seq, sure: bool) {
        let Some(high) = self.high else { return };
        let tolerance = if sure { 0 } else { self.tolerance };
        let mut seq = self.judged.unwrap_or(una).max(una);
        while seq.plus(tolerance) < high {
            if self.mark(seq) == Mark::InFlight {
                self.lose_overtaken(seq);
            }
            seq = seq.plus(1);
        }
        self.judged = Some(seq);
        self.judge_resent(sure);
    }

    /// Records the return of a retransmission: it has arrived, or its response has.
    fn on_returned(&mut self, resent: Resent) {
        let returns = &mut self.returns[usize::from(resent.answered)];
        returns.newest = returns.newest.max(resent.order + 1);
        returns.is_new = true;
        if resent.probe {
            returns.probe = returns.probe.max(Some((resent.order + 1, resent.after)));
        }
    }

    /// Returns whether a retransmission has returned by which [`Scoreboard::judge_by_returns`] has not judged yet.
    pub(super) fn has_returns(&self) -> bool {
        self.returns.iter().any(|returns| returns.is_new)
    }

    /// Declares packets lost that were sent before a retransmission that has returned. `answered` returns which packets have
    /// a response.
    pub(super) fn judge_by_returns(&mut self, una: Seq, answered: impl Fn(Seq) -> bool) {
        self.tolerance = self.tolerance.max(TOLERANCE);
        self.judge_resent(false);
        if let Some((order, after)) = self.returns[1].probe {
            let mut seq = una;
            while seq < after && self.is_active() {
                if answered(seq) && matches!(self.mark(seq), Mark::InFlight | Mark::Arrived) {
                    self.lose_overtaken(seq);
                }
                seq = seq.plus(1);
            }
            self.returns[1].probe = Some((order, una));
        }
        self.returns.iter_mut().for_each(|returns| returns.is_new = false);
    }

    /// Declares retransmissions lost that later packets have overtaken.
    fn judge_resent(&mut self, sure: bool) {
        for kind in 0..self.queues.len() {
            while let Some((seq, order)) = self.queues[kind].front().copied() {
                match self.slot(seq) {
                    Slot::Resent(resent) if resent.order == order => {
                        if !self.is_overtaken(&resent, sure) {
                            break;
                        }
                        self.lose_overtaken(seq);
                    }
                    _ => {}
                }
                self.queues[kind].pop_front();
            }
        }
    }

    fn is_overtaken(&self, resent: &Resent, sure: bool) -> bool {
        let Returns { newest, probe, .. } = self.returns[usize::from(resent.answered)];
        let returned =
            resent.order + self.tolerance < newest || probe.is_some_and(|(probe, _)| resent.order + 1 < probe);
        let arrived = match resent.answered {
            true => self.answers,
            false => self.high,
        };
        let passed = arrived.is_some_and(|arrived| resent.after.plus(self.tolerance) < arrived);
        returned || passed || sure && !resent.answered
    }

    /// Records a retransmission, when `after` is the next PSN to be sent for the first time. `answered`: for its response.
    pub(super) fn on_resent(&mut self, seq: Seq, after: Seq, answered: bool) {
        self.wanted = self.wanted.filter(|wanted| *wanted != seq);
        self.resend(seq, after, answered, false);
    }

    /// Records a retransmission for a response, after a probe timeout.
    pub(super) fn on_probed(&mut self, una: Seq, seq: Seq, after: Seq) {
        self.ring.begin(una);
        self.resend(seq, after, true, true);
    }

    fn resend(&mut self, seq: Seq, after: Seq, answered: bool, probe: bool) {
        let order = self.order;
        self.order += 1;
        self.set(
            seq,
            Slot::Resent(Resent {
                after,
                order,
                answered,
                probe,
            }),
        );
        let kind = usize::from(answered);
        if self.queues[kind].len() > FEW + 2 * self.ring.len() {
            let mut queue = core::mem::take(&mut self.queues[kind]);
            queue.retain(|(seq, order)| matches!(self.slot(*seq), Slot::Resent(resent) if resent.order == *order));
            self.queues[kind] = queue;
        }
        self.queues[kind].push_back((seq, order));
    }
}

#[cfg(test)]
mod tests;
