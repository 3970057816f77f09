//! How long a loop that has nothing to do looks for work before it sleeps.
//!
//! Who spins when something comes needs no wake-up, which costs some microseconds and a switch; who spins in vain keeps a
//! processor from those who would give him work. So it is done as long as it works.

use std::{fmt, str::FromStr, time::Duration};

use roce::verbs::Instant;

/// Longest spinning that is tried by itself: what a wake-up costs at most.
const MOST: Duration = Duration::from_micros(50);
/// Longest that can be asked for.
const LONGEST: Duration = Duration::from_millis(10);
/// After too little success, and after another thread wanted the processor, there is none for so long.
const AFTER_FAILURES: Duration = Duration::from_millis(10);
const AFTER_A_SWITCH: Duration = Duration::from_millis(100);
/// Spins that are remembered.
const REMEMBERED: u32 = u64::BITS;

/// Whether a loop spins (`--spin µs|auto|off`).
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

/// What a loop did when it had nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Idle {
    /// How long there was nothing to do.
    pub time: Duration,
    /// Whether it spun, and with that found something before it slept.
    pub spun: Option<bool>,
}

/// Decides how long to spin.
#[derive(Debug)]
pub struct Spin {
    mode: SpinMode,
    /// How long there is nothing to do, on average: an exponential one, of about the last eight times.
    idle: Option<Duration>,
    /// The last spins, the latest lowest: 1 is a success.
    successes: u64,
    remembered: u32,
    /// None before.
    not_before: Instant,
}

impl Spin {
    /// Nothing is known yet.
    pub fn new(mode: SpinMode) -> Self {
        Self {
            mode,
            idle: None,
            successes: 0,
            remembered: 0,
            not_before: Instant::ZERO,
        }
    }

    /// How long to spin when there is nothing to do from `now` on.
    pub fn budget(&self, now: Instant) -> Duration {
        match self.mode {
            SpinMode::Off => Duration::ZERO,
            SpinMode::For(time) => time,
            SpinMode::Auto if now < self.not_before => Duration::ZERO,
            SpinMode::Auto => match self.idle {
                // Most of what is waited for would come too late.
                Some(idle) if idle <= MOST => (2 * idle).min(MOST),
                _ => Duration::ZERO,
            },
        }
    }

    /// Whether [`switched`](Self::switched) is to be told after a spin.
    pub fn wants_switches(&self) -> bool {
        self.mode == SpinMode::Auto
    }

    /// There is something to do again.
    pub fn ended(&mut self, now: Instant, idle: Idle) {
        // Long sleeps are all alike, and shall not hide a change for the better.
        let time = idle.time.min(4 * MOST);
        self.idle = Some(match self.idle {
            None => time,
            Some(average) => (7 * average + time) / 8,
        });
        let Some(success) = idle.spun else { return };
        self.successes = self.successes << 1 | u64::from(success);
        self.remembered = (self.remembered + 1).min(REMEMBERED);
        let pays = self.successes.count_ones() * 2 >= self.remembered;
        if !pays {
            self.rest(now, AFTER_FAILURES);
        }
    }

    /// After a spin: how often this thread was made to give up its processor (`ru_nivcsw`) before and after it. If it was
    /// while it spun, somebody needs the processor.
    pub fn switched(&mut self, now: Instant, before: u64, after: u64) {
        if after > before {
            self.rest(now, AFTER_A_SWITCH);
        }
    }

    fn rest(&mut self, now: Instant, time: Duration) {
        self.not_before = self.not_before.max(now + time);
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

    fn slept(n: u64) -> Idle {
        Idle {
            time: us(n),
            spun: None,
        }
    }

    fn spun(n: u64, success: bool) -> Idle {
        Idle {
            time: us(n),
            spun: Some(success),
        }
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
    fn it_spins_twice_as_long_as_it_waits_and_not_for_long() {
        let mut spin = Spin::new(SpinMode::Auto);
        assert_eq!(spin.budget(at(0)), Duration::ZERO, "nothing is known");
        spin.ended(at(0), slept(10));
        assert_eq!(spin.budget(at(0)), us(20));
        for _ in 0..50 {
            spin.ended(at(0), slept(40));
        }
        assert_eq!(spin.budget(at(0)), us(50));
        for _ in 0..50 {
            spin.ended(at(0), slept(1000));
        }
        assert_eq!(spin.budget(at(0)), Duration::ZERO, "it would be in vain");
        for _ in 0..50 {
            spin.ended(at(0), slept(5));
        }
        let budget = spin.budget(at(0));
        assert!(
            budget >= us(10) && budget <= us(11),
            "{budget:?}: what was long ago is forgotten"
        );
    }

    #[test]
    fn without_success_it_rests_and_tries_again() {
        let mut spin = Spin::new(SpinMode::Auto);
        spin.ended(at(0), slept(10));
        spin.ended(at(0), spun(10, true));
        spin.ended(at(0), spun(10, false));
        assert_ne!(spin.budget(at(0)), Duration::ZERO, "half of them paid");
        spin.ended(at(100), spun(10, false));
        assert_eq!(spin.budget(at(101)), Duration::ZERO);
        assert_eq!(spin.budget(at(10_099)), Duration::ZERO);
        assert_ne!(spin.budget(at(10_100)), Duration::ZERO);
        // One that fails again ends it again, and enough that pay let it go on.
        spin.ended(at(10_100), spun(10, false));
        assert_eq!(spin.budget(at(10_101)), Duration::ZERO);
        for n in 0..10 {
            spin.ended(at(30_000 + n), spun(10, true));
        }
        assert_ne!(spin.budget(at(50_000)), Duration::ZERO);
    }

    #[test]
    fn only_the_last_spins_count() {
        let mut spin = Spin::new(SpinMode::Auto);
        for _ in 0..1000 {
            spin.ended(at(0), spun(10, false));
        }
        for n in 1..=REMEMBERED {
            // Later than any rest.
            let now = u64::from(n) * 20_000;
            spin.ended(at(now), spun(10, true));
            let rests = spin.budget(at(now + 1)) == Duration::ZERO;
            assert_eq!(rests, n < REMEMBERED / 2, "{n}");
        }
    }

    #[test]
    fn who_is_made_to_give_way_while_spinning_rests() {
        let mut spin = Spin::new(SpinMode::Auto);
        spin.ended(at(0), slept(10));
        spin.switched(at(0), 5, 5);
        // Between spins it may happen.
        spin.switched(at(0), 9, 9);
        assert_ne!(spin.budget(at(0)), Duration::ZERO);
        spin.switched(at(0), 9, 10);
        assert_eq!(spin.budget(at(99_999)), Duration::ZERO);
        assert_ne!(spin.budget(at(100_000)), Duration::ZERO);
    }

    #[test]
    fn who_is_told_how_long_does_not_decide() {
        for (mode, time) in [(SpinMode::Off, Duration::ZERO), (SpinMode::For(us(30)), us(30))] {
            let mut spin = Spin::new(mode);
            for _ in 0..100 {
                spin.ended(at(0), spun(1000, false));
            }
            spin.switched(at(0), 0, 100);
            assert_eq!(spin.budget(at(0)), time);
            assert!(!spin.wants_switches());
        }
    }
}
