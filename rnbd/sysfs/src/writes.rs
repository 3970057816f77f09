//! Writes, each in its own thread, as one may take as long as connecting does, and their interruption.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fuser::{Errno, ReplyWrite};
use parking_lot::{Condvar, Mutex};
use roce_net::places::{Limits, Peer, Places};

use crate::caller::Caller;

/// Limits of writes in progress.
const LIMITS: Limits = Limits {
    all: 32,
    open: 32,
    reserved: 8,
    each: 8,
};
/// Interval at which callers are checked for signals.
const LOOK: Duration = Duration::from_millis(50);

/// A write in progress.
struct Waiting {
    /// Its place among the writes in progress.
    place: u64,
    caller: Caller,
    /// Until it is answered.
    reply: Mutex<Option<ReplyWrite>>,
    /// A signal was pending at the last check. One that another thread of the process takes is gone at the next.
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

struct InProgress {
    writes: Vec<Arc<Waiting>>,
    places: Places<Instant>,
    ended: bool,
}

type Shared = (Mutex<InProgress>, Condvar);

/// Writes in progress. The thread that watches them ends when this is dropped.
pub(crate) struct Writes {
    shared: Arc<Shared>,
}

impl Writes {
    /// The kernel asks for interruptions by requests that fuser does not pass on, so the callers themselves are checked.
    pub(crate) fn new() -> std::io::Result<Self> {
        let in_progress = InProgress {
            writes: Vec::new(),
            places: Places::new(LIMITS),
            ended: false,
        };
        let shared = Arc::new((Mutex::new(in_progress), Condvar::new()));
        let watched = shared.clone();
        let thread = thread::Builder::new().name("ferroce-sysfs".into());
        thread.spawn(move || watch(&watched))?;
        Ok(Self { shared })
    }

    /// Runs a write in a thread, and answers with its result: the number of bytes, or an error.
    pub(crate) fn start(
        &self,
        caller: Caller,
        user: Peer,
        reply: ReplyWrite,
        write: impl FnOnce() -> Result<u32, Errno> + Send + 'static,
    ) {
        let (lock, some) = &*self.shared;
        let mut in_progress = lock.lock();
        let place = match in_progress.places.take(user) {
            Ok(place) => place,
            Err(_) => {
                drop(in_progress);
                tracing::warn!(
                    "{}: write to an attribute refused, too many are in progress",
                    user.identity
                );
                return reply.error(Errno::EBUSY);
            }
        };
        let waiting = Arc::new(Waiting {
            place,
            caller,
            reply: Mutex::new(Some(reply)),
            signal: AtomicBool::new(false),
        });
        in_progress.writes.push(waiting.clone());
        drop(in_progress);
        some.notify_all();
        let (all, own) = (self.shared.clone(), waiting.clone());
        let thread = thread::Builder::new().name("ferroce-write".into());
        let started = thread.spawn(move || {
            own.answer(write());
            end(&all, &own);
        });
        if let Err(e) = started {
            tracing::warn!("no thread for a write to an attribute: {e}");
            waiting.answer(Err(Errno::EAGAIN));
            end(&self.shared, &waiting);
        }
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        let (lock, some) = &*self.shared;
        lock.lock().ended = true;
        some.notify_all();
    }
}

fn end(shared: &Shared, own: &Arc<Waiting>) {
    let mut in_progress = shared.0.lock();
    in_progress.writes.retain(|other| !Arc::ptr_eq(own, other));
    in_progress.places.leave(own.place);
}

fn watch((lock, some): &Shared) {
    let mut in_progress = lock.lock();
    while !in_progress.ended {
        if in_progress.writes.iter().all(|write| write.reply.lock().is_none()) {
            some.wait(&mut in_progress);
            continue;
        }
        some.wait_for(&mut in_progress, LOOK);
        for write in &in_progress.writes {
            let signal = write.caller.is_interrupted();
            if write.signal.swap(signal, Ordering::Relaxed) && signal {
                write.answer(Err(Errno::EINTR));
            }
        }
    }
}
