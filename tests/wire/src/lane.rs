//! One way of a network: what becomes of each frame, and when it comes out. No clocks and no I/O: times are those since the start of
//! the wire.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    ops::{Add, AddAssign},
    time::Duration,
};

use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Losses in a row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Burst {
    /// The probability that a frame is the first of a burst.
    pub begins: f64,
    /// Frames of a burst, on average.
    pub length: f64,
}

/// A line that carries so many bytes a second, and a queue before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// Bytes a second.
    pub rate: u64,
    /// Bytes that may wait; what comes when it is full is dropped.
    pub queue: u64,
    /// Frames that find more bytes than this waiting get ECN's CE mark if they are of a transport that knows ECN.
    pub mark_above: Option<u64>,
}

/// How one way of a network is. By default it is perfect.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Conditions {
    /// Nothing gets in. What is under way arrives.
    pub cut: bool,
    /// The probability that a frame is lost.
    pub loss: f64,
    /// Losses in a row.
    pub burst: Option<Burst>,
    /// The probability that a frame comes twice.
    pub duplicate: f64,
    /// The probability that a frame is held back, so that those after it come before it.
    pub reorder: f64,
    /// How long it is held back.
    pub reorder_by: Duration,
    /// How long each frame takes.
    pub delay: Duration,
    /// Up to this much more, at random; frames stay in order.
    pub jitter: Duration,
    /// As fast as the wire can, without a queue, if `None`.
    pub line: Option<Line>,
}

impl Conditions {
    /// Nothing comes through.
    pub const CUT: Self = Self {
        cut: true,
        loss: 0.0,
        burst: None,
        duplicate: 0.0,
        reorder: 0.0,
        reorder_by: Duration::ZERO,
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
        line: None,
    };
}

/// Frames. Every frame that came is lost, cut off, dropped, or comes out, once for itself and once for each repetition:
/// `taken + repeated == cut + lost + dropped + refused + delivered +` what is under way.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// Came in.
    pub taken: u64,
    /// Came while the way was cut.
    pub cut: u64,
    /// Lost at random, in bursts too.
    pub lost: u64,
    /// Found the queue full.
    pub dropped: u64,
    /// Put in a second time.
    pub repeated: u64,
    /// Held back.
    pub reordered: u64,
    /// Got ECN's CE mark.
    pub marked: u64,
    /// Came out.
    pub delivered: u64,
    /// Should have come out, but the kernel did not take them (the interface is down).
    pub refused: u64,
}

impl Counters {
    /// With names, for reports.
    pub fn named(&self) -> [(&'static str, u64); 9] {
        [
            ("taken", self.taken),
            ("cut", self.cut),
            ("lost", self.lost),
            ("dropped", self.dropped),
            ("repeated", self.repeated),
            ("reordered", self.reordered),
            ("marked", self.marked),
            ("delivered", self.delivered),
            ("refused", self.refused),
        ]
    }
}

impl Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            taken: self.taken + other.taken,
            cut: self.cut + other.cut,
            lost: self.lost + other.lost,
            dropped: self.dropped + other.dropped,
            repeated: self.repeated + other.repeated,
            reordered: self.reordered + other.reordered,
            marked: self.marked + other.marked,
            delivered: self.delivered + other.delivered,
            refused: self.refused + other.refused,
        }
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// A frame under way. The order is that in which frames come out.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct UnderWay {
    due: Duration,
    number: u64,
    frame: Vec<u8>,
}

/// One way of a network.
pub struct Lane {
    conditions: Conditions,
    counters: Counters,
    rng: ChaCha8Rng,
    in_burst: bool,
    /// When the line has sent all that waits.
    line_free: Duration,
    /// When the last frame that was not held back comes out.
    last_due: Duration,
    number: u64,
    heap: BinaryHeap<Reverse<UnderWay>>,
}

impl Lane {
    /// A perfect one; the same seed and frames give the same fates.
    pub fn new(seed: u64) -> Self {
        Self {
            conditions: Conditions::default(),
            counters: Counters::default(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            in_burst: false,
            line_free: Duration::ZERO,
            last_due: Duration::ZERO,
            number: 0,
            heap: BinaryHeap::new(),
        }
    }

    /// How it is.
    pub fn conditions(&self) -> Conditions {
        self.conditions
    }

    /// Changes it, for the frames that come from then on.
    pub fn set(&mut self, conditions: Conditions) {
        self.conditions = conditions;
    }

    /// What became of frames.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Frames under way.
    pub fn under_way(&self) -> usize {
        self.heap.len()
    }

    /// A frame comes in.
    pub fn push(&mut self, now: Duration, mut frame: Vec<u8>) {
        self.counters.taken += 1;
        if self.conditions.cut {
            self.counters.cut += 1;
            return;
        }
        if self.loses() {
            self.counters.lost += 1;
            return;
        }
        let repeat = self.chance(self.conditions.duplicate).then(|| frame.clone());
        self.queue(now, &mut frame);
        if let Some(mut again) = repeat {
            self.counters.repeated += 1;
            self.queue(now, &mut again);
        }
    }

    /// The next frame that is due.
    pub fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
        if self.next_due()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(under_way)| under_way.frame)
    }

    /// When the next frame is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse(under_way)| under_way.due)
    }

    /// What became of a frame that was due.
    pub fn came_out(&mut self, delivered: bool) {
        match delivered {
            true => self.counters.delivered += 1,
            false => self.counters.refused += 1,
        }
    }

    fn chance(&mut self, probability: f64) -> bool {
        // Nothing is drawn for what can't happen, so that one condition does not change the fates under another.
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

    fn queue(&mut self, now: Duration, frame: &mut Vec<u8>) {
        let Some(sent) = self.line(now, frame) else {
            self.counters.dropped += 1;
            return;
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
        self.number += 1;
        self.heap.push(Reverse(UnderWay {
            due,
            number: self.number,
            frame: std::mem::take(frame),
        }));
    }

    /// When the line has sent it; `None` if the queue is full.
    fn line(&mut self, now: Duration, frame: &mut [u8]) -> Option<Duration> {
        let Some(line) = self.conditions.line else {
            return Some(now);
        };
        let rate = line.rate.max(1) as f64;
        let waiting = (self.line_free.saturating_sub(now).as_secs_f64() * rate) as u64;
        if waiting + frame.len() as u64 > line.queue {
            return None;
        }
        if line.mark_above.is_some_and(|above| waiting > above) && mark(frame) {
            self.counters.marked += 1;
        }
        self.line_free = self.line_free.max(now) + Duration::from_secs_f64(frame.len() as f64 / rate);
        Some(self.line_free)
    }
}

/// The two bits of ECN.
const ECN: u8 = 3;

/// Sets Congestion Experienced in an IP packet whose transport knows ECN; whether it did.
fn mark(frame: &mut [u8]) -> bool {
    match frame {
        // IPv4: the checksum covers the byte.
        [_, _, _, _, _, _, _, _, _, _, _, _, 8, 0, ip @ ..] if ip.len() >= 20 && ip[1] & ECN != 0 => {
            let before = u16::from_be_bytes([ip[0], ip[1]]);
            ip[1] |= ECN;
            let after = u16::from_be_bytes([ip[0], ip[1]]);
            let sum = u16::from_be_bytes([ip[10], ip[11]]);
            // RFC 1624, equation 3.
            let mut new = u32::from(!sum) + u32::from(!before) + u32::from(after);
            while new > 0xffff {
                new = (new & 0xffff) + (new >> 16);
            }
            ip[10..12].copy_from_slice(&(!(new as u16)).to_be_bytes());
            true
        }
        [_, _, _, _, _, _, _, _, _, _, _, _, 0x86, 0xdd, ip @ ..] if ip.len() >= 40 && ip[1] & (ECN << 4) != 0 => {
            ip[1] |= ECN << 4;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn frame(number: u32) -> Vec<u8> {
        let mut frame = vec![0; 1000];
        frame[..4].copy_from_slice(&number.to_be_bytes());
        frame
    }

    fn lane(conditions: Conditions) -> Lane {
        let mut lane = Lane::new(7);
        lane.set(conditions);
        lane
    }

    /// Sends frames, one each so long after the other; their numbers as they come out, and when.
    fn sent(lane: &mut Lane, frames: u32, apart: Duration) -> Vec<(u32, Duration)> {
        let mut out = Vec::new();
        let mut take = |lane: &mut Lane, until: Duration| {
            while let Some(due) = lane.next_due().filter(|due| *due <= until) {
                let frame = lane.pop(due).expect("it is due");
                out.push((u32::from_be_bytes(frame[..4].try_into().expect("4 bytes")), due));
                lane.came_out(true);
            }
        };
        for n in 0..frames {
            take(lane, apart * n);
            lane.push(apart * n, frame(n));
        }
        take(lane, Duration::MAX);
        balanced(lane);
        out
    }

    fn balanced(lane: &Lane) {
        let c = lane.counters();
        let ends = c.cut + c.lost + c.dropped + c.refused + c.delivered + lane.under_way() as u64;
        assert_eq!(c.taken + c.repeated, ends, "{c:?}");
    }

    #[test]
    fn a_perfect_lane_gives_what_it_gets_at_once_and_in_order() {
        let mut lane = lane(Conditions::default());
        let out = sent(&mut lane, 100, MS);
        assert_eq!(out, (0..100).map(|n| (n, MS * n)).collect::<Vec<_>>());
    }

    #[test]
    fn a_cut_lane_gives_what_was_under_way() {
        let mut lane = lane(Conditions {
            delay: MS,
            ..Conditions::default()
        });
        lane.push(Duration::ZERO, frame(1));
        lane.set(Conditions::CUT);
        lane.push(Duration::ZERO, frame(2));
        assert_eq!(lane.pop(Duration::ZERO), None);
        assert_eq!((lane.pop(MS), lane.pop(MS)), (Some(frame(1)), None));
        assert_eq!(lane.counters().cut, 1);
    }

    #[test]
    fn losses_are_as_many_as_they_are_to_be() {
        let mut lane = lane(Conditions {
            loss: 0.05,
            ..Conditions::default()
        });
        let out = sent(&mut lane, 10_000, MS);
        assert_eq!(out.len() as u64, 10_000 - lane.counters().lost);
        assert!((400..600).contains(&lane.counters().lost), "{:?}", lane.counters());
    }

    #[test]
    fn bursts_have_their_length() {
        let burst = Burst {
            begins: 0.01,
            length: 8.0,
        };
        let mut lane = lane(Conditions {
            burst: Some(burst),
            ..Conditions::default()
        });
        let out = sent(&mut lane, 20_000, MS);
        let gaps: Vec<u32> = out
            .windows(2)
            .map(|w| w[1].0 - w[0].0 - 1)
            .filter(|gap| *gap > 0)
            .collect();
        let mean = f64::from(gaps.iter().sum::<u32>()) / gaps.len() as f64;
        assert!(
            (100..300).contains(&gaps.len()) && (6.0..10.0).contains(&mean),
            "{} {mean}",
            gaps.len()
        );
    }

    #[test]
    fn duplicates_come_twice_and_late_ones_after_those_behind_them() {
        let mut lane = lane(Conditions {
            duplicate: 0.1,
            reorder: 0.1,
            reorder_by: MS * 3,
            ..Conditions::default()
        });
        let out = sent(&mut lane, 10_000, MS);
        let c = lane.counters();
        assert_eq!(out.len() as u64, 10_000 + c.repeated);
        assert!(
            (900..1100).contains(&c.repeated) && (1000..1200).contains(&c.reordered),
            "{c:?}"
        );
        assert!(out.windows(2).any(|w| w[0].0 > w[1].0));
    }

    #[test]
    fn jitter_keeps_the_order() {
        let mut lane = lane(Conditions {
            delay: MS * 5,
            jitter: MS * 20,
            ..Conditions::default()
        });
        let out = sent(&mut lane, 1000, MS);
        assert!(out.is_sorted_by_key(|(n, _)| *n));
        assert!(
            out.iter()
                .all(|(n, due)| (MS * 5..=MS * 26).contains(&(*due - MS * *n)))
        );
    }

    #[test]
    fn a_line_has_a_rate_and_its_queue_overflows() {
        let line = Line {
            rate: 500_000,
            queue: 10_000,
            mark_above: None,
        };
        let mut lane = lane(Conditions {
            line: Some(line),
            ..Conditions::default()
        });
        // Twice the rate.
        let out = sent(&mut lane, 1000, MS);
        let c = lane.counters();
        assert!(c.delivered.abs_diff(505) < 5 && c.dropped.abs_diff(495) < 5, "{c:?}");
        assert!(
            out.windows(2)
                .all(|w| w[1].1 - w[0].1 >= MS * 2 - Duration::from_nanos(10))
        );
    }

    #[test]
    fn marks_are_set_above_a_threshold_and_leave_the_checksum_right() {
        let line = Line {
            rate: 500_000,
            queue: 1 << 20,
            mark_above: Some(5000),
        };
        let mut lane = lane(Conditions {
            line: Some(line),
            ..Conditions::default()
        });
        let mut v4 = vec![0; 1000];
        v4[12..14].copy_from_slice(&[8, 0]);
        v4[14..34].copy_from_slice(&[
            0x45, 2, 3, 0xda, 0x12, 0x34, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        let sum = |ip: &[u8]| -> u16 {
            let mut sum: u32 = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            sum as u16
        };
        let check = !sum(&v4[14..34]);
        v4[24..26].copy_from_slice(&check.to_be_bytes());
        let mut v6 = vec![0; 1000];
        v6[12..16].copy_from_slice(&[0x86, 0xdd, 0x60, 0x10]);
        let mut unable = v4.clone();
        unable[15] = 0;
        for _ in 0..10 {
            for frame in [&v4, &v6, &unable] {
                lane.push(Duration::ZERO, frame.clone());
            }
        }
        let mut marked = 0;
        while let Some(frame) = lane.pop(Duration::from_secs(1)) {
            match frame[12] {
                8 if frame[15] == 3 => assert_eq!(sum(&frame[14..34]), 0xffff),
                0x86 if frame[15] == 0x30 => {}
                _ => continue,
            }
            marked += 1;
        }
        // The first five thousand bytes found less before them.
        assert_eq!((marked, lane.counters().marked), (16, 16));
    }
}
