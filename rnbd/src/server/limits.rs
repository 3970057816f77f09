//! Limits and counters of a server.

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
