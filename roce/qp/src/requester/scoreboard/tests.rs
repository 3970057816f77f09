//! Model check and tests of the scoreboard.

use std::collections::HashSet;

use super::*;

fn at(n: u64) -> Seq {
    Seq::start(Psn::new(0x00ff_fffd)).plus(n)
}

/// Packets of the model: all ways in which they and what is said of them come, or don't, are tried.
const PACKETS: u64 = 4;
/// Words of the peer that are under way at a time.
const WORDS: usize = 2;

/// Replaces the order of a retransmission by its age.
fn aged(slot: Slot, ago: impl Fn(u64) -> u64) -> Slot {
    match slot {
        Slot::Resent(resent) => Slot::Resent(Resent {
            order: ago(resent.order),
            ..resent
        }),
        other => other,
    }
}

/// A requester, a peer that buffers packets, and what is between them.
#[derive(Clone)]
struct World {
    board: Scoreboard,
    una: u64,
    next: u64,
    /// Bits of packets that the peer has, and of those under way.
    has: u8,
    under_way: u8,
    /// Reports of the peer that have not arrived.
    words: Vec<u8>,
}

/// Returns the slots with their PSNs.
fn slots(board: &Scoreboard) -> impl Iterator<Item = (Seq, Slot)> {
    let base = board.ring.base().unwrap_or(at(0));
    let seqs = (0..board.ring.len() as u64).map(move |n| base.plus(n));
    seqs.map(|seq| (seq, board.slot(seq)))
}

impl World {
    fn new() -> Self {
        Self {
            board: Scoreboard::default(),
            una: 0,
            next: 0,
            has: 0,
            under_way: 0,
            words: Vec::new(),
        }
    }

    fn key(&self) -> String {
        let board = &self.board;
        // Only how long ago a packet was resent makes a difference, and not even that beyond the tolerance.
        let ago = |at: u64| (board.order - at).min(2 * TOLERANCE);
        let slots: Vec<Slot> = slots(board).map(|(_, slot)| aged(slot, ago)).collect();
        let returns = board.returns.map(|r| (ago(r.newest), r.probe, r.is_new));
        format!(
            "{:?} {slots:?} {returns:?} {:?} {:?} {:?} {} {} {} {:b} {:b} {:?}",
            board.ring.base(),
            board.high,
            board.judged,
            board.wanted.map(|seq| seq >= at(self.una)),
            board.tolerance,
            self.una,
            self.next,
            self.has,
            self.under_way,
            self.words
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
        if let Some(lost) = self.board.next_lost(at(self.una)) {
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
            add(&|w| w.board.silence_for_test(at(w.una), at(w.next)));
        }
        all
    }

    fn send_again(&mut self, seq: Seq) {
        self.under_way |= 1 << seq.since(at(0));
        self.board.on_resent(seq, at(self.next), false);
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
        self.board.on_acked(at(to));
        self.una = to;
        self.board.judge_by_returns(at(self.una), |_| false);
        let has: Vec<u64> = (0..8).filter(|n| word >> n & 1 == 1).collect();
        let outstanding = (at(self.una), at(self.next));
        report(expected, &has, |report| {
            self.board.on_report(outstanding, report, |_| false, sure);
        });
        self.board.changes.clear();
    }

    fn check(&self) {
        let board = &self.board;
        for n in self.una..self.next {
            let mark = board.mark(at(n));
            let has = self.has >> n & 1 == 1;
            assert!(mark != Mark::Arrived || has, "{n} has not arrived: {}", self.key());
            let done = board.ring.word(at(n).round_down(WORD)) >> (at(n).since(at(n).round_down(WORD))) & 1 == 1;
            assert_eq!(done, matches!(mark, Mark::Arrived | Mark::Answered), "{}", self.key());
        }
        let count = |mark| slots(board).filter(|(_, slot)| slot.mark() == mark).count() as u64;
        assert_eq!(
            (board.lost, board.resent),
            (count(Mark::Lost), count(Mark::Resent)),
            "{}",
            self.key()
        );
        let first = slots(board).find(|(_, slot)| slot.mark() == Mark::Lost);
        assert_eq!(
            self.board.next_lost(at(self.una)),
            first.map(|(seq, _)| seq),
            "{}",
            self.key()
        );
        for (seq, slot) in slots(board) {
            if let Slot::Resent(resent) = slot {
                let queue = &board.queues[usize::from(resent.answered)];
                assert!(queue.contains(&(seq, resent.order)), "{}", self.key());
            }
        }
        let queues = board.queues.iter();
        assert!(
            queues
                .into_iter()
                .all(|queue| queue.iter().is_sorted_by_key(|(_, order)| *order))
        );
    }

    /// Without further losses the peer gets everything, and the requester hears of it.
    fn comes_to_an_end(mut self) {
        for _ in 0..8 * PACKETS {
            while let Some(lost) = self.board.next_lost(at(self.una)) {
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
            self.board.silence_for_test(at(self.una), at(self.next));
        }
        panic!("no end: {}", self.key());
    }
}

impl Scoreboard {
    /// Declares packets lost as the requester does on a timeout.
    fn silence_for_test(&mut self, una: Seq, next: Seq) {
        let mut seq = una;
        while seq < next {
            if seq == una || self.mark(seq).is_in_flight(false) {
                self.lose(una, seq);
            }
            seq = seq.plus(1);
        }
        self.changes.clear();
    }
}

impl Clone for Scoreboard {
    fn clone(&self) -> Self {
        Self {
            ring: self.ring.clone(),
            queues: self.queues.clone(),
            changes: self.changes.clone(),
            ..*self
        }
    }
}

/// Passes the selective ACK of a peer that has some packets beyond `expected`.
fn report(expected: u64, has: &[u64], pass: impl FnOnce(&Report<'_>)) {
    let base = at(expected).round_down(WORD);
    let mut bitmap = vec![0; 64];
    for n in has.iter().filter(|n| **n >= expected) {
        let bit = at(*n).since(base);
        bitmap[(bit / 8) as usize] |= 1 << (bit % 8);
    }
    let mut payload = at(expected).psn().value().to_be_bytes().to_vec();
    payload.append(&mut bitmap);
    pass(&Report::parse(at(expected), &payload).expect("a report"));
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

fn reported(board: &mut Scoreboard, una: u64, next: u64, expected: u64, has: &[u64]) -> Vec<(u64, Mark)> {
    report(expected, has, |report| {
        board.on_report((at(una), at(next)), report, |_| false, false);
    });
    let changes = board.take_changes();
    changes.iter().map(|c| (c.seq.since(at(0)), c.to)).collect()
}

#[test]
fn a_packet_is_lost_when_three_later_ones_have_arrived() {
    let mut r = Scoreboard::default();
    assert_eq!(
        reported(&mut r, 0, 10, 0, &[1, 2]),
        [(1, Mark::Arrived), (2, Mark::Arrived)]
    );
    assert_eq!(r.next_lost(at(0)), None);
    assert_eq!(
        reported(&mut r, 0, 10, 0, &[1, 2, 3]),
        [(3, Mark::Arrived), (0, Mark::Lost)]
    );
    r.on_resent(at(0), at(10), false);
    // What was sent before that says nothing of it …
    reported(&mut r, 0, 20, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(r.next_lost(at(0)), None);
    // … and what was sent after it does.
    reported(&mut r, 0, 20, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14]);
    assert_eq!(r.next_lost(at(0)), Some(at(0)));
    assert_eq!(r.next_lost(at(1)), Some(at(10)));
}

/// Answers are waited for, all of 0 to 9, and those before `to` are sent again.
fn asked_again(to: u64) -> Scoreboard {
    let mut r = Scoreboard::default();
    for n in 0..to {
        r.lose(at(0), at(n));
        r.on_resent(at(n), at(10), true);
    }
    r
}

fn overtaken(r: &mut Scoreboard, una: u64) -> Vec<u64> {
    assert!(r.has_returns());
    r.take_changes();
    r.judge_by_returns(at(una), |_| true);
    assert!(!r.has_returns());
    let changes = r.take_changes();
    assert!(changes.iter().all(|c| c.to == Mark::Lost));
    changes.iter().map(|c| c.seq.since(at(0))).collect()
}

#[test]
fn an_answer_is_lost_when_one_that_was_asked_for_again_three_later_has_come() {
    let mut r = asked_again(6);
    r.on_response(at(0), at(3), |_| true);
    assert_eq!([0, 1].map(|n| r.mark(at(n))), [Mark::Lost, Mark::Resent]);
    r.on_response(at(0), at(5), |_| true);
    assert_eq!([2, 4].map(|n| r.mark(at(n))), [Mark::Lost, Mark::Resent]);
    assert!(overtaken(&mut r, 0).is_empty());
    // The same when it is the oldest, which is only acknowledged.
    let mut r = asked_again(6);
    r.on_resent(at(0), at(10), true);
    r.on_acked(at(1));
    assert_eq!(overtaken(&mut r, 1), [1, 2, 3]);
}

#[test]
fn all_that_is_missing_is_lost_when_a_probe_is_answered() {
    let mut r = asked_again(3);
    r.on_probed(at(0), at(0), at(10));
    r.on_acked(at(1));
    assert_eq!(overtaken(&mut r, 1), (1..10).collect::<Vec<_>>());
    assert_eq!(r.next_lost(at(1)), Some(at(1)));
    // What is sent after the probe is judged by what comes later.
    r.on_resent(at(1), at(12), true);
    assert_eq!(r.mark(at(1)), Mark::Resent);
    assert_eq!(r.mark(at(10)), Mark::InFlight);
}

#[test]
fn what_a_silence_took_for_lost_tells_nothing_of_reordering() {
    let mut r = Scoreboard::default();
    for n in 0..50 {
        r.lose(at(0), at(n));
    }
    let mut has: Vec<u64> = (1..50).filter(|n| *n != 10).collect();
    reported(&mut r, 0, 100, 0, &has);
    assert_eq!(
        [0, 1, 10].map(|n| r.mark(at(n))),
        [Mark::Lost, Mark::Arrived, Mark::Lost]
    );
    for n in [0, 10] {
        r.on_resent(at(n), at(50), false);
    }
    // Lost once more: so many that were sent later are there.
    has.extend(50..=53);
    reported(&mut r, 0, 100, 0, &has);
    assert_eq!([0, 10].map(|n| r.mark(at(n))), [Mark::Lost, Mark::Lost]);
}

#[test]
fn a_packet_that_was_sent_again_and_came_late_is_late_by_what_was_sent_after_that() {
    let mut r = Scoreboard::default();
    let mut has: Vec<u64> = (1..=60).collect();
    reported(&mut r, 0, 200, 0, &has);
    r.on_resent(at(0), at(61), false);
    has.extend(61..=64);
    reported(&mut r, 0, 200, 0, &has);
    assert_eq!(r.mark(at(0)), Mark::Lost);
    // It was four packets late, not sixty.
    reported(&mut r, 0, 200, 66, &[]);
    r.on_acked(at(66));
    reported(&mut r, 66, 200, 66, &(67..=71).collect::<Vec<_>>());
    assert_eq!(r.mark(at(66)), Mark::Lost);
}

#[test]
fn reordering_that_is_seen_makes_it_wait_longer() {
    let mut r = Scoreboard::default();
    reported(&mut r, 0, 100, 0, &(1..=8).collect::<Vec<_>>());
    assert_eq!(r.mark(at(0)), Mark::Lost);
    // It was only late.
    r.on_acked(at(0));
    reported(&mut r, 0, 100, 9, &[]);
    r.on_acked(at(9));
    reported(&mut r, 9, 100, 9, &(10..=16).collect::<Vec<_>>());
    assert_eq!(r.mark(at(9)), Mark::InFlight, "{r:?}");
    reported(&mut r, 9, 100, 9, &(10..=19).collect::<Vec<_>>());
    assert_eq!(r.mark(at(9)), Mark::Lost);
}

#[test]
fn what_the_peer_expects_is_sent_again_first() {
    let mut r = Scoreboard::default();
    // Responses to 0 to 4 are waited for, two are lost, and so is 5, which the peer expects.
    (0..2).for_each(|n| r.lose(at(0), at(n)));
    report(5, &[6, 7, 8], |report| {
        r.on_report((at(0), at(10)), report, |seq| seq < at(5), false);
    });
    assert_eq!(r.next_resend(at(0), |_| true), Some(at(5)));
    assert_eq!(r.next_resend(at(0), |seq| seq != at(5)), Some(at(0)));
    r.on_resent(at(1), at(10), true);
    assert_eq!([0, 1, 5].map(|n| r.is_wanted(at(n))), [false, false, true]);
    r.on_resent(at(5), at(10), false);
    assert!(!r.is_wanted(at(5)));
    assert_eq!(r.next_resend(at(0), |_| true), Some(at(0)));
}

#[test]
fn nothing_is_known_any_more_when_all_that_was_lost_has_arrived() {
    for acked in [false, true] {
        let mut r = Scoreboard::default();
        (0..4).for_each(|n| r.lose(at(0), at(n)));
        (0..2).for_each(|n| r.on_resent(at(n), at(4), false));
        if !acked {
            reported(&mut r, 0, 4, 4, &[]);
        }
        assert!(r.is_active());
        r.on_acked(at(4));
        assert!(!r.is_active());
        assert_eq!((r.lost, r.resent, r.next_lost(at(4))), (0, 0, None));
    }
    // What the owner has still to do stays.
    let mut r = Scoreboard::default();
    r.lose(at(0), at(0));
    report(1, &[], |report| r.on_report((at(0), at(4)), report, |_| false, false));
    r.on_acked(at(1));
    assert!(!r.is_active() && r.is_wanted(at(1)));
    assert_eq!(r.take_changes().len(), 2);
}

#[test]
fn only_what_is_named_is_lost_or_resumed() {
    let mut r = Scoreboard::default();
    r.lose_all(at(5), at(5));
    assert_eq!((r.next_lost(at(5)), r.is_active()), (None, false));
    r.lose_all(at(0), at(10));
    r.resume(at(3), at(7));
    let lost: Vec<u64> = (0..12).filter(|n| r.mark(at(*n)) == Mark::Lost).collect();
    assert_eq!(lost, [0, 1, 2, 7, 8, 9]);
    assert_eq!(r.next_lost(at(3)), Some(at(7)));
}

#[test]
fn a_report_without_news_changes_nothing() {
    // Oldest outstanding PSN, next one, and the expected one.
    for (una, next, expected, known) in [
        (5, 5, 5, false),
        (5, 5, 6, false),
        (5, 10, 5, false),
        (5, 10, 4, false),
        (5, 10, 6, true),
    ] {
        let mut r = Scoreboard::default();
        let payload = at(expected).psn().value().to_be_bytes();
        let report = Report::parse(at(una), &payload).expect("a report without a bitmap");
        r.on_report((at(una), at(next)), &report, |_| false, false);
        assert_eq!(r.is_active(), known, "{una} {next} {expected}");
    }
}

#[test]
fn a_response_tells_of_what_was_sent_three_packets_before() {
    // 0 has no response.
    let mut r = Scoreboard::default();
    r.on_response(at(0), at(5), |seq| seq > at(0));
    let marks = [0, 1, 2, 3, 4, 5].map(|n| r.mark(at(n)));
    use Mark::{Answered, Arrived, InFlight, Lost};
    assert_eq!(marks, [Arrived, Lost, Lost, InFlight, InFlight, Answered]);
    // That the requests have arrived shows no reordering of responses.
    report(6, &[], |report| {
        r.on_report((at(0), at(10)), report, |seq| seq > at(0), false)
    });
    assert_eq!((r.mark(at(1)), r.tolerance), (Lost, TOLERANCE));
}

#[test]
fn a_retransmission_is_lost_when_three_packets_sent_after_it_have_arrived() {
    let mut r = Scoreboard::default();
    reported(&mut r, 0, 10, 0, &(2..10).collect::<Vec<_>>());
    (0..2).for_each(|n| r.on_resent(at(n), at(10), false));
    // This one later once more.
    r.on_resent(at(0), at(20), false);
    reported(&mut r, 0, 20, 0, &(2..13).collect::<Vec<_>>());
    assert_eq!([0, 1].map(|n| r.mark(at(n))), [Mark::Resent, Mark::Resent]);
    reported(&mut r, 0, 20, 0, &(2..14).collect::<Vec<_>>());
    assert_eq!([0, 1].map(|n| r.mark(at(n))), [Mark::Resent, Mark::Lost]);
}

#[test]
fn an_answered_probe_tells_nothing_of_the_rest_of_it() {
    let mut r = Scoreboard::default();
    (0..2).for_each(|n| r.on_probed(at(0), at(n), at(10)));
    r.on_acked(at(1));
    assert_eq!(overtaken(&mut r, 1), (2..10).collect::<Vec<_>>());
    assert_eq!(r.mark(at(1)), Mark::Resent);
}

/// The newest packet was sent again to cause the report.
#[test]
fn a_sure_report_lacks_only_what_is_lost() {
    for (answered, mark) in [(false, Mark::Lost), (true, Mark::Resent)] {
        let mut r = Scoreboard::default();
        r.lose(at(0), at(1));
        r.on_resent(at(1), at(4), answered);
        report(1, &[3], |report| {
            r.on_report((at(0), at(4)), report, |_| answered, true)
        });
        assert_eq!([1, 2].map(|n| r.mark(at(n))), [mark, Mark::Lost]);
    }
}

/// Its receive is missing: it must come again.
#[test]
fn a_packet_that_has_arrived_and_is_expected_is_lost() {
    let mut r = Scoreboard::default();
    for (expected, has, mark) in [(0, [2, 2], Mark::Arrived), (2, [4, 4], Mark::Lost)] {
        report(expected, &has, |report| {
            r.on_report((at(0), at(6)), report, |_| false, false)
        });
        assert_eq!(r.mark(at(2)), mark, "{expected}");
    }
}
