//! Counters of a loop.

use crate::counters;

counters! {
    /// Counters of one loop. Calls that receive and send packets are counted by the device
    /// ([`DatapathCounters`](crate::DatapathCounters)).
    pub struct Counters;

    /// Turns.
    turns,
    /// Rounds within turns: completions, events, the service's work.
    rounds,
    /// Turns that ended because their time was over.
    cut,
    /// Waits (`epoll_wait` with a timeout).
    sleeps,
    /// Looks at the descriptors that do not wait (`epoll_wait` without).
    looks,
    /// Times that it spun before it slept.
    spins,
    /// Spins among them that found work.
    spins_won,
    /// Times that it offered its processor to others while it spun (`sched_yield`).
    yields,
    /// Changes of what is watched (`epoll_ctl`).
    interests,
    /// Receives asked of the device.
    receives,
    /// Times that the send buffer was full.
    blocked,
    /// Commands that came.
    commands,
    /// Jobs that were done.
    jobs,
    /// Completions that were handed to the service.
    completions,
}
