//! Congestion control: how many bytes may be under way to a peer.

use core::{fmt, time::Duration};

use roce_verbs::Instant;

use crate::window_config::WindowConfig;

/// Bytes that arrived.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    /// When that was heard.
    pub now: Instant,
    /// How many.
    pub bytes: usize,
    /// In flight before, these included.
    pub in_flight: usize,
    /// A round trip that was measured with them.
    pub rtt: Option<Duration>,
}

/// How a loss was noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// A go-back-N peer reported a gap: everything behind it is sent again.
    Gap,
    /// A peer that keeps packets said what it lacks: nothing else is sent again.
    Told,
    /// Nothing came back for so long that everything in flight must be lost.
    Timeout,
}

/// Decides about the size of a [`Window`](crate::Window).
pub trait CongestionControl: fmt::Debug + Send {
    /// How many bytes may be in flight.
    fn size(&self) -> usize;
    /// How many were, or are, before the last loss or queue made it shrink; no less than the size.
    fn potential(&self) -> usize;
    /// The shortest round trip of late.
    fn shortest_rtt(&self) -> Option<Duration>;
    /// Bytes arrived.
    fn on_acked(&mut self, acked: Acked);
    /// So many bytes were lost.
    fn on_loss(&mut self, now: Instant, loss: Loss, bytes: usize);
    /// The last timeout was spurious: packets taken for lost were only late.
    fn on_spurious_timeout(&mut self);
}

/// Bytes of each sender in the queue of the slowest link: enough to keep the link busy, and the same share for all if all have as much
/// in the queue.
const SHARE: usize = 256 << 10;
/// Growth per round trip towards a go-back-N peer that has lost something. As many times more as the path is longer than this, up to
/// [`LONG_PATH_MOST`] times.
const STEP: usize = 16 << 10;
const LONG_PATH: Duration = Duration::from_millis(2);
const LONG_PATH_MOST: u128 = 16;
/// Growth per round trip beside senders that fill the queue (about what CUBIC does there), and as much more for each microsecond of the
/// path up to a limit.
const STEP_BESIDE: usize = 4 << 10;
const STEP_BESIDE_PER_US: usize = 4;
const STEP_BESIDE_MOST: usize = 128 << 10;
/// The queue is empty as long as round trips take no more than one part in so many longer than the shortest one and
/// [`SLACK`], which scheduling alone can take.
const EMPTY: u32 = 16;
/// It is long when they take more than that longer. What is lost then may have overflowed.
const LONG: u32 = 4;
/// See [`EMPTY`].
const SLACK: Duration = Duration::from_micros(500);
/// The shortest round trip is forgotten after one to two of these: paths change.
const EPOCH: Duration = Duration::from_secs(30);
/// A queue that was not empty for so long is made so, if nobody else fills it, …
const LOOK: Duration = Duration::from_millis(500);
/// … and this long after a look that has not found it empty. Never more often than once in so many round trips.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
const LOOK_ROUNDS: u32 = 10;
/// How many rounds a look takes at most.
const LOOK_LASTS: u8 = 5;
/// After so many looks in vain there is somebody else who fills the queue, and does not give way.
const LOOKS: u8 = 4;
/// How often to look whether that is still so, or when the queue falls: somebody else may look.
const LOOK_BESIDE: Duration = Duration::from_secs(1);
const LOOK_ALONG: Duration = Duration::from_millis(250);
/// For so long after that one look in vain is enough: who fills the queue lets it become empty now and then.
const WARY: Duration = Duration::from_secs(5);
/// Losing more than a window divided by this at once is heavy (15 %).
const HEAVY: usize = 7;
/// Of what a peer that keeps packets was sent, losing more than a part of this size is heavy (17 %).
const HEAVY_TOLD: usize = 6;
/// That is judged of no less than this, bytes.
const TOLD_LEAST: usize = 128 << 10;

/// State of queues on the way, as round trips show it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Queue {
    Empty,
    Some,
    Long,
}

/// Who else fills the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Company {
    /// Nobody, or senders that give way as this one does.
    Polite,
    /// Senders that fill it until it overflows, as TCP does.
    Greedy,
}

/// One round trip's worth of acknowledgements.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    begun: Instant,
    /// The shortest round trip in it, and the longest of it and the one before.
    least: Option<Duration>,
    most: [Duration; 2],
    /// The most bytes in flight, and in the round before.
    peak: usize,
    peak_before: usize,
}

/// Judges by round trips and, where those say that there is a queue, by losses: random loss does not make it slow.
///
/// The window doubles per round trip until a queue shows. From there on it approaches the size at which a fixed number of bytes
/// is in the queue (256 KiB, as FAST TCP has it): senders that have as much in the same queue get the same share of the link.
/// That takes the round trip without a queue, which a sender that comes late has never seen. So the queue is made empty now and
/// then: one sender has less in flight for a round trip, and those that see the queue fall do the same. Senders that only stop
/// when the queue overflows, as TCP's do, never let it become empty. Beside them the window grows by steps and shrinks with
/// losses as theirs do, until the queue is found empty again (the modes of Copa, Arun and Balakrishnan, NSDI 2018).
///
/// A peer that says what it lacks costs no more than the lost packets. Losses count only where the queue was long in two rounds, beside
/// greedy senders, or if they are heavy: a receive buffer overflows without a queue. Towards a go-back-N peer a loss counts if
/// less than half a window was delivered since the loss before: a window much longer than the runs between losses is wasted
/// anyway.
#[derive(Debug)]
pub struct DelayAware {
    config: WindowConfig,
    size: usize,
    /// Below this the window doubles per round trip.
    threshold: usize,
    /// Bytes delivered since the last loss.
    run: usize,
    /// Bytes delivered, and lost, since it was judged last how much a peer that keeps packets loses.
    told: (usize, usize),
    /// Bytes delivered towards the next step of growth.
    credit: usize,
    round: Round,
    /// The shortest round trips of this epoch and the one before.
    shortest: [Option<Duration>; 2],
    epoch: Instant,
    /// State in the last round and the one before, and the last round trip.
    queue: Queue,
    queue_before: Queue,
    latest: Queue,
    /// How long a round takes.
    rtt: Duration,
    company: Company,
    /// When the queue was last seen empty, or looked for that.
    looked: Instant,
    /// Rounds that are left of a look, and the size to return to.
    look: Option<(u8, usize)>,
    /// The shortest round trip before the last look, and whether that has found a shorter one: there may be a shorter one yet.
    known: Duration,
    learnt: bool,
    /// Looks in a row that have not found the queue empty.
    looks: u8,
    /// When there was greedy company last, and the window's size beside it.
    beside: Option<(Instant, usize)>,
    /// Delays in the queue of the last two rounds.
    delays: [Duration; 2],
    /// The peer goes back when it lacks something.
    strict: bool,
    /// Rounds since a loss made it shrink: each lets it grow by one step more than the one before.
    rounds: usize,
    /// Losses before this are those for which the window has shrunk already.
    shrunk_until: Instant,
    /// Size and threshold before a timeout that may prove unfounded.
    before: Option<(usize, usize)>,
}

impl DelayAware {
    /// As nothing is known of the path.
    pub fn new(config: WindowConfig) -> Self {
        Self {
            config,
            size: config.initial.clamp(config.min, config.max.max(config.min)),
            threshold: config.max,
            run: 0,
            told: (0, 0),
            credit: 0,
            round: Round::default(),
            shortest: [None; 2],
            epoch: Instant::ZERO,
            queue: Queue::Empty,
            queue_before: Queue::Empty,
            latest: Queue::Empty,
            rtt: Duration::ZERO,
            company: Company::Polite,
            looked: Instant::ZERO,
            look: None,
            known: Duration::ZERO,
            learnt: false,
            looks: 0,
            beside: None,
            delays: [Duration::ZERO; 2],
            strict: false,
            rounds: usize::MAX,
            shrunk_until: Instant::ZERO,
            before: None,
        }
    }

    /// A queue is a nuisance, not a loss: it makes the window no smaller than this.
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
            self.learnt = self.look.is_some() && least + least / EMPTY < self.known;
            self.company = Company::Polite;
            self.looked = now;
            self.beside = self.beside.filter(|(at, _)| now.saturating_since(*at) < WARY);
            self.looks = if self.beside.is_some() { LOOKS - 1 } else { 0 };
        }
        if let Some((left, back)) = self.look {
            let found = self.queue == Queue::Empty;
            if !found && left > 1 {
                self.look = Some((left - 1, back));
                return;
            }
            // At once: whoever grows back slowly finds that others have taken its place.
            (self.look, self.size, self.threshold) = (None, back, back);
            if !found {
                self.not_found(now, back);
            }
            return;
        }
        if self.queue != Queue::Empty && self.is_time_to_look(now, delay < before / 4 * 3) {
            self.begin_look(now);
            return;
        }
        if self.company == Company::Polite && used {
            self.approach();
        }
    }

    fn is_time_to_look(&self, now: Instant, falls: bool) -> bool {
        let rest = match (self.company, self.looks) {
            // Somebody else looks: together it is found empty. But it also falls when somebody greedy has lost something.
            (Company::Greedy, _) if falls => LOOK_ALONG,
            (Company::Greedy, _) => LOOK_BESIDE,
            _ if falls => LOOK_AGAIN,
            (Company::Polite, 0) if !self.learnt => LOOK,
            (Company::Polite, _) => LOOK_AGAIN,
        };
        let rest = rest.max(self.shortest_rtt().unwrap_or_default() * LOOK_ROUNDS);
        now.saturating_since(self.looked) > rest
    }

    /// Lets the queue become empty.
    fn begin_look(&mut self, now: Instant) {
        self.looked = now;
        self.credit = 0;
        self.look = Some((LOOK_LASTS, self.size));
        self.known = self.shortest_rtt().unwrap_or_default();
        let held = self.part(self.known);
        self.size = (held / 4 * 3).max(self.config.min * 2).min(self.size);
    }

    fn not_found(&mut self, now: Instant, back: usize) {
        self.looks = self.looks.saturating_add(1);
        if self.looks < LOOKS {
            return;
        }
        if self.company == Company::Polite {
            self.company = Company::Greedy;
            self.threshold = self.beside.map_or(self.config.max, |(_, size)| size.max(back));
        }
        self.beside = Some((now, self.threshold));
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
            Queue::Empty if self.strict => step,
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
        let greedy = self.company == Company::Greedy;
        if self.look.is_some() {
            return;
        }
        if self.size < self.threshold {
            if greedy || self.latest != Queue::Long {
                self.size = (self.size + bytes).min(self.threshold);
            }
        } else if greedy {
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
        match self.company {
            Company::Polite => {
                let times = shortest.as_nanos() / LONG_PATH.as_nanos();
                STEP * times.clamp(1, LONG_PATH_MOST) as usize
            }
            Company::Greedy => {
                let more = (shortest.as_micros() as usize).saturating_mul(STEP_BESIDE_PER_US);
                STEP_BESIDE.saturating_add(more).min(STEP_BESIDE_MOST)
            }
        }
    }

    /// The size, or the one to return to from a look.
    fn full(&self) -> usize {
        self.look.map_or(self.size, |(_, back)| back)
    }

    fn shrink_to(&mut self, size: usize) {
        self.before = None;
        self.look = None;
        self.credit = 0;
        self.rounds = 0;
        self.size = size.max(self.config.min);
        self.threshold = self.size;
    }

    fn on_gap(&mut self, bytes: usize) {
        self.strict = true;
        let run = core::mem::take(&mut self.run);
        let full = self.full();
        if run < full / 2 || bytes > full / HEAVY {
            self.shrink_to(full / 4 * 3);
        }
        self.before = None;
        self.threshold = self.full();
    }

    fn on_told(&mut self, now: Instant, bytes: usize) {
        self.told.1 = self.told.1.saturating_add(bytes);
        self.judge_told(now);
        let greedy = self.company == Company::Greedy;
        if now < self.shrunk_until || !(greedy || self.is_long()) {
            return;
        }
        let full = self.full();
        let less = full / 10 * 7;
        if greedy {
            self.beside = Some((now, less));
        }
        let floor = self.floor().min(full);
        self.shrink_for(now, less.max(floor));
    }

    /// Shrinks for all that is lost of what was sent before now: that is told within a round trip.
    fn shrink_for(&mut self, now: Instant, size: usize) {
        self.shrunk_until = now + self.round.most[0].max(self.round.most[1]);
        self.shrink_to(size);
    }

    /// Whether the queue has been long for two rounds: in one of them somebody may not have run who carries packets.
    fn is_long(&self) -> bool {
        self.queue == Queue::Long && self.queue_before == Queue::Long
    }

    fn judge_told(&mut self, now: Instant) {
        let (delivered, lost) = self.told;
        let all = delivered.saturating_add(lost);
        let full = self.full();
        if all < full.max(TOLD_LEAST) {
            return;
        }
        self.told = (0, 0);
        if lost > all / HEAVY_TOLD && now >= self.shrunk_until {
            self.shrink_for(now, full / 4 * 3);
        }
    }

    fn on_timeout(&mut self) {
        let size = self.full();
        self.look = None;
        // The queue pairs of a peer that is silent time out one after the other.
        if self.before.is_none() {
            self.before = Some((size, self.threshold));
            self.threshold = (size / 2).max(self.config.min * 2);
        }
        self.size = self.config.min;
        self.run = 0;
        self.credit = 0;
    }
}

impl CongestionControl for DelayAware {
    fn size(&self) -> usize {
        self.size
    }

    fn potential(&self) -> usize {
        self.size.max(self.threshold)
    }

    fn shortest_rtt(&self) -> Option<Duration> {
        self.shortest.into_iter().flatten().min()
    }

    fn on_acked(&mut self, acked: Acked) {
        let Acked {
            now,
            bytes,
            in_flight,
            rtt,
        } = acked;
        self.round.peak = self.round.peak.max(in_flight);
        if self.size >= self.threshold {
            self.before = None;
        }
        self.run = self.run.saturating_add(bytes);
        self.told.0 = self.told.0.saturating_add(bytes);
        self.judge_told(now);
        let used = self.round.peak.max(self.round.peak_before) >= self.size / 2;
        if let Some(rtt) = rtt {
            self.on_round_trip(now, rtt, used);
        }
        if used {
            self.grow(bytes);
        }
    }

    fn on_loss(&mut self, now: Instant, loss: Loss, bytes: usize) {
        match loss {
            Loss::Gap => self.on_gap(bytes),
            Loss::Told => self.on_told(now, bytes),
            Loss::Timeout => self.on_timeout(),
        }
    }

    fn on_spurious_timeout(&mut self) {
        if let Some((size, threshold)) = self.before.take() {
            self.size = self.size.max(size);
            self.threshold = self.threshold.max(threshold);
        }
    }
}

#[cfg(test)]
mod tests;
