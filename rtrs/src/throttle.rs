//! Log lines that a peer can cause as often as it likes: one line per interval, which says how many were suppressed before it.

use core::time::Duration;

use roce_verbs::Instant;

/// Interval of lines that anybody can cause.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Decides when a line is written. The clock is the caller's.
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    /// When the interval of the last line ends.
    quiet_until: Option<Instant>,
    suppressed: u64,
}

impl Throttle {
    /// One line per `interval` at most.
    pub const fn new(interval: Duration) -> Self {
        Self {
            interval,
            quiet_until: None,
            suppressed: 0,
        }
    }

    /// Returns whether a line is to be written now: how many were suppressed since the last one.
    pub fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.suppressed += 1;
            return None;
        }
        self.quiet_until = Some(now + self.interval);
        Some(core::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_interval_says_how_many_were_suppressed() {
        let at = |ms: u64| Instant::ZERO + Duration::from_millis(ms);
        let mut lines = Throttle::new(Duration::from_secs(1));
        assert_eq!(lines.pass(at(0)), Some(0));
        for _ in 0..5 {
            assert_eq!(lines.pass(at(999)), None);
        }
        assert_eq!(lines.pass(at(1000)), Some(5));
        assert_eq!(lines.pass(at(1500)), None);
        assert_eq!(lines.pass(at(2000)), Some(1));
        assert_eq!(lines.pass(at(3000)), Some(0));
    }
}
