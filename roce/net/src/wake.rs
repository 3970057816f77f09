//! Runtime of the threads that share a port: wakes the progress thread by arriving packets, unless it is parked, and by a timer.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout},
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use parking_lot::Mutex;
use roce_verbs::Instant;

use crate::{
    clock,
    progress::Environment,
    sink::EventSink,
    sys::{self, EventFd},
};

pub(crate) const TOKEN_TIMER: u64 = 0;
const TOKEN_STOP: u64 = 1;
/// Changes of interfaces.
pub(crate) const TOKEN_LINKS: u64 = 2;
/// Messages of other engines.
pub(crate) const TOKEN_INBOX: u64 = 3;
/// Token of the datapath's first descriptor.
pub(crate) const TOKEN_SOCKETS: u64 = 16;

/// Timers that expire earlier do so before the kernel's next tick, which is a millisecond to ten away.
const NEAR: Duration = Duration::from_millis(1);

struct Descriptors {
    /// Epoll instance in which the thread waits.
    epoll: Epoll,
    timer: TimerFd,
    stop: EventFd,
}

impl Descriptors {
    fn new() -> io::Result<Self> {
        let this = Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            timer: TimerFd::new(
                ClockId::CLOCK_MONOTONIC,
                TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
            )?,
            stop: EventFd::new()?,
        };
        this.add(this.timer.as_fd(), TOKEN_TIMER)?;
        this.add(this.stop.as_fd(), TOKEN_STOP)?;
        Ok(this)
    }

    /// Registers a descriptor that always wakes the thread.
    fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        sys::epoll_watch(&self.epoll, true, fd.as_raw_fd(), token, true)
    }
}

#[derive(Default)]
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
        // Zero would disarm it.
        let delay = at.saturating_since(now).max(Duration::from_nanos(1));
        match timer.set(Expiration::OneShot(delay.into()), TimerSetTimeFlags::empty()) {
            Ok(()) => self.timer = Some(at),
            Err(e) => tracing::error!("timerfd_settime failed: {e}"),
        }
        let took = clock::now().saturating_since(begin);
        (at < now + NEAR).then_some(took)
    }
}

/// Moves an estimate of the median, nanoseconds, by a step towards a sample. A mean would follow the samples that a preemption made long.
fn towards_median(known: u64, sample: u64) -> u64 {
    const STEP: u64 = 100;
    const MOST: u64 = 8_000;
    match sample > known {
        true => (known + STEP).min(MOST),
        false => known.saturating_sub(STEP),
    }
}

/// Epoll registrations and timer of the progress thread, and the event sink.
pub(crate) struct Wake {
    descriptors: Option<Descriptors>,
    sink: Arc<dyn EventSink>,
    /// Process that made it ([`sys::generation`]).
    born: u32,
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
    /// Creates the runtime of a driver. `background`: it has a progress thread; without one nothing is woken.
    pub(crate) fn new(background: bool, sockets: &[BorrowedFd<'_>], sink: Arc<dyn EventSink>) -> io::Result<Self> {
        let this = Self {
            descriptors: background.then(Descriptors::new).transpose()?,
            sink,
            born: sys::generation(),
            state: Mutex::default(),
            watching: AtomicBool::new(true),
            parked: AtomicBool::new(false),
            timer_cost: AtomicU64::new(0),
        };
        this.follow(sockets)?;
        Ok(this)
    }

    pub(crate) fn sink(&self) -> &dyn EventSink {
        &*self.sink
    }

    /// Registers a descriptor that always wakes the thread, if there is one.
    pub(crate) fn also(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.descriptors.as_ref().map_or(Ok(()), |d| d.add(fd, token))
    }

    /// Follows a change of the datapath's descriptors. Those that are gone are closed already.
    ///
    /// # Errors
    /// When a new one can't be watched.
    pub(crate) fn follow(&self, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut state = self.state.lock();
        let now: Vec<RawFd> = sockets.iter().map(|s| s.as_raw_fd()).collect();
        if let Some(d) = &self.descriptors {
            for (token, fd) in (TOKEN_SOCKETS..).zip(&now) {
                if !state.sockets.contains(fd) {
                    sys::epoll_watch(&d.epoll, true, *fd, token, self.watches_sockets())?;
                }
            }
        }
        state.sockets = now;
        Ok(())
    }

    /// Returns whether there is a thread to be woken.
    pub(crate) fn has_thread(&self) -> bool {
        self.descriptors.is_some()
    }

    /// Adds the datapath's descriptors to a list.
    pub(crate) fn sockets(&self, add: &mut Vec<RawFd>) {
        add.extend_from_slice(&self.state.lock().sockets);
    }

    fn change(&self, now: Instant, change: impl FnOnce(&mut State)) {
        let Some(d) = &self.descriptors else { return };
        let mut state = self.state.lock();
        change(&mut state);
        if !state.awake {
            self.note_cost(state.arm(&d.timer, now));
        }
    }

    fn note_cost(&self, sample: Option<Duration>) {
        let Some(sample) = sample else { return };
        let known = self.timer_cost.load(Ordering::Relaxed);
        let next = towards_median(known, sample.as_nanos() as u64);
        self.timer_cost.store(next, Ordering::Relaxed);
    }

    /// Looks for events, or (`sleeps`) waits for one. Returns how many there are.
    pub(crate) fn wait(&self, events: &mut [EpollEvent], sleeps: bool) -> io::Result<usize> {
        let Some(d) = &self.descriptors else { return Ok(0) };
        let timeout = match sleeps {
            true => EpollTimeout::NONE,
            false => EpollTimeout::ZERO,
        };
        if sleeps {
            let mut state = self.state.lock();
            state.awake = false;
            self.note_cost(state.arm(&d.timer, clock::now()));
        }
        Ok(d.epoll.wait(events, timeout)?)
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

impl Environment for Wake {
    fn now(&self) -> Instant {
        clock::now()
    }

    fn watch_sockets(&self, on: bool) {
        let Some(d) = &self.descriptors else { return };
        let state = self.state.lock();
        if self.watching.swap(on, Ordering::AcqRel) == on {
            return;
        }
        for (token, fd) in (TOKEN_SOCKETS..).zip(&state.sockets) {
            match sys::epoll_watch(&d.epoll, false, *fd, token, on) {
                // Socket of a multicast group, closed a moment ago: `follow` comes next.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBADF | libc::ENOENT)) => {}
                Err(e) => tracing::error!("epoll_ctl of the progress thread's sockets failed: {e}"),
                Ok(()) => {}
            }
        }
    }

    fn watches_sockets(&self) -> bool {
        self.watching.load(Ordering::Acquire)
    }

    fn wake_by(&self, now: Instant, at: Instant) {
        self.change(now, |state| {
            state.wish = Some(state.wish.map_or(at, |wish| wish.min(at)))
        });
    }

    fn set_lease(&self, now: Instant, end: Instant) {
        self.change(now, |state| state.lease = Some(end));
    }

    fn park(&self, on: bool) -> bool {
        self.parked.load(Ordering::Acquire) != on && self.parked.swap(on, Ordering::AcqRel)
    }

    fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Acquire)
    }

    fn timer_cost(&self) -> Duration {
        Duration::from_nanos(self.timer_cost.load(Ordering::Relaxed))
    }

    fn is_inherited(&self) -> bool {
        self.born != sys::generation()
    }

    fn closed(&self) {
        self.sink.closed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::EXPENSIVE_TIMER;

    #[test]
    fn preemptions_do_not_make_a_timer_expensive() {
        let expensive = EXPENSIVE_TIMER.as_nanos() as u64;
        let mut known = 0;
        for n in 0..1000 {
            known = towards_median(known, if n % 4 == 0 { 200_000 } else { 1_000 });
            assert!(known < expensive, "sample {n}");
        }
        for _ in 0..50 {
            known = towards_median(known, 20_000);
        }
        assert!(known >= expensive);
        for _ in 0..50 {
            known = towards_median(known, 1_000);
        }
        assert!(known < expensive);
    }
}
