//! IPv4 Identifications of peers, which the ICRC covers and a UDP socket does not show.
//!
//! Recovery (see `roce-icrc`) finds an Identification for one in 2^16 corrupt packets. What the peer has shown so far
//! wins bits back: ConnectX sends 0 and ferroce a small index, so those are held to (nearly) all 32 bits of the ICRC;
//! rdma_rxe sends a counter, so an Identification far from the next one is not believed at first.
//!
//! This finds damage. Against forgery it does nothing, as anybody can seal a packet with any Identification; but who could
//! teach a tracker wrong numbers would have it refuse the peer's own packets. So it matters who teaches what:
//!
//! | packets from the peer's address | judged by | teach |
//! | --- | --- | --- |
//! | to a connected queue pair, its PSN where that expects one (`QueuePair::expects`) | [`IdentTracker`] | it: a believed one confirms and moves it, three others in a row that fit together replace it |
//! | the same, and the first that its queue pair hears (`QueuePair::heard`) | nothing | it: the address may belong to another host by now |
//! | to a connected queue pair, any other PSN | [`IdentTracker`] | nothing |
//! | of strangers: to QP1, datagrams, multicast | [`IdentTracker`], and what that refuses by [`Strangers`] | [`Strangers`], that there was one to refuse |
//!
//! [`Strangers`] only ever lets in more, and only strangers. An address without queue pairs leaves no trace at all: from
//! there every Identification is believed.

use core::time::Duration;

use roce_verbs::Instant;

/// Identifications below this are a place in a GSO send (`UDP_MAX_SEGMENTS` of newer kernels).
const INDEX_END: u16 = 128;
/// So many zeros, and nothing but small numbers, make a peer one that sends small numbers. A counter does not repeat.
const ZEROS_OF_PROOF: u8 = 4;
/// So far ahead of the expected one a counter may be at once: packets lost, or under way to others.
const COUNTER_SPREAD: u64 = 4096;
/// So far behind it: packets overtaken.
const OVERTAKEN: u16 = 1024;
/// And one further ahead per so much time: packets of the same counter that don't teach, and the random step by which Linux
/// moves an idle counter on. After 16 ms nothing is predicted any more.
const NANOS_PER_STEP: u64 = 256;
/// So many packets in a row that fit together under a counter refute everything believed before.
const DISSENTERS_OF_PROOF: u8 = 3;
/// Strangers with Identifications that are not believed come once in so long a time, when it is damage: 2^16 damaged
/// packets make one of them.
const STRANGERS_MEMORY: Duration = Duration::from_secs(60);

/// Pattern of a peer's Identifications.
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
    dissent: Option<Dissent>,
}

/// The last Identification that was not believed, and how many in a row fit after it.
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

/// How many steps ahead of where it stood at a time a counter may be now.
fn reach(at: Instant, now: Instant) -> u64 {
    now.as_nanos().saturating_sub(at.as_nanos()) / NANOS_PER_STEP + COUNTER_SPREAD
}

/// Whether `id` is where a counter may be now that stood at `next` at a time.
fn near(id: u16, next: u16, at: Instant, now: Instant) -> bool {
    let (ahead, behind) = (u64::from(id.wrapping_sub(next)), next.wrapping_sub(id));
    ahead < COUNTER_SPREAD || behind < OVERTAKEN || ahead < reach(at, now)
}

impl IdentTracker {
    /// The Identification to try first for packet `index` of a GRO buffer. A wrong one only costs time.
    pub(crate) fn hint(&self, index: u16) -> u16 {
        match self.pattern {
            Pattern::Counter { next, .. } => next.wrapping_add(index),
            _ => index,
        }
    }

    /// Judges the Identification with which a packet's ICRC came out right, of a packet that may be anybody's. False: it is
    /// taken for corrupt.
    pub(crate) fn judge(&self, now: Instant, id: u16) -> bool {
        match self.pattern {
            Pattern::Unknown { .. } => true,
            Pattern::Index => id < INDEX_END,
            Pattern::Counter { next, at, .. } => near(id, next, at, now),
        }
    }

    /// Whether a packet with this Identification is believed and has nothing to teach, wherever it is: most packets, in few
    /// instructions.
    #[inline]
    pub(crate) fn is_usual(&self, id: u16) -> bool {
        self.pattern == Pattern::Index && id < INDEX_END && self.dissent.is_none()
    }

    /// Judges and learns from a packet that is where a queue pair expects one. False: it is taken for corrupt.
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

    /// Learns from the first packet that a queue pair hears of its peer, which is believed whatever there was before.
    pub(crate) fn learn_first(&mut self, now: Instant, id: u16) {
        if !self.judge(now, id) {
            *self = Self::default();
        }
        self.learn(now, id);
    }

    /// Takes in an Identification that was believed.
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
                let gone_round = |near: u16| reach(*at, now) + u64::from(near) >= 1 << 16;
                // Zero again, and the counter can't have gone round: a corrupt packet at the start, or a peer that is no
                // more, had made it look like one.
                *zeros = match id {
                    0 if *next <= INDEX_END && !gone_round(INDEX_END) => zeros.saturating_add(1),
                    1..INDEX_END => *zeros,
                    _ => 0,
                };
                // A packet that was overtaken does not move the counter back. It looks the same as one that has nearly gone
                // round; then those that it has overtaken are behind it.
                if !(1..OVERTAKEN).contains(&next.wrapping_sub(id)) || gone_round(OVERTAKEN) {
                    *next = id.wrapping_add(1);
                }
                *at = now;
                if *zeros >= ZEROS_OF_PROOF {
                    self.pattern = Pattern::Index;
                }
            }
        }
    }

    /// Counts Identifications that were not believed; enough that fit together start a new counter.
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

/// A counter that stood at `id`.
fn counter(now: Instant, id: u16) -> Pattern {
    Pattern::Counter {
        next: id.wrapping_add(1),
        at: now,
        zeros: 0,
    }
}

/// Strangers from a peer's address with Identifications that the peer's tracker does not believe. One may be damage. If
/// others come as well the peer has started anew, or somebody forges: then they are let in, because a flood of forged
/// ones must not keep the peer's own out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Strangers {
    last: Option<Instant>,
}

impl Strangers {
    /// Whether one that was not believed is let in.
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
    fn a_counter_that_may_have_gone_round_is_not_taken_for_an_index() {
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
    fn a_counter_that_has_nearly_gone_round_is_where_it_is_seen() {
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
