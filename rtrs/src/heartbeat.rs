//! Heartbeats: each side asks over the service connection at every interval in which it heard something, and gives the
//! path up after some intervals of silence (`hb_work` in the kernel: 5 s, 5 times).

use core::time::Duration;

/// Interval, and how many may be missed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeartbeatConfig {
    /// Time between two looks at the peer.
    pub interval: Duration,
    /// Silent intervals after the question that end the path.
    pub max_missed: u32,
}

impl Default for HeartbeatConfig {
    /// The kernel's: 5 s (`RTRS_HB_INTERVAL_MS`), 5 (`RTRS_HB_MISSED_MAX`).
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            max_missed: 5,
        }
    }
}

impl HeartbeatConfig {
    /// The longest time from a peer's last sign of life until the path is given up: the counter is looked at before it
    /// is counted up, so that is two intervals more than `max_missed`.
    pub fn timeout(&self) -> Duration {
        self.interval * (self.max_missed + 2)
    }
}

/// Action at the end of an interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beat {
    /// Ask.
    Send,
    /// Asked already: wait on.
    Wait,
    /// Give the path up.
    Lost,
}

/// The counter of silent intervals. The clock is the caller's: it calls [`Heartbeat::tick`] once per interval.
#[derive(Debug)]
pub struct Heartbeat {
    config: HeartbeatConfig,
    missed: u32,
}

impl Heartbeat {
    /// A peer that was heard just now.
    pub fn new(config: HeartbeatConfig) -> Self {
        Self { config, missed: 0 }
    }

    /// The configuration.
    pub fn config(&self) -> &HeartbeatConfig {
        &self.config
    }

    /// Anything came from the peer.
    pub fn heard(&mut self) {
        self.missed = 0;
    }

    /// An interval is over.
    pub fn tick(&mut self) -> Beat {
        if self.missed > self.config.max_missed {
            return Beat::Lost;
        }
        self.missed += 1;
        match self.missed {
            1 => Beat::Send,
            _ => Beat::Wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_ends_the_path_after_the_kernels_number_of_intervals() {
        let mut hb = Heartbeat::new(HeartbeatConfig::default());
        assert_eq!(hb.tick(), Beat::Send);
        for _ in 0..5 {
            assert_eq!(hb.tick(), Beat::Wait);
        }
        assert_eq!(hb.tick(), Beat::Lost);
        assert_eq!(hb.config().timeout(), Duration::from_secs(35));
    }

    #[test]
    fn any_sign_of_life_starts_over() {
        let mut hb = Heartbeat::new(HeartbeatConfig::default());
        for _ in 0..100 {
            assert_eq!(hb.tick(), Beat::Send);
            for _ in 0..5 {
                assert_eq!(hb.tick(), Beat::Wait);
            }
            hb.heard();
        }
    }
}
