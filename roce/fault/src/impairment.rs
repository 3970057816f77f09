//! Impairments of one direction of a network, decided packet by packet by a seeded generator. Times are those since a start that the
//! caller chooses.

use std::{collections::BTreeMap, time::Duration};

use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use roce_verbs::counters;

/// Losses in a row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Burst {
    /// Probability that a packet is the first of a burst.
    pub begins: f64,
    /// Packets of a burst, on average.
    pub length: f64,
}

/// A line of limited rate with a queue in front.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// Bytes per second.
    pub rate: u64,
    /// Bytes that may wait; packets that arrive at a full queue are dropped.
    pub queue: u64,
    /// Packets that find more bytes than this waiting get ECN's CE mark, if their sender supports ECN.
    pub mark_above: Option<u64>,
}

/// Impairments of one direction of a network. The default has none.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Conditions {
    /// Nothing gets in. Packets under way still arrive.
    pub cut: bool,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Losses in a row.
    pub burst: Option<Burst>,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a packet is held back, so that later packets overtake it.
    pub reorder: f64,
    /// Time for which it is held back.
    pub reorder_by: Duration,
    /// Time that each packet takes.
    pub delay: Duration,
    /// Largest random addition to the delay; packets stay in order.
    pub jitter: Duration,
    /// Probability that a bit of a packet is flipped.
    pub corrupt: f64,
    /// Probability that a packet gets ECN's CE mark, if its sender supports ECN.
    pub mark: f64,
    /// Rate and queue; `None`: as fast as the caller.
    pub line: Option<Line>,
}

impl Conditions {
    /// Nothing comes through.
    pub fn cut() -> Self {
        Self {
            cut: true,
            ..Self::default()
        }
    }
}

counters! {
    /// Counts of packets. Each packet that came in is cut, lost, dropped, refused or delivered, once for itself and once for each
    /// duplicate: `taken + repeated == cut + lost + dropped + refused + delivered +` packets under way.
    pub struct Counters;

    /// Came in.
    taken,
    /// Came while the way was cut.
    cut,
    /// Lost at random, in bursts too.
    lost,
    /// Found the queue full.
    dropped,
    /// Put in a second time.
    repeated,
    /// Held back.
    reordered,
    /// Had a bit flipped.
    corrupted,
    /// Got ECN's CE mark.
    marked,
    /// Came out.
    delivered,
    /// Were due, but the receiving side did not take them.
    refused,
}

/// One arrival of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Passage {
    /// Time of arrival.
    pub due: Duration,
    /// The packet gets ECN's CE mark, if its sender supports ECN.
    pub marked: bool,
    /// A bit is flipped: the argument of [`flip`].
    pub damage: Option<u64>,
}

/// Arrivals of one packet: none, one or two.
pub type Passages = [Option<Passage>; 2];

/// Flips the bit of `bytes` that a random number chooses. Does nothing to an empty slice.
pub fn flip(bytes: &mut [u8], random: u64) {
    let bits = bytes.len() as u64 * 8;
    if let Some(bit) = random.checked_rem(bits) {
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

/// Decides the fates of packets in one direction.
#[derive(Clone, Debug)]
pub struct Impairment {
    conditions: Conditions,
    counters: Counters,
    rng: ChaCha8Rng,
    in_burst: bool,
    /// Time when the line has sent all that waits.
    line_free: Duration,
    /// Arrival of the last packet that was not held back.
    last_due: Duration,
}

impl Impairment {
    /// Creates one without impairments. The same seed and packets give the same fates.
    pub fn new(seed: u64) -> Self {
        Self {
            conditions: Conditions::default(),
            counters: Counters::default(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            in_burst: false,
            line_free: Duration::ZERO,
            last_due: Duration::ZERO,
        }
    }

    /// Returns the current impairments.
    pub fn conditions(&self) -> Conditions {
        self.conditions
    }

    /// Changes the impairments for later packets.
    pub fn set(&mut self, conditions: Conditions) {
        self.conditions = conditions;
    }

    /// Returns the counts. `marked`, `delivered` and `refused` are left to the caller, who knows.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the counts since the last call.
    pub(crate) fn take_counters(&mut self) -> Counters {
        std::mem::take(&mut self.counters)
    }

    /// Decides the fate of a packet of `len` bytes.
    pub fn pass(&mut self, now: Duration, len: usize) -> Passages {
        self.counters.taken += 1;
        if self.conditions.cut {
            self.counters.cut += 1;
            return [None; 2];
        }
        if self.loses() {
            self.counters.lost += 1;
            return [None; 2];
        }
        let repeats = self.chance(self.conditions.duplicate);
        let first = self.queue(now, len);
        let second = repeats.then(|| {
            self.counters.repeated += 1;
            self.queue(now, len)
        });
        [first, second.flatten()]
    }

    fn chance(&mut self, probability: f64) -> bool {
        // Draw nothing for what can't happen, so that one condition does not change the fates under another.
        probability > 0.0 && self.rng.random::<f64>() < probability
    }

    fn loses(&mut self) -> bool {
        if let Some(burst) = self.conditions.burst {
            let turns = match self.in_burst {
                true => 1.0 / burst.length.max(1.0),
                false => burst.begins,
            };
            if self.chance(turns) {
                self.in_burst = !self.in_burst;
            }
            if self.in_burst {
                return true;
            }
        }
        self.chance(self.conditions.loss)
    }

    fn queue(&mut self, now: Duration, len: usize) -> Option<Passage> {
        let Some((sent, congested)) = self.line(now, len) else {
            self.counters.dropped += 1;
            return None;
        };
        let jitter = match self.conditions.jitter {
            Duration::ZERO => Duration::ZERO,
            most => most.mul_f64(self.rng.random()),
        };
        let mut due = (sent + self.conditions.delay + jitter).max(self.last_due);
        self.last_due = due;
        if self.chance(self.conditions.reorder) {
            self.counters.reordered += 1;
            due += self.conditions.reorder_by;
        }
        let marked = self.chance(self.conditions.mark) || congested;
        let damage = self.chance(self.conditions.corrupt).then(|| self.rng.random());
        self.counters.corrupted += u64::from(damage.is_some());
        Some(Passage { due, marked, damage })
    }

    /// Returns when the line has sent a packet, and whether it found a long queue. `None`: the queue is full.
    fn line(&mut self, now: Duration, len: usize) -> Option<(Duration, bool)> {
        let Some(line) = self.conditions.line else {
            return Some((now, false));
        };
        let rate = line.rate.max(1) as f64;
        let waiting = (self.line_free.saturating_sub(now).as_secs_f64() * rate) as u64;
        if waiting + len as u64 > line.queue {
            return None;
        }
        self.line_free = self.line_free.max(now) + Duration::from_secs_f64(len as f64 / rate);
        Some((self.line_free, line.mark_above.is_some_and(|above| waiting > above)))
    }
}

/// Packets under way, until they are due: by time of arrival, and in the order of pushes at the same time.
#[derive(Debug)]
pub struct UnderWay<T> {
    packets: BTreeMap<(Duration, u64), T>,
    number: u64,
}

impl<T> Default for UnderWay<T> {
    fn default() -> Self {
        Self {
            packets: BTreeMap::new(),
            number: 0,
        }
    }
}

impl<T> UnderWay<T> {
    /// Adds a packet.
    pub fn push(&mut self, due: Duration, packet: T) {
        self.number += 1;
        self.packets.insert((due, self.number), packet);
    }

    /// Takes the next packet that is due.
    pub fn pop(&mut self, now: Duration) -> Option<T> {
        let next = self.packets.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(next.remove())
    }

    /// Returns when the next packet is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.packets.first_key_value().map(|((due, _), _)| *due)
    }

    /// Returns the number of packets.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passages(conditions: Conditions, seed: u64, packets: u32) -> (Vec<Passages>, Counters) {
        let mut way = Impairment::new(seed);
        way.set(conditions);
        let fates = (0..packets)
            .map(|n| way.pass(Duration::from_millis(n.into()), 1000))
            .collect();
        (fates, way.counters())
    }

    #[test]
    fn the_same_seed_gives_the_same_fates_and_another_seed_others() {
        let conditions = Conditions {
            loss: 0.1,
            duplicate: 0.1,
            reorder: 0.1,
            reorder_by: Duration::from_millis(3),
            jitter: Duration::from_millis(1),
            corrupt: 0.1,
            mark: 0.1,
            ..Conditions::default()
        };
        let fates = |seed| passages(conditions, seed, 1000);
        assert_eq!(fates(7), fates(7));
        assert_ne!(fates(7).0, fates(8).0);
    }

    #[test]
    fn packets_are_damaged_and_marked_as_often_as_asked() {
        let conditions = Conditions {
            corrupt: 0.25,
            mark: 0.5,
            ..Conditions::default()
        };
        let (fates, counters) = passages(conditions, 1, 10_000);
        let of = |f: fn(&Passage) -> bool| fates.iter().flatten().flatten().filter(|p| f(p)).count();
        let damaged = of(|p| p.damage.is_some());
        assert_eq!(damaged as u64, counters.corrupted);
        assert!((2300..2700).contains(&damaged), "{damaged}");
        assert!((4700..5300).contains(&of(|p| p.marked)));
    }

    #[test]
    fn one_bit_is_flipped_anywhere() {
        let mut seen = [false; 24];
        for random in 0..1000 {
            let mut bytes = [0; 3];
            flip(&mut bytes, random);
            let bits = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
            assert_eq!(bits.count_ones(), 1);
            seen[bits.trailing_zeros() as usize] = true;
        }
        assert_eq!(seen, [true; 24]);
        flip(&mut [], 7);
    }

    #[test]
    fn packets_leave_in_the_order_of_their_times() {
        let mut way = UnderWay::default();
        let ms = Duration::from_millis;
        for (due, item) in [(3, 'c'), (1, 'a'), (3, 'd'), (2, 'b')] {
            way.push(ms(due), item);
        }
        assert_eq!((way.pop(ms(0)), way.next_due(), way.len()), (None, Some(ms(1)), 4));
        let all: String = std::iter::from_fn(|| way.pop(ms(9))).collect();
        assert_eq!(all, "abcd");
    }
}
