//! Services of a loop.

use std::{
    cell::Cell,
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use crate::{
    Completion, LocalDevice, NewDevice,
    verbs::{
        Instant,
        provider::{DeviceIx, Event, Provider, QpId},
    },
};
use mio::{Interest, Registry, Token, unix::SourceFd};

use crate::reactor::{
    counters::Counters,
    jobs::{JobResult, Jobs},
    stats::LoopStats,
};

/// Tokens from here on are the loop's own.
pub(crate) const RESERVED: usize = usize::MAX - 16;
/// Token of the devices' sockets.
pub(crate) const DEVICE: Token = Token(RESERVED);

/// Readiness of a descriptor. Reported once (edge-triggered): the service keeps it until a call says that it would block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readiness {
    /// There is something to read, or the end.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
    /// The peer writes no more, or the descriptor failed.
    pub closed: bool,
}

impl From<&mio::event::Event> for Readiness {
    fn from(event: &mio::event::Event) -> Self {
        Self {
            readable: event.is_readable(),
            writable: event.is_writable(),
            closed: event.is_read_closed() || event.is_error(),
        }
    }
}

/// Descriptors that a loop watches for its service.
pub struct Sockets<'a> {
    registry: &'a Registry,
    changes: &'a Cell<u64>,
}

impl<'a> Sockets<'a> {
    pub(crate) fn new(registry: &'a Registry, changes: &'a Cell<u64>) -> Self {
        Self { registry, changes }
    }

    fn change(&self) {
        self.changes.set(self.changes.get() + 1);
    }

    /// Watches all descriptors of a device, or none.
    pub(crate) fn watch_device(&self, fds: &[BorrowedFd<'_>], token: Token) -> io::Result<()> {
        for (index, fd) in fds.iter().enumerate() {
            if let Err(e) = self.watch(*fd, token, Interest::READABLE) {
                for fd in &fds[..index] {
                    let _ = self.deregister(*fd);
                }
                return Err(e);
            }
        }
        Ok(())
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> io::Result<()> {
        self.change();
        self.registry.register(&mut SourceFd(&fd.as_raw_fd()), token, interest)
    }

    fn check(token: Token) -> io::Result<()> {
        match token.0 < RESERVED {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Watches a descriptor. It comes with its token to [`Service::ready`]; several may have the same. It is to be
    /// deregistered before it is closed.
    ///
    /// # Errors
    /// When the token is one of the loop's own, the highest 17; those of `epoll_ctl`.
    pub fn register(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> io::Result<()> {
        Self::check(token)?;
        self.watch(fd, token, interest)
    }

    /// Watches a descriptor for something else. Its readiness is reported again.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn reregister(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> io::Result<()> {
        Self::check(token)?;
        self.change();
        self.registry
            .reregister(&mut SourceFd(&fd.as_raw_fd()), token, interest)
    }

    /// Watches a descriptor no longer. Readiness seen in this turn is reported nevertheless.
    ///
    /// # Errors
    /// As of `epoll_ctl`.
    pub fn deregister(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.change();
        self.registry.deregister(&mut SourceFd(&fd.as_raw_fd()))
    }
}

debug!(Sockets<'_>, "Sockets");

/// Context of a service's call. `J` is the output of its jobs.
pub struct TurnCx<'a, J> {
    /// The time, as of this round of the turn.
    pub now: Instant,
    /// The devices of the loop.
    pub device: &'a mut LocalDevice,
    /// The descriptors that are watched for the service.
    pub sockets: Sockets<'a>,
    /// Work that waits for the system.
    pub jobs: &'a Jobs<J>,
    /// Counters of the loop.
    pub counters: &'a Counters,
    pub(crate) stop: &'a mut bool,
}

impl<J> TurnCx<'_, J> {
    /// The devices, as state machines know them.
    pub fn provider(&mut self) -> &mut dyn Provider {
        self.device.provider()
    }

    /// Returns the present statistics.
    pub fn stats(&mut self) -> LoopStats {
        LoopStats {
            devices: self.device.all_stats(),
            usage: self.device.usage(),
            turns: *self.counters,
        }
    }

    /// The loop drives one more device, which has been opened for it ([`crate::Opener`]).
    ///
    /// # Errors
    /// As of `epoll_ctl`; the device comes back.
    pub fn attach(&mut self, new: Box<NewDevice>) -> Result<DeviceIx, (io::Error, Box<NewDevice>)> {
        match self.sockets.watch_device(&new.descriptors(), DEVICE) {
            Ok(()) => Ok(self.device.attach(*new)),
            Err(e) => Err((e, new)),
        }
    }

    /// Ends the loop after this turn.
    pub fn stop(&mut self) {
        *self.stop = true;
    }
}

debug!(TurnCx<'_, J>, "TurnCx" [J], |this| now: this.now);

/// Service of a loop: state machines, and whatever sockets and files they need. Everything is called from the loop's
/// thread, and nothing may wait.
///
/// Posted work requests leave together when the turn ends, after [`end`](Self::end).
pub trait Service {
    /// Command of other threads.
    type Command: Send + 'static;
    /// Output of its jobs.
    type Output: Send + 'static;

    /// Handles a command of another thread.
    fn command(&mut self, cx: &mut TurnCx<'_, Self::Output>, command: Self::Command);

    /// A descriptor that the service has registered is ready.
    fn ready(&mut self, _cx: &mut TurnCx<'_, Self::Output>, _token: Token, _readiness: Readiness) {}

    /// Work requests have completed, in their order.
    fn completions(&mut self, cx: &mut TurnCx<'_, Self::Output>, completions: &[(QpId, Completion)]);

    /// An event. Completions before it have been handled before.
    fn event(&mut self, cx: &mut TurnCx<'_, Self::Output>, event: Event);

    /// A job is done.
    fn job_done(&mut self, _cx: &mut TurnCx<'_, Self::Output>, _done: JobResult<Self::Output>) {}

    /// [`next_timeout`](Self::next_timeout) is due.
    fn timeout(&mut self, _cx: &mut TurnCx<'_, Self::Output>) {}

    /// Does what needs no event of the loop: reads what is known to be readable, starts and ends disk I/O, passes on what one
    /// machine has for another. It bounds itself. Returns whether it did something; then there is another round.
    fn work(&mut self, _cx: &mut TurnCx<'_, Self::Output>) -> bool {
        false
    }

    /// The turn ends: what was collected in it is posted, and then sent.
    fn end(&mut self, _cx: &mut TurnCx<'_, Self::Output>) {}

    /// The packets of this turn are on their way: the time for what takes long, such as copies into other sockets, since
    /// nobody waits for a packet meanwhile. True: there is more to do at once, which nothing else will call for.
    fn sent(&mut self, _cx: &mut TurnCx<'_, Self::Output>) -> bool {
        false
    }

    /// Returns when to call [`timeout`](Self::timeout) at the latest.
    fn next_timeout(&self) -> Option<Instant> {
        None
    }
}
