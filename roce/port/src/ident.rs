//! IPv4 Identifications of peers, which the ICRC covers and a UDP socket does not show.
//!
//! Recovery (see `roce-icrc`) finds an Identification for one in 2^16 corrupt packets. The peer's pattern wins bits back: ConnectX
//! sends 0 and ferroce a small index, so that their ICRCs count with (nearly) all 32 bits; rdma_rxe sends a counter, so that an
//! Identification far from the next one is implausible.
//!
//! This detects corruption, not forgery: anybody can seal a packet with any Identification. But a forger who teaches a tracker wrong
//! numbers would have it refuse the peer's own packets. Therefore only some packets teach:
//!
//! | packets from the peer's address | judged by | teach |
//! | --- | --- | --- |
//! | to a connected queue pair, with a PSN that it expects (`QueuePair::expects`) | [`IdentTracker`] | it: a plausible one confirms and moves it, three others in a row that fit together replace it |
//! | the same, the first of its queue pair (`QueuePair::heard`) | nothing | it: the address may belong to another host by now |
//! | to a connected queue pair, any other PSN | [`IdentTracker`] | nothing |
//! | of strangers: to QP1, datagrams, multicast | [`IdentTracker`], if implausible also [`Strangers`] | [`Strangers`], that there was an implausible one |
//!
//! [`Strangers`] only admits more packets, and only of strangers. No state is kept of an address without queue pairs: every
//! Identification from there is plausible.

use core::time::Duration;

use roce_verbs::Instant;

/// Identifications below this are an index in a GSO send (`UDP_MAX_SEGMENTS` of newer kernels).
const INDEX_END: u16 = 128;
/// Zeros, among only small numbers, that prove that a peer sends small numbers. A counter does not repeat.
const ZEROS_OF_PROOF: u8 = 4;
/// Distance by which a counter may be ahead at once: packets lost, or sent to others.
const COUNTER_SPREAD: u64 = 4096;
/// Distance by which a counter may be behind: packets overtaken.
const OVERTAKEN: u16 = 1024;
/// Time in which the counter may move one further: packets of the same counter that don't teach, and the random step by which Linux
/// moves an idle counter. After 16 ms every Identification is plausible.
const NANOS_PER_STEP: u64 = 256;
/// Packets in a row that fit together as a counter and replace the pattern.
const DISSENTERS_OF_PROOF: u8 = 3;
/// Interval in which at most one implausible stranger comes from corruption: 2^16 corrupt packets make one.
const STRANGERS_MEMORY: Duration = Duration::from_secs(60);

/// Pattern of a peer's Identifications.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pattern {
    /// Not known yet: number of zeros, and whether all numbers were small.
    Unknown { zeros: u8, only_small: bool },
    /// Zero or a small index.
    Index,
    /// Counts up. `zeros`: zeros in a row, with only small numbers between them.
    Counter { next: u16, at: Instant, zeros: u8 },
}

/// Learns and judges one peer's Identifications.
#[derive(Clone, Debug)]
pub(crate) struct IdentTracker {
    pattern: Pattern,
    dissent: Option<Dissent>,
}

/// Last implausible Identification, and the number of those in a row that fit together.
#[derive(Clone, Copy, Debug)]
struct Dissent {
    id: u16,
    at: Instant,
    run: u8,
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

/// Returns the number of steps that a counter may be ahead of its position at a time.
fn reach(at: Instant, now: Instant) -> u64 {
    now.as_nanos().saturating_sub(at.as_nanos()) / NANOS_PER_STEP + COUNTER_SPREAD
}

/// Returns whether a counter whose position was `next` at a time may be at `id` now.
fn near(id: u16, next: u16, at: Instant, now: Instant) -> bool {
    let (ahead, behind) = (u64::from(id.wrapping_sub(next)), next.wrapping_sub(id));
    ahead < COUNTER_SPREAD || behind < OVERTAKEN || ahead < reach(at, now)
}

impl IdentTracker {
    /// Returns the Identification to try first for packet `index` of a GRO buffer. A wrong one only costs time.
    pub(crate) fn hint(&self, index: u16) -> u16 {
        match self.pattern {
            Pattern::Counter { next, .. } => next.wrapping_add(index),
            _ => index,
        }
    }

    /// Returns whether the Identification with which a packet's ICRC is right is plausible. Else the packet is taken for corrupt. Anybody
    /// may have sent it: nothing is learned.
    pub(crate) fn judge(&self, now: Instant, id: u16) -> bool {
        match self.pattern {
            Pattern::Unknown { .. } => true,
            Pattern::Index => id < INDEX_END,
            Pattern::Counter { next, at, .. } => near(id, next, at, now),
        }
    }

    /// Returns whether the Identification is plausible and teaches nothing: a shortcut for most packets.
    #[inline]
    pub(crate) fn is_usual(&self, id: u16) -> bool {
        self.pattern == Pattern::Index && id < INDEX_END && self.dissent.is_none()
    }

    /// Judges and learns the Identification of a packet with an expected PSN. Returns false if it is implausible.
    pub(crate) fn learn(&mut self, now: Instant, id: u16) -> bool {
        if !self.judge(now, id) {
            self.doubt(now, id);
            return false;
        }
        self.dissent = None;
        if self.pattern != Pattern::Index {
            self.confirm(now, id);
        }
        true
    }

    /// Learns from the first packet of a queue pair, which is plausible in any case.
    pub(crate) fn learn_first(&mut self, now: Instant, id: u16) {
        if !self.judge(now, id) {
            *self = Self::default();
        }
        self.learn(now, id);
    }

    /// Learns a plausible Identification.
    fn confirm(&mut self, now: Instant, id: u16) {
        match &mut self.pattern {
            Pattern::Unknown { zeros, only_small } => {
                *zeros = zeros.saturating_add(u8::from(id == 0));
                *only_small &= id < INDEX_END;
                if !*only_small {
                    self.pattern = counter(now, id);
                } else if *zeros >= ZEROS_OF_PROOF {
                    self.pattern = Pattern::Index;
                }
            }
            Pattern::Index => {}
            Pattern::Counter { next, at, zeros } => {
                let wrapped = |near: u16| reach(*at, now) + u64::from(near) >= 1 << 16;
                // Zero again, and the counter can't have wrapped: a corrupt packet at the start, or a former peer, had made it
                // look like a counter.
                *zeros = match id {
                    0 if *next <= INDEX_END && !wrapped(INDEX_END) => zeros.saturating_add(1),
                    1..INDEX_END => *zeros,
                    _ => 0,
                };
                // An overtaken packet does not move the counter back. It looks like a counter that has nearly wrapped, which
                // does move.
                if !(1..OVERTAKEN).contains(&next.wrapping_sub(id)) || wrapped(OVERTAKEN) {
                    *next = id.wrapping_add(1);
                }
                *at = now;
                if *zeros >= ZEROS_OF_PROOF {
                    self.pattern = Pattern::Index;
                }
            }
        }
    }

    /// Counts implausible Identifications. Enough that fit together start a new counter.
    fn doubt(&mut self, now: Instant, id: u16) {
        let run = match self.dissent {
            Some(d) if near(id, d.id, d.at, now) => d.run.saturating_add(1),
            _ => 1,
        };
        self.dissent = Some(Dissent { id, at: now, run });
        if run >= DISSENTERS_OF_PROOF {
            self.pattern = counter(now, id);
            self.dissent = None;
        }
    }
}

/// Creates a counter whose position is `id`.
fn counter(now: Instant, id: u16) -> Pattern {
    Pattern::Counter {
        next: id.wrapping_add(1),
        at: now,
        zeros: 0,
    }
}

/// Strangers from a peer's address with implausible Identifications. A single one may be corrupt. If others follow, the peer has
/// restarted, or somebody forges packets: then they are admitted, because a flood of forged ones must not keep the peer's own out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Strangers {
    last: Option<Instant>,
}

impl Strangers {
    /// Returns whether an implausible one is admitted.
    pub(crate) fn admit(&mut self, now: Instant) -> bool {
        let before = self.last.replace(now);
        before.is_some_and(|at| now.saturating_since(at) < STRANGERS_MEMORY)
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
            assert!(t.learn(T, id));
        }
        assert_eq!(t.hint(5), 5);
        assert!(!t.learn(T, 40_000));
        assert!(!t.learn(T, 17_000));
        assert!(t.learn(T, 63));
    }

    #[test]
    fn a_counter_is_followed_and_predicted() {
        let mut t = IdentTracker::default();
        for id in [65_533, 65_534, 65_535, 0, 1, 3, 900] {
            assert!(t.learn(T, id), "{id}");
        }
        assert_eq!(t.hint(0), 901);
        assert!(t.learn(T, 899), "overtaken");
        assert_eq!(t.hint(0), 901);
        assert!(!t.learn(T, 30_000));
        assert!(t.learn(T, 901));
        let later = T + Duration::from_secs(2);
        assert!(t.learn(later, 30_000));
        assert_eq!(t.hint(0), 30_001);
    }

    #[test]
    fn a_counter_may_move_on_unseen_with_time() {
        let mut t = IdentTracker::default();
        assert!(t.learn(T, 1000));
        // Half a million packets a second to others, of which one in 10,000 is seen here.
        let (mut now, mut id) = (T, 1000u16);
        for _ in 0..100 {
            (now, id) = (now + Duration::from_millis(20), id.wrapping_add(10_000));
            assert!(t.learn(now, id), "{id}");
        }
        assert!(!t.judge(now, id.wrapping_add(5000)));
        assert!(t.judge(now + Duration::from_millis(1), id.wrapping_add(5000)));
    }

    #[test]
    fn one_corrupt_packet_does_not_weaken_the_check_for_ever() {
        let mut t = IdentTracker::default();
        // Corrupt, but nothing is known yet that could tell.
        assert!(t.learn(T, 40_000));
        for id in [0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 0] {
            t.learn(T, id);
        }
        assert!(!t.learn(T, 3000));
        assert!(t.learn(T, 1));
    }

    #[test]
    fn a_counter_that_may_have_wrapped_is_not_taken_for_an_index() {
        let mut t = IdentTracker::default();
        assert!(t.learn(T, 500));
        let mut now = T;
        for _ in 0..8 {
            now = now + Duration::from_millis(50);
            assert!(t.learn(now, 0));
        }
        assert!(t.learn(now, 1000));
    }

    #[test]
    fn a_counter_that_has_nearly_wrapped_is_where_it_is_seen() {
        let mut t = IdentTracker::default();
        assert!(t.learn(T, 311));
        let later = T + Duration::from_secs(2);
        assert!(t.learn(later, 64_825));
        assert!(t.learn(later, 64_824), "overtaken");
        assert_eq!(t.hint(0), 64_826);
    }

    #[test]
    fn a_wrong_belief_is_given_up() {
        let mut t = IdentTracker::default();
        for _ in 0..8 {
            assert!(t.learn(T, 0));
        }
        // The address now belongs to a peer that counts.
        assert!(!t.learn(T, 500));
        assert!(!t.learn(T, 501));
        assert!(!t.learn(T, 503));
        assert!(t.learn(T, 504));
    }

    #[test]
    fn what_is_only_judged_changes_nothing() {
        let mut t = IdentTracker::default();
        for _ in 0..8 {
            assert!(t.learn(T, 0));
        }
        for id in 500..600 {
            assert!(!t.judge(T, id));
        }
        assert!(t.learn(T, 0));
    }

    #[test]
    fn the_first_packet_of_a_queue_pair_is_believed() {
        let mut t = IdentTracker::default();
        for _ in 0..8 {
            assert!(t.learn(T, 0));
        }
        t.learn_first(T, 9000);
        assert!(t.learn(T, 9001));
        assert!(!t.learn(T, 0));
        t.learn_first(T, 9002);
        assert_eq!(t.hint(0), 9003);
    }

    #[test]
    fn one_strange_stranger_is_refused_and_others_after_it_are_not() {
        let mut s = Strangers::default();
        assert!(!s.admit(T));
        assert!(s.admit(T + Duration::from_secs(5)));
        assert!(s.admit(T + Duration::from_secs(10)));
        assert!(!s.admit(T + Duration::from_secs(100)));
    }
}
