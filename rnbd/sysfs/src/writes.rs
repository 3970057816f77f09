//! Writes, each in a thread of its own as it may take as long as connecting does, and their interruption.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use fuser::{Errno, ReplyWrite};
use parking_lot::{Condvar, Mutex};

use crate::caller::Caller;

/// Writes under way at most.
const MAX_WRITES: usize = 32;
/// How often it is looked whether who waits is interrupted.
const LOOK: Duration = Duration::from_millis(50);

/// A write under way.
struct Waiting {
    caller: Caller,
    /// Until it is answered.
    reply: Mutex<Option<ReplyWrite>>,
    /// A signal was pending when it was last looked at. One that another thread of the process takes is gone by the next time.
    signal: AtomicBool,
}

impl Waiting {
    fn answer(&self, outcome: Result<u32, Errno>) {
        match (self.reply.lock().take(), outcome) {
            (Some(reply), Ok(size)) => reply.written(size),
            (Some(reply), Err(errno)) => reply.error(errno),
            (None, _) => {}
        }
    }
}

#[derive(Default)]
struct UnderWay {
    writes: Vec<Arc<Waiting>>,
    ended: bool,
}

/// Writes under way. The thread that looks after them ends when this is dropped.
pub(crate) struct Writes {
    under_way: Arc<(Mutex<UnderWay>, Condvar)>,
}

impl Writes {
    /// The kernel asks for interruptions by requests that fuser does not pass on, so it is looked at the callers themselves.
    pub(crate) fn new() -> std::io::Result<Self> {
        let under_way = Arc::<(Mutex<UnderWay>, Condvar)>::default();
        let watched = under_way.clone();
        let thread = thread::Builder::new().name("ferroce-sysfs".into());
        thread.spawn(move || watch(&watched))?;
        Ok(Self { under_way })
    }

    /// Answers with what this gives: the bytes written, or why not.
    pub(crate) fn start(
        &self,
        caller: Caller,
        reply: ReplyWrite,
        write: impl FnOnce() -> Result<u32, Errno> + Send + 'static,
    ) {
        let (lock, some) = &*self.under_way;
        let mut under_way = lock.lock();
        if under_way.writes.len() >= MAX_WRITES {
            drop(under_way);
            tracing::warn!("{MAX_WRITES} writes to attributes are under way; no further one is taken");
            return reply.error(Errno::EBUSY);
        }
        let waiting = Arc::new(Waiting {
            caller,
            reply: Mutex::new(Some(reply)),
            signal: AtomicBool::new(false),
        });
        under_way.writes.push(waiting.clone());
        drop(under_way);
        some.notify_all();
        let (all, own) = (self.under_way.clone(), waiting.clone());
        let thread = thread::Builder::new().name("ferroce-write".into());
        let started = thread.spawn(move || {
            own.answer(write());
            end(&all, &own);
        });
        if let Err(e) = started {
            tracing::warn!("no thread for a write to an attribute: {e}");
            waiting.answer(Err(Errno::EAGAIN));
            end(&self.under_way, &waiting);
        }
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        let (lock, some) = &*self.under_way;
        lock.lock().ended = true;
        some.notify_all();
    }
}

fn end(under_way: &(Mutex<UnderWay>, Condvar), own: &Arc<Waiting>) {
    under_way.0.lock().writes.retain(|other| !Arc::ptr_eq(own, other));
}

fn watch((lock, some): &(Mutex<UnderWay>, Condvar)) {
    let mut under_way = lock.lock();
    while !under_way.ended {
        if under_way.writes.iter().all(|write| write.reply.lock().is_none()) {
            some.wait(&mut under_way);
            continue;
        }
        some.wait_for(&mut under_way, LOOK);
        for write in &under_way.writes {
            let signal = write.caller.is_interrupted();
            if write.signal.swap(signal, Ordering::Relaxed) && signal {
                write.answer(Err(Errno::EINTR));
            }
        }
    }
}
