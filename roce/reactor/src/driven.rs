//! A loop within a loop of the caller's.

use std::{
    os::fd::{AsRawFd, RawFd},
    time::Duration,
};

use roce::LocalDevice;

use crate::{
    service::{Service, TurnCx},
    turn::{Loop, Reactor, ReactorError},
};

/// A loop that the caller drives: it has one descriptor, and each call runs one turn and returns.
///
/// ```no_run
/// # use std::os::fd::{AsRawFd, RawFd};
/// # use roce_reactor::{Driven, Service, Turned};
/// # fn wait_readable(fd: RawFd, timeout: Option<std::time::Duration>) {}
/// # fn run<S: Service>(mut driven: Driven<S>) -> Result<(), Box<dyn std::error::Error>> {
/// while let Turned::Wait(timeout) = driven.turn()? {
///     // By poll, epoll, mio or tokio's AsyncFd, next to the caller's own descriptors.
///     wait_readable(driven.as_raw_fd(), timeout);
/// }
/// # Ok(())
/// # }
/// ```
pub struct Driven<S: Service> {
    turns: Loop<S::Command, S::Output>,
    service: S,
}

/// Next step after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turned {
    /// The next turn is due when the descriptor is readable, and after this time; `None`: there is no time.
    Wait(Option<Duration>),
    /// The service has [stopped](TurnCx::stop) the loop.
    Stopped,
}

impl<S: Service> std::fmt::Debug for Driven<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driven").finish_non_exhaustive()
    }
}

impl<S: Service> Reactor<S> {
    /// Prepares the loop for turns in the caller's loop instead of running it. `start` makes the service.
    ///
    /// # Errors
    /// When the system refuses to watch a descriptor.
    pub fn drive(
        self,
        devices: LocalDevice,
        start: impl FnOnce(&mut TurnCx<'_, S::Output>) -> S,
    ) -> Result<Driven<S>, ReactorError> {
        let mut turns = Loop::new(self, devices)?;
        let service = start(&mut turns.cx());
        Ok(Driven { turns, service })
    }
}

impl<S: Service> Driven<S> {
    /// Runs one turn, without waiting. To be called when the descriptor is readable, when the time of the last turn is over, and after
    /// the service was given something to do.
    ///
    /// # Errors
    /// When the system fails, or the device.
    pub fn turn(&mut self) -> Result<Turned, ReactorError> {
        self.turns.after_wait()?;
        self.turns.turn(&mut self.service)?;
        if self.turns.stop {
            self.turns.last_flush();
            return Ok(Turned::Stopped);
        }
        self.turns.before_wait(&self.service).map(Turned::Wait)
    }

    /// Returns the service that runs on the loop.
    pub fn service(&mut self) -> &mut S {
        &mut self.service
    }
}

impl<S: Service> AsRawFd for Driven<S> {
    /// Returns the descriptor that is readable when a turn has something to do. It is the loop's own: not to be read or closed.
    fn as_raw_fd(&self) -> RawFd {
        self.turns.as_raw_fd()
    }
}
