//! The thread that makes memory persistent for peers' FLUSHes, with no lock of the port held. It begins with the first of them.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, ThreadId},
};

use parking_lot::Mutex;
use roce_port::{Persisted, Persisting};

use crate::sys;

/// Takes a finished job. False: the port is gone.
pub(crate) type Report = dyn Fn(Persisted) -> bool + Send + Sync;

#[derive(Default)]
struct State {
    closed: bool,
    worker: Option<(Sender<Persisting>, sys::Thread)>,
    /// Identifier of the thread, also after [`Persister::close`].
    id: Option<ThreadId>,
}

/// Jobs of the thread. Both locks are leaf locks.
#[derive(Default)]
pub(crate) struct Persister {
    state: Mutex<State>,
    /// Held during a job.
    job: Mutex<()>,
}

impl Persister {
    /// Queues a job; `report` is called when it is done. Starts the thread if there is none.
    pub(crate) fn push(self: &Arc<Self>, job: Persisting, report: &Arc<Report>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        if state.worker.is_none() {
            let (jobs, queue) = channel();
            let (this, report) = (self.clone(), report.clone());
            match sys::Thread::start("roce persist", move || this.work(&queue, &*report)) {
                Ok(thread) => {
                    state.id = Some(thread.id());
                    state.worker = Some((jobs, thread));
                }
                // The peer asks again and gives up in the end.
                Err(e) => tracing::error!("no thread to make memory persistent: {e}"),
            }
        }
        if let Some((jobs, _)) = &state.worker {
            // The thread has ended because the port is gone.
            let _ = jobs.send(job);
        }
    }

    fn work(&self, queue: &Receiver<Persisting>, report: &Report) {
        while let Ok(job) = queue.recv() {
            if self.state.lock().closed {
                return;
            }
            let running = self.job.lock();
            let done = job.run();
            drop(running);
            if !report(done) {
                return;
            }
        }
    }

    /// Returns when the job that runs at the time of the call is done. A job that has not begun finds that memory was revoked before, and
    /// leaves it alone.
    pub(crate) fn pass(&self) {
        // A job may call the program, which may deregister memory.
        if self.state.lock().id != Some(thread::current().id()) {
            drop(self.job.lock());
        }
    }

    /// Ends the thread, which finishes its job.
    pub(crate) fn close(&self) {
        let worker = {
            let mut state = self.state.lock();
            state.closed = true;
            state.worker.take()
        };
        let Some((jobs, thread)) = worker else { return };
        drop(jobs);
        if !thread.finish() {
            tracing::error!("the thread that makes memory persistent had panicked, or does not end");
        }
    }
}
