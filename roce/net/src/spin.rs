//! Decides how long an idle loop or thread polls for work before it sleeps.
//!
//! Polling saves a wake-up, which takes 5 to 50 us. It costs processor time that the peer may need. So a thread polls while that finds
//! work often enough.

use std::{fmt, str::FromStr, thread, time::Duration};

use roce_verbs::Instant;

use crate::clock;

/// Longest spin with [`SpinMode::Auto`]: the longest wake-ups, which virtual machines have.
const MOST: Duration = Duration::from_micros(100);
/// Longest spin that a user can configure.
const LONGEST: Duration = Duration::from_millis(10);
/// Length of the history, spins.
const REMEMBERED: u32 = u64::BITS;
/// Shortest history that counts, spins.
const TRIAL: u32 = 8;
/// Time without spins after a history with too few successes. Doubles each time, up to [`LONGEST_REST`].
const REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_millis(640);
/// Duration of a spin that shows that another thread needs the processor: spins yield.
const TAKEN: Duration = Duration::from_millis(1);
/// Time without spins after one of [`TAKEN`].
const REST_OF_TAKEN: Duration = Duration::from_millis(100);

/// Spinning of a loop or thread (`--spin µs|auto|off`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpinMode {
    /// Never.
    Off,
    /// While it finds work often enough.
    #[default]
    Auto,
    /// Always, for this time.
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

/// Spin in progress.
#[derive(Debug)]
pub struct Spinning {
    begun: Instant,
    /// Time that a spin should take, to count as a failure.
    wanted: Duration,
    /// Time that this spin may take.
    budget: Duration,
}

impl Spinning {
    /// Yields the processor. False: the spin's time is over.
    pub fn goes_on(&self) -> bool {
        thread::yield_now();
        clock::now().saturating_since(self.begun) < self.budget
    }
}

/// Decides how long to spin.
///
/// The time between two pieces of work of a sleeping thread says little: the peer may sleep too, and each waits for the other's wake-up.
/// So spins are tried, and continue while every other one finds work.
#[derive(Debug)]
pub struct Spin {
    mode: SpinMode,
    /// Duration of a spin with [`SpinMode::Auto`].
    most: Duration,
    /// History, the latest spin in the lowest bit. 1: it found work.
    successes: u64,
    /// Length of the history.
    remembered: u32,
    /// Time of the next spin.
    not_before: Instant,
    /// Time without spins after the next history with too few successes.
    rest: Duration,
}

impl Spin {
    /// Creates one without a history.
    pub fn new(mode: SpinMode) -> Self {
        Self {
            mode,
            most: MOST,
            successes: 0,
            remembered: 0,
            not_before: Instant::ZERO,
            rest: REST,
        }
    }

    /// Limits spins with [`SpinMode::Auto`] to this time.
    #[must_use]
    pub fn at_most(self, most: Duration) -> Self {
        Self { most, ..self }
    }

    /// Begins a spin of at most `limit`, if that pays. The caller looks for work while [`Spinning::goes_on`], then calls
    /// [`end`](Self::end).
    pub fn begin(&self, limit: Option<Duration>) -> Option<Spinning> {
        let begun = clock::now();
        let wanted = self.budget(begun);
        let budget = limit.map_or(wanted, |limit| wanted.min(limit));
        (!budget.is_zero()).then_some(Spinning { begun, wanted, budget })
    }

    /// Records whether the spin found work.
    pub fn end(&mut self, spinning: &Spinning, found: bool) {
        let now = clock::now();
        let time = now.saturating_since(spinning.begun);
        // A spin that was cut short could not find anything.
        if found || time >= spinning.wanted {
            self.ended(now, time, found);
        }
    }

    /// Returns the duration of a spin that begins at `now`.
    fn budget(&self, now: Instant) -> Duration {
        match self.mode {
            SpinMode::Off => Duration::ZERO,
            SpinMode::For(time) => time,
            SpinMode::Auto if now < self.not_before => Duration::ZERO,
            SpinMode::Auto => self.most,
        }
    }

    fn ended(&mut self, now: Instant, time: Duration, found: bool) {
        if time >= TAKEN {
            self.forget();
            self.not_before = now + REST_OF_TAKEN;
            return;
        }
        self.successes = self.successes << 1 | u64::from(found);
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
    fn spins_continue_while_half_of_them_find_work() {
        let mut spin = Spin::new(SpinMode::Auto);
        assert_eq!(spin.budget(at(0)), MOST);
        for n in 0..1000 {
            spin.ended(at(n), us(10), n % 2 == 0);
            assert_eq!(spin.budget(at(n)), MOST, "{n}: half of them pay");
        }
    }

    #[test]
    fn rests_without_success_become_longer() {
        let mut spin = Spin::new(SpinMode::Auto);
        let mut now = 0;
        for rest in [10, 20, 40, 80, 160, 320, 640, 640] {
            for n in 0..TRIAL {
                assert_eq!(spin.budget(at(now)), MOST, "spin {n} before a rest of {rest} ms");
                spin.ended(at(now), us(50), false);
            }
            now += rest * 1000;
            assert_eq!(spin.budget(at(now - 1)), Duration::ZERO, "{rest} ms");
        }
        // Success makes the next rest short again.
        for _ in 0..REMEMBERED {
            spin.ended(at(now), us(10), true);
        }
        while spin.budget(at(now)) != Duration::ZERO {
            spin.ended(at(now), us(50), false);
        }
        assert_eq!(spin.budget(at(now + 9_999)), Duration::ZERO);
        assert_eq!(spin.budget(at(now + 10_000)), MOST);
    }

    #[test]
    fn only_the_history_counts() {
        let mut spin = Spin::new(SpinMode::Auto);
        for _ in 0..1000 {
            spin.ended(at(0), us(10), true);
        }
        let mut failures = 0;
        while spin.budget(at(0)) != Duration::ZERO {
            spin.ended(at(0), us(50), false);
            failures += 1;
        }
        assert_eq!(failures, REMEMBERED / 2 + 1);
    }

    #[test]
    fn a_spin_that_another_thread_made_long_is_followed_by_a_rest() {
        let mut spin = Spin::new(SpinMode::Auto);
        // The peer's turn.
        spin.ended(at(0), us(300), true);
        assert_eq!(spin.budget(at(0)), MOST);
        for (n, found) in [(0, true), (1_000_000, false)] {
            spin.ended(at(n), us(3000), found);
            assert_eq!(spin.budget(at(n + 99_999)), Duration::ZERO);
            assert_eq!(spin.budget(at(n + 100_000)), MOST);
        }
    }

    #[test]
    fn spins_cut_short_do_not_count() {
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
            "another thread had the processor"
        );
    }

    #[test]
    fn configured_times_do_not_adapt() {
        for (mode, time) in [(SpinMode::Off, Duration::ZERO), (SpinMode::For(us(30)), us(30))] {
            let mut spin = Spin::new(mode);
            for _ in 0..100 {
                spin.ended(at(0), us(50), false);
            }
            assert_eq!(spin.budget(at(0)), time);
        }
    }
}
