//! Threads that sleep for completions and bring the packets themselves.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    time::Duration,
};

use crate::{driver::Driver, sys};

/// A thread that sleeps for completions of a port ([`Driver::attend`]).
pub struct Attendance<'a> {
    pub(crate) driver: &'a Driver,
    /// It is one of those that sleep; a port without a background thread has none.
    pub(crate) counted: bool,
    /// It is the one that sleeps for the packets.
    pub(crate) attending: bool,
    /// The last packets have left something to do.
    pub(crate) more: bool,
}

impl Attendance<'_> {
    fn attends(&mut self) -> bool {
        self.attending = self.attending && self.driver.shared.still_attends();
        self.attending
    }

    /// Adds what to wait for, if anything.
    fn sockets(&mut self, add: &mut Vec<RawFd>) {
        if self.attends() {
            self.driver.shared.around().wake.sockets(add);
        }
    }

    /// Looks for packets. False: another thread has them.
    pub fn look(&mut self) -> bool {
        self.more = self.attends() && self.driver.shared.packets_came();
        self.attending
    }
}

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        if self.counted {
            self.driver.shared.leave(self.attending, self.more);
        }
    }
}

/// Sleeps until `event` is readable, packets have come, which are handled then, or the time runs out (`None`: never). May return early.
///
/// # Errors
/// When the system call fails.
pub fn sleep(event: BorrowedFd<'_>, ports: &mut [Attendance<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let mut fds = Vec::with_capacity(1 + 2 * ports.len());
    fds.push(event.as_raw_fd());
    let ends = ports.iter_mut().map(|port| {
        port.sockets(&mut fds);
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
            port.look();
        }
        start = end;
    }
    Ok(())
}
