//! State that the thread of a machine shares with others.

use std::{
    collections::HashMap,
    io, mem,
    sync::mpsc::Sender,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use roce::reactor::{Handle, LoopStats};
use roce_verbs::{self as verbs, provider::Cx};

use crate::machine::Machine;

/// Closure for the machine's thread.
pub(crate) type Work<M> = Box<dyn FnOnce(&mut M, &mut Cx<'_>) + Send>;

/// Command to the thread of a machine.
pub(crate) enum Command<M> {
    /// There is something to post.
    Flush,
    /// Run this.
    Run(Work<M>),
    /// Send the present statistics.
    Stats(Sender<LoopStats>),
    /// End the machine, then the thread.
    Stop,
}

/// State of a machine after a part of a turn.
pub(crate) struct Turned {
    pub(crate) next_timeout: Option<verbs::Instant>,
    pub(crate) wants_turn: bool,
    pub(crate) is_stopped: bool,
}

/// See the module.
pub(crate) struct Shared<M: Machine> {
    state: Mutex<State<M>>,
    /// A part of the machine may have changed.
    changed: Condvar,
    handle: Handle<Command<M>, ()>,
}

/// State behind the lock, which is never held while something waits.
struct State<M: Machine> {
    /// `None` before the first turn and after the last.
    machine: Option<M>,
    /// Tasks to wake when a part of the machine changes.
    wakers: HashMap<M::Key, Vec<Waker>>,
    /// Tasks to wake once the lock is free.
    woken: Vec<Waker>,
    /// Why the machine has ended.
    ended: Option<(io::ErrorKind, String)>,
}

impl<M: Machine> State<M> {
    /// The machine.
    ///
    /// # Errors
    /// Why it has ended.
    fn machine(&mut self) -> io::Result<&mut M> {
        match (&mut self.machine, &self.ended) {
            (Some(machine), _) => Ok(machine),
            (None, Some((kind, text))) => Err(io::Error::new(*kind, text.clone())),
            (None, None) => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Takes what the machine has to report. Returns whether a part has changed.
    fn take_reports(&mut self) -> bool {
        let Some(machine) = &mut self.machine else { return false };
        let mut changed = false;
        machine.take_reports(&mut |key| {
            changed = true;
            self.woken.extend(self.wakers.remove(&key).into_iter().flatten());
        });
        changed
    }
}

impl<M: Machine> Shared<M> {
    pub(crate) fn new(handle: Handle<Command<M>, ()>) -> Self {
        Self {
            state: Mutex::new(State {
                machine: None,
                wakers: HashMap::new(),
                woken: Vec::new(),
                ended: None,
            }),
            changed: Condvar::new(),
            handle,
        }
    }

    pub(crate) fn command(&self, command: Command<M>) {
        self.handle.command(command);
    }

    /// The machine begins.
    pub(crate) fn begin(&self, machine: M) {
        self.state.lock().machine = Some(machine);
    }

    /// Works on the machine in a turn of its thread, if it is there still.
    pub(crate) fn in_turn(&self, f: impl FnOnce(&mut M)) -> Turned {
        let mut state = self.state.lock();
        if let Some(machine) = &mut state.machine {
            f(machine);
        }
        self.report(&mut state);
        let turned = Turned {
            next_timeout: state.machine.as_ref().and_then(Machine::next_timeout),
            wants_turn: state.machine.as_ref().is_some_and(Machine::wants_turn),
            is_stopped: state.machine.as_ref().is_none_or(Machine::is_stopped),
        };
        self.wake_up(state);
        turned
    }

    /// Calls the machine.
    ///
    /// # Errors
    /// Why it has ended.
    pub(crate) fn call<T>(&self, f: impl FnOnce(&mut M) -> T) -> io::Result<T> {
        let mut state = self.state.lock();
        let result = self.attempt(&mut state, f);
        self.wake_up(state);
        result
    }

    /// Calls the machine until it is ready, or the time is over.
    ///
    /// # Errors
    /// `TimedOut`, and why it has ended.
    pub(crate) fn wait<T>(&self, timeout: Option<Duration>, mut f: impl FnMut(&mut M) -> Poll<T>) -> io::Result<T> {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        loop {
            if let Poll::Ready(result) = self.attempt(&mut state, &mut f)? {
                self.wake_up(state);
                return Ok(result);
            }
            let woken = mem::take(&mut state.woken);
            if !woken.is_empty() {
                MutexGuard::unlocked(&mut state, || woken.into_iter().for_each(Waker::wake));
                continue;
            }
            match end {
                Some(end) if self.changed.wait_until(&mut state, end).timed_out() => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Calls the machine once. What is to be posted leaves by its thread.
    fn attempt<T>(&self, state: &mut State<M>, f: impl FnOnce(&mut M) -> T) -> io::Result<T> {
        let result = f(state.machine()?);
        self.report(state);
        if state.machine.as_ref().is_some_and(Machine::wants_turn) {
            self.command(Command::Flush);
        }
        Ok(result)
    }

    fn report(&self, state: &mut State<M>) {
        if state.take_reports() {
            self.changed.notify_all();
        }
    }

    /// Wakes tasks. What they do at once needs the lock.
    fn wake_up(&self, mut state: MutexGuard<'_, State<M>>) {
        let woken = mem::take(&mut state.woken);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Has a task woken when a part of the machine changes.
    pub(crate) fn wake(&self, key: M::Key, waker: &Waker) {
        let mut state = self.state.lock();
        let wakers = state.wakers.entry(key).or_default();
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }

    /// Forgets the tasks of a part.
    pub(crate) fn forget(&self, key: M::Key) {
        let forgotten = self.state.lock().wakers.remove(&key);
        // What goes with the last handle of a task may need the lock.
        drop(forgotten);
    }

    /// The machine has ended.
    pub(crate) fn end(&self, why: &io::Error) {
        let mut state = self.state.lock();
        let machine = state.machine.take();
        state.ended.get_or_insert_with(|| (why.kind(), why.to_string()));
        let wakers = mem::take(&mut state.wakers);
        state.woken.extend(wakers.into_values().flatten());
        self.changed.notify_all();
        self.wake_up(state);
        drop(machine);
    }
}
