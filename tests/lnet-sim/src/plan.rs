//! Plans of hosts and their programs.

/// Memory of a host for PUTs of another one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    /// Bytes of a place, for one PUT at a time.
    pub(crate) len: usize,
    /// Their number.
    pub(crate) count: usize,
}

/// Plan of a program.
#[derive(Clone, Debug)]
pub(crate) struct ProgramPlan {
    /// Operations to begin.
    pub(crate) operations: u32,
    /// Operations at a time.
    pub(crate) at_once: usize,
    /// Lengths of data.
    pub(crate) lens: Vec<usize>,
    /// Longest pause between two operations, nanoseconds.
    pub(crate) think: u64,
    /// Probability that an operation is a GET, that a PUT asks for an acknowledgement, and that nothing matches an operation.
    pub(crate) gets: f64,
    pub(crate) acks: f64,
    pub(crate) misses: f64,
    /// Probability that a program pings instead.
    pub(crate) pings: f64,
}
