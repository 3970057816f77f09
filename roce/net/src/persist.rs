//! The thread that makes memory persistent for peers' FLUSHes, with no lock of the port held. It begins with the first of them.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::{self, ThreadId},
};

use parking_lot::{Condvar, Mutex};
use roce_port::{Persisted, Persisting};

use crate::sys;

/// Takes what is done. False: nobody is there any more.
pub(crate) type Report = dyn Fn(Persisted) -> bool + Send + Sync;

#[derive(Default)]
struct State {
    jobs: VecDeque<Persisting>,
    /// The thread is at one.
    busy: bool,
    /// Of those that it has begun.
    begun: u64,
    closed: bool,
    thread: Option<sys::Thread>,
    id: Option<ThreadId>,
}

/// See the module. The lock in it is the last in the order: nothing is called under it.
#[derive(Default)]
pub(crate) struct Persister {
    state: Mutex<State>,
    changed: Condvar,
}

impl Persister {
    /// Has it done; `report` is called when it is. Starts the thread if there is none.
    pub(crate) fn push(self: &Arc<Self>, job: Persisting, report: &Arc<Report>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.jobs.push_back(job);
        if state.thread.is_none() {
            let (this, report) = (self.clone(), report.clone());
            match sys::Thread::start("roce persist", move || this.work(&*report)) {
                Ok(thread) => {
                    state.id = Some(thread.id());
                    state.thread = Some(thread);
                }
                // The peer asks again and gives up in the end.
                Err(e) => tracing::error!("no thread to make memory persistent: {e}"),
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn work(&self, report: &Report) {
        while let Some(job) = self.next() {
            let done = job.run();
            self.state.lock().busy = false;
            self.changed.notify_all();
            if !report(done) {
                return;
            }
        }
    }

    fn next(&self) -> Option<Persisting> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                state.busy = true;
                state.begun += 1;
                return Some(job);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Returns when what is being made persistent at the time of the call is. What has not begun finds memory that was taken back
    /// before, and leaves it alone.
    pub(crate) fn pass(&self) {
        let mut state = self.state.lock();
        // It may be called by what it calls.
        if state.id == Some(thread::current().id()) {
            return;
        }
        let begun = state.begun;
        while state.busy && state.begun == begun {
            self.changed.wait(&mut state);
        }
    }

    /// Ends the thread, which finishes what it is at.
    pub(crate) fn close(&self) {
        let thread = {
            let mut state = self.state.lock();
            state.closed = true;
            state.jobs.clear();
            state.thread.take()
        };
        self.changed.notify_all();
        if let Some(thread) = thread
            && !thread.finish()
        {
            tracing::error!("the thread that makes memory persistent had panicked, or does not end");
        }
    }
}
