//! Bytes in flight towards one peer.

use core::{num::NonZeroU64, time::Duration};

use roce_verbs::Instant;

use crate::pace::{FREE_RATE, FreePace, Pace};

/// Limits of a [`Window`], bytes where nothing else is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowConfig {
    /// At the start.
    pub initial: usize,
    /// Never less.
    pub min: usize,
    /// Never more: about what the peer's socket buffer holds.
    pub max: usize,
    /// Bytes per second of the services that nobody acknowledges (UC, UD); `None`: no limit.
    pub unreliable_rate: Option<NonZeroU64>,
}

impl Default for WindowConfig {
    fn default() -> Self {
        Self {
            initial: 64 << 10,
            min: 16 << 10,
            max: 4 << 20,
            unreliable_rate: Some(FREE_RATE),
        }
    }
}

/// Growth per window acknowledged, once past the threshold.
const STEP: usize = 16 << 10;
/// A round trip is long when it takes more than this many of the shortest ones …
const LONG: u32 = 3;
/// … and this much on top, which scheduling alone can take.
const LONG_SLACK: Duration = Duration::from_millis(1);
/// A round trip is short up to this many of the shortest ones …
const SHORT: u32 = 2;
/// … and this much on top.
const SHORT_SLACK: Duration = Duration::from_micros(500);
/// The shortest round trip is forgotten after one to two of these: paths change.
const EPOCH: Duration = Duration::from_secs(10);
/// Losing more than a window divided by this at once is heavy (15 %).
const HEAVY: usize = 7;

/// Of what a peer that keeps packets was sent, losing more than a part of this size is heavy (17 %): less is what lossy paths are like,
/// and where a queue fills, round trips tell.
const HEAVY_TOLD: usize = 6;
/// That is judged of no less than this, bytes.
const TOLD_LEAST: usize = 128 << 10;

/// What the last round trip says about queues on the way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Queue {
    Empty,
    Some,
    Long,
}

/// The window: how many bytes may be under way to a peer, over all queue pairs.
///
/// It is clocked by acknowledgements. It doubles per round trip up to a threshold and then grows by a step, while round
/// trips stay near the shortest seen and while it is really used. Long round trips make it shrink. A loss makes it
/// shrink only if less than half a window was delivered since the loss before: with go-back-N a window much longer
/// than the runs between losses is wasted anyway, and a receive buffer that overflows makes runs as short as itself,
/// but isolated random losses don't matter.
#[derive(Clone, Debug)]
pub struct Window {
    config: WindowConfig,
    size: usize,
    in_flight: usize,
    /// Below this the window doubles per round trip.
    threshold: usize,
    /// Bytes delivered since the last loss.
    run: usize,
    /// Bytes delivered, and lost, since it was judged last how much a peer that keeps packets loses.
    told: (usize, usize),
    /// Bytes delivered towards the next step of growth.
    credit: usize,
    /// The most bytes in flight during this round trip, and bytes delivered during it.
    peak: usize,
    round: usize,
    /// The shortest round trips of this epoch and the one before.
    shortest: [Option<Duration>; 2],
    epoch: Instant,
    queue: Queue,
    /// Size and threshold before a timeout that may prove unfounded.
    before: Option<(usize, usize)>,
    pace: Pace,
    free: FreePace,
}

impl Window {
    /// An open window with nothing in flight.
    pub fn new(config: WindowConfig) -> Self {
        Self {
            config,
            size: config.initial.clamp(config.min, config.max.max(config.min)),
            in_flight: 0,
            threshold: config.max,
            run: 0,
            told: (0, 0),
            credit: 0,
            peak: 0,
            round: 0,
            shortest: [None; 2],
            epoch: Instant::ZERO,
            queue: Queue::Empty,
            before: None,
            pace: Pace::default(),
            free: FreePace::new(config.unreliable_rate),
        }
    }

    /// Bytes that may be sent now.
    pub fn available(&self) -> usize {
        self.size.saturating_sub(self.in_flight)
    }

    /// Bytes in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The window's size, bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The most bytes that one READ request should ask for: the window can't hold the answer back once it is asked for.
    /// Half of what the window was before anything was lost, so that two take turns.
    pub fn read_limit(&self) -> usize {
        let WindowConfig { min, max, .. } = self.config;
        (self.size.max(self.threshold) / 2).max(min * 2).min(max)
    }

    /// The most bytes to ask for again when nothing else is under way.
    pub fn piece_limit(&self) -> usize {
        (self.read_limit() * 2).min(self.config.max)
    }

    /// The shortest round trip of late.
    pub fn shortest_rtt(&self) -> Option<Duration> {
        self.shortest.into_iter().flatten().min()
    }

    /// Bytes were sent (or asked for with a READ).
    pub fn on_sent(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_add(bytes);
        self.peak = self.peak.max(self.in_flight);
    }

    /// Bytes arrived; `rtt` is a round trip measured with them.
    pub fn on_acked(&mut self, now: Instant, bytes: usize, rtt: Option<Duration>) {
        let used = self.peak >= self.size / 2;
        self.forget(bytes);
        self.round += bytes;
        if self.round >= self.size {
            self.round = 0;
            self.peak = self.in_flight;
        }
        if self.size >= self.threshold {
            self.before = None;
        }
        self.run = self.run.saturating_add(bytes);
        self.told.0 = self.told.0.saturating_add(bytes);
        self.judge_told();
        if let Some(rtt) = rtt {
            self.queue = self.judge(now, rtt);
        }
        match self.queue {
            Queue::Long => {
                // At most a quarter per round trip, and not to the bottom: a queue is a nuisance, not a loss.
                self.threshold = self.size;
                let floor = (self.config.min * 4).min(self.size);
                self.size = (self.size - bytes.min(self.size) / 4).max(floor);
            }
            Queue::Empty if used => self.grow(bytes),
            Queue::Empty | Queue::Some => {}
        }
    }

    fn grow(&mut self, bytes: usize) {
        if self.size < self.threshold {
            self.size += bytes;
        } else {
            self.credit += bytes;
            if self.credit >= self.size {
                self.credit = 0;
                self.size += STEP;
            }
        }
        self.size = self.size.min(self.config.max);
    }

    fn judge(&mut self, now: Instant, rtt: Duration) -> Queue {
        if now.saturating_since(self.epoch) > EPOCH {
            self.epoch = now;
            self.shortest = [None, self.shortest[0]];
        }
        self.shortest[0] = Some(self.shortest[0].map_or(rtt, |s| s.min(rtt)));
        let shortest = self.shortest_rtt().unwrap_or(rtt);
        if rtt > shortest * LONG + LONG_SLACK {
            Queue::Long
        } else if rtt > shortest * SHORT + SHORT_SLACK {
            Queue::Some
        } else {
            Queue::Empty
        }
    }

    /// A loss was seen; `bytes` are known to be lost.
    pub fn on_loss(&mut self, _now: Instant, bytes: usize) {
        self.forget(bytes);
        let run = core::mem::take(&mut self.run);
        self.before = None;
        if run < self.size / 2 || bytes > self.size / HEAVY {
            self.credit = 0;
            self.size = (self.size / 4 * 3).max(self.config.min);
        }
        self.threshold = self.size;
    }

    /// A peer that keeps packets lacks some, of so many bytes; all others have arrived, so nothing else is sent again. A window that is
    /// longer than the runs between losses is not wasted then, and only heavy losses make it shrink.
    pub fn on_told_loss(&mut self, bytes: usize) {
        self.forget(bytes);
        self.told.1 = self.told.1.saturating_add(bytes);
        self.judge_told();
    }

    fn judge_told(&mut self) {
        let (delivered, lost) = self.told;
        let all = delivered.saturating_add(lost);
        if all < self.size.max(TOLD_LEAST) {
            return;
        }
        self.told = (0, 0);
        if lost > all / HEAVY_TOLD {
            self.before = None;
            self.credit = 0;
            self.size = (self.size / 4 * 3).max(self.config.min);
            self.threshold = self.size;
        }
    }

    /// Nothing came back for so long that everything in flight must be lost.
    pub fn on_timeout(&mut self, _now: Instant) {
        // The queue pairs of a peer that is silent time out one after the other.
        if self.before.is_none() {
            self.before = Some((self.size, self.threshold));
            self.threshold = (self.size / 2).max(self.config.min * 2);
        }
        self.size = self.config.min;
        self.run = 0;
        self.credit = 0;
    }

    /// What the last timeout took for lost was only late.
    pub fn on_spurious_timeout(&mut self) {
        if let Some((size, threshold)) = self.before.take() {
            self.size = self.size.max(size);
            self.threshold = self.threshold.max(threshold);
        }
    }

    /// Whether READ responses may go to the peer now, or when: it gets as many as it asks for, until it has shown that
    /// they are more than it can take.
    pub fn may_respond(&mut self, now: Instant) -> Result<(), Instant> {
        self.pace.may_send(now)
    }

    /// READ responses were sent.
    pub fn on_responded(&mut self, bytes: usize) {
        self.pace.on_sent(bytes);
    }

    /// Whether packets that nobody acknowledges may be sent now, or when.
    pub fn may_send_freely(&mut self, now: Instant) -> Result<(), Instant> {
        self.free.may_send(now)
    }

    /// Packets that nobody acknowledges were sent.
    pub fn on_sent_freely(&mut self, bytes: usize) {
        self.free.on_sent(bytes);
    }

    /// The peer asks for a READ again, of which `arrived` bytes in a row came to it and `lost` more were sent, the last of
    /// them `silence` ago.
    pub fn on_response_loss(&mut self, now: Instant, silence: Duration, arrived: usize, lost: usize) {
        self.pace.on_loss(now, silence, arrived, lost);
    }

    /// Bytes will never be acknowledged: they are sent again, or their queue pair is gone.
    pub fn forget(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_of_many_queue_pairs_counts_once_and_can_be_taken_back() {
        let mut w = Window::new(CONFIG);
        let mut now = 0;
        for _ in 0..8 {
            now = round(&mut w, now, 100);
        }
        let size = w.size();
        for _ in 0..100 {
            w.on_timeout(at(now));
        }
        assert_eq!(w.size(), CONFIG.min);
        let mut early = w.clone();
        early.on_spurious_timeout();
        assert_eq!(early.size(), size);
        for _ in 0..6 {
            now = round(&mut w, now, 100);
        }
        assert!(w.size() >= size / 2, "{}", w.size());
    }

    const KB: usize = 1024;
    const CONFIG: WindowConfig = WindowConfig {
        initial: 64 * KB,
        min: 16 * KB,
        max: 1024 * KB,
        unreliable_rate: None,
    };

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    /// Sends a full window and has it acknowledged in pieces, `rtt` microseconds later; returns the new time.
    fn round(w: &mut Window, mut now: u64, rtt: u64) -> u64 {
        let n = w.available();
        w.on_sent(n);
        now += rtt;
        for _ in 0..4 {
            w.on_acked(at(now), n / 4, Some(Duration::from_micros(rtt)));
        }
        w.forget(w.in_flight());
        now
    }

    #[test]
    fn bytes_in_flight_close_the_window() {
        let mut w = Window::new(CONFIG);
        assert_eq!(w.available(), 64 * KB);
        w.on_sent(60 * KB);
        assert_eq!((w.available(), w.in_flight()), (4 * KB, 60 * KB));
        // A queue pair may always have one packet in flight, so more than the window can be.
        w.on_sent(10 * KB);
        assert_eq!(w.available(), 0);
        w.forget(70 * KB);
        assert_eq!(w.available(), 64 * KB);
        w.forget(1);
        assert_eq!(w.in_flight(), 0);
    }

    #[test]
    fn it_opens_to_the_limit_while_round_trips_stay_short() {
        let mut w = Window::new(CONFIG);
        let mut now = 0;
        for _ in 0..8 {
            now = round(&mut w, now, 100);
        }
        assert_eq!(w.size(), CONFIG.max);
    }

    #[test]
    fn an_unused_window_does_not_grow() {
        let mut w = Window::new(CONFIG);
        for i in 0..1000 {
            w.on_sent(KB);
            w.on_acked(at(i * 100), KB, Some(Duration::from_micros(100)));
        }
        assert_eq!(w.size(), CONFIG.initial);
    }

    #[test]
    fn long_round_trips_shrink_it_but_not_to_the_bottom() {
        let mut w = Window::new(CONFIG);
        let mut now = 0;
        for _ in 0..8 {
            now = round(&mut w, now, 100);
        }
        for _ in 0..20 {
            now = round(&mut w, now, 20_000);
        }
        assert_eq!(w.size(), CONFIG.min * 4);
        // When the queue is gone it grows again, in steps.
        let before = w.size();
        for _ in 0..20 {
            now = round(&mut w, now, 100);
        }
        assert!(w.size() >= before + 10 * STEP, "{}", w.size());
    }

    #[test]
    fn isolated_losses_do_not_starve_it() {
        let mut w = Window::new(CONFIG);
        let mut now = 0;
        for i in 0..400 {
            now = round(&mut w, now, 100);
            // One packet of 4 KiB in about two windows.
            if i % 2 == 0 {
                w.on_loss(at(now), 4 * KB);
            }
        }
        assert!(w.size() > CONFIG.max / 2, "{}", w.size());
    }

    #[test]
    fn told_losses_shrink_it_only_when_they_are_heavy() {
        let lossy = |percent: usize| {
            let mut w = Window::new(CONFIG);
            let mut now = 0;
            for _ in 0..200 {
                let n = w.available();
                w.on_sent(n);
                now += 20_000;
                let lost = n * percent / 100;
                w.on_told_loss(lost);
                w.on_acked(at(now), n - lost, Some(Duration::from_millis(20)));
                w.forget(w.in_flight());
            }
            w.size()
        };
        assert_eq!((lossy(0), lossy(3), lossy(12)), (CONFIG.max, CONFIG.max, CONFIG.max));
        assert!(lossy(30) <= TOLD_LEAST, "{}", lossy(30));
    }

    #[test]
    fn a_receiver_that_holds_less_makes_it_shrink_to_about_that() {
        // The peer takes 100 KB of every burst and drops the rest.
        let room = 100 * KB;
        let mut w = Window::new(CONFIG);
        let (mut now, mut sizes) = (0, Vec::new());
        for _ in 0..200 {
            let n = w.available();
            w.on_sent(n);
            now += 100;
            w.on_acked(at(now), n.min(room), Some(Duration::from_micros(100)));
            if n > room {
                w.on_loss(at(now), 4 * KB);
                w.forget(w.in_flight());
            }
            sizes.push(w.size());
        }
        let late = &sizes[50..];
        assert!(late.iter().all(|s| *s <= 3 * room && *s >= room / 2), "{late:?}");
    }

    #[test]
    fn a_timeout_starts_over_from_the_bottom_and_recovers_quickly() {
        let mut w = Window::new(CONFIG);
        let mut now = 0;
        for _ in 0..8 {
            now = round(&mut w, now, 100);
        }
        w.on_timeout(at(now));
        assert_eq!(w.size(), CONFIG.min);
        for _ in 0..6 {
            now = round(&mut w, now, 100);
        }
        assert!(w.size() >= CONFIG.max / 2, "{}", w.size());
    }

    #[test]
    fn limits_hold_whatever_happens() {
        let mut w = Window::new(CONFIG);
        for i in 0..100 {
            w.on_loss(at(i), 64 * KB);
            w.on_timeout(at(i));
        }
        assert_eq!(w.size(), CONFIG.min);
        for i in 0..1000 {
            round(&mut w, i * 100, 100);
        }
        assert_eq!(w.size(), CONFIG.max);
    }
}
