//! How long a loop or a thread that has nothing to do looks for work before it sleeps.
//!
//! Who spins when something comes needs no wake-up, which costs some microseconds and a switch; who spins in vain keeps a
//! processor from those who would give him work. So it is done as long as it works.

use std::{fmt, str::FromStr, thread, time::Duration};

use roce_verbs::Instant;

use crate::clock;

/// Longest spinning that is tried by itself: what a wake-up costs at most, above all in virtual machines.
const MOST: Duration = Duration::from_micros(100);
/// Longest that can be asked for.
const LONGEST: Duration = Duration::from_millis(10);
/// Spins that are remembered, and how many of them, at least, are judged.
const REMEMBERED: u32 = u64::BITS;
const TRIAL: u32 = 8;
/// There is none for so long after a trial that did not pay, twice as long after the next one, and so on.
const REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_millis(640);
/// Spinning gives way at each look. If it gets the processor back as late as this, somebody computes there.
const TAKEN: Duration = Duration::from_millis(1);
const REST_OF_TAKEN: Duration = Duration::from_millis(100);

/// Whether a loop or a thread spins (`--spin µs|auto|off`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpinMode {
    /// Never.
    Off,
    /// As long as it works.
    #[default]
    Auto,
    /// Always for so long.
    For(Duration),
}

impl FromStr for SpinMode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            us => {
                let parsed = us.parse().map(Duration::from_micros);
                let time = parsed.map_err(|_| format!("{s:?} is neither auto nor off nor a number of microseconds"))?;
                match time {
                    Duration::ZERO => Ok(Self::Off),
                    time if time <= LONGEST => Ok(Self::For(time)),
                    _ => Err(format!("{s} µs are too long: at most {}", LONGEST.as_micros())),
                }
            }
        }
    }
}

impl fmt::Display for SpinMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::For(time) => write!(f, "{}", time.as_micros()),
        }
    }
}

/// A spin under way.
#[derive(Debug)]
pub struct Spinning {
    begun: Instant,
    /// How long it is to take, and may take.
    wanted: Duration,
    budget: Duration,
}

impl Spinning {
    /// Gives way to others. False: it has taken long enough.
    pub fn goes_on(&self) -> bool {
        thread::yield_now();
        clock::now().saturating_since(self.begun) < self.budget
    }
}

/// One spin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spun {
    /// How long it took.
    time: Duration,
    /// Whether there was something to do before it ended.
    found: bool,
}

/// Decides how long to spin.
///
/// How long one waited while sleeping says little: the one who is waited for sleeps as well, and each waits for the other's
/// wake-up. So spinning is tried, and goes on if it finds something every other time.
#[derive(Debug)]
pub struct Spin {
    mode: SpinMode,
    /// The last spins, the latest lowest: 1 is a success.
    successes: u64,
    remembered: u32,
    /// None before.
    not_before: Instant,
    /// The next rest after a trial in vain.
    rest: Duration,
}

impl Spin {
    /// Nothing is known yet.
    pub fn new(mode: SpinMode) -> Self {
        Self {
            mode,
            successes: 0,
            remembered: 0,
            not_before: Instant::ZERO,
            rest: REST,
        }
    }

    /// Begins to spin, for no longer than `limit`, if that pays. It goes on while what is looked for is not there and
    /// [`Spinning::goes_on`], and must be [ended](Self::end).
    pub fn begin(&self, limit: Option<Duration>) -> Option<Spinning> {
        let begun = clock::now();
        let wanted = self.budget(begun);
        let budget = limit.map_or(wanted, |limit| wanted.min(limit));
        (!budget.is_zero()).then_some(Spinning { begun, wanted, budget })
    }

    /// Learns whether what was looked for was found.
    pub fn end(&mut self, spinning: &Spinning, found: bool) {
        let now = clock::now();
        let time = now.saturating_since(spinning.begun);
        // One that something else cut short says nothing.
        if found || time >= spinning.wanted {
            self.ended(now, Spun { time, found });
        }
    }

    /// How long to spin when there is nothing to do from `now` on.
    fn budget(&self, now: Instant) -> Duration {
        match self.mode {
            SpinMode::Off => Duration::ZERO,
            SpinMode::For(time) => time,
            SpinMode::Auto if now < self.not_before => Duration::ZERO,
            SpinMode::Auto => MOST,
        }
    }

    fn ended(&mut self, now: Instant, spun: Spun) {
        if spun.time >= TAKEN {
            self.forget();
            self.not_before = now + REST_OF_TAKEN;
            return;
        }
        self.successes = self.successes << 1 | u64::from(spun.found);
        self.remembered = (self.remembered + 1).min(REMEMBERED);
        let pays = self.successes.count_ones() * 2 >= self.remembered;
        if !pays && self.remembered >= TRIAL {
            self.forget();
            self.not_before = now + self.rest;
            self.rest = (2 * self.rest).min(LONGEST_REST);
        } else if pays && self.remembered == REMEMBERED {
            self.rest = REST;
        }
    }

    fn forget(&mut self) {
        (self.successes, self.remembered) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    fn spun(n: u64, found: bool) -> Spun {
        Spun { time: us(n), found }
    }

    #[test]
    fn modes_are_read_and_shown() {
        for (text, mode) in [
            ("off", SpinMode::Off),
            ("auto", SpinMode::Auto),
            ("20", SpinMode::For(us(20))),
        ] {
            assert_eq!(text.parse(), Ok(mode));
            assert_eq!(mode.to_string(), text);
        }
        assert_eq!("0".parse(), Ok(SpinMode::Off));
        for bad in ["", "on", "-1", "20us", "10001", "99999999999999999999"] {
            assert!(bad.parse::<SpinMode>().is_err(), "{bad}");
        }
    }

    #[test]
    fn it_tries_and_goes_on_while_it_pays() {
        let mut spin = Spin::new(SpinMode::Auto);
        assert_eq!(spin.budget(at(0)), MOST);
        for n in 0..1000 {
            spin.ended(at(n), spun(10, n % 2 == 0));
            assert_eq!(spin.budget(at(n)), MOST, "{n}: half of them pay");
        }
    }

    #[test]
    fn without_success_it_rests_longer_and_longer() {
        let mut spin = Spin::new(SpinMode::Auto);
        let mut now = 0;
        for rest in [10, 20, 40, 80, 160, 320, 640, 640] {
            for n in 0..TRIAL {
                assert_eq!(spin.budget(at(now)), MOST, "spin {n} before a rest of {rest} ms");
                spin.ended(at(now), spun(50, false));
            }
            now += rest * 1000;
            assert_eq!(spin.budget(at(now - 1)), Duration::ZERO, "{rest} ms");
        }
        // The trial after it counts for itself, and success makes the next rest short again.
        for _ in 0..REMEMBERED {
            spin.ended(at(now), spun(10, true));
        }
        while spin.budget(at(now)) != Duration::ZERO {
            spin.ended(at(now), spun(50, false));
        }
        assert_eq!(spin.budget(at(now + 9_999)), Duration::ZERO);
        assert_eq!(spin.budget(at(now + 10_000)), MOST);
    }

    #[test]
    fn only_the_last_spins_count() {
        let mut spin = Spin::new(SpinMode::Auto);
        for _ in 0..1000 {
            spin.ended(at(0), spun(10, true));
        }
        let mut failures = 0;
        while spin.budget(at(0)) != Duration::ZERO {
            spin.ended(at(0), spun(50, false));
            failures += 1;
        }
        assert_eq!(failures, REMEMBERED / 2 + 1);
    }

    #[test]
    fn who_gets_the_processor_back_late_rests() {
        let mut spin = Spin::new(SpinMode::Auto);
        // The peer's turn.
        spin.ended(at(0), spun(300, true));
        assert_eq!(spin.budget(at(0)), MOST);
        for (n, found) in [(0, true), (1_000_000, false)] {
            spin.ended(at(n), spun(3000, found));
            assert_eq!(spin.budget(at(n + 99_999)), Duration::ZERO);
            assert_eq!(spin.budget(at(n + 100_000)), MOST);
        }
    }

    #[test]
    fn what_is_cut_short_says_nothing() {
        let mut spin = Spin::new(SpinMode::Auto);
        for _ in 0..2 * TRIAL {
            let spinning = spin.begin(None).unwrap();
            spin.end(
                &Spinning {
                    wanted: Duration::MAX,
                    ..spinning
                },
                false,
            );
        }
        assert_eq!(spin.remembered, 0);
        assert!(spin.begin(Some(Duration::ZERO)).is_none());
        let spinning = spin.begin(None).unwrap();
        while spinning.goes_on() {}
        spin.end(&spinning, false);
        assert!(
            spin.remembered == 1 || spin.begin(None).is_none(),
            "somebody else had the processor"
        );
    }

    #[test]
    fn who_is_told_how_long_does_not_decide() {
        for (mode, time) in [(SpinMode::Off, Duration::ZERO), (SpinMode::For(us(30)), us(30))] {
            let mut spin = Spin::new(mode);
            for _ in 0..100 {
                spin.ended(at(0), spun(50, false));
            }
            assert_eq!(spin.budget(at(0)), time);
        }
    }
}
