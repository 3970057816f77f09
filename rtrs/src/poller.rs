//! The thread that polls a completion queue: it spins for a moment when the queue runs dry, then arms it and waits on
//! the channel, at most until the next timer.

use core::time::Duration;
use std::{
    sync::Arc,
    thread::{Builder, JoinHandle},
    time::Instant,
};

use parking_lot::Mutex;
use roce_verbs::{
    Completion, QpCaps, WcStatus,
    provider::{CompletionChannel, CompletionQueue, Provider, VerbsError},
};

use crate::{Error, PathError, conn::WrId};

/// Completions taken at a time.
const BATCH: usize = 64;
/// Longest wait on a channel: a stop is noticed by then, whatever happens to the wake-up.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// What a polling thread works for.
pub(crate) trait Handler: Send + Sync + 'static {
    /// Completions came. An error ends it all, as [`Handler::broken`] does.
    fn completions(&self, wcs: &[Completion]) -> Result<(), PathError>;
    /// It can't go on.
    fn broken(&self, why: PathError);
    /// Runs due timers and says when the next is due.
    fn timers(&self, now: Instant) -> Option<Instant>;
    /// The thread shall end.
    fn stopped(&self) -> bool;
    /// Last thing that the thread does.
    fn finish(&self) {}
}

/// The part of a path's work that a thread of I/O connections does: completions, while timers and the end are the
/// business of the service thread.
pub(crate) struct IoSide<H>(pub(crate) Arc<H>);

impl<H: Handler> Handler for IoSide<H> {
    fn completions(&self, wcs: &[Completion]) -> Result<(), PathError> {
        self.0.completions(wcs)
    }

    fn broken(&self, why: PathError) {
        self.0.broken(why);
    }

    fn timers(&self, _now: Instant) -> Option<Instant> {
        None
    }

    fn stopped(&self) -> bool {
        self.0.stopped()
    }
}

/// How long flushed work requests may wait for the event that explains them.
const FLUSH_GRACE: Duration = Duration::from_secs(2);

/// Flushed work requests tell only that the queue pair is in error. Mostly the peer has disconnected and the event is
/// on its way; if none comes, something else is wrong.
#[derive(Debug, Default)]
pub(crate) struct Flushed(Mutex<Option<Instant>>);

impl Flushed {
    /// Sorts a failed completion: what must end the path at once.
    pub(crate) fn judge(&self, wc: &Completion) -> Result<(), PathError> {
        if wc.status == WcStatus::FlushError {
            self.0.lock().get_or_insert_with(|| Instant::now() + FLUSH_GRACE);
            return Ok(());
        }
        Err(PathError::Completion {
            what: WrId::what(wc),
            status: wc.status,
        })
    }

    /// When to call [`Flushed::check`].
    pub(crate) fn due(&self) -> Option<Instant> {
        *self.0.lock()
    }

    /// Fails when nothing has explained the flush in time.
    pub(crate) fn check(&self, now: Instant) -> Result<(), PathError> {
        match self.due() {
            Some(due) if now >= due => Err(PathError::Flushed),
            _ => Ok(()),
        }
    }
}

/// A completion queue with its channel.
pub(crate) struct Queue<P: Provider> {
    pub(crate) cq: P::Cq,
    channel: P::Channel,
}

impl<P: Provider> Queue<P> {
    pub(crate) fn new(provider: &P, entries: u32) -> Result<Self, VerbsError> {
        let channel = provider.create_channel()?;
        let cq = provider.create_cq(entries, Some(&channel), 0)?;
        Ok(Self { cq, channel })
    }

    /// Queues for so many I/O connections, which `threads` threads share evenly.
    pub(crate) fn spread(
        provider: &P,
        connections: usize,
        threads: usize,
        caps: QpCaps,
    ) -> Result<Vec<Self>, VerbsError> {
        let queue = |i| {
            let conns = (connections + threads - 1 - i) / threads;
            let entries = (caps.max_send_wr + caps.max_recv_wr) as usize * conns + 16;
            // A peer that keeps to the queue depth never fills so many.
            let entries = u32::try_from(entries).unwrap_or(u32::MAX);
            Self::new(provider, entries.min(provider.limits().max_cqe))
        };
        (0..threads).map(queue).collect()
    }

    /// Appends at least one completion, or none when the deadline passes.
    pub(crate) fn poll_until(&self, out: &mut Vec<Completion>, deadline: Instant) -> Result<(), VerbsError> {
        loop {
            if self.cq.poll(out, BATCH)? > 0 {
                return Ok(());
            }
            self.cq.arm(false)?;
            if self.cq.poll(out, BATCH)? > 0 {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.channel.wait(Some(left.min(MAX_WAIT)))?;
        }
    }
}

/// Starts the thread.
pub(crate) fn spawn<P: Provider, H: Handler>(
    name: &str,
    queue: Queue<P>,
    spin: Duration,
    handler: Arc<H>,
) -> Result<JoinHandle<()>, Error> {
    Builder::new()
        .name(name.into())
        .spawn(move || {
            let _guard = PanicGuard(handler.clone());
            if let Err(e) = run(&queue, spin, handler.as_ref()) {
                handler.broken(e.into());
            }
            drop(queue);
            handler.finish();
        })
        .map_err(|e| Error::System("starting a thread", e))
}

/// A callback of the user that panics must not leave a path behind that nobody drives.
struct PanicGuard<H: Handler>(Arc<H>);

impl<H: Handler> Drop for PanicGuard<H> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken(VerbsError::State("a callback panicked".into()).into());
            self.0.finish();
        }
    }
}

fn run<P: Provider, H: Handler>(queue: &Queue<P>, spin: Duration, handler: &H) -> Result<(), VerbsError> {
    let mut wcs = Vec::with_capacity(BATCH);
    loop {
        if handler.stopped() {
            return Ok(());
        }
        let now = Instant::now();
        let due = handler.timers(now);
        wcs.clear();
        if queue.cq.poll(&mut wcs, BATCH)? == 0 && !spin_for(queue, &mut wcs, spin)? {
            queue.cq.arm(false)?;
            if queue.cq.poll(&mut wcs, BATCH)? == 0 && !handler.stopped() {
                let wait = due.map_or(MAX_WAIT, |d| d.saturating_duration_since(now).min(MAX_WAIT));
                queue.channel.wait(Some(wait))?;
                continue;
            }
        }
        if let Err(e) = handler.completions(&wcs) {
            handler.broken(e);
        }
    }
}

/// Polls for some time; true when something came.
fn spin_for<P: Provider>(queue: &Queue<P>, wcs: &mut Vec<Completion>, spin: Duration) -> Result<bool, VerbsError> {
    if spin.is_zero() {
        return Ok(false);
    }
    let start = Instant::now();
    loop {
        for _ in 0..8 {
            core::hint::spin_loop();
        }
        if queue.cq.poll(wcs, BATCH)? > 0 {
            return Ok(true);
        }
        if start.elapsed() >= spin {
            return Ok(false);
        }
    }
}
