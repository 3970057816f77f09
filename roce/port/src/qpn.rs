//! Queue pair numbers: drawn at random, and quarantined after use as long as there are others.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::BuildHasherDefault,
    mem,
    time::Duration,
};

use rand::Rng;
use rand_chacha::ChaCha12Rng;
use roce_bth::Qpn;
use roce_verbs::{Instant, NumberHasher};

/// Quarantine of a number after its queue pair is destroyed: longer than packets and the kernel's timewait live.
const QUARANTINE: Duration = Duration::from_secs(60);
/// Largest range that is searched when random draws find no free number.
const SEARCHED: u32 = 1 << 17;
/// Largest number of quarantined numbers. Beyond it, the oldest are released early.
const MAX_QUARANTINED: usize = 1 << 16;
/// Random draws before the search; with at most 2^17 of 2^24 numbers taken all fail with probability 2^-400.
const DRAWS: usize = 64;

/// Range of queue pair numbers. Each of several processes behind one address has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpnRange {
    /// Lowest number; at least 2.
    pub first: u32,
    /// Highest number; at most 2^24 - 2.
    pub last: u32,
}

impl QpnRange {
    /// Returns how many of them a queue pair can have: neither those of management (0, 1) nor that of multicast.
    pub const fn count(&self) -> u32 {
        let Self { first, last } = self.usable();
        (last + 1).saturating_sub(first)
    }

    pub(crate) const fn contains(&self, n: u32) -> bool {
        self.first <= n && n <= self.last
    }

    /// Returns one of the range's [parts](QpnParts).
    const fn part(&self, index: u32) -> Self {
        let len = (self.last + 1 - self.first) / QpnParts::COUNT;
        let first = self.first + index * len;
        Self {
            first,
            last: first + (len - 1),
        }
    }

    const fn usable(&self) -> Self {
        let most = Qpn::MULTICAST.value() - 1;
        Self {
            first: if self.first < 2 { 2 } else { self.first },
            last: if self.last > most { most } else { self.last },
        }
    }
}

impl Default for QpnRange {
    fn default() -> Self {
        Self {
            first: 2,
            last: Qpn::MULTICAST.value() - 1,
        }
    }
}

/// Parts of a slot's [`QpnRange`] that numbers are drawn from. A process that exits leaves numbers that peers may still send to.
/// They are those of one part, unless it has had very many queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpnParts {
    /// Part of the first numbers. The others are used when it has none left.
    pub home: u8,
    /// Parts that are not used, a bit for each: peers may send to the queue pairs that had their numbers.
    pub resting: u16,
}

impl QpnParts {
    /// Parts of a range.
    pub const COUNT: u32 = u16::BITS;

    /// Returns how many numbers of a range are available.
    pub fn count(self, range: QpnRange) -> u32 {
        self.of(range, 0).map(|part| part.count()).sum()
    }

    /// Iterates over the parts that are used (`resting`: 0) or not (1).
    fn of(self, range: QpnRange, resting: u16) -> impl Iterator<Item = QpnRange> {
        let parts = (0..Self::COUNT).filter(move |part| self.resting >> part & 1 == resting);
        parts.map(move |part| range.part(part))
    }
}

/// Slot of one process or loop of several behind one address: all numbers with these top bits. Packets and management datagrams show
/// by their numbers which process they are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpnSlot {
    /// Number of top bits that name the slot: 1 to 12.
    pub bits: u8,
    /// The slot, less than 2^bits.
    pub slot: u16,
}

impl QpnSlot {
    /// Returns whether there is such a slot.
    pub const fn is_valid(self) -> bool {
        self.bits >= 1 && self.bits <= 12 && (self.slot as u32) < 1 << self.bits
    }

    /// Returns its queue pair numbers: the top bits of 24.
    pub const fn qpns(self) -> QpnRange {
        let low = 24 - self.bits as u32;
        let first = (self.slot as u32) << low;
        QpnRange {
            first,
            last: first + ((1 << low) - 1),
        }
    }

    /// Returns one of the [parts](QpnParts) of its numbers. The slot must not have more than 8 bits.
    pub const fn part(self, index: u8) -> Self {
        let bits = QpnParts::COUNT.trailing_zeros() as u8;
        Self {
            bits: self.bits + bits,
            slot: (self.slot << bits) | index as u16,
        }
    }

    /// Returns its communication IDs and SIDR request IDs, first and last: the top bits of 32.
    pub const fn comm_ids(self) -> (u32, u32) {
        let low = 32 - self.bits as u32;
        let first = (self.slot as u32) << low;
        (first, first + ((1 << low) - 1))
    }
}

/// Maps numbers to slots of the port's slab.
#[derive(Default)]
pub(crate) struct QpnTable {
    used: HashMap<u32, usize, BuildHasherDefault<NumberHasher>>,
    quarantined: HashSet<u32, BuildHasherDefault<NumberHasher>>,
    /// Quarantined numbers, oldest first.
    order: VecDeque<(Instant, u32)>,
    /// All numbers of the port.
    range: QpnRange,
    /// Parts of the range, if it is a whole slot's.
    parts: Option<QpnParts>,
    /// Numbers of all parts are used.
    spread: bool,
    spread_unreported: bool,
}

impl QpnTable {
    /// Creates an empty table. A range that is a whole slot's may be divided into parts.
    pub(crate) fn new(range: QpnRange, parts: Option<QpnParts>) -> Self {
        Self {
            range,
            parts,
            ..Self::default()
        }
    }

    /// Returns true once: when numbers of all parts are used from now on.
    pub(crate) fn take_spread(&mut self) -> bool {
        mem::take(&mut self.spread_unreported)
    }

    /// Returns the numbers to draw from, and how many of them are available.
    fn drawn_from(&self) -> (QpnRange, u32) {
        match self.parts {
            None => (self.range.usable(), self.range.count()),
            Some(parts) if self.spread => (self.range.usable(), parts.count(self.range)),
            Some(parts) => {
                let home = self.range.part(parts.home.into());
                (home.usable(), home.count())
            }
        }
    }

    /// Returns whether the number may be assigned here.
    pub(crate) fn includes(&self, qpn: Qpn) -> bool {
        self.range.usable().contains(qpn.value())
    }

    pub(crate) fn len(&self) -> usize {
        self.used.len()
    }

    pub(crate) fn get(&self, qpn: Qpn) -> Option<usize> {
        self.used.get(&qpn.value()).copied()
    }

    /// Draws a number that is neither in use nor quarantined. If there is none, releases the one that has been quarantined longest:
    /// random PSNs and the connection manager keep apart what is sent to the former queue pair and to the new one. `None` if all are
    /// in use.
    pub(crate) fn draw(&mut self, now: Instant, rng: &mut ChaCha12Rng) -> Option<Qpn> {
        self.release_expired(now);
        let (QpnRange { first, last }, count) = self.drawn_from();
        if first > last || self.used.len() + self.quarantined.len() >= count as usize {
            if self.parts.is_some() && !mem::replace(&mut self.spread, true) {
                self.spread_unreported = true;
                return self.draw(now, rng);
            }
            return self.release_oldest().or_else(|| self.search(rng)).map(Qpn::new);
        }
        let mut draws = (0..DRAWS).map(|_| rng.random_range(first..=last));
        let drawn = draws.find(|n| self.is_free(*n));
        drawn
            .or_else(|| self.search(rng))
            .or_else(|| self.release_oldest())
            .map(Qpn::new)
    }

    fn is_free(&self, n: u32) -> bool {
        let mut unused = self.parts.into_iter().flat_map(|parts| parts.of(self.range, 1));
        !self.used.contains_key(&n) && !self.quarantined.contains(&n) && !unused.any(|part| part.contains(n))
    }

    /// Searches for a free number in the small part of the space that one of several processes has.
    fn search(&self, rng: &mut ChaCha12Rng) -> Option<u32> {
        let (QpnRange { first, last }, _) = self.drawn_from();
        if first > last || last - first >= SEARCHED {
            return None;
        }
        let start = rng.random_range(first..=last);
        (start..=last).chain(first..start).find(|n| self.is_free(*n))
    }

    fn release_oldest(&mut self) -> Option<u32> {
        let (_, qpn) = self.order.pop_front()?;
        self.quarantined.remove(&qpn);
        Some(qpn)
    }

    fn release_expired(&mut self, now: Instant) {
        while self
            .order
            .front()
            .is_some_and(|(since, _)| self.order.len() > MAX_QUARANTINED || now.saturating_since(*since) >= QUARANTINE)
        {
            self.release_oldest();
        }
    }

    pub(crate) fn insert(&mut self, qpn: Qpn, slot: usize) {
        self.used.insert(qpn.value(), slot);
    }

    /// Quarantines a number that is no longer in use. One that is never drawn, QP1's, is free at once.
    pub(crate) fn remove(&mut self, now: Instant, qpn: Qpn) -> Option<usize> {
        let slot = self.used.remove(&qpn.value())?;
        self.release_expired(now);
        if self.includes(qpn) {
            self.quarantined.insert(qpn.value());
            self.order.push_back((now, qpn.value()));
        }
        Some(slot)
    }
}

/// Returns the default UDP source port for a pair of queue pair numbers, in 0xC000 to 0xFFFF: that of `rdma_get_udp_sport`
/// (`rdma/ib_verbs.h`), the same on both sides.
pub(crate) fn udp_source_port(local: Qpn, remote: Qpn) -> u16 {
    let mut v = u64::from(local.value()) * u64::from(remote.value());
    v ^= v >> 20;
    v ^= v >> 40;
    let label = (v & 0xf_ffff) as u32;
    let low = (label & 0x3fff) ^ (label >> 14);
    low as u16 | 0xc000
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn numbers_are_distinct_never_special_and_rest() {
        let mut rng = ChaCha12Rng::seed_from_u64(1);
        let mut t = QpnTable::new(QpnRange { first: 0, last: 33 }, None);
        let now = Instant::ZERO;
        let mut seen = Vec::new();
        while let Some(q) = t.draw(now, &mut rng) {
            assert!(q.value() >= 2 && q.value() <= 33);
            assert!(!seen.contains(&q));
            t.insert(q, seen.len());
            seen.push(q);
        }
        assert!(seen.len() >= 24, "{}", seen.len());
        for (i, q) in seen.iter().enumerate() {
            assert_eq!(t.remove(now, *q), Some(i));
            assert_eq!(t.get(*q), None);
        }
        assert!(t.draw(now + Duration::from_secs(61), &mut rng).is_some());
    }

    #[test]
    fn numbers_that_no_queue_pair_has_are_not_counted() {
        let last = QpnSlot { bits: 11, slot: 2047 }.qpns();
        assert_eq!((last.last, last.count()), (0x00ff_ffff, 8191));
        assert_eq!(QpnSlot { bits: 11, slot: 2046 }.qpns().count(), 8192);
        let first = QpnRange { first: 0, last: 33 };
        assert_eq!(first.count(), 32);
        let mut rng = ChaCha12Rng::seed_from_u64(3);
        let mut t = QpnTable::new(last, None);
        for i in 0..last.count() {
            let qpn = t.draw(Instant::ZERO, &mut rng).unwrap();
            t.insert(qpn, i as usize);
        }
        assert!(t.draw(Instant::ZERO, &mut rng).is_none());
    }

    #[test]
    fn a_small_range_is_used_up_to_its_last_number_and_again() {
        let mut rng = ChaCha12Rng::seed_from_u64(2);
        let range = QpnRange {
            first: 8192,
            last: 8999,
        };
        let mut t = QpnTable::new(range, None);
        let now = Instant::ZERO;
        let all: Vec<Qpn> = (range.first..=range.last)
            .map(|_| {
                let q = t.draw(now, &mut rng).unwrap();
                t.insert(q, 0);
                q
            })
            .collect();
        assert_eq!(t.draw(now, &mut rng), None, "all are in use");
        for q in &all {
            t.remove(now, *q);
        }
        // A program that makes and ends queue pairs without pause gets the one that has rested longest, for ever.
        for q in all.iter().cycle().take(3 * all.len()) {
            assert_eq!(t.draw(now, &mut rng), Some(*q));
            t.insert(*q, 0);
            t.remove(now, *q);
        }
    }

    #[test]
    fn numbers_rest_as_long_as_there_are_others() {
        let mut rng = ChaCha12Rng::seed_from_u64(3);
        let range = QpnRange {
            first: 1 << 13,
            last: (2 << 13) - 1,
        };
        let mut t = QpnTable::new(range, None);
        let mut now = Instant::ZERO;
        let mut last_drawn: HashMap<Qpn, usize> = HashMap::new();
        for cycle in 0..30_000 {
            let q = t.draw(now, &mut rng).unwrap();
            if let Some(before) = last_drawn.insert(q, cycle) {
                assert!(cycle - before >= 8192 - 1, "{q} rested for {} cycles", cycle - before);
            }
            t.insert(q, 0);
            t.remove(now, q);
            now = now + Duration::from_nanos(100);
        }
    }

    #[test]
    fn a_slot_is_used_part_by_part_without_those_that_rest() {
        let mut rng = ChaCha12Rng::seed_from_u64(5);
        let slot = QpnSlot { bits: 7, slot: 9 };
        let (parts, now) = (
            QpnParts {
                home: 3,
                resting: 0b1010_0000_0000_0110,
            },
            Instant::ZERO,
        );
        let part_of = |qpn: Qpn| (qpn.value() >> 13) & 15;
        let mut t = QpnTable::new(slot.qpns(), Some(parts));
        assert_eq!(parts.count(slot.qpns()), 12 << 13);
        for n in 0..1 << 13 {
            let q = t.draw(now, &mut rng).unwrap();
            assert_eq!(part_of(q), 3);
            assert!(t.includes(q) && slot.part(3).qpns().first <= q.value());
            t.insert(q, n);
        }
        assert!(!t.take_spread());
        for n in 1 << 13..12 << 13 {
            let q = t.draw(now, &mut rng).unwrap();
            assert_eq!(parts.resting & (1 << part_of(q)), 0, "{q}");
            t.insert(q, n);
        }
        assert!(t.take_spread() && !t.take_spread(), "told once");
        assert_eq!(t.draw(now, &mut rng), None);
        let lent = t.remove(now, Qpn::new(slot.part(15).qpns().first));
        assert!(lent.is_none(), "a part that rests has no queue pair");
    }

    #[test]
    fn the_management_queue_pairs_number_is_never_drawn() {
        let mut rng = ChaCha12Rng::seed_from_u64(4);
        let now = Instant::ZERO;
        let mut t = QpnTable::new(QpnRange { first: 0, last: 3 }, None);
        t.insert(Qpn::GSI, 0);
        assert_eq!(t.remove(now, Qpn::GSI), Some(0));
        for _ in 0..100 {
            let q = t.draw(now, &mut rng).unwrap();
            assert!(q.value() >= 2, "{q}");
            t.insert(q, 0);
            t.remove(now, q);
        }
    }

    #[test]
    fn source_ports_are_symmetric_and_in_range() {
        let (a, b) = (Qpn::new(0x12_3456), Qpn::new(0xab_cdef));
        assert_eq!(udp_source_port(a, b), udp_source_port(b, a));
        assert!(udp_source_port(a, b) >= 0xc000);
        // 1 * 1 folds to label 1.
        assert_eq!(udp_source_port(Qpn::GSI, Qpn::GSI), 0xc001);
    }
}
