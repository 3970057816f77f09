//! Who advances a port, under a scheduler that tries interleavings: whatever its programs do, packets are handled, and nobody who
//! sleeps for them sleeps for ever (the scheduler reports a deadlock).

#[path = "../src/handover.rs"]
#[allow(dead_code, unreachable_pub, reason = "the crate has more use for it than the model")]
mod handover;

/// The scheduler's locks and atomics, in the place of the crate's.
mod sync {
    use std::ops::{Deref, DerefMut};

    pub(crate) use shuttle::{
        sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
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
        /// Lets others have it.
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

    /// Its atomics work only where it schedules.
    pub(crate) fn model(run: impl Fn() + Send + Sync + 'static) {
        shuttle::check_random(run, 1);
    }
}

use std::time::Duration;

use handover::{Handover, Moves, Surroundings, Watch};
use roce_verbs::Instant;
use shuttle::{
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// Packets that come.
const PACKETS: u64 = 4;
/// More polls in a row than it takes until the background thread stands back.
const MANY_POLLS: usize = 20;

struct State {
    arrived: u64,
    handled: u64,
    watching: Watch,
    alarm: Option<Instant>,
    clock: Instant,
    over: bool,
}

/// Sockets, alarm clock and time.
struct Outside {
    state: Mutex<State>,
    changed: Condvar,
}

impl Outside {
    fn new() -> Arc<Self> {
        let state = State {
            arrived: 0,
            handled: 0,
            watching: Watch::All,
            alarm: None,
            clock: Instant::from_nanos(1),
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

    /// Sleeps until all packets are handled.
    fn wait_handled(&self) {
        let mut state = self.state.lock().expect("state");
        while state.handled < PACKETS {
            state = self.changed.wait(state).expect("state");
        }
    }

    /// Waits as the background thread does: for packets if they are watched, and for the alarm clock. False: it is over.
    fn wait_woken(&self) -> bool {
        let mut state = self.state.lock().expect("state");
        loop {
            if state.over {
                return false;
            }
            if state.watching == Watch::All && state.arrived > state.handled {
                return true;
            }
            if let Some(at) = state.alarm.take() {
                state.clock = state.clock.max(at);
                return true;
            }
            state = self.changed.wait(state).expect("state");
        }
    }

    /// Sleeps until more packets are handled than were, or if it is to attend until some are there.
    fn wait_attending(&self, seen: u64, attends: bool) {
        let mut state = self.state.lock().expect("state");
        while state.handled == seen && !(attends && state.arrived > state.handled) {
            state = self.changed.wait(state).expect("state");
        }
    }

    fn handled(&self) -> u64 {
        self.state.lock().expect("state").handled
    }
}

impl Surroundings for Arc<Outside> {
    fn now(&self) -> Instant {
        self.change(|s| {
            s.clock = s.clock + Duration::from_micros(50);
            s.clock
        })
    }

    fn watch(&self, what: Watch) {
        self.change(|s| s.watching = what);
    }

    fn watching(&self) -> Watch {
        self.state.lock().expect("state").watching
    }

    fn set_alarm(&self, _now: Instant, at: Instant) {
        self.change(|s| {
            if s.alarm.is_none_or(|set| at < set && s.watching != Watch::Nothing) {
                s.alarm = Some(at);
            }
        });
    }

    fn postpone(&self, now: Instant, at: Instant) {
        self.change(|s| {
            let soon = |set: Instant| set.saturating_since(now) < at.saturating_since(now) / 2;
            if s.watching == Watch::Nothing && s.alarm.is_some_and(soon) {
                s.alarm = Some(at);
            }
        });
    }

    fn is_inherited(&self) -> bool {
        false
    }

    fn closed(&self) {}
}

/// Handles two packets in a pass.
struct Port(Arc<Outside>);

impl Moves for Port {
    fn pass(&mut self, _now: Instant) -> bool {
        self.0.change(|s| {
            s.handled = s.arrived.min(s.handled + 2);
            s.handled < s.arrived
        })
    }

    fn pass_in_program(&mut self, now: Instant) -> bool {
        self.pass(now)
    }

    fn keep_time(&mut self, _now: Instant) -> bool {
        false
    }

    fn received(&self) -> u64 {
        self.0.handled()
    }

    fn datagrams(&self) -> u64 {
        self.0.handled()
    }
}

type Shared = Arc<Handover<Port, Arc<Outside>>>;

/// Runs programs beside a network and a background thread, until all packets are handled.
fn world(programs: &[fn(&Shared, &Outside)]) {
    let outside = Outside::new();
    let shared: Shared = Arc::new(Handover::new(Port(outside.clone()), outside.clone()));
    let background = {
        let (shared, outside) = (shared.clone(), outside.clone());
        thread::spawn(move || {
            while outside.wait_woken() {
                shared.woken();
                // Before an alarm clock rings others have had time.
                thread::yield_now();
            }
        })
    };
    let network = {
        let outside = outside.clone();
        thread::spawn(move || (0..PACKETS).for_each(|_| outside.change(|s| s.arrived += 1)))
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
    background.join().expect("background");
}

/// Polls until it has found everything.
fn polls(shared: &Shared, outside: &Outside) {
    let mut seen = 0;
    while seen < PACKETS {
        shared.empty_poll();
        let handled = outside.handled();
        if handled > seen {
            seen = handled;
            shared.found();
        }
        thread::yield_now();
    }
}

/// Polls for a while, and sleeps for an event.
fn sleeps(shared: &Shared, outside: &Outside) {
    (0..MANY_POLLS).for_each(|_| shared.empty_poll());
    shared.leave_poll();
    outside.wait_handled();
}

/// Sleeps for each packet, and attends if it is the only one.
fn attends(shared: &Shared, outside: &Outside) {
    let mut seen = outside.handled();
    while seen < PACKETS {
        let mut attending = shared.attend();
        let mut more = false;
        while outside.handled() == seen {
            attending = attending && shared.still_attends();
            if !more {
                outside.wait_attending(seen, attending);
            }
            attending = attending && shared.still_attends();
            more = attending && shared.packets_came();
        }
        shared.leave(attending, more);
        seen = outside.handled();
    }
}

/// Is back often enough to be trusted, and then stays away.
fn attends_no_more(shared: &Shared, _outside: &Outside) {
    for _ in 0..MANY_POLLS {
        let attending = shared.attend();
        shared.leave(attending, false);
    }
}

/// Polls for a while, and does something else.
fn goes_away(shared: &Shared, _outside: &Outside) {
    (0..MANY_POLLS).for_each(|_| shared.empty_poll());
}

/// Posts now and then.
fn posts(shared: &Shared, _outside: &Outside) {
    for _ in 0..4 {
        drop(shared.lock().expect("open"));
        shared.serve_wanted();
        thread::yield_now();
    }
}

fn try_out(programs: &'static [fn(&Shared, &Outside)]) {
    shuttle::check_random(move || world(programs), 300);
    shuttle::check_pct(move || world(programs), 300, 3);
}

#[test]
fn without_programs_the_background_thread_handles_all() {
    try_out(&[]);
}

#[test]
fn a_program_that_polls_finds_all() {
    try_out(&[polls]);
}

#[test]
fn a_program_that_goes_to_sleep_is_woken() {
    try_out(&[sleeps]);
}

#[test]
fn a_program_that_attends_is_woken_beside_any_other() {
    try_out(&[attends]);
    try_out(&[attends, attends]);
    try_out(&[attends, polls]);
    try_out(&[attends, posts]);
    try_out(&[attends, goes_away, sleeps]);
}

#[test]
fn what_a_program_leaves_behind_is_handled() {
    try_out(&[goes_away]);
    try_out(&[attends_no_more]);
    try_out(&[attends_no_more, attends]);
    try_out(&[attends_no_more, posts]);
}

#[test]
fn programs_that_post_take_the_packets_that_they_keep_others_from() {
    try_out(&[posts, posts]);
}

#[test]
fn programs_of_all_kinds_get_along() {
    try_out(&[polls, sleeps, posts]);
    try_out(&[goes_away, posts, sleeps]);
}
