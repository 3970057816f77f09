//! Wakes the progress thread: by arriving packets, unless it is parked, and by a timer.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use mio::{Interest, Poll, Token, unix::SourceFd};
use parking_lot::Mutex;
use roce_verbs::Instant;

use crate::{
    clock,
    sys::{self, EventFd, TimerFd},
};

pub(crate) const TOKEN_TIMER: Token = Token(0);
const TOKEN_STOP: Token = Token(1);
/// Changes of interfaces.
pub(crate) const TOKEN_LINKS: Token = Token(2);
/// Messages of other engines.
pub(crate) const TOKEN_INBOX: Token = Token(3);
/// Token of the datapath's first descriptor.
pub(crate) const TOKEN_SOCKETS: usize = 16;

/// Timers that expire earlier do so before the kernel's next tick, which is a millisecond to ten away.
const NEAR: Duration = Duration::from_millis(1);

struct Descriptors {
    /// Epoll instance in which the thread waits.
    epoll: OwnedFd,
    timer: TimerFd,
    stop: EventFd,
}

struct State {
    /// Descriptors of the datapath.
    sockets: Vec<RawFd>,
    /// Expiry of the timer, if it is armed.
    timer: Option<Instant>,
    /// Whether the thread is awake: it arms the timer before it sleeps, for all wishes at once.
    awake: bool,
    /// Earliest wish since the timer expired last.
    wish: Option<Instant>,
    /// End of the program's lease.
    lease: Option<Instant>,
}

impl State {
    /// Arms the timer for the wish or the end of the lease, whichever is earlier. Returns how long that took if it is near: only then
    /// the processor's timer has to be set.
    fn arm(&mut self, timer: &TimerFd, now: Instant) -> Option<Duration> {
        let at = self.wish.into_iter().chain(self.lease).min()?;
        if self.timer == Some(at) {
            return None;
        }
        let begin = clock::now();
        match timer.set(at.saturating_since(now)) {
            Ok(()) => self.timer = Some(at),
            Err(e) => tracing::error!("timerfd_settime failed: {e}"),
        }
        let took = clock::now().saturating_since(begin);
        (at < now + NEAR).then_some(took)
    }
}

/// Epoll registrations and timer of the progress thread.
pub(crate) struct Wake {
    descriptors: Option<Descriptors>,
    /// Leaf lock: acquire no other lock while holding it.
    state: Mutex<State>,
    /// Whether packets wake the thread. Written under the lock.
    watching: AtomicBool,
    /// Whether the thread is parked: its timer expires at the end of the lease.
    parked: AtomicBool,
    /// Usual time to arm a near timer, nanoseconds. Written under the lock.
    timer_cost: AtomicU64,
}

impl Wake {
    /// Makes one for a driver without a progress thread: it does nothing.
    pub(crate) fn without_thread() -> Self {
        Self::of(None, vec![])
    }

    fn of(descriptors: Option<Descriptors>, sockets: Vec<RawFd>) -> Self {
        Self {
            state: Mutex::new(State {
                sockets,
                timer: None,
                awake: false,
                wish: None,
                lease: None,
            }),
            descriptors,
            watching: AtomicBool::new(true),
            parked: AtomicBool::new(false),
            timer_cost: AtomicU64::new(0),
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

    /// Registers a descriptor that always wakes the thread.
    pub(crate) fn also(poll: &Poll, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        poll.registry()
            .register(&mut SourceFd(&fd.as_raw_fd()), token, Interest::READABLE)
    }

    /// Follows a change of the datapath's descriptors. Those that are gone are closed already.
    ///
    /// # Errors
    /// When a new one can't be watched.
    pub(crate) fn follow(&self, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        let Some(d) = &self.descriptors else { return Ok(()) };
        let mut state = self.state.lock();
        let now: Vec<RawFd> = sockets.iter().map(|s| s.as_raw_fd()).collect();
        for (i, fd) in now.iter().enumerate() {
            if !state.sockets.contains(fd) {
                sys::epoll_add(d.epoll.as_fd(), *fd, TOKEN_SOCKETS + i, self.is_watching())?;
            }
        }
        state.sockets = now;
        Ok(())
    }

    /// Lets packets wake the thread, or not. Packets that are waiting wake it at once.
    pub(crate) fn watch(&self, on: bool) {
        let Some(d) = &self.descriptors else { return };
        let state = self.state.lock();
        if self.watching.swap(on, Ordering::AcqRel) == on {
            return;
        }
        for (i, fd) in state.sockets.iter().enumerate() {
            match sys::epoll_watch(d.epoll.as_fd(), *fd, TOKEN_SOCKETS + i, on) {
                // Socket of a multicast group, closed a moment ago: `follow` comes next.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOENT)) => {}
                Err(e) => tracing::error!("epoll_ctl of the progress thread's sockets failed: {e}"),
                Ok(()) => {}
            }
        }
    }

    pub(crate) fn is_watching(&self) -> bool {
        self.watching.load(Ordering::Acquire)
    }

    /// Notes whether the thread is parked. Returns whether it was.
    pub(crate) fn park(&self, on: bool) -> bool {
        self.parked.load(Ordering::Acquire) != on && self.parked.swap(on, Ordering::AcqRel)
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Acquire)
    }

    /// Returns whether there is a thread to be woken.
    pub(crate) fn has_thread(&self) -> bool {
        self.descriptors.is_some()
    }

    /// Adds the datapath's descriptors to a list.
    pub(crate) fn sockets(&self, add: &mut Vec<RawFd>) {
        add.extend_from_slice(&self.state.lock().sockets);
    }

    /// Wakes the thread no later than `at`.
    pub(crate) fn wake_by(&self, now: Instant, at: Instant) {
        self.change(now, |state| {
            state.wish = Some(state.wish.map_or(at, |wish| wish.min(at)))
        });
    }

    /// Wakes the thread at the end of the program's lease, in place of the end set before.
    pub(crate) fn set_lease(&self, now: Instant, end: Instant) {
        self.change(now, |state| state.lease = Some(end));
    }

    fn change(&self, now: Instant, change: impl FnOnce(&mut State)) {
        let Some(d) = &self.descriptors else { return };
        let mut state = self.state.lock();
        change(&mut state);
        if !state.awake {
            self.note_cost(state.arm(&d.timer, now));
        }
    }

    /// Averages the time that arming the timer takes. Samples that a preemption made long count little.
    fn note_cost(&self, sample: Option<Duration>) {
        const MOST: u64 = 50_000;
        let Some(sample) = sample else { return };
        let (known, sample) = (
            self.timer_cost.load(Ordering::Relaxed),
            (sample.as_nanos() as u64).min(MOST),
        );
        self.timer_cost.store((known * 15 + sample) / 16, Ordering::Relaxed);
    }

    /// Returns how long it usually takes to arm a near timer.
    pub(crate) fn timer_cost(&self) -> Duration {
        Duration::from_nanos(self.timer_cost.load(Ordering::Relaxed))
    }

    /// Arms the timer for a thread that is about to sleep.
    pub(crate) fn before_sleep(&self) {
        let Some(d) = &self.descriptors else { return };
        let mut state = self.state.lock();
        state.awake = false;
        self.note_cost(state.arm(&d.timer, clock::now()));
    }

    /// Notes that the thread has woken up. `expired`: by the timer.
    pub(crate) fn after_sleep(&self, expired: bool) {
        let mut state = self.state.lock();
        state.awake = true;
        if expired {
            (state.timer, state.wish, state.lease) = (None, None, None);
        }
    }

    /// Wakes the thread to end.
    pub(crate) fn stop(&self) {
        if let Some(d) = &self.descriptors {
            d.stop.raise();
        }
    }
}
