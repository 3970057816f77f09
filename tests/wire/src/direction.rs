//! One direction of a network: what becomes of each Ethernet frame, and when it arrives. No clocks and no I/O: times are those since the
//! start of the wire.

use std::time::Duration;

pub use roce_fault::{Burst, Conditions, Counters, Line};
use roce_fault::{Impairment, UnderWay, flip};

/// Bytes of a frame before the IP header.
const ETHERNET: usize = 14;

/// One direction of a network.
pub struct Direction {
    impairment: Impairment,
    frames: UnderWay<Vec<u8>>,
    /// What the impairment does not know: marked, delivered and refused frames.
    own: Counters,
}

impl Direction {
    /// Creates a perfect one. The same seed and frames give the same fates.
    pub fn new(seed: u64) -> Self {
        Self {
            impairment: Impairment::new(seed),
            frames: UnderWay::default(),
            own: Counters::default(),
        }
    }

    /// Returns the current impairments.
    pub fn conditions(&self) -> Conditions {
        self.impairment.conditions()
    }

    /// Changes the impairments, for later frames.
    pub fn set(&mut self, conditions: Conditions) {
        self.impairment.set(conditions);
    }

    /// Returns what became of frames.
    pub fn counters(&self) -> Counters {
        let mut all = self.impairment.counters();
        all.add(&self.own);
        all
    }

    /// Returns the number of frames under way.
    pub fn under_way(&self) -> usize {
        self.frames.len()
    }

    /// Takes a frame.
    pub fn push(&mut self, now: Duration, frame: Vec<u8>) {
        let [first, second] = self.impairment.pass(now, frame.len());
        // A duplicate that was not dropped needs a copy.
        let copy = second.is_some().then(|| frame.clone());
        for (passage, frame) in [(first, Some(frame)), (second, copy)] {
            let (Some(passage), Some(mut frame)) = (passage, frame) else {
                continue;
            };
            if passage.marked && mark(&mut frame) {
                self.own.marked += 1;
            }
            if let (Some(random), Some(packet)) = (passage.damage, frame.get_mut(ETHERNET..)) {
                flip(packet, random);
            }
            self.frames.push(passage.due, frame);
        }
    }

    /// Takes out the next frame that is due.
    pub fn pop(&mut self, now: Duration) -> Option<Vec<u8>> {
        self.frames.pop(now)
    }

    /// Returns when the next frame is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.frames.next_due()
    }

    /// Counts a frame that was due.
    pub fn came_out(&mut self, delivered: bool) {
        match delivered {
            true => self.own.delivered += 1,
            false => self.own.refused += 1,
        }
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

    fn direction(conditions: Conditions) -> Direction {
        let mut direction = Direction::new(7);
        direction.set(conditions);
        direction
    }

    /// Sends frames, one each so long after the other; their numbers as they come out, and when.
    fn sent(direction: &mut Direction, frames: u32, apart: Duration) -> Vec<(u32, Duration)> {
        let mut out = Vec::new();
        let mut take = |direction: &mut Direction, until: Duration| {
            while let Some(due) = direction.next_due().filter(|due| *due <= until) {
                let frame = direction.pop(due).expect("it is due");
                out.push((u32::from_be_bytes(frame[..4].try_into().expect("4 bytes")), due));
                direction.came_out(true);
            }
        };
        for n in 0..frames {
            take(direction, apart * n);
            direction.push(apart * n, frame(n));
        }
        take(direction, Duration::MAX);
        balanced(direction);
        out
    }

    fn balanced(direction: &Direction) {
        let c = direction.counters();
        let ends = c.cut + c.lost + c.dropped + c.refused + c.delivered + direction.under_way() as u64;
        assert_eq!(c.taken + c.repeated, ends, "{c:?}");
    }

    #[test]
    fn a_perfect_lane_gives_what_it_gets_at_once_and_in_order() {
        let mut direction = direction(Conditions::default());
        let out = sent(&mut direction, 100, MS);
        assert_eq!(out, (0..100).map(|n| (n, MS * n)).collect::<Vec<_>>());
    }

    #[test]
    fn a_cut_lane_gives_what_was_under_way() {
        let mut direction = direction(Conditions {
            delay: MS,
            ..Conditions::default()
        });
        direction.push(Duration::ZERO, frame(1));
        direction.set(Conditions::cut());
        direction.push(Duration::ZERO, frame(2));
        assert_eq!(direction.pop(Duration::ZERO), None);
        assert_eq!((direction.pop(MS), direction.pop(MS)), (Some(frame(1)), None));
        assert_eq!(direction.counters().cut, 1);
    }

    #[test]
    fn losses_are_as_many_as_they_are_to_be() {
        let mut direction = direction(Conditions {
            loss: 0.05,
            ..Conditions::default()
        });
        let out = sent(&mut direction, 10_000, MS);
        assert_eq!(out.len() as u64, 10_000 - direction.counters().lost);
        assert!(
            (400..600).contains(&direction.counters().lost),
            "{:?}",
            direction.counters()
        );
    }

    #[test]
    fn bursts_have_their_length() {
        let burst = Burst {
            begins: 0.01,
            length: 8.0,
        };
        let mut direction = direction(Conditions {
            burst: Some(burst),
            ..Conditions::default()
        });
        let out = sent(&mut direction, 20_000, MS);
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
        let mut direction = direction(Conditions {
            duplicate: 0.1,
            reorder: 0.1,
            reorder_by: MS * 3,
            ..Conditions::default()
        });
        let out = sent(&mut direction, 10_000, MS);
        let c = direction.counters();
        assert_eq!(out.len() as u64, 10_000 + c.repeated);
        assert!(
            (900..1100).contains(&c.repeated) && (1000..1200).contains(&c.reordered),
            "{c:?}"
        );
        assert!(out.windows(2).any(|w| w[0].0 > w[1].0));
    }

    #[test]
    fn damage_spares_the_ethernet_header() {
        let mut direction = direction(Conditions {
            corrupt: 1.0,
            ..Conditions::default()
        });
        for _ in 0..100 {
            direction.push(Duration::ZERO, vec![0; 20]);
            let frame = direction.pop(Duration::ZERO).expect("it is due");
            let ones: u32 = frame[ETHERNET..].iter().map(|byte| byte.count_ones()).sum();
            assert!(ones == 1 && frame[..ETHERNET] == [0; ETHERNET], "{frame:?}");
        }
        assert_eq!(direction.counters().corrupted, 100);
    }

    #[test]
    fn jitter_keeps_the_order() {
        let mut direction = direction(Conditions {
            delay: MS * 5,
            jitter: MS * 20,
            ..Conditions::default()
        });
        let out = sent(&mut direction, 1000, MS);
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
        let mut direction = direction(Conditions {
            line: Some(line),
            ..Conditions::default()
        });
        // Twice the rate.
        let out = sent(&mut direction, 1000, MS);
        let c = direction.counters();
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
        let mut direction = direction(Conditions {
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
                direction.push(Duration::ZERO, frame.clone());
            }
        }
        let mut marked = 0;
        while let Some(frame) = direction.pop(Duration::from_secs(1)) {
            match frame[12] {
                8 if frame[15] == 3 => assert_eq!(sum(&frame[14..34]), 0xffff),
                0x86 if frame[15] == 0x30 => {}
                _ => continue,
            }
            marked += 1;
        }
        // The first five thousand bytes found less before them.
        assert_eq!((marked, direction.counters().marked), (16, 16));
    }
}
