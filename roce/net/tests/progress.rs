//! Model of [`progress`] under shuttle's schedulers: programs that poll, sleep, wait, post and go away, next to the progress thread.
//!
//! Claims, stated without regard to the code:
//!
//! - No wake-up is lost: all packets are handled (shuttle reports a deadlock otherwise).
//! - One owner: the progress thread makes no pass while a poller's lease is young.
//! - Take-over: no packet waits longer than [`TAKE_OVER`] for a pass, although a timer is always pending a second ahead.
//!
//! Sockets are edge-triggered, as the driver's are. The clock runs by a little in each call, and jumps when the timer expires.

#[path = "../src/progress.rs"]
#[allow(dead_code, unreachable_pub, reason = "the crate has more use for it than the model")]
mod progress;

/// Shuttle's locks and atomics in place of the crate's.
mod sync {
    use std::ops::{Deref, DerefMut};

    pub(crate) use shuttle::{
        sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
        thread::yield_now,
    };

    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        held: Option<shuttle::sync::MutexGuard<'a, T>>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard {
                mutex: self,
                held: self.0.lock().ok(),
            }
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            let held = Some(self.0.try_lock().ok()?);
            Some(MutexGuard { mutex: self, held })
        }
    }

    impl<T> MutexGuard<'_, T> {
        /// Releases the lock and takes it again.
        pub(crate) fn bump(this: &mut Self) {
            this.held = None;
            this.held = this.mutex.0.lock().ok();
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.held.as_ref().expect("held")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.held.as_mut().expect("held")
        }
    }
}

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use progress::{Advance, Environment, LEASE, Progress, Work};
use roce_verbs::Instant;
use shuttle::{
    sync::{Arc, Condvar, Mutex},
    thread::{self, ThreadId},
};

/// Packets of a run.
const PACKETS: u64 = 4;
/// Polls of a program that goes away.
const MANY_POLLS: usize = 20;
/// Longest time that a packet waits for a pass.
const TAKE_OVER: Duration = Duration::from_micros(150);
/// Time from each pass to the port's timer.
const PORT_TIMER: Duration = Duration::from_secs(1);
/// Time that one look at the clock takes.
const TICK: Duration = Duration::from_nanos(100);

/// Planted bug, which the model must find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// A timer that is pending is not brought forward.
    LateTimer,
}

struct State {
    bug: Bug,
    arrived: u64,
    handled: u64,
    /// Whether packets wake the progress thread, and whether some have and were not noticed yet.
    watching: bool,
    edge: bool,
    /// Earliest time at which the progress thread is to wake, and the end of the program's lease.
    wish: Option<Instant>,
    lease: Option<Instant>,
    parked: bool,
    clock: Instant,
    /// Time since which a packet has waited without a pass.
    unattended: Option<Instant>,
    /// Time of the last poll, unless the program has stopped polling.
    polled: Option<Instant>,
    pollers: HashSet<ThreadId>,
    /// Calls that end leases, and are under way.
    ending: u32,
    progress_thread: Option<ThreadId>,
    /// Program threads inside a call: time does not jump meanwhile.
    calls: u32,
    /// Threads that wait for events, and those of them that packets wake.
    waiters: u32,
    owners: u32,
    over: bool,
}

impl State {
    fn timer(&self) -> Option<Instant> {
        self.wish.into_iter().chain(self.lease).min()
    }
}

/// Sockets, timer and clock.
struct Outside {
    state: Mutex<State>,
    changed: Condvar,
}

impl Outside {
    fn new(bug: Bug) -> Arc<Self> {
        let clock = Instant::from_nanos(1);
        let state = State {
            bug,
            arrived: 0,
            handled: 0,
            watching: true,
            edge: false,
            wish: Some(clock + PORT_TIMER),
            lease: None,
            parked: false,
            clock,
            unattended: None,
            polled: None,
            pollers: HashSet::new(),
            ending: 0,
            progress_thread: None,
            calls: 0,
            waiters: 0,
            owners: 0,
            over: false,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.state.lock().expect("state"));
        self.changed.notify_all();
        result
    }

    /// Makes a call of a program.
    fn call<R>(&self, call: impl FnOnce() -> R) -> R {
        self.change(|s| s.calls += 1);
        let result = call();
        self.change(|s| s.calls -= 1);
        result
    }

    /// Makes a call that ends the lease of all pollers.
    fn end_lease<R>(&self, call: impl FnOnce() -> R) -> R {
        self.change(|s| s.ending += 1);
        let result = self.call(call);
        self.change(|s| (s.ending, s.polled) = (s.ending - 1, None));
        result
    }

    /// Sleeps until all packets are handled.
    fn wait_handled(&self) {
        let mut state = self.state.lock().expect("state");
        while state.handled < PACKETS {
            state = self.changed.wait(state).expect("state");
        }
    }

    /// Sleeps as the progress thread does. False: the run is over.
    fn wait_woken(&self) -> bool {
        let mut state = self.state.lock().expect("state");
        loop {
            if state.over {
                return false;
            }
            if state.edge && state.watching {
                state.edge = false;
                return true;
            }
            // A thread that can run takes no time to do so.
            let waiter_runs = state.owners > 0 && state.arrived > state.handled;
            if let Some(at) = state.timer().filter(|_| state.calls == 0 && !waiter_runs) {
                state.clock = state.clock.max(at);
                drop(state);
                self.change(|s| (s.wish, s.lease) = (None, None));
                return true;
            }
            state = self.changed.wait(state).expect("state");
        }
    }

    /// Sleeps until more packets are handled than were, or for the owner until some are there.
    fn wait_event(&self, seen: u64, owns: bool) {
        let mut state = self.state.lock().expect("state");
        while state.handled == seen && !(owns && state.arrived > state.handled) {
            state = self.changed.wait(state).expect("state");
        }
    }

    fn handled(&self) -> u64 {
        self.state.lock().expect("state").handled
    }
}

impl Environment for Arc<Outside> {
    fn now(&self) -> Instant {
        self.change(|s| {
            s.clock = s.clock + TICK;
            s.clock
        })
    }

    fn watch_sockets(&self, on: bool) {
        self.change(|s| {
            s.edge = on && (s.edge || (!s.watching && s.arrived > s.handled));
            s.watching = on;
        });
    }

    fn watches_sockets(&self) -> bool {
        self.state.lock().expect("state").watching
    }

    fn park(&self, on: bool) -> bool {
        self.change(|s| std::mem::replace(&mut s.parked, on))
    }

    fn is_parked(&self) -> bool {
        self.state.lock().expect("state").parked
    }

    fn timer_cost(&self) -> Duration {
        Duration::ZERO
    }

    fn wake_by(&self, _now: Instant, at: Instant) {
        self.change(|s| {
            if s.timer().is_none() || s.bug != Bug::LateTimer {
                s.wish = Some(s.wish.map_or(at, |wish| wish.min(at)));
            }
        });
    }

    fn set_lease(&self, _now: Instant, end: Instant) {
        self.change(|s| {
            if s.timer().is_none() || s.bug != Bug::LateTimer {
                s.lease = Some(end);
            }
        });
    }

    fn is_inherited(&self) -> bool {
        false
    }

    fn closed(&self) {}
}

/// Port that handles two packets in a pass.
struct Port(Arc<Outside>);

impl Advance for Port {
    fn pass(&mut self, now: Instant, polls: bool) -> Work {
        let me = thread::current().id();
        let more = self.0.change(|s| {
            // A poller makes other passes too, for the progress thread, which lengthen no lease.
            if polls {
                assert!(s.pollers.contains(&me), "a pass that arms no timer, of no poller");
                s.polled = Some(now);
            }
            let leased = s.polled.is_some_and(|at| now < at + LEASE);
            let intrudes = s.progress_thread == Some(me) && leased && s.waiters == 0 && s.ending == 0;
            assert!(!intrudes, "the progress thread advances a poller's port");
            if let Some(since) = s.unattended {
                let gap = s.clock.saturating_since(since);
                assert!(gap <= TAKE_OVER, "a packet waits {gap:?} for a pass");
            }
            s.handled = s.arrived.min(s.handled + 2);
            let more = s.handled < s.arrived;
            s.unattended = more.then_some(s.clock);
            more
        });
        self.0.wake_by(now, now + PORT_TIMER);
        if more { Work::More } else { Work::None }
    }

    fn arm(&mut self, _now: Instant) {}

    fn datagrams(&self) -> u64 {
        self.0.handled()
    }
}

type Shared = Arc<Progress<Port, Arc<Outside>>>;

/// Runs programs next to a network and a progress thread until all packets are handled.
fn world(programs: &[fn(&Shared, &Outside)], bug: Bug) {
    let outside = Outside::new(bug);
    let shared: Shared = Arc::new(Progress::new(
        Port(outside.clone()),
        std::sync::Arc::new(outside.clone()),
    ));
    let progress = {
        let (shared, outside) = (shared.clone(), outside.clone());
        thread::spawn(move || {
            outside.change(|s| s.progress_thread = Some(thread::current().id()));
            while outside.wait_woken() {
                shared.woken();
                // Other threads run before the next timer expires.
                thread::yield_now();
            }
        })
    };
    let network = {
        let outside = outside.clone();
        thread::spawn(move || {
            for _ in 0..PACKETS {
                outside.change(|s| {
                    s.arrived += 1;
                    s.edge = s.watching;
                    s.unattended = s.unattended.or(Some(s.clock));
                });
            }
        })
    };
    let programs: Vec<_> = programs
        .iter()
        .map(|program| {
            let (shared, outside, program) = (shared.clone(), outside.clone(), *program);
            thread::spawn(move || program(&shared, &outside))
        })
        .collect();
    outside.wait_handled();
    network.join().expect("network");
    for program in programs {
        program.join().expect("program");
    }
    outside.change(|s| s.over = true);
    progress.join().expect("progress thread");
}

fn poll(shared: &Shared, outside: &Outside) {
    let me = thread::current().id();
    outside.change(|s| s.pollers.insert(me));
    outside.call(|| shared.poll());
    outside.change(|s| s.pollers.remove(&me));
}

/// Polls until it has found everything.
fn polls(shared: &Shared, outside: &Outside) {
    while outside.handled() < PACKETS {
        poll(shared, outside);
        thread::yield_now();
    }
}

/// Polls for a while, and sleeps for an event.
fn sleeps(shared: &Shared, outside: &Outside) {
    (0..MANY_POLLS).for_each(|_| poll(shared, outside));
    outside.end_lease(|| shared.stop_polling());
    outside.wait_handled();
}

/// Waits for each packet.
fn waits(shared: &Shared, outside: &Outside) {
    let mut seen = outside.handled();
    while seen < PACKETS {
        seen = wait_once(shared, outside, seen);
    }
}

/// Waits for one packet. Returns the number handled so far.
fn wait_once(shared: &Shared, outside: &Outside, seen: u64) -> u64 {
    let owner = |owns: bool| outside.change(|s| s.owners = if owns { s.owners + 1 } else { s.owners - 1 });
    outside.change(|s| s.waiters += 1);
    let mut more = false;
    let mut owns = outside.end_lease(|| {
        let owns = shared.begin_wait();
        if owns {
            owner(true);
        }
        owns
    });
    while outside.handled() == seen {
        if !more {
            outside.wait_event(seen, owns);
        }
        if owns {
            (owns, more) = outside.call(|| {
                let advanced = shared.advance_waiter();
                if advanced.is_none() {
                    owner(false);
                }
                (advanced.is_some(), advanced == Some(true))
            });
        }
    }
    outside.call(|| {
        shared.end_wait(owns, more);
        if owns {
            owner(false);
        }
    });
    outside.change(|s| s.waiters -= 1);
    outside.handled()
}

/// Waits for one packet, and does something else.
fn waits_once(shared: &Shared, outside: &Outside) {
    let seen = outside.handled();
    if seen < PACKETS {
        wait_once(shared, outside, seen);
    }
}

/// Polls for a while, and does something else.
fn goes_away(shared: &Shared, outside: &Outside) {
    (0..MANY_POLLS).for_each(|_| poll(shared, outside));
}

/// Posts now and then.
fn posts(shared: &Shared, outside: &Outside) {
    for _ in 0..4 {
        outside.call(|| shared.with(|_, _| ()).expect("open"));
        thread::yield_now();
    }
}

type Program = fn(&Shared, &Outside);

fn run_all(programs: &'static [Program], bug: Bug) {
    shuttle::check_random(move || world(programs, bug), 300);
    shuttle::check_pct(move || world(programs, bug), 300, 3);
}

fn check(programs: &'static [Program]) {
    run_all(programs, Bug::None);
}

#[test]
fn without_programs_the_progress_thread_handles_all() {
    check(&[]);
}

#[test]
fn a_poller_finds_all() {
    check(&[polls]);
    check(&[polls, polls]);
}

#[test]
fn a_program_that_goes_to_sleep_is_woken() {
    check(&[sleeps]);
}

#[test]
fn a_waiter_is_woken_next_to_any_other_program() {
    check(&[waits]);
    check(&[waits, waits]);
    check(&[waits, polls]);
    check(&[waits, posts]);
    check(&[waits, goes_away, sleeps]);
}

#[test]
fn the_progress_thread_takes_over_from_programs_that_go_away() {
    check(&[goes_away]);
    check(&[waits_once]);
    check(&[waits_once, waits]);
    check(&[waits_once, posts]);
    check(&[goes_away, waits_once]);
}

#[test]
fn programs_that_post_serve_the_progress_thread() {
    check(&[posts, posts]);
}

#[test]
fn programs_of_all_kinds_run_next_to_each_other() {
    check(&[polls, sleeps, posts]);
    check(&[goes_away, posts, sleeps]);
}

#[test]
fn the_model_finds_a_timer_that_is_not_brought_forward() {
    for programs in [&[goes_away as Program][..], &[waits_once as Program][..]] {
        let programs: &'static [Program] = programs.to_vec().leak();
        let found = catch_unwind(AssertUnwindSafe(|| run_all(programs, Bug::LateTimer)));
        assert!(found.is_err(), "the model does not find the planted bug");
    }
}
