//! What a peer puts into the IPv4 Identification, which the ICRC covers and a UDP socket does not show.
//!
//! Recovery (see `roce-icrc`) finds an Identification for one in 2^16 corrupt packets. What the peer has shown so far
//! wins bits back: ConnectX sends 0 and ferroce a small index, so those are held to (nearly) all 32 bits of the ICRC;
//! rdma_rxe sends a counter, so an Identification far from the next one is not believed at first.

use core::time::Duration;

use roce_verbs::Instant;

/// Identifications below this are a place in a GSO send (`UDP_MAX_SEGMENTS` of newer kernels).
const INDEX_END: u16 = 128;
/// So many zeros, and nothing but small numbers, make a peer one that sends small numbers. A counter does not repeat.
const ZEROS_OF_PROOF: u8 = 4;
/// So far from the expected one a counter may be: packets lost, or sent to others under the same counter.
const COUNTER_SPREAD: u16 = 4096;
/// Linux moves its counters on by a random step that grows with the idle time: after this pause nothing is predicted.
const PREDICTION_LIFE: Duration = Duration::from_secs(1);
/// So many packets in a row that fit together under a counter refute everything believed before.
const DISSENTERS_OF_PROOF: u8 = 3;

/// What is known about a peer's Identifications.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pattern {
    /// Nothing yet but so many zeros and (if true) only small numbers.
    Unknown { zeros: u8, only_small: bool },
    /// Zero or a small index.
    Index,
    /// Counts up. `zeros`: how often 0 came with nothing but small numbers around it.
    Counter { next: u16, at: Instant, zeros: u8 },
}

/// Learns and judges one peer's Identifications.
#[derive(Clone, Debug)]
pub(crate) struct IdentTracker {
    pattern: Pattern,
    /// The last Identification that was not believed, and how many in a row fit after it.
    dissent: Option<(u16, u8)>,
}

impl Default for IdentTracker {
    fn default() -> Self {
        Self {
            pattern: Pattern::Unknown {
                zeros: 0,
                only_small: true,
            },
            dissent: None,
        }
    }
}

/// Whether `id` is where a counter that stood at `next` may be now.
fn near(id: u16, next: u16) -> bool {
    id.wrapping_sub(next) < COUNTER_SPREAD || next.wrapping_sub(id) < COUNTER_SPREAD / 4
}

impl IdentTracker {
    /// The Identification to try first for packet `index` of a GRO buffer.
    pub(crate) fn hint(&self, index: u16) -> u16 {
        match self.pattern {
            Pattern::Counter { next, .. } => next.wrapping_add(index),
            _ => index,
        }
    }

    /// Judges the Identification with which a packet's ICRC came out right. False: the packet is taken for corrupt.
    pub(crate) fn accept(&mut self, now: Instant, id: u16) -> bool {
        let believed = match &mut self.pattern {
            Pattern::Unknown { zeros, only_small } => {
                *zeros = zeros.saturating_add(u8::from(id == 0));
                *only_small &= id < INDEX_END;
                if !*only_small {
                    self.pattern = Pattern::Counter {
                        next: id.wrapping_add(1),
                        at: now,
                        zeros: 0,
                    };
                } else if *zeros >= ZEROS_OF_PROOF {
                    self.pattern = Pattern::Index;
                }
                true
            }
            Pattern::Index => id < INDEX_END,
            Pattern::Counter { next, at, zeros } => {
                let fits = now.saturating_since(*at) > PREDICTION_LIFE || near(id, *next);
                if fits {
                    // A packet that was overtaken does not move the counter back.
                    if id.wrapping_sub(*next) < 1 << 15 || now.saturating_since(*at) > PREDICTION_LIFE {
                        *next = id.wrapping_add(1);
                    }
                    *at = now;
                    *zeros = match id {
                        0 => zeros.saturating_add(1),
                        1..INDEX_END => *zeros,
                        _ => 0,
                    };
                    // A corrupt packet at the start had made it look like a counter.
                    if *zeros >= ZEROS_OF_PROOF {
                        self.pattern = Pattern::Index;
                    }
                }
                fits
            }
        };
        if believed {
            self.dissent = None;
        } else {
            self.doubt(now, id);
        }
        believed
    }

    /// Counts Identifications that were not believed; enough that fit together start a new counter.
    fn doubt(&mut self, now: Instant, id: u16) {
        let run = match self.dissent {
            Some((last, run)) if near(id, last) => run.saturating_add(1),
            _ => 1,
        };
        self.dissent = Some((id, run));
        if run >= DISSENTERS_OF_PROOF {
            self.pattern = Pattern::Counter {
                next: id.wrapping_add(1),
                at: now,
                zeros: 0,
            };
            self.dissent = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Instant = Instant::from_nanos(1_000_000);

    #[test]
    fn a_peer_that_sends_small_numbers_is_held_to_them() {
        let mut t = IdentTracker::default();
        for id in [0, 0, 1, 2, 3, 0, 0] {
            assert!(t.accept(T, id));
        }
        assert_eq!(t.hint(5), 5);
        assert!(!t.accept(T, 40_000));
        assert!(!t.accept(T, 17_000));
        assert!(t.accept(T, 63));
    }

    #[test]
    fn a_counter_is_followed_and_predicted() {
        let mut t = IdentTracker::default();
        for id in [65_533, 65_534, 65_535, 0, 1, 3, 900] {
            assert!(t.accept(T, id), "{id}");
        }
        assert_eq!(t.hint(0), 901);
        assert!(t.accept(T, 899), "overtaken");
        assert_eq!(t.hint(0), 901);
        assert!(!t.accept(T, 30_000));
        assert!(t.accept(T, 901));
        let later = T + Duration::from_secs(2);
        assert!(t.accept(later, 30_000));
        assert_eq!(t.hint(0), 30_001);
    }

    #[test]
    fn one_corrupt_packet_does_not_weaken_the_check_for_ever() {
        let mut t = IdentTracker::default();
        // Corrupt, but nothing is known yet that could tell.
        assert!(t.accept(T, 40_000));
        for id in [0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 0] {
            t.accept(T, id);
        }
        assert!(!t.accept(T, 3000));
        assert!(t.accept(T, 1));
    }

    #[test]
    fn a_wrong_belief_is_given_up() {
        let mut t = IdentTracker::default();
        for _ in 0..8 {
            assert!(t.accept(T, 0));
        }
        // The address now belongs to a peer that counts.
        assert!(!t.accept(T, 500));
        assert!(!t.accept(T, 501));
        assert!(!t.accept(T, 503));
        assert!(t.accept(T, 504));
    }
}
