//! Traffic of a path.

use crate::Direction;

/// Requests that have gone by a path, or have come by it (`stats/rdma` of the kernel). Bytes are data and headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RdmaStats {
    /// Requests that the client reads by.
    pub reads: u64,
    /// Bytes that they asked for.
    pub read_bytes: u64,
    /// Requests that the client writes by, and those without data.
    pub writes: u64,
    /// Bytes that they brought.
    pub write_bytes: u64,
}

impl RdmaStats {
    /// A request of so many bytes.
    pub(crate) fn count(&mut self, direction: Direction, bytes: u64) {
        let (requests, sum) = match direction {
            Direction::Read => (&mut self.reads, &mut self.read_bytes),
            Direction::Write => (&mut self.writes, &mut self.write_bytes),
        };
        *requests += 1;
        *sum += bytes;
    }

    /// Adds those of another share.
    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.write_bytes += other.write_bytes;
    }
}
