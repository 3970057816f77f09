//! Limits and counters of a server.

use core::fmt;

/// Limits of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Devices that one session may have open.
    pub max_devices: usize,
    /// Devices that all sessions together may have open, those included that are being opened or closed. One that is open
    /// for writing takes two descriptors, any other one.
    pub max_open: usize,
}

impl Default for Limits {
    /// 256 devices a session, 1024 in all.
    fn default() -> Self {
        Self {
            max_devices: 256,
            max_open: 1024,
        }
    }
}

/// Counts the devices that are open, being opened or being closed: of a server, or of several together.
pub trait Places: fmt::Debug + Send {
    /// One more, if there is room.
    fn take(&mut self) -> bool;
    /// One less.
    fn give_back(&mut self);
}

/// Open devices of one server.
#[derive(Debug)]
pub(super) struct OwnPlaces {
    pub(super) taken: usize,
    pub(super) most: usize,
}

impl Places for OwnPlaces {
    fn take(&mut self) -> bool {
        let room = self.taken < self.most;
        self.taken += usize::from(room);
        room
    }

    fn give_back(&mut self) {
        self.taken = self.taken.saturating_sub(1);
    }
}

/// Counters of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerCounters {
    /// Devices opened.
    pub opens: u64,
    /// Open requests refused.
    pub refused: u64,
    /// Refusals because the session or the server had as many devices open as it may have.
    pub refused_limit: u64,
    /// Devices open now, those included that are being opened or closed.
    pub open: u64,
    /// Block requests answered.
    pub requests: u64,
    /// Block requests answered with an error.
    pub failed: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Messages that were malformed or unexpected.
    pub malformed: u64,
}

impl ServerCounters {
    /// Adds what another server has done.
    pub fn add(&mut self, other: &Self) {
        self.opens += other.opens;
        self.refused += other.refused;
        self.refused_limit += other.refused_limit;
        self.open += other.open;
        self.requests += other.requests;
        self.failed += other.failed;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.malformed += other.malformed;
    }
}
