//! Heartbeats: each side asks over the service connection at every interval in which it heard something, and gives the
//! path up after some intervals of silence (`hb_work` in the kernel: 5 s, 5 times).

use core::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use std::time::Instant;

use parking_lot::Mutex;

use crate::PathError;

/// Interval and patience.
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
    pub fn patience(&self) -> Duration {
        self.interval * (self.max_missed + 2)
    }
}

/// What to do at the end of an interval.
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
    missed: AtomicU32,
}

impl Heartbeat {
    /// A peer that was heard just now.
    pub fn new(config: HeartbeatConfig) -> Self {
        Self {
            config,
            missed: AtomicU32::new(0),
        }
    }

    /// The configuration.
    pub fn config(&self) -> &HeartbeatConfig {
        &self.config
    }

    /// Anything came from the peer.
    pub fn heard(&self) {
        self.missed.store(0, Ordering::Relaxed);
    }

    /// An interval is over.
    pub fn tick(&self) -> Beat {
        if self.missed.load(Ordering::Relaxed) > self.config.max_missed {
            return Beat::Lost;
        }
        match self.missed.fetch_add(1, Ordering::Relaxed) {
            0 => Beat::Send,
            _ => Beat::Wait,
        }
    }
}

/// A path's heartbeat: the counter, and when it is to be looked at.
#[derive(Debug)]
pub(crate) struct Pulse {
    heartbeat: Heartbeat,
    next: Mutex<Instant>,
}

impl Pulse {
    /// A peer that was heard just now.
    pub(crate) fn new(config: HeartbeatConfig) -> Self {
        Self {
            heartbeat: Heartbeat::new(config),
            next: Mutex::new(Instant::now() + config.interval),
        }
    }

    /// The first interval begins now.
    pub(crate) fn restart(&self) {
        *self.next.lock() = Instant::now() + self.heartbeat.config().interval;
    }

    /// Anything came from the peer.
    pub(crate) fn heard(&self) {
        self.heartbeat.heard();
    }

    /// Runs what is due; `ask` sends the question to the peer. Returns when the next interval ends, and the error that
    /// ends the path.
    pub(crate) fn run(
        &self,
        now: Instant,
        ask: impl FnOnce() -> Result<(), PathError>,
    ) -> (Instant, Result<(), PathError>) {
        let config = self.heartbeat.config();
        let mut next = self.next.lock();
        if now < *next {
            return (*next, Ok(()));
        }
        // From now, not from the last beat: a process that was stopped must not count its own absence.
        *next = now + config.interval;
        let due = *next;
        drop(next);
        let done = match self.heartbeat.tick() {
            Beat::Send => ask(),
            Beat::Wait => Ok(()),
            Beat::Lost => Err(PathError::HeartbeatLost(config.patience())),
        };
        (due, done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_ends_the_path_after_the_kernels_number_of_intervals() {
        let hb = Heartbeat::new(HeartbeatConfig::default());
        assert_eq!(hb.tick(), Beat::Send);
        for _ in 0..5 {
            assert_eq!(hb.tick(), Beat::Wait);
        }
        assert_eq!(hb.tick(), Beat::Lost);
        assert_eq!(hb.config().patience(), Duration::from_secs(35));
    }

    #[test]
    fn any_sign_of_life_starts_over() {
        let hb = Heartbeat::new(HeartbeatConfig::default());
        for _ in 0..100 {
            assert_eq!(hb.tick(), Beat::Send);
            for _ in 0..5 {
                assert_eq!(hb.tick(), Beat::Wait);
            }
            hb.heard();
        }
    }
}
