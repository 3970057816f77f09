//! Thread that writes a ring.

use std::{
    fmt::{self, Formatter},
    io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use roce_net::{Thread, wait_any_readable};

use super::{
    cause::Cause,
    files,
    memory::Ring,
    request::{Chunks, RingRequest, SOCKETS, Sent, To, answer},
};

/// Time between two files because of trouble, at least.
const INTERVAL: Duration = Duration::from_secs(10);
/// Files because of trouble, at most: others of the name are for those who ask.
const MAX_ON_BAD: u32 = 8;
/// Processes that wait for trouble, at most.
const MAX_WAITING: usize = 16;

/// Attempt to write a ring to a file.
#[derive(Debug)]
pub struct Written {
    /// Cause of the attempt.
    pub cause: Cause,
    /// The file and the number of packets, or the error.
    pub result: io::Result<(PathBuf, u64)>,
}

/// Settings of a [`RingControl`].
pub struct RingConfig {
    /// Name by which the process is found, besides its process ID.
    pub name: String,
    /// File to write. Further ones have numbers: `trace.pcap`, `trace-2.pcap`, … up to [`MAX_FILES`](super::MAX_FILES).
    pub file: PathBuf,
    /// Write the ring when something goes wrong: at most once in 10 s, 8 times in all, and once because of wrong ICRCs, which strangers can
    /// send.
    pub on_bad: bool,
    /// Write the ring whenever a byte can be read from this descriptor, a pipe.
    pub signals: Option<OwnedFd>,
    /// Called with each file, by the thread that writes.
    pub report: Box<dyn Fn(&Written) + Send>,
}

impl fmt::Debug for RingConfig {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingConfig")
            .field("name", &self.name)
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

/// Writes a ring when it is asked for, and when something goes wrong, until it is dropped.
pub struct RingControl {
    ring: Ring,
    ends: Arc<AtomicBool>,
    thread: Mutex<Option<Thread>>,
    generation: u32,
}

debug!(RingControl, "RingControl", |this| ring: this.ring);

impl RingControl {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no socket or thread left.
    pub fn start(ring: &Ring, config: RingConfig) -> io::Result<Self> {
        let listener = SOCKETS.listen(&config.name)?;
        listener.set_nonblocking(true)?;
        let ends = Arc::<AtomicBool>::default();
        let server = Server {
            ring: ring.clone(),
            listener,
            waiting: Vec::new(),
            budget: Budget::new(config.on_bad),
            config,
            ends: ends.clone(),
        };
        server.arm(Instant::now());
        Ok(Self {
            ring: ring.clone(),
            ends,
            thread: Mutex::new(Some(Thread::start("ferroce ring", move || server.run())?)),
            generation: roce_net::generation(),
        })
    }

    /// Ends the thread, after it has written what is due: call it before a process exits. Waits for 5 s at most.
    pub fn finish(&self) {
        // In a forked child socket and thread are the parent's.
        if self.generation != roce_net::generation() {
            return;
        }
        self.ends.store(true, Ordering::Release);
        self.ring.wake();
        if let Some(thread) = self.thread.lock().take()
            && !thread.finish()
        {
            tracing::error!("the thread that writes the ring of packets panicked, or takes longer than 5 s");
        }
    }
}

impl Drop for RingControl {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Limit of the files because of trouble.
#[derive(Debug)]
struct Budget {
    left: u32,
    icrc: bool,
    /// Not before this time.
    next: Option<Instant>,
}

impl Budget {
    fn new(on_bad: bool) -> Self {
        Self {
            left: if on_bad { MAX_ON_BAD } else { 0 },
            icrc: true,
            next: None,
        }
    }

    /// Returns whether a file may be written for a cause.
    fn allows(&self, cause: Cause, now: Instant) -> bool {
        self.left > 0 && self.next.is_none_or(|next| next <= now) && (self.icrc || cause != Cause::Icrc)
    }

    fn take(&mut self, cause: Cause, now: Instant) {
        self.left -= 1;
        self.icrc &= cause != Cause::Icrc;
        self.next = Some(now + INTERVAL);
    }

    /// Returns when it will allow more than now.
    fn changes(&self, now: Instant) -> Option<Instant> {
        self.next.filter(|next| self.left > 0 && *next > now)
    }
}

/// State of the thread.
struct Server {
    ring: Ring,
    listener: UnixListener,
    /// Processes that wait for trouble.
    waiting: Vec<(UnixStream, RingRequest, To)>,
    budget: Budget,
    config: RingConfig,
    ends: Arc<AtomicBool>,
}

impl Server {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            self.arm(now);
            if let Some(cause) = self.ring.take_raised() {
                self.on_bad(cause, now);
                continue;
            }
            if self.ends.load(Ordering::Acquire) {
                // Reported before the end was asked for.
                if let Some(cause) = self.ring.take_raised() {
                    self.on_bad(cause, now);
                }
                return;
            }
            if let Err(e) = self.wait(now) {
                tracing::error!("the ring of packets can't be asked for any more: {e}");
                return;
            }
        }
    }

    /// Has the ring report what something is to be written for.
    fn arm(&self, now: Instant) {
        let wanted = |cause: &Cause| !self.waiting.is_empty() || self.budget.allows(*cause, now);
        self.ring.arm(Cause::BAD.into_iter().filter(wanted));
    }

    /// Waits for something to do, and answers requests.
    fn wait(&mut self, now: Instant) -> io::Result<()> {
        let mut fds: Vec<RawFd> = vec![self.ring.reports().as_raw_fd(), self.listener.as_raw_fd()];
        fds.extend(self.waiting.iter().map(|(stream, ..)| stream.as_raw_fd()));
        fds.extend(self.config.signals.as_ref().map(AsRawFd::as_raw_fd));
        let timeout = self.budget.changes(now).map(|at| at - now);
        let ready = wait_any_readable(&fds, timeout)?;
        let signalled = self.config.signals.is_some() && ready.last() == Some(&true);
        // They have nothing to send: the connection has ended.
        let mut gone = ready[2..].iter();
        self.waiting.retain(|_| gone.next() != Some(&true));
        if signalled {
            self.on_signal()?;
        }
        if ready[1] {
            // The process that connected may be gone.
            if let Ok((stream, _)) = self.listener.accept()
                && let Err(e) = self.serve(stream)
            {
                tracing::debug!("a request for the ring of packets was not answered: {e}");
            }
        }
        Ok(())
    }

    fn on_signal(&mut self) -> io::Result<()> {
        let Some(signals) = &self.config.signals else {
            return Ok(());
        };
        // Several signals are one.
        let mut pipe = std::fs::File::from(signals.try_clone()?);
        if io::Read::read(&mut pipe, &mut [0; 64])? == 0 {
            self.config.signals = None;
            return Ok(());
        }
        let _ = self.write_file(Cause::Signal, u64::MAX);
        Ok(())
    }

    fn serve(&mut self, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let (request, to) = match RingRequest::receive(&stream) {
            Ok(request) => request,
            Err(e) => return answer(&stream, "error", &e.to_string()),
        };
        match request.on_bad {
            false => self.give(&stream, &request, to, Cause::Request),
            true if self.waiting.len() >= MAX_WAITING => answer(&stream, "error", "too many wait for trouble already"),
            true => {
                self.waiting.push((stream, request, to));
                Ok(())
            }
        }
    }

    /// Writes or sends the ring, and answers.
    fn give(&mut self, stream: &UnixStream, request: &RingRequest, to: To, cause: Cause) -> io::Result<()> {
        match to {
            To::File => match self.write_file(cause, request.last) {
                Ok(Sent { packets, path }) => {
                    let path = path.unwrap_or_default();
                    answer(stream, "ok", &format!("{packets} {}", path.display()))
                }
                Err(text) => answer(stream, "error", &text),
            },
            To::Peer => {
                answer(stream, "ok", &cause.to_string())?;
                let mut out = Chunks(stream);
                let packets = self.ring.write(&mut out, request.last)?;
                out.finish(packets)
            }
        }
    }

    fn on_bad(&mut self, cause: Cause, now: Instant) {
        if self.budget.allows(cause, now) {
            self.budget.take(cause, now);
            let _ = self.write_file(cause, u64::MAX);
        }
        for (stream, request, to) in std::mem::take(&mut self.waiting) {
            if let Err(e) = self.give(&stream, &request, to, cause) {
                tracing::debug!("a request for the ring of packets was not answered: {e}");
            }
        }
    }

    /// Writes the next file, and reports it. The error is a text.
    fn write_file(&self, cause: Cause, last: u64) -> Result<Sent, String> {
        let result = files::write_new(&self.config.file, |file| self.ring.write(file, last));
        let answer = match &result {
            Ok((path, packets)) => Ok(Sent {
                packets: *packets,
                path: Some(path.clone()),
            }),
            Err(e) => Err(e.to_string()),
        };
        (self.config.report)(&Written { cause, result });
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_writes_few_files() {
        let (mut budget, begin) = (Budget::new(true), Instant::now());
        let mut now = begin;
        assert!(budget.allows(Cause::Icrc, now));
        budget.take(Cause::Icrc, now);
        assert!(!budget.allows(Cause::Path, now) && budget.changes(now) == Some(now + INTERVAL));
        now += INTERVAL;
        assert!(!budget.allows(Cause::Icrc, now), "strangers get one");
        for _ in 1..MAX_ON_BAD {
            assert!(budget.allows(Cause::QueuePair, now));
            budget.take(Cause::QueuePair, now);
            now += INTERVAL;
        }
        assert!(!budget.allows(Cause::QueuePair, now) && budget.changes(begin).is_none());
        assert!(!Budget::new(false).allows(Cause::QueuePair, now));
    }
}
