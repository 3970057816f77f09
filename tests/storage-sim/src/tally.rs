//! Counts of runs with storage.

use roce_sim::{Coverage, RunsWith, Stats, Total};

/// Counts of runs with storage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StorageStats {
    /// Runs.
    pub runs: u64,
    /// Packets sent.
    pub packets: u64,
    /// Packets that the network lost.
    pub lost: u64,
    /// Block operations that ended.
    pub operations: u64,
    /// Block operations that succeeded.
    pub succeeded: u64,
    /// Virtual time, nanoseconds.
    pub simulated_ns: u64,
    /// Fingerprint of the run: times and headers of all packets received, and how operations ended. Of several runs: combined.
    pub trace_hash: u64,
    /// Number of runs with each event, and of the events.
    pub coverage: RunsWith,
    /// Packets that adversaries forged.
    pub forged: u64,
    /// Clients accepted under a flood of requests.
    pub admitted: u64,
    /// Time until the slowest of them was accepted, nanoseconds.
    pub longest_admission_ns: u64,
}

impl StorageStats {
    /// Adds a run of the admission of clients.
    pub(crate) fn add_admission(&mut self, run: &Stats) {
        self.packets += run.packets;
        self.simulated_ns += run.simulated_ns;
        self.trace_hash ^= run.trace_hash;
        self.forged += run.forged;
        self.admitted += run.admitted;
        self.longest_admission_ns = self.longest_admission_ns.max(run.longest_admission_ns);
    }
}

impl Total for StorageStats {
    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.packets += other.packets;
        self.lost += other.lost;
        self.operations += other.operations;
        self.succeeded += other.succeeded;
        self.simulated_ns += other.simulated_ns;
        self.trace_hash ^= other.trace_hash;
        Coverage::sum(&mut self.coverage, &other.coverage);
        self.forged += other.forged;
        self.admitted += other.admitted;
        self.longest_admission_ns = self.longest_admission_ns.max(other.longest_admission_ns);
    }
}
