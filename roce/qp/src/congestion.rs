//! Congestion control: decides how many bytes may be in flight towards a peer.

use core::time::Duration;

use roce_verbs::Instant;

/// Way in which a loss was noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// A go-back-N peer reported a gap: everything behind it is retransmitted.
    Gap,
    /// A selective ACK reported what is missing: nothing else is retransmitted.
    Selective,
    /// No answer within the timeout: everything in flight counts as lost.
    Timeout,
}

/// Limits of a [`Window`](crate::Window), bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowConfig {
    /// Initial size.
    pub initial: usize,
    /// Smallest size.
    pub min: usize,
    /// Largest size: about what the peer's socket buffer holds.
    pub max: usize,
}

impl Default for WindowConfig {
    fn default() -> Self {
        Self {
            initial: 64 << 10,
            min: 16 << 10,
            max: 4 << 20,
        }
    }
}

/// Bytes that each sender keeps in the queue of the slowest link: enough to keep the link busy. Senders with as much in the queue get
/// the same share.
const SHARE: usize = 256 << 10;
/// Growth per round trip towards a go-back-N peer after a loss. Multiplied by round trip / [`LONG_PATH`], at most
/// [`LONG_PATH_MOST`] times.
const STEP: usize = 16 << 10;
const LONG_PATH: Duration = Duration::from_millis(2);
const LONG_PATH_MOST: u128 = 16;
/// Growth per round trip in competition with loss-based senders, about that of CUBIC: a base, more for each microsecond of the round
/// trip, and a limit.
const STEP_LOSS_BASED: usize = 4 << 10;
const STEP_LOSS_BASED_PER_US: usize = 4;
const STEP_LOSS_BASED_MOST: usize = 128 << 10;
/// The queue is empty while round trips exceed the shortest one by no more than this part of it and [`SLACK`], which scheduling
/// alone can take.
const EMPTY: u32 = 16;
/// The queue is long if they exceed it by more than this part. Losses may be overflows then.
const LONG: u32 = 4;
/// See [`EMPTY`].
const SLACK: Duration = Duration::from_micros(500);
/// Lifetime of the shortest round trip, once to twice this: paths change.
const EPOCH: Duration = Duration::from_secs(30);
/// Time without an empty queue after which a probe drains it, …
const PROBE_INTERVAL: Duration = Duration::from_millis(500);
/// … and after a probe that has not found it empty. At least [`PROBE_MIN_RTTS`] round trips pass between probes.
const PROBE_RETRY: Duration = Duration::from_millis(100);
const PROBE_MIN_RTTS: u32 = 10;
/// Longest probe, rounds.
const PROBE_ROUNDS: u8 = 5;
/// Failed probes in a row that show that loss-based senders fill the queue.
const FAILED_PROBES: u8 = 4;
/// Time between probes in competition with them, and when the queue falls: another sender may be probing.
const PROBE_INTERVAL_LOSS_BASED: Duration = Duration::from_secs(1);
const PROBE_JOIN: Duration = Duration::from_millis(250);
/// Time after such competition in which one failed probe shows it again: loss-based senders let the queue become empty now and then.
const WARY: Duration = Duration::from_secs(5);
/// A loss of more than a window divided by this is heavy (15 %).
const HEAVY: usize = 7;
/// A loss of more than this part of the bytes sent to a peer with selective ACKs is heavy (17 %).
const HEAVY_SELECTIVE: usize = 6;
/// Fewest bytes of which that is judged.
const SELECTIVE_LEAST: usize = 128 << 10;

/// State of the queues on the path, as round trips show it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Queue {
    Empty,
    Some,
    Long,
}

/// Competing senders in the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Competition {
    /// None, or ones that keep the queue short as this one does.
    DelayBased,
    /// Ones that fill it until it overflows, as TCP does.
    LossBased,
}

/// Acknowledgements of one round trip.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    begun: Instant,
    /// Shortest round trip in it; longest of it and of the round before.
    least: Option<Duration>,
    most: [Duration; 2],
    /// Most bytes in flight in it, and in the round before.
    peak: usize,
    peak_before: usize,
}

/// Congestion control by round trips and, if those show a queue, by losses: random loss does not slow it down.
///
/// The window doubles per round trip until a queue builds up. Then it approaches the size at which a fixed number of bytes
/// is in the queue (256 KiB, as in FAST TCP): senders with as much in the same queue get the same share of the link.
/// That requires the round trip without a queue, which a late sender has never seen. So probes drain the queue now and
/// then: one sender has less in flight for a round trip, and those that see the queue fall do the same. Loss-based senders,
/// such as TCP's, never let it become empty. In competition with them the window grows by steps and shrinks with
/// losses as theirs do, until the queue is found empty again (the modes of Copa, Arun and Balakrishnan, NSDI 2018).
///
/// With selective ACKs a loss costs no more than the lost packets. It counts only if the queue was long in two rounds, in competition
/// with loss-based senders, or if it is heavy: a receive buffer overflows without a queue. Towards a go-back-N peer a loss counts if
/// less than half a window was delivered since the loss before: a window much longer than the runs between losses is wasted
/// anyway.
#[derive(Debug)]
pub(crate) struct DelayAware {
    config: WindowConfig,
    size: usize,
    /// Size up to which the window doubles per round trip.
    threshold: usize,
    /// Bytes delivered since the last loss.
    run: usize,
    /// Bytes delivered and lost since losses reported by selective ACKs were judged last.
    selective: (usize, usize),
    /// Bytes delivered towards the next step of growth.
    credit: usize,
    round: Round,
    /// Shortest round trips of this epoch and the one before.
    shortest: [Option<Duration>; 2],
    epoch: Instant,
    /// State in the last round, in the one before, and by the last round trip.
    queue: Queue,
    queue_before: Queue,
    latest: Queue,
    /// Duration of a round.
    rtt: Duration,
    competition: Competition,
    /// Time when the queue was last empty, or probed.
    probed: Instant,
    /// Probe in progress: rounds left, and the size to return to.
    probe: Option<(u8, usize)>,
    /// Shortest round trip before the last probe, and whether that has found a shorter one: there may be one yet.
    rtt_before: Duration,
    found_shorter: bool,
    /// Probes in a row that have not found the queue empty.
    failed_probes: u8,
    /// Last time of competition with loss-based senders, and the window's size then.
    competed: Option<(Instant, usize)>,
    /// Delays in the queue of the last two rounds.
    delays: [Duration; 2],
    /// The peer is go-back-N and has reported a gap.
    go_back_n: bool,
    /// Rounds since a loss shrank the window: each permits growth by one step more than the one before.
    rounds: usize,
    /// End of the losses for which the window has shrunk already.
    shrunk_until: Instant,
    /// Size and threshold before a timeout that may be spurious.
    before: Option<(usize, usize)>,
}

impl DelayAware {
    /// Creates the state for an unknown path.
    pub(crate) fn new(config: WindowConfig) -> Self {
        Self {
            config,
            size: config.initial.clamp(config.min, config.max.max(config.min)),
            threshold: config.max,
            run: 0,
            selective: (0, 0),
            credit: 0,
            round: Round::default(),
            shortest: [None; 2],
            epoch: Instant::ZERO,
            queue: Queue::Empty,
            queue_before: Queue::Empty,
            latest: Queue::Empty,
            rtt: Duration::ZERO,
            competition: Competition::DelayBased,
            probed: Instant::ZERO,
            probe: None,
            rtt_before: Duration::ZERO,
            found_shorter: false,
            failed_probes: 0,
            competed: None,
            delays: [Duration::ZERO; 2],
            go_back_n: false,
            rounds: usize::MAX,
            shrunk_until: Instant::ZERO,
            before: None,
        }
    }

    /// Returns the size below which a queue does not shrink the window.
    fn floor(&self) -> usize {
        self.config.min * 4
    }

    fn judge(&self, rtt: Duration) -> Queue {
        let shortest = self.shortest_rtt().unwrap_or(rtt);
        if rtt > shortest + shortest / LONG + SLACK {
            Queue::Long
        } else if rtt > shortest + shortest / EMPTY + SLACK {
            Queue::Some
        } else {
            Queue::Empty
        }
    }

    fn on_round_trip(&mut self, now: Instant, rtt: Duration, used: bool) {
        if now.saturating_since(self.epoch) > EPOCH {
            self.epoch = now;
            self.shortest = [None, self.shortest[0]];
        }
        self.shortest[0] = Some(self.shortest[0].map_or(rtt, |s| s.min(rtt)));
        self.latest = self.judge(rtt);
        let least = self.round.least.map_or(rtt, |l| l.min(rtt));
        self.round.least = Some(least);
        self.round.most[0] = self.round.most[0].max(rtt);
        // What has been acknowledged was sent in this round.
        if now.saturating_since(self.round.begun) >= rtt {
            self.end_round(now, least, used);
        }
    }

    fn end_round(&mut self, now: Instant, least: Duration, used: bool) {
        self.round = Round {
            begun: now,
            least: None,
            most: [Duration::ZERO, self.round.most[0]],
            peak: 0,
            peak_before: self.round.peak,
        };
        self.rtt = least;
        self.rounds = self.rounds.saturating_add(1);
        self.queue_before = self.queue;
        self.queue = self.judge(least);
        let delay = least.saturating_sub(self.shortest_rtt().unwrap_or(least));
        let before = self.delays[0].min(self.delays[1]);
        self.delays = [delay, self.delays[0]];
        if self.queue == Queue::Empty {
            self.found_shorter = self.probe.is_some() && least + least / EMPTY < self.rtt_before;
            self.competition = Competition::DelayBased;
            self.probed = now;
            self.competed = self.competed.filter(|(at, _)| now.saturating_since(*at) < WARY);
            self.failed_probes = if self.competed.is_some() { FAILED_PROBES } else { 0 };
        }
        if let Some((left, back)) = self.probe {
            let found = self.queue == Queue::Empty;
            if !found && left > 1 {
                self.probe = Some((left - 1, back));
                return;
            }
            // At once: while growing back slowly, others would take the share.
            (self.probe, self.size, self.threshold) = (None, back, back);
            if !found {
                self.on_failed_probe(now, back);
            }
            return;
        }
        if self.queue != Queue::Empty && self.is_probe_due(now, delay < before / 4 * 3) {
            self.begin_probe(now);
            return;
        }
        if self.competition == Competition::DelayBased && used {
            self.approach();
        }
    }

    fn is_probe_due(&self, now: Instant, falls: bool) -> bool {
        let rest = match (self.competition, self.failed_probes) {
            // Another sender probes: together they drain it. But it also falls after a loss of a loss-based sender.
            (Competition::LossBased, _) if falls => PROBE_JOIN,
            (Competition::LossBased, _) => PROBE_INTERVAL_LOSS_BASED,
            _ if falls => PROBE_RETRY,
            (Competition::DelayBased, 0) if !self.found_shorter => PROBE_INTERVAL,
            (Competition::DelayBased, _) => PROBE_RETRY,
        };
        let rest = rest.max(self.shortest_rtt().unwrap_or_default() * PROBE_MIN_RTTS);
        now.saturating_since(self.probed) > rest
    }

    /// Starts a probe: drains the queue.
    fn begin_probe(&mut self, now: Instant) {
        self.probed = now;
        self.credit = 0;
        self.probe = Some((PROBE_ROUNDS, self.size));
        self.rtt_before = self.shortest_rtt().unwrap_or_default();
        let held = self.part(self.rtt_before);
        self.size = (held / 4 * 3).max(self.config.min * 2).min(self.size);
    }

    fn on_failed_probe(&mut self, now: Instant, back: usize) {
        self.failed_probes = self.failed_probes.saturating_add(1);
        if self.failed_probes < FAILED_PROBES {
            return;
        }
        if self.competition == Competition::DelayBased {
            self.competition = Competition::LossBased;
            self.threshold = self.competed.map_or(self.config.max, |(_, size)| size.max(back));
        }
        self.competed = Some((now, self.threshold));
    }

    /// Goes half of the way to the size at which [`SHARE`] is in the queue (FAST TCP, Wei et al., 2006).
    fn approach(&mut self) {
        if self.size < self.threshold && self.queue != Queue::Long {
            return;
        }
        // Less than this is no queue.
        let still = self.shortest_rtt().unwrap_or_default() + SLACK;
        let goal = self.part(still) + SHARE;
        let (half, step) = ((self.size + goal) / 2, self.size + self.step());
        let size = match self.queue {
            Queue::Empty if self.go_back_n => step,
            Queue::Empty => half.min(self.size * 2).max(step),
            Queue::Some | Queue::Long => half,
        };
        let most = self.size.saturating_add(STEP.saturating_mul(self.rounds));
        self.size = size.min(most).clamp(self.config.min, self.config.max);
        self.threshold = self.size;
    }

    /// Returns the part of the window that would be in flight if round trips took so long.
    fn part(&self, rtt: Duration) -> usize {
        let part = self.size as u128 * rtt.min(self.rtt).as_nanos() / self.rtt.as_nanos().max(1);
        part as usize
    }

    fn grow(&mut self, bytes: usize) {
        let loss_based = self.competition == Competition::LossBased;
        if self.probe.is_some() {
            return;
        }
        if self.size < self.threshold {
            if loss_based || self.latest != Queue::Long {
                self.size = (self.size + bytes).min(self.threshold);
            }
        } else if loss_based {
            self.credit += bytes;
            if self.credit >= self.size {
                self.credit = 0;
                self.size += self.step();
            }
        }
        self.size = self.size.min(self.config.max);
    }

    fn step(&self) -> usize {
        let shortest = self.shortest_rtt().unwrap_or_default();
        match self.competition {
            Competition::DelayBased => {
                let times = shortest.as_nanos() / LONG_PATH.as_nanos();
                STEP * times.clamp(1, LONG_PATH_MOST) as usize
            }
            Competition::LossBased => {
                let more = (shortest.as_micros() as usize).saturating_mul(STEP_LOSS_BASED_PER_US);
                STEP_LOSS_BASED.saturating_add(more).min(STEP_LOSS_BASED_MOST)
            }
        }
    }

    /// Returns the size, or the one to return to after a probe.
    fn full(&self) -> usize {
        self.probe.map_or(self.size, |(_, back)| back)
    }

    fn shrink_to(&mut self, size: usize) {
        self.before = None;
        self.probe = None;
        self.credit = 0;
        self.rounds = 0;
        self.size = size.max(self.config.min);
        self.threshold = self.size;
    }

    fn on_gap(&mut self, bytes: usize) {
        self.go_back_n = true;
        let run = core::mem::take(&mut self.run);
        let full = self.full();
        if run < full / 2 || bytes > full / HEAVY {
            self.shrink_to(full / 4 * 3);
        }
        self.before = None;
        self.threshold = self.full();
    }

    fn on_selective(&mut self, now: Instant, bytes: usize) {
        self.selective.1 = self.selective.1.saturating_add(bytes);
        self.judge_selective(now);
        let loss_based = self.competition == Competition::LossBased;
        if now < self.shrunk_until || !(loss_based || self.is_long()) {
            return;
        }
        let full = self.full();
        let less = full / 10 * 7;
        if loss_based {
            self.competed = Some((now, less));
        }
        let floor = self.floor().min(full);
        self.shrink_for(now, less.max(floor));
    }

    /// Shrinks once for all losses of what was sent before now, which are reported within a round trip.
    fn shrink_for(&mut self, now: Instant, size: usize) {
        self.shrunk_until = now + self.round.most[0].max(self.round.most[1]);
        self.shrink_to(size);
    }

    /// Returns whether the queue was long for two rounds: in one, a process that forwards packets may not have been scheduled.
    fn is_long(&self) -> bool {
        self.queue == Queue::Long && self.queue_before == Queue::Long
    }

    fn judge_selective(&mut self, now: Instant) {
        let (delivered, lost) = self.selective;
        let all = delivered.saturating_add(lost);
        let full = self.full();
        if all < full.max(SELECTIVE_LEAST) {
            return;
        }
        self.selective = (0, 0);
        if lost > all / HEAVY_SELECTIVE && now >= self.shrunk_until {
            self.shrink_for(now, full / 4 * 3);
        }
    }

    fn on_timeout(&mut self) {
        let size = self.full();
        self.probe = None;
        // The queue pairs to a silent peer time out one after the other.
        if self.before.is_none() {
            self.before = Some((size, self.threshold));
            self.threshold = (size / 2).max(self.config.min * 2);
        }
        self.size = self.config.min;
        self.run = 0;
        self.credit = 0;
    }

    /// Returns the limits.
    pub(crate) fn config(&self) -> WindowConfig {
        self.config
    }

    /// Returns how many bytes may be in flight.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Returns the size before the last loss or queue made it shrink; no less than the size.
    pub(crate) fn potential(&self) -> usize {
        self.size.max(self.threshold)
    }

    /// Returns the shortest recent round trip.
    fn shortest_rtt(&self) -> Option<Duration> {
        self.shortest.into_iter().flatten().min()
    }

    /// Records the arrival of `bytes` of `in_flight`, and a round trip measured with them.
    pub(crate) fn on_acked(&mut self, now: Instant, bytes: usize, in_flight: usize, rtt: Option<Duration>) {
        self.round.peak = self.round.peak.max(in_flight);
        if self.size >= self.threshold {
            self.before = None;
        }
        self.run = self.run.saturating_add(bytes);
        self.selective.0 = self.selective.0.saturating_add(bytes);
        self.judge_selective(now);
        let used = self.round.peak.max(self.round.peak_before) >= self.size / 2;
        if let Some(rtt) = rtt {
            self.on_round_trip(now, rtt, used);
        }
        if used {
            self.grow(bytes);
        }
    }

    /// Records a loss of `bytes`.
    pub(crate) fn on_loss(&mut self, now: Instant, loss: Loss, bytes: usize) {
        match loss {
            Loss::Gap => self.on_gap(bytes),
            Loss::Selective => self.on_selective(now, bytes),
            Loss::Timeout => self.on_timeout(),
        }
    }

    /// Records that the last timeout was spurious: packets taken for lost were only late.
    pub(crate) fn on_spurious_timeout(&mut self) {
        if let Some((size, threshold)) = self.before.take() {
            self.size = self.size.max(size);
            self.threshold = self.threshold.max(threshold);
        }
    }
}

#[cfg(test)]
mod tests;
