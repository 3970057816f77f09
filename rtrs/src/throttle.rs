//! Log lines that a peer can cause as often as it likes: the first is written at once, then one line per interval says
//! how many more there were.

use core::time::Duration;

use roce_verbs::Instant;

/// How often a throttled line may come.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Decides when a line is written. The clock is the caller's.
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    /// When the interval of the last line ends.
    quiet_until: Option<Instant>,
    more: u64,
}

impl Throttle {
    /// One line per `interval` at most.
    pub const fn new(interval: Duration) -> Self {
        Self {
            interval,
            quiet_until: None,
            more: 0,
        }
    }

    /// It happened: `true` if the line shall be written now. Call [`Throttle::due`] before, or what was kept back stays
    /// so until the next call of it.
    pub fn hit(&mut self, now: Instant) -> bool {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.more += 1;
            return false;
        }
        self.quiet_until = Some(now + self.interval);
        true
    }

    /// How many were kept back, once the interval is over: a summary is to be written now.
    pub fn due(&mut self, now: Instant) -> Option<u64> {
        if self.quiet_until.is_none_or(|until| now < until) {
            return None;
        }
        let more = core::mem::take(&mut self.more);
        self.quiet_until = (more > 0).then(|| now + self.interval);
        (more > 0).then_some(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_at_once_then_one_summary_per_interval() {
        let at = |s: u64| Instant::ZERO + Duration::from_secs(s);
        let mut t = Throttle::new(Duration::from_secs(10));
        assert_eq!(t.due(at(0)), None);
        assert!(t.hit(at(0)));
        for _ in 0..1000 {
            assert!(!t.hit(at(5)));
        }
        assert_eq!(t.due(at(9)), None);
        assert_eq!(t.due(at(10)), Some(1000));
        // The summary was a line: the next has to wait as well.
        assert!(!t.hit(at(11)));
        assert_eq!(t.due(at(19)), None);
        assert_eq!(t.due(at(20)), Some(1));
        assert_eq!(t.due(at(30)), None);
        assert!(t.hit(at(31)));
    }
}
