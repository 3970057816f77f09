//! Log lines that clients can cause.

use core::time::Duration;

use roce_verbs::Instant;
use rtrs::throttle::Throttle;

/// One kind of line is written as often as this at most.
const INTERVAL: Duration = Duration::from_secs(1);

/// A line of one kind per interval.
#[derive(Debug)]
pub(super) struct Lines(Throttle);

impl Lines {
    const fn new() -> Self {
        Self(Throttle::new(INTERVAL))
    }

    /// `Some(n)` when a line is to be written, `n` having been left out since the last one.
    pub(super) fn pass(&mut self, now: Instant) -> Option<u64> {
        match self.0.due(now) {
            None => self.0.hit(now).then_some(0),
            more => more,
        }
    }
}

/// The server's lines: those of a session would start again with the next one.
#[derive(Debug)]
pub(super) struct Logs {
    pub(super) sessions: Lines,
    pub(super) devices: Lines,
    pub(super) refused: Lines,
    pub(super) malformed: Lines,
}

impl Logs {
    pub(super) const fn new() -> Self {
        Self {
            sessions: Lines::new(),
            devices: Lines::new(),
            refused: Lines::new(),
            malformed: Lines::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_interval_says_how_many_were_left_out() {
        let at = |ms: u64| Instant::ZERO + Duration::from_millis(ms);
        let mut lines = Lines::new();
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
