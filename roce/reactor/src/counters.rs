//! Counters of a loop.

/// Counts of one loop. Calls that receive and send packets are counted by the device
/// ([`DatapathCounters`](roce::DatapathCounters)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Turns.
    pub turns: u64,
    /// Rounds within turns: completions, events, the service's work.
    pub rounds: u64,
    /// Turns that ended because their time was over.
    pub cut: u64,
    /// Waits (`epoll_wait` with a timeout).
    pub sleeps: u64,
    /// Looks at the descriptors that do not wait (`epoll_wait` without).
    pub looks: u64,
    /// Times that it spun before it slept.
    pub spins: u64,
    /// Spins among them that found work.
    pub spins_won: u64,
    /// Times that it offered its processor to others while it spun (`sched_yield`).
    pub yields: u64,
    /// Changes of what is watched (`epoll_ctl`).
    pub interests: u64,
    /// Receives asked of the device.
    pub receives: u64,
    /// Times that the send buffer was full.
    pub blocked: u64,
    /// Commands that came.
    pub commands: u64,
    /// Jobs that were done.
    pub jobs: u64,
    /// Completions that were handed to the service.
    pub completions: u64,
}

impl Counters {
    /// Adds what another loop has done.
    pub fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.rounds += other.rounds;
        self.cut += other.cut;
        self.sleeps += other.sleeps;
        self.looks += other.looks;
        self.spins += other.spins;
        self.spins_won += other.spins_won;
        self.yields += other.yields;
        self.interests += other.interests;
        self.receives += other.receives;
        self.blocked += other.blocked;
        self.commands += other.commands;
        self.jobs += other.jobs;
        self.completions += other.completions;
    }
}
