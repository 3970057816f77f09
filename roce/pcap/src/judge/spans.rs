//! Requests of one direction in the order of their PSNs.

use std::collections::VecDeque;

use roce_bth::Opcode;

/// Acknowledged spans that are kept to tell repetitions from PSNs that are used twice.
const KEPT: usize = 4096;
/// Parts of a READ that were asked for again and are remembered.
pub(super) const AGAIN: usize = 4;
/// Spans that are kept at most.
const MAX: usize = 1 << 16;
/// Spans that the directions of all conversations share: with many conversations each keeps fewer.
const BUDGET: usize = 1 << 19;

/// Returns how many spans a direction keeps beside those of so many conversations.
pub(super) fn room(conversations: usize) -> usize {
    (BUDGET / conversations.max(1)).clamp(64, MAX)
}

/// Kind of a span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Body {
    /// Request packet: digest of its payload, unless the capture cut it.
    Packet(Option<u32>),
    /// READ request.
    Read(Read),
    /// Request that is answered by one packet of its own: atomics, FLUSH, ATOMIC WRITE.
    Single(Option<u32>),
    /// PSNs of which no packet was seen.
    Hole,
}

/// READ request and how far it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Read {
    /// Bytes; `None`: the capture cut the header.
    pub(super) len: Option<u32>,
    pub(super) va: u64,
    pub(super) rkey: u32,
    /// PSN of the next response.
    pub(super) next: i64,
    /// Everything before this PSN was answered, or something behind it.
    pub(super) seen: i64,
    /// Responses are missing in the capture.
    pub(super) gap: bool,
    /// PSNs that were asked for again, the last ones first: from, up to.
    pub(super) again: [Option<(i64, i64)>; AGAIN],
    /// Its length is not known, or parts of it were asked for again that `again` doesn't have: responses may have any position.
    pub(super) forgotten: bool,
    /// A later READ was answered first.
    pub(super) passed: bool,
    /// The number of its PSNs was taken from the next request's PSN, because the path MTU was not known.
    pub(super) assumed: bool,
}

/// PSNs of one request packet, of a READ, or of packets that were not seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) start: i64,
    pub(super) count: i64,
    pub(super) body: Body,
    pub(super) opcode: Option<Opcode>,
    /// Frame of its first transmission.
    pub(super) frame: u64,
    /// Times of its first and last transmission.
    pub(super) first_ns: u64,
    pub(super) last_ns: u64,
    /// Transmissions.
    pub(super) sent: u32,
    /// Whether an answer was asked for.
    pub(super) asks: bool,
    /// Whether it ends a message.
    pub(super) ends: bool,
    /// Messages that end before it, counted from the direction's first.
    pub(super) ends_before: i64,
    /// PSNs before it of which no packet was seen.
    pub(super) holes_before: i64,
}

impl Body {
    /// Whether the number of PSNs is not certain, but can be counted when the path MTU is known.
    pub(super) const fn is_assumed(&self) -> bool {
        matches!(
            self,
            Self::Read(Read {
                len: Some(_),
                assumed: true,
                ..
            })
        )
    }
}

impl Read {
    /// Remembers that PSNs `from..to` were asked for again.
    pub(super) fn ask_again(&mut self, from: i64, to: i64) {
        self.forgotten |= self.again[AGAIN - 1].is_some();
        self.again.rotate_right(1);
        self.again[0] = Some((from, to));
        (self.next, self.gap) = (self.next.min(from), false);
    }
}

impl Span {
    pub(super) const fn end(&self) -> i64 {
        self.start + self.count
    }

    /// Whether its answer is more than an acknowledgement, and has not come.
    pub(super) const fn awaits_response(&self) -> bool {
        match self.body {
            Body::Read(read) => read.next < self.end() && !read.gap,
            _ => false,
        }
    }

    pub(super) const fn is_hole(&self) -> bool {
        matches!(self.body, Body::Hole)
    }
}

/// Spans end to end.
#[derive(Default, Debug)]
pub(super) struct Spans(VecDeque<Span>);

impl Spans {
    pub(super) fn find(&self, psn: i64) -> Option<usize> {
        let at = self.0.partition_point(|span| span.end() <= psn);
        self.0.get(at).filter(|span| span.start <= psn).map(|_| at)
    }

    pub(super) fn get(&self, at: usize) -> Option<&Span> {
        self.0.get(at)
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Span> {
        self.0.get_mut(at)
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut Span> {
        self.0.back_mut()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Span> {
        self.0.iter()
    }

    /// Spans from `psn` on.
    pub(super) fn from(&self, psn: i64) -> impl Iterator<Item = &Span> {
        let at = self.0.partition_point(|span| span.end() <= psn);
        self.0.range(at..)
    }

    /// Adds a span at the end; forgets the oldest acknowledged ones.
    pub(super) fn push(&mut self, mut span: Span, acked: i64, room: usize) {
        if let Some(last) = self.0.back() {
            span.ends_before = last.ends_before + i64::from(last.ends);
            span.holes_before = last.holes_before + if last.is_hole() { last.count } else { 0 };
        }
        self.0.push_back(span);
        while self.0.len() > room || (self.0.len() > KEPT && self.0.front().is_some_and(|s| s.end() <= acked)) {
            self.0.pop_front();
        }
    }

    /// Puts a packet into the hole at `at`. A hole with more than [`KEPT`] spans behind it stays, as each of them would have to be
    /// counted again for every packet.
    pub(super) fn fill(&mut self, at: usize, mut span: Span) {
        let Some(&hole) = self.0.get(at).filter(|_| self.0.len() - at <= KEPT) else {
            return;
        };
        span.ends_before = hole.ends_before;
        span.holes_before = hole.holes_before + (span.start - hole.start);
        let mut parts = vec![];
        if hole.start < span.start {
            parts.push(Span {
                count: span.start - hole.start,
                ..hole
            });
        }
        parts.push(span);
        if span.end() < hole.end() {
            parts.push(Span {
                start: span.end(),
                count: hole.end() - span.end(),
                ends_before: span.ends_before + i64::from(span.ends),
                holes_before: span.holes_before,
                ..hole
            });
        }
        let filled = span.count.min(hole.count);
        let (ends, rest) = (i64::from(span.ends), at + parts.len());
        self.0.remove(at);
        for (n, part) in parts.into_iter().enumerate() {
            self.0.insert(at + n, part);
        }
        for later in self.0.range_mut(rest..) {
            later.ends_before += ends;
            later.holes_before -= filled;
        }
    }

    /// Gives the READ at `at` its number of PSNs, which ends before the next request. What is between them becomes a hole.
    pub(super) fn resize(&mut self, at: usize, count: i64) {
        let Some(span) = self.0.get_mut(at).filter(|span| span.count != count) else {
            return;
        };
        span.count = count;
        let span = *span;
        let mut before = 0;
        while let Some(hole) = self.0.get(at + 1).filter(|span| span.is_hole()) {
            before += hole.count;
            self.0.remove(at + 1);
        }
        let Some(following) = self.0.get(at + 1) else { return };
        let rest = following.start - span.end();
        for later in self.0.range_mut(at + 1..) {
            later.holes_before += rest - before;
        }
        if rest > 0 {
            let hole = Span {
                start: span.end(),
                count: rest,
                body: Body::Hole,
                opcode: None,
                asks: false,
                ends: false,
                ends_before: span.ends_before + i64::from(span.ends),
                ..span
            };
            self.0.insert(at + 1, hole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_whether_answers_come_or_not() {
        let span = PACKET;
        let (mut answered, mut silent) = (Spans::default(), Spans::default());
        for start in 0..10_000 {
            answered.push(Span { start, ..span }, start, MAX);
            silent.push(Span { start, ..span }, 0, room(256));
        }
        assert_eq!((answered.0.len(), silent.0.len()), (KEPT, BUDGET / 256));
        assert_eq!(
            silent.find(9_999).map(|at| silent.get(at).unwrap().ends_before),
            Some(9_999)
        );
        assert_eq!(silent.find(0), None);
    }

    const PACKET: Span = Span {
        start: 0,
        count: 1,
        body: Body::Packet(None),
        opcode: Some(Opcode::RcReadRequest),
        frame: 1,
        first_ns: 0,
        last_ns: 0,
        sent: 1,
        asks: true,
        ends: true,
        ends_before: 0,
        holes_before: 0,
    };
    const HOLE: Span = Span {
        body: Body::Hole,
        opcode: None,
        asks: false,
        ends: false,
        ..PACKET
    };

    /// Spans of these lengths from 0 on, holes where the length is negative.
    fn spans(lengths: &[i64]) -> Spans {
        let (mut spans, mut start) = (Spans::default(), 0);
        for length in lengths {
            let kind = if *length < 0 { HOLE } else { PACKET };
            let count = length.abs();
            spans.push(Span { start, count, ..kind }, 0, MAX);
            start += count;
        }
        spans
    }

    /// Filled and resized spans are as if they had been pushed so.
    fn assert_same(spans: &Spans, lengths: &[i64]) {
        assert_eq!(spans.0, self::spans(lengths).0);
    }

    #[test]
    fn a_packet_in_a_hole_leaves_holes_on_both_sides() {
        let cases: [(i64, i64, &[i64]); 4] = [
            (3, 1, &[1, -1, 1, 1, -3, 1, -2, 1]),
            (5, 1, &[1, -1, 1, -2, 1, -1, 1, -2, 1]),
            (6, 1, &[1, -1, 1, -3, 1, 1, -2, 1]),
            (3, 4, &[1, -1, 1, 4, 1, -2, 1]),
        ];
        for (start, count, lengths) in cases {
            let mut spans = spans(&[1, -1, 1, -4, 1, -2, 1]);
            spans.fill(3, Span { start, count, ..PACKET });
            assert_same(&spans, lengths);
        }
    }

    #[test]
    fn a_read_takes_psns_from_the_hole_behind_it_and_leaves_some() {
        let cases: [(usize, i64, &[i64]); 6] = [
            (2, 1, &[1, -1, 1, -4, 1, -2, 1]),
            (2, 2, &[1, -1, 2, -3, 1, -2, 1]),
            (2, 3, &[1, -1, 3, -2, 1, -2, 1]),
            (2, 4, &[1, -1, 4, -1, 1, -2, 1]),
            (2, 5, &[1, -1, 5, 1, -2, 1]),
            (6, 9, &[1, -1, 3, -2, 1, -2, 9]),
        ];
        for (at, count, lengths) in cases {
            let mut spans = spans(&[1, -1, 3, -2, 1, -2, 1]);
            spans.resize(at, count);
            assert_same(&spans, lengths);
        }
        let mut spans = spans(&[3, 1]);
        spans.resize(0, 2);
        assert_same(&spans, &[2, -1, 1]);
    }

    #[test]
    fn a_hole_is_filled_unless_too_much_follows() {
        let (hole, packet) = (Span { count: 2, ..HOLE }, PACKET);
        for (following, filled) in [(KEPT - 1, true), (KEPT, false)] {
            let mut spans = Spans::default();
            spans.push(hole, 0, MAX);
            for n in 0..following {
                let start = 2 + n as i64;
                spans.push(Span { start, ..packet }, 0, MAX);
            }
            spans.fill(0, packet);
            assert_eq!(spans.get(0).unwrap().is_hole(), !filled, "{following}");
            let last = spans.last_mut().unwrap();
            assert_eq!(last.holes_before, if filled { 1 } else { 2 });
        }
    }
}
