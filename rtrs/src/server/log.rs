//! Log lines that anybody may cause.

use roce_verbs::Instant;

use crate::throttle::{INTERVAL, Throttle};

/// One kind of line: the first is written at once, then one line per interval says how many more there were.
#[derive(Debug)]
pub(crate) struct Lines {
    throttle: Throttle,
    summary: fn(u64),
    /// When the interval of the last line ends.
    until: Instant,
    /// Lines are kept back.
    kept: bool,
}

impl Lines {
    /// `summary` writes how many were kept back.
    pub(crate) fn new(summary: fn(u64)) -> Self {
        Self {
            throttle: Throttle::new(INTERVAL),
            summary,
            until: Instant::ZERO,
            kept: false,
        }
    }

    /// It happened: calls `line`, or counts it.
    pub(crate) fn hit(&mut self, now: Instant, line: impl FnOnce()) {
        self.tick(now);
        if self.throttle.hit(now) {
            self.until = now + INTERVAL;
            line();
        } else {
            self.kept = true;
        }
    }

    /// Writes the summary if it is due.
    pub(crate) fn tick(&mut self, now: Instant) {
        if let Some(more) = self.throttle.due(now) {
            (self.until, self.kept) = (now + INTERVAL, false);
            (self.summary)(more);
        }
    }

    /// When the summary is due, if there is to be one.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.kept.then_some(self.until)
    }
}

#[cfg(test)]
mod tests {
    use core::{cell::Cell, time::Duration};

    use super::*;

    thread_local!(static TOLD: Cell<u64> = const { Cell::new(0) });

    #[test]
    fn a_summary_is_due_only_when_lines_were_kept_back() {
        let at = |s: u64| Instant::ZERO + Duration::from_secs(s);
        let mut lines = Lines::new(|more| TOLD.set(TOLD.get() + more));
        let mut written = 0;
        lines.hit(at(3), || written += 1);
        assert_eq!((written, lines.next_timeout()), (1, None));
        for _ in 0..5 {
            lines.hit(at(4), || written += 1);
        }
        assert_eq!((written, lines.next_timeout()), (1, Some(at(3) + INTERVAL)));
        lines.tick(at(3) + INTERVAL);
        assert_eq!((TOLD.get(), lines.next_timeout()), (5, None));
        // The summary was a line as well.
        lines.hit(at(14), || written += 1);
        assert_eq!((written, lines.next_timeout()), (1, Some(at(3) + INTERVAL + INTERVAL)));
    }
}
