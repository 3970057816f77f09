//! Sleeps for an event and for a port's packets at once.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    time::Duration,
};

use crate::{engine::Shared, sys};

/// Thread that sleeps for an event of a port ([`Driver::begin_wait`](crate::Driver::begin_wait)).
pub struct Waiter<'a> {
    pub(crate) shared: &'a Shared,
    /// Whether the driver counts this thread among those that sleep. A driver without a progress thread counts none.
    pub(crate) counted: bool,
    /// Whether packets wake this thread.
    pub(crate) owns: bool,
    /// Whether the last pass left something to do.
    pub(crate) more: bool,
}

impl Waiter<'_> {
    /// Advances the port. False: packets concern another thread.
    pub fn advance(&mut self) -> bool {
        if self.owns {
            let more = self.shared.advance_waiter();
            (self.owns, self.more) = (more.is_some(), more == Some(true));
        }
        self.owns
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.counted {
            self.shared.end_wait(self.owns, self.more);
        }
    }
}

/// Sleeps until `event` is readable, packets arrive (their ports are then advanced), or the time runs out (`None`: never). May return
/// early.
///
/// # Errors
/// When the system call fails.
pub fn wait(event: BorrowedFd<'_>, ports: &mut [Waiter<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let mut fds: Vec<RawFd> = Vec::with_capacity(1 + 2 * ports.len());
    fds.push(event.as_raw_fd());
    let ends = ports.iter_mut().map(|port| {
        if port.owns {
            port.shared.env().sockets(&mut fds);
        }
        fds.len()
    });
    let ends: Vec<usize> = ends.collect();
    let timeout = match ports.iter().any(|port| port.more) {
        true => Some(Duration::ZERO),
        false => timeout,
    };
    let readable = sys::wait_any_readable(&fds, timeout)?;
    let mut start = 1;
    for (port, end) in ports.iter_mut().zip(ends) {
        if port.more || readable[start..end].contains(&true) {
            port.advance();
        }
        start = end;
    }
    Ok(())
}
