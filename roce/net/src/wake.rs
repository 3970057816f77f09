//! What wakes the background thread: arriving packets, unless it stands back, and an alarm clock.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::atomic::{AtomicU8, Ordering},
};

use mio::{Interest, Poll, Token, unix::SourceFd};
use parking_lot::Mutex;
use roce_verbs::Instant;

use crate::{
    handover::Watch,
    sys::{self, EventFd, TimerFd},
};

pub(crate) const TOKEN_TIMER: Token = Token(0);
const TOKEN_STOP: Token = Token(1);
/// Changes of interfaces.
pub(crate) const TOKEN_LINKS: Token = Token(2);
/// Messages of other engines.
pub(crate) const TOKEN_INBOX: Token = Token(3);
/// The first of the datapath's descriptors.
pub(crate) const TOKEN_SOCKETS: usize = 16;

struct Descriptors {
    /// The epoll instance that the thread waits in.
    epoll: OwnedFd,
    timer: TimerFd,
    stop: EventFd,
}

struct State {
    /// The datapath's.
    sockets: Vec<RawFd>,
    /// What wakes the thread.
    watching: Watch,
    /// When the alarm clock rings.
    alarm: Option<Instant>,
}

/// See the module. The lock in it is the last in the order: nothing is called under it.
pub(crate) struct Wake {
    descriptors: Option<Descriptors>,
    state: Mutex<State>,
    /// [`State::watching`], to be read without the lock.
    watching: AtomicU8,
}

impl Wake {
    /// For a driver without a background thread: does nothing.
    pub(crate) fn nobody() -> Self {
        Self::of(None, vec![])
    }

    fn of(descriptors: Option<Descriptors>, sockets: Vec<RawFd>) -> Self {
        // Nothing to change where nobody is woken.
        let watching = Watch::All;
        Self {
            state: Mutex::new(State {
                sockets,
                watching,
                alarm: None,
            }),
            descriptors,
            watching: AtomicU8::new(watching as u8),
        }
    }

    /// Registers everything with the poll in which the thread will wait.
    pub(crate) fn new(poll: &Poll, sockets: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let descriptors = Descriptors {
            epoll: sys::epoll_of(poll)?,
            timer: TimerFd::new()?,
            stop: EventFd::new()?,
        };
        let sockets: Vec<RawFd> = sockets.iter().map(|s| s.as_raw_fd()).collect();
        let register = |fd: RawFd, token| poll.registry().register(&mut SourceFd(&fd), token, Interest::READABLE);
        register(descriptors.timer.as_fd().as_raw_fd(), TOKEN_TIMER)?;
        register(descriptors.stop.as_fd().as_raw_fd(), TOKEN_STOP)?;
        for (i, fd) in sockets.iter().enumerate() {
            register(*fd, Token(TOKEN_SOCKETS + i))?;
        }
        Ok(Self::of(Some(descriptors), sockets))
    }

    /// Also lets this descriptor wake the thread, always.
    pub(crate) fn also(poll: &Poll, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        poll.registry()
            .register(&mut SourceFd(&fd.as_raw_fd()), token, Interest::READABLE)
    }

    /// The datapath has other descriptors than before. Those that are gone are closed already.
    ///
    /// # Errors
    /// When a new one can't be watched.
    pub(crate) fn follow(&self, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        let Some(d) = &self.descriptors else { return Ok(()) };
        let mut state = self.state.lock();
        let now: Vec<RawFd> = sockets.iter().map(|s| s.as_raw_fd()).collect();
        for (i, fd) in now.iter().enumerate() {
            if !state.sockets.contains(fd) {
                sys::epoll_add(d.epoll.as_fd(), *fd, TOKEN_SOCKETS + i, state.watching == Watch::All)?;
            }
        }
        state.sockets = now;
        Ok(())
    }

    /// What is to wake the thread. Packets that wait already wake it at once.
    pub(crate) fn watch(&self, what: Watch) {
        let Some(d) = &self.descriptors else { return };
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut state.watching, what);
        self.watching.store(what as u8, Ordering::Release);
        let packets = what == Watch::All;
        if packets == (before == Watch::All) {
            return;
        }
        for (i, fd) in state.sockets.iter().enumerate() {
            match sys::epoll_watch(d.epoll.as_fd(), *fd, TOKEN_SOCKETS + i, packets) {
                // A group's socket that was closed a moment ago: `follow` comes next.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOENT)) => {}
                Err(e) => tracing::error!("changing what the background thread waits for failed: {e}"),
                Ok(()) => {}
            }
        }
    }

    pub(crate) fn watching(&self) -> Watch {
        const ALL: u8 = Watch::All as u8;
        const TIMERS: u8 = Watch::Timers as u8;
        match self.watching.load(Ordering::Acquire) {
            ALL => Watch::All,
            TIMERS => Watch::Timers,
            _ => Watch::Nothing,
        }
    }

    /// Whether there is a thread to be woken.
    pub(crate) fn has_thread(&self) -> bool {
        self.descriptors.is_some()
    }

    /// The datapath's descriptors.
    pub(crate) fn sockets(&self, add: &mut Vec<RawFd>) {
        add.extend_from_slice(&self.state.lock().sockets);
    }

    /// The thread is to wake up no later than `at`.
    pub(crate) fn set_alarm(&self, now: Instant, at: Instant) {
        let Some(d) = &self.descriptors else { return };
        let mut state = self.state.lock();
        // While the thread stands back the program runs timers, and if it stays away the alarm that there is rings soon enough.
        if state
            .alarm
            .is_some_and(|set| set <= at || state.watching == Watch::Nothing)
        {
            return;
        }
        match d.timer.set(at.saturating_since(now)) {
            Ok(()) => state.alarm = Some(at),
            Err(e) => tracing::error!("setting a timer failed: {e}"),
        }
    }

    /// While the thread stands back: the program has polled again, so that nobody need look before `at`. The clock is set again only
    /// when half of that time is over.
    pub(crate) fn postpone(&self, now: Instant, at: Instant) {
        let Some(d) = &self.descriptors else { return };
        let mut state = self.state.lock();
        let soon = |set: Instant| set.saturating_since(now) < at.saturating_since(now) / 2;
        if state.watching != Watch::Nothing || !state.alarm.is_some_and(soon) {
            return;
        }
        match d.timer.set(at.saturating_since(now)) {
            Ok(()) => state.alarm = Some(at),
            Err(e) => tracing::error!("setting a timer failed: {e}"),
        }
    }

    /// The alarm clock has rung.
    pub(crate) fn alarm_rang(&self) {
        self.state.lock().alarm = None;
    }

    /// Wakes the thread to end.
    pub(crate) fn stop(&self) {
        if let Some(d) = &self.descriptors {
            d.stop.raise();
        }
    }
}
