//! What has become of the packets in flight, as far as a peer that keeps packets beyond a gap has said, and which of them are to be
//! sent again.
//!
//! The reference is IRN (Mittal et al., SIGCOMM 2018) for what is sent again, and RFC 9002 for when a packet is taken for lost: when one
//! that was sent so many packets later has arrived. Unlike there, the distance grows with reordering that is seen, and a packet that was
//! sent again counts by what was sent after that, for the first time or once more, so that it may be lost more than once.

use std::collections::{BTreeMap, VecDeque};

use crate::seq::Seq;

/// Packets sent later that have to arrive before one is taken for lost (kPacketThreshold of RFC 9002).
const TOLERANCE: u64 = 3;
/// The most that reordering makes of it.
const MAX_TOLERANCE: u64 = 512;

/// State of a packet.
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
    /// Its answer is here.
    Answered,
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
    /// Taken for lost because later ones have arrived: with the number that was next to be sent for the first time when it was sent.
    /// `None`: for another reason, as a silence; that it is there after all says nothing of reordering then.
    lost: BTreeMap<Seq, Option<Seq>>,
    /// Sent again.
    again: BTreeMap<Seq, Resent>,
    /// One past the highest number that has arrived.
    high: Option<Seq>,
    /// One past the highest number whose answer is here.
    answers: Option<Seq>,
    /// Packets before it have arrived or were taken for lost.
    judged: Option<Seq>,
    /// Answers to those before are here or were taken for lost.
    heard: Option<Seq>,
    tolerance: u64,
    /// Packets that were sent again so far.
    order: u64,
    /// Their returns: of those that have no answer, and of those that have one.
    returns: [Returns; 2],
}

/// State of a packet that was sent again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Resent {
    /// The number that was next to be sent for the first time then.
    after: Seq,
    /// How many had been sent again before.
    order: u64,
    /// It is its answer that is waited for: that comes later than word of what has arrived.
    answered: bool,
    /// It was sent because nothing had come for longer than anything takes.
    probe: bool,
}

/// The newest of the packets sent again that have arrived, or whose answers have.
#[derive(Clone, Copy, Default, Debug)]
struct Returns {
    /// One past its order.
    newest: u64,
    /// The same of the newest probe: what was sent before it and is not here is lost. With what was next to be sent then, or where nothing is
    /// left to be judged by it.
    probe: Option<(u64, Seq)>,
    /// Nobody has been judged by that yet.
    is_new: bool,
}

impl Recovery {
    /// Whether anything is known.
    pub(super) fn is_active(&self) -> bool {
        self.base.is_some()
    }

    fn clear(&mut self) {
        let tolerance = self.tolerance;
        *self = Self {
            tolerance,
            ..Self::default()
        };
    }

    /// Returns the state of a packet.
    pub(crate) fn mark(&self, seq: Seq) -> Mark {
        let Some(base) = self.base.filter(|base| *base <= seq) else {
            return Mark::Flying;
        };
        self.marks
            .get(seq.since(base) as usize)
            .copied()
            .unwrap_or(Mark::Flying)
    }

    /// Returns the end of a run of numbers with such marks that begins at `from`, `to` at the latest.
    pub(super) fn run_end(&self, from: Seq, to: Seq, is: impl Fn(Mark) -> bool) -> Seq {
        // From here on all are flying.
        let unknown = self.base.map_or(from, |base| base.plus(self.marks.len() as u64));
        let mut seq = from;
        while seq < to && is(self.mark(seq)) {
            if seq >= unknown {
                return to;
            }
            seq = seq.plus(1);
        }
        seq
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
        let resent = match from {
            Mark::Lost => {
                self.lost.remove(&seq);
                None
            }
            Mark::Again => self.again.remove(&seq),
            Mark::Flying | Mark::Arrived | Mark::Answered => None,
        };
        if to == Mark::Lost {
            self.lost.insert(seq, Some(resent.map_or(seq, |r| r.after)));
        } else {
            resent.into_iter().for_each(|r| self.returned(r));
        }
        changed(Change { seq, from, to });
    }

    /// Takes a packet for lost for another reason than the order in which others have arrived.
    fn give_up(&mut self, seq: Seq, changed: &mut impl FnMut(Change)) {
        if self.mark(seq) != Mark::Lost {
            self.set(seq, Mark::Lost, changed);
            self.lost.entry(seq).and_modify(|sent| *sent = None);
        }
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
        let again = self.again.split_off(&una);
        let returned = core::mem::replace(&mut self.again, again);
        returned.into_values().for_each(|resent| self.returned(resent));
        // Nothing is known of the rest: it is as if it had just been sent.
        if self.high.is_none_or(|high| high <= una) && self.lost.is_empty() && self.again.is_empty() {
            self.clear();
        }
    }

    /// The peer has told which packets it has: all before `from`, and beyond that those of which `has` says so, before `upto`. `una..next`
    /// is what is outstanding. `sure`: the newest packet was sent once more for that, and what is not there is lost. Of numbers that
    /// have an answer, as `answered` says, it tells that the request is there, and nothing of an answer that was lost.
    pub(super) fn told(
        &mut self,
        (una, next): (Seq, Seq),
        (from, upto): (Seq, Seq),
        has: impl Fn(Seq) -> bool,
        answered: impl Fn(Seq) -> bool,
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
                high = high.max(seq.plus(1));
                let mark = self.mark(seq);
                let missing = matches!(mark, Mark::Lost | Mark::Again) && !answered(seq);
                if missing && mark == Mark::Lost {
                    // It was only late: packets come out of order by so much.
                    let sent = self.lost.get(&seq).copied().flatten().filter(|sent| *sent < high);
                    late = late.max(sent.map_or(0, |sent| high.since(sent)));
                }
                if missing || mark == Mark::Flying {
                    self.set(seq, Mark::Arrived, &mut changed);
                }
            }
            seq = seq.plus(1);
        }
        // It was there, but could not be executed: a receive is missing.
        if from >= una && from < next && self.mark(from) == Mark::Arrived {
            self.give_up(from, &mut changed);
        }
        self.high = Some(high);
        self.tolerance = tolerance.max(late).min(MAX_TOLERANCE);
        self.judge(una, sure, &mut changed);
    }

    /// An answer has come that is not the oldest which is missing: whatever was sent before its request has been executed. `answered`
    /// says which numbers have an answer.
    pub(super) fn responded(
        &mut self,
        una: Seq,
        seq: Seq,
        answered: impl Fn(Seq) -> bool,
        mut changed: impl FnMut(Change),
    ) {
        self.base.get_or_insert(una);
        self.set(seq, Mark::Answered, &mut changed);
        let high = self.high.map_or(seq.plus(1), |high| high.max(seq.plus(1)));
        self.high = Some(high);
        let answers = self.answers.map_or(seq.plus(1), |answers| answers.max(seq.plus(1)));
        self.answers = Some(answers);
        self.tolerance = self.tolerance.max(TOLERANCE);
        let mut at = self.heard.unwrap_or(una).max(una);
        while at.plus(self.tolerance) < seq.plus(1) {
            match (self.mark(at), answered(at)) {
                (Mark::Flying | Mark::Arrived, true) => self.set(at, Mark::Lost, &mut changed),
                (Mark::Flying | Mark::Lost | Mark::Again, false) => self.set(at, Mark::Arrived, &mut changed),
                _ => {}
            }
            at = at.plus(1);
        }
        self.heard = Some(at);
        self.judge_again(false, &mut changed);
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
        self.judge_again(sure, changed);
    }

    /// A packet that was sent again has arrived, or its answer has.
    fn returned(&mut self, resent: Resent) {
        let returns = &mut self.returns[usize::from(resent.answered)];
        returns.newest = returns.newest.max(resent.order + 1);
        returns.is_new = true;
        if resent.probe {
            returns.probe = returns.probe.max(Some((resent.order + 1, resent.after)));
        }
    }

    /// Whether something has come back of what was sent again that [`Recovery::overtaken`] has not judged by.
    pub(super) fn has_returns(&self) -> bool {
        self.returns.iter().any(|returns| returns.is_new)
    }

    /// Something has: what was sent before that, again or for the first time, and is not here, is lost. `answered` says which numbers have
    /// an answer.
    pub(super) fn overtaken(&mut self, una: Seq, answered: impl Fn(Seq) -> bool, mut changed: impl FnMut(Change)) {
        self.tolerance = self.tolerance.max(TOLERANCE);
        self.judge_again(false, &mut changed);
        if let Some((order, after)) = self.returns[1].probe {
            let mut seq = una;
            while seq < after && self.is_active() {
                if answered(seq) && matches!(self.mark(seq), Mark::Flying | Mark::Arrived) {
                    self.set(seq, Mark::Lost, &mut changed);
                }
                seq = seq.plus(1);
            }
            self.returns[1].probe = Some((order, una));
        }
        self.returns.iter_mut().for_each(|returns| returns.is_new = false);
    }

    /// The same, of those that were sent again.
    fn judge_again(&mut self, sure: bool, changed: &mut impl FnMut(Change)) {
        let (high, answers, tolerance, returns) = (self.high, self.answers, self.tolerance, self.returns);
        let is_overtaken = |resent: &Resent| {
            let Returns { newest, probe, .. } = returns[usize::from(resent.answered)];
            resent.order + tolerance < newest || probe.is_some_and(|(probe, _)| resent.order + 1 < probe)
        };
        let is_lost = |resent: &Resent| match resent.answered {
            _ if is_overtaken(resent) => true,
            true => answers.is_some_and(|answers| resent.after.plus(tolerance) < answers),
            false => sure || high.is_some_and(|high| resent.after.plus(tolerance) < high),
        };
        let lost = self.again.iter().filter(|(_, resent)| is_lost(resent));
        let lost: Vec<Seq> = lost.map(|(seq, _)| *seq).collect();
        lost.into_iter().for_each(|seq| self.set(seq, Mark::Lost, changed));
    }

    /// Takes a packet for lost, whatever is known of it.
    pub(super) fn lose(&mut self, una: Seq, seq: Seq, mut changed: impl FnMut(Change)) {
        self.base.get_or_insert(una);
        self.give_up(seq, &mut changed);
    }

    /// The oldest packet from a number on that is to be sent again.
    pub(super) fn next_lost(&self, from: Seq) -> Option<Seq> {
        self.lost.range(from..).next().map(|(seq, _)| *seq)
    }

    /// A packet was sent again, when `after` was the next one to be sent for the first time. `answered`: for its answer.
    pub(super) fn resent(&mut self, seq: Seq, after: Seq, answered: bool) {
        self.send_again(seq, after, answered, false);
    }

    /// The same, because nothing had come for longer than anything takes.
    pub(super) fn probed(&mut self, una: Seq, seq: Seq, after: Seq) {
        self.base.get_or_insert(una);
        self.send_again(seq, after, true, true);
    }

    fn send_again(&mut self, seq: Seq, after: Seq, answered: bool, probe: bool) {
        self.set(seq, Mark::Again, &mut |_| ());
        let order = self.order;
        self.order += 1;
        let resent = Resent {
            after,
            order,
            answered,
            probe,
        };
        self.again.insert(seq, resent);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use roce_bth::Psn;

    use super::*;

    fn at(n: u64) -> Seq {
        Seq::start(Psn::new(0x00ff_fffd)).plus(n)
    }

    /// Packets of the model: all ways in which they and what is said of them come, or don't, are tried.
    const PACKETS: u64 = 4;
    /// Words of the peer that are under way at a time.
    const WORDS: usize = 2;

    /// A requester, a peer that keeps packets, and what is between them.
    #[derive(Clone)]
    struct World {
        recovery: Recovery,
        una: u64,
        next: u64,
        /// Bits of packets that the peer has, and of those under way.
        has: u8,
        under_way: u8,
        /// Reports of the peer that have not arrived.
        words: Vec<u8>,
    }

    impl World {
        fn new() -> Self {
            Self {
                recovery: Recovery::default(),
                una: 0,
                next: 0,
                has: 0,
                under_way: 0,
                words: Vec::new(),
            }
        }

        fn key(&self) -> String {
            let mut recovery = self.recovery.clone();
            // Only how long ago something was sent again makes a difference, and not even that beyond the tolerance.
            let order = core::mem::replace(&mut recovery.order, 0);
            let ago = |at: u64| (order - at).min(2 * TOLERANCE);
            recovery
                .again
                .values_mut()
                .for_each(|resent| resent.order = ago(resent.order));
            recovery
                .returns
                .iter_mut()
                .for_each(|returns| returns.newest = ago(returns.newest));
            format!(
                "{recovery:?} {} {} {:b} {:b} {:?}",
                self.una, self.next, self.has, self.under_way, self.words
            )
        }

        /// Everything that can happen next.
        fn steps(&self) -> Vec<Self> {
            let mut all = Vec::new();
            let mut add = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                world.check();
                all.push(world);
            };
            if let Some(lost) = self.recovery.next_lost(at(self.una)) {
                add(&|w| w.send_again(lost));
            } else if self.next < PACKETS {
                add(&|w| {
                    w.under_way |= 1 << w.next;
                    w.next += 1;
                });
            }
            for n in (0..self.next).filter(|n| self.under_way >> n & 1 == 1) {
                add(&|w| w.under_way &= !(1 << n));
                add(&|w| w.deliver(n));
            }
            for n in 0..self.words.len() {
                add(&|w| {
                    w.words.remove(n);
                });
                add(&|w| {
                    let word = w.words.remove(n);
                    w.hear(word, false);
                });
                add(&|w| {
                    let word = w.words.remove(n);
                    w.hear(word, true);
                });
            }
            if self.una < self.next && self.under_way == 0 && self.words.is_empty() {
                add(&|w| w.recovery.silence_for_test(at(w.una), at(w.next)));
            }
            all
        }

        fn send_again(&mut self, seq: Seq) {
            self.under_way |= 1 << seq.since(at(0));
            self.recovery.resent(seq, at(self.next), false);
        }

        fn deliver(&mut self, n: u64) {
            self.under_way &= !(1 << n);
            self.has |= 1 << n;
            if self.words.len() < WORDS {
                self.words.push(self.has);
            }
        }

        /// Hears what the peer had some time ago.
        fn hear(&mut self, word: u8, sure: bool) {
            let expected = u64::from(word.trailing_ones());
            let to = expected.max(self.una);
            self.recovery.acked(at(to));
            self.una = to;
            self.recovery.overtaken(at(self.una), |_| false, |_| ());
            let upto = at(u64::from(8 - word.leading_zeros()).max(expected));
            let has = |seq: Seq| word >> seq.since(at(0)) & 1 == 1;
            let outstanding = (at(self.una), at(self.next));
            self.recovery
                .told(outstanding, (at(expected), upto), has, |_| false, sure, |_| ());
        }

        fn check(&self) {
            for n in self.una..self.next {
                let mark = self.recovery.mark(at(n));
                let has = self.has >> n & 1 == 1;
                assert!(mark != Mark::Arrived || has, "{n} has not arrived: {}", self.key());
                assert_eq!(
                    self.recovery.lost.contains_key(&at(n)),
                    mark == Mark::Lost,
                    "{}",
                    self.key()
                );
                assert_eq!(
                    self.recovery.again.contains_key(&at(n)),
                    mark == Mark::Again,
                    "{}",
                    self.key()
                );
            }
            let known = self.recovery.lost.keys().chain(self.recovery.again.keys());
            assert!(known.into_iter().all(|seq| *seq >= at(self.una)), "{}", self.key());
        }

        /// Without further losses the peer gets everything, and the requester hears of it.
        fn comes_to_an_end(mut self) {
            for _ in 0..8 * PACKETS {
                while let Some(lost) = self.recovery.next_lost(at(self.una)) {
                    self.send_again(lost);
                }
                for n in 0..PACKETS {
                    if self.under_way >> n & 1 == 1 {
                        self.deliver(n);
                    }
                }
                self.words = vec![self.has];
                self.hear(self.has, false);
                if self.una == self.next {
                    return;
                }
                self.recovery.silence_for_test(at(self.una), at(self.next));
            }
            panic!("no end: {}", self.key());
        }
    }

    impl Recovery {
        /// As the requester does when nothing comes back.
        fn silence_for_test(&mut self, una: Seq, next: Seq) {
            let mut seq = una;
            while seq < next {
                if seq == una || self.mark(seq).in_flight() {
                    self.lose(una, seq, |_| ());
                }
                seq = seq.plus(1);
            }
        }
    }

    impl Clone for Recovery {
        fn clone(&self) -> Self {
            Self {
                base: self.base,
                marks: self.marks.clone(),
                lost: self.lost.clone(),
                again: self.again.clone(),
                high: self.high,
                answers: self.answers,
                judged: self.judged,
                heard: self.heard,
                tolerance: self.tolerance,
                order: self.order,
                returns: self.returns,
            }
        }
    }

    /// Every order in which four packets, and all that is said of them, are delivered, lost and overtaken.
    #[test]
    fn nothing_is_taken_for_there_that_is_not_and_all_gets_there() {
        let mut seen = HashSet::new();
        let mut open = vec![World::new()];
        while let Some(world) = open.pop() {
            if !seen.insert(world.key()) {
                continue;
            }
            world.clone().comes_to_an_end();
            open.extend(world.steps());
        }
        assert!(seen.len() > 10_000, "{}", seen.len());
    }

    fn told(recovery: &mut Recovery, una: u64, next: u64, expected: u64, has: &[u64]) -> Vec<(u64, Mark)> {
        let mut changes = Vec::new();
        let upto = has.iter().max().map_or(expected, |n| n + 1);
        let has = |seq: Seq| has.contains(&seq.since(at(0)));
        recovery.told(
            (at(una), at(next)),
            (at(expected), at(upto)),
            has,
            |_| false,
            false,
            |c| {
                changes.push((c.seq.since(at(0)), c.to));
            },
        );
        changes
    }

    #[test]
    fn a_packet_is_lost_when_three_later_ones_have_arrived() {
        let mut r = Recovery::default();
        assert_eq!(
            told(&mut r, 0, 10, 0, &[1, 2]),
            [(1, Mark::Arrived), (2, Mark::Arrived)]
        );
        assert_eq!(r.next_lost(at(0)), None);
        assert_eq!(
            told(&mut r, 0, 10, 0, &[1, 2, 3]),
            [(3, Mark::Arrived), (0, Mark::Lost)]
        );
        r.resent(at(0), at(10), false);
        // What was sent before that says nothing of it …
        told(&mut r, 0, 20, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(r.next_lost(at(0)), None);
        // … and what was sent after it does.
        told(&mut r, 0, 20, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14]);
        assert_eq!(r.next_lost(at(0)), Some(at(0)));
        assert_eq!(r.next_lost(at(1)), Some(at(10)));
    }

    /// Answers are waited for, all of 0 to 9, and those before `to` are sent again.
    fn asked_again(to: u64) -> Recovery {
        let mut r = Recovery::default();
        for n in 0..to {
            r.lose(at(0), at(n), |_| ());
            r.resent(at(n), at(10), true);
        }
        r
    }

    fn overtaken(r: &mut Recovery, una: u64) -> Vec<u64> {
        let mut lost = Vec::new();
        assert!(r.has_returns());
        r.overtaken(
            at(una),
            |_| true,
            |c| {
                assert_eq!(c.to, Mark::Lost);
                lost.push(c.seq.since(at(0)));
            },
        );
        assert!(!r.has_returns());
        lost
    }

    #[test]
    fn an_answer_is_lost_when_one_that_was_asked_for_again_three_later_has_come() {
        let mut r = asked_again(6);
        r.responded(at(0), at(3), |_| true, |_| ());
        assert_eq!([0, 1].map(|n| r.mark(at(n))), [Mark::Lost, Mark::Again]);
        r.responded(at(0), at(5), |_| true, |_| ());
        assert_eq!([2, 4].map(|n| r.mark(at(n))), [Mark::Lost, Mark::Again]);
        assert!(overtaken(&mut r, 0).is_empty());
        // The same when it is the oldest, which is only acknowledged.
        let mut r = asked_again(6);
        r.resent(at(0), at(10), true);
        r.acked(at(1));
        assert_eq!(overtaken(&mut r, 1), [1, 2, 3]);
    }

    #[test]
    fn all_that_is_missing_is_lost_when_a_probe_is_answered() {
        let mut r = asked_again(3);
        r.probed(at(0), at(0), at(10));
        r.acked(at(1));
        assert_eq!(overtaken(&mut r, 1), (1..10).collect::<Vec<_>>());
        assert_eq!(r.next_lost(at(1)), Some(at(1)));
        // What is sent after the probe is judged by what comes later.
        r.resent(at(1), at(12), true);
        assert_eq!(r.mark(at(1)), Mark::Again);
        assert_eq!(r.mark(at(10)), Mark::Flying);
    }

    #[test]
    fn what_a_silence_took_for_lost_tells_nothing_of_reordering() {
        let mut r = Recovery::default();
        for n in 0..50 {
            r.lose(at(0), at(n), |_| ());
        }
        let mut has: Vec<u64> = (1..50).filter(|n| *n != 10).collect();
        told(&mut r, 0, 100, 0, &has);
        assert_eq!(
            [0, 1, 10].map(|n| r.mark(at(n))),
            [Mark::Lost, Mark::Arrived, Mark::Lost]
        );
        for n in [0, 10] {
            r.resent(at(n), at(50), false);
        }
        // Lost once more: so many that were sent later are there.
        has.extend(50..=53);
        told(&mut r, 0, 100, 0, &has);
        assert_eq!([0, 10].map(|n| r.mark(at(n))), [Mark::Lost, Mark::Lost]);
    }

    #[test]
    fn a_packet_that_was_sent_again_and_came_late_is_late_by_what_was_sent_after_that() {
        let mut r = Recovery::default();
        let mut has: Vec<u64> = (1..=60).collect();
        told(&mut r, 0, 200, 0, &has);
        r.resent(at(0), at(61), false);
        has.extend(61..=64);
        told(&mut r, 0, 200, 0, &has);
        assert_eq!(r.mark(at(0)), Mark::Lost);
        // It was four packets late, not sixty.
        told(&mut r, 0, 200, 66, &[]);
        r.acked(at(66));
        told(&mut r, 66, 200, 66, &(67..=71).collect::<Vec<_>>());
        assert_eq!(r.mark(at(66)), Mark::Lost);
    }

    #[test]
    fn reordering_that_is_seen_makes_it_wait_longer() {
        let mut r = Recovery::default();
        told(&mut r, 0, 100, 0, &(1..=8).collect::<Vec<_>>());
        assert_eq!(r.mark(at(0)), Mark::Lost);
        // It was only late.
        r.acked(at(0));
        told(&mut r, 0, 100, 9, &[]);
        r.acked(at(9));
        told(&mut r, 9, 100, 9, &(10..=16).collect::<Vec<_>>());
        assert_eq!(r.mark(at(9)), Mark::Flying, "{r:?}");
        told(&mut r, 9, 100, 9, &(10..=19).collect::<Vec<_>>());
        assert_eq!(r.mark(at(9)), Mark::Lost);
    }
}
