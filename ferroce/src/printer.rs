//! Standard output of commands that run until they are stopped, written by a thread of its own.
//!
//! A reader that stops reading blocks that thread and nothing else: beyond [`MAX_LINES`] lines further events are dropped, and counted
//! for the reader.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, LazyLock},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{event::Event, output::Failure};

/// Lines that wait to be written at most; further events are dropped.
const MAX_LINES: usize = 1024;
/// Time without progress after which the lines that wait are given up when the program ends.
const STUCK: Duration = Duration::from_secs(1);

/// How a line is written, which is how a notice of lost lines is written, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// A line of text for people.
    Text,
    /// A line of JSON.
    Json,
}

impl Format {
    /// The line that reports dropped events.
    fn notice(self, events: u64) -> String {
        let lost = Event::EventsLost { events };
        match self {
            Self::Text => format!("{lost}, as standard output was not read"),
            Self::Json => lost.json(None, true),
        }
    }
}

/// A bounded queue of lines and the thread that writes them.
#[derive(Clone)]
pub(crate) struct Printer(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// A line was queued, written or dropped, or the output failed.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<String>,
    /// Events dropped since the last notice, and the format of that notice.
    lost: Option<(u64, Format)>,
    /// The thread is writing a line.
    writing: bool,
    /// Lines written.
    written: u64,
    /// Why nothing is written any more.
    failed: Option<(io::ErrorKind, String)>,
    /// The program ends, and the reader is stuck: nothing is queued any more.
    given_up: bool,
}

impl State {
    fn failure(&self) -> Result<(), Failure> {
        match &self.failed {
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone()).into()),
            None => Ok(()),
        }
    }

    /// Queues the notice of dropped events, if there are any. Called when there is room.
    fn queue_notice(&mut self) {
        if let Some((events, format)) = self.lost.take() {
            self.lines.push_back(format.notice(events));
        }
    }

    fn is_idle(&self) -> bool {
        (self.lines.is_empty() && !self.writing) || self.failed.is_some() || self.given_up
    }
}

impl Printer {
    /// The printer of the process's standard output.
    pub(crate) fn stdout() -> Self {
        static STDOUT: LazyLock<Printer> = LazyLock::new(|| Printer::new(io::stdout()));
        STDOUT.clone()
    }

    fn new(output: impl Write + Send + 'static) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let printing = shared.clone();
        let started = thread::Builder::new()
            .name("ferroce-print".into())
            .spawn(move || printing.print(output));
        if let Err(e) = started {
            shared.state.lock().failed = Some((e.kind(), format!("no thread for standard output: {e}")));
        }
        Self(shared)
    }

    /// Queues an event's line. Never waits: without room the event is dropped and counted.
    ///
    /// # Errors
    /// When an earlier line could not be written.
    pub(crate) fn event(&self, line: String, format: Format) -> Result<(), Failure> {
        let mut state = self.0.state.lock();
        state.failure()?;
        if state.lines.len() >= MAX_LINES || state.given_up {
            if state.lost.is_none() {
                tracing::warn!("standard output is not read: events are dropped");
            }
            let lost = state.lost.map_or(0, |(events, _)| events);
            state.lost = Some((lost + 1, format));
        } else {
            state.queue_notice();
            state.lines.push_back(line);
            self.0.changed.notify_all();
        }
        Ok(())
    }

    /// Queues the answer to a request, and waits for room. It is dropped when the output has failed, or the program ends with a stuck
    /// reader.
    pub(crate) fn answer(&self, line: String) {
        let mut state = self.0.state.lock();
        while state.lines.len() >= MAX_LINES && state.failed.is_none() && !state.given_up {
            self.0.changed.wait(&mut state);
        }
        if state.failed.is_none() && !state.given_up {
            state.queue_notice();
            state.lines.push_back(line);
            self.0.changed.notify_all();
        }
    }

    /// Checks the output.
    ///
    /// # Errors
    /// When an earlier line could not be written.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.0.state.lock().failure()
    }

    /// Waits until all lines are written; gives them up after [`STUCK`] without progress.
    ///
    /// # Errors
    /// When a line could not be written.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        self.finish_within(STUCK)
    }

    fn finish_within(&self, stuck: Duration) -> Result<(), Failure> {
        let mut state = self.0.state.lock();
        let mut progress = (state.written, Instant::now());
        while !state.is_idle() || self.owes_notice(&mut state) {
            if state.written != progress.0 {
                progress = (state.written, Instant::now());
            }
            if self.0.changed.wait_until(&mut state, progress.1 + stuck).timed_out() && state.written == progress.0 {
                state.given_up = true;
                self.0.changed.notify_all();
            }
        }
        state.failure()
    }

    /// Queues the last notice of dropped events. True: it is still to be written.
    fn owes_notice(&self, state: &mut MutexGuard<'_, State>) -> bool {
        let owes = state.lost.is_some() && state.failed.is_none() && !state.given_up;
        if owes {
            state.queue_notice();
            self.0.changed.notify_all();
        }
        owes
    }
}

impl Shared {
    /// Writes lines until the output fails.
    fn print(&self, mut output: impl Write) {
        let mut state = self.state.lock();
        loop {
            let Some(mut line) = state.lines.pop_front() else {
                self.changed.wait(&mut state);
                continue;
            };
            state.writing = true;
            line.push('\n');
            let written = MutexGuard::unlocked(&mut state, || {
                output.write_all(line.as_bytes()).and_then(|()| output.flush())
            });
            state.writing = false;
            match written {
                Ok(()) => state.written += 1,
                Err(e) => {
                    state.lines.clear();
                    state.failed = Some((e.kind(), e.to_string()));
                }
            }
            self.changed.notify_all();
            if state.failed.is_some() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        os::unix::net::UnixStream,
    };

    use super::*;

    /// A line that a socket's buffer has no room for.
    fn long() -> String {
        "x".repeat(4 << 20)
    }

    #[test]
    fn a_stuck_reader_loses_events_and_is_told_how_many() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let printer = Printer::new(ours);
        printer.event(long(), Format::Json).unwrap();
        // Perhaps the thread has taken the first line, perhaps not.
        for n in 0..MAX_LINES + 10 {
            printer.event(n.to_string(), Format::Json).unwrap();
        }
        let mut lines = BufReader::new(theirs).lines().map(Result::unwrap);
        assert_eq!(lines.next().unwrap().len(), 4 << 20);
        let mut printed = 0;
        let notice = loop {
            let line = lines.next().unwrap();
            if line != printed.to_string() {
                break line;
            }
            printed += 1;
            if printed == MAX_LINES - 1 {
                printer.event("after".into(), Format::Json).unwrap();
            }
        };
        let notice: serde_json::Value = serde_json::from_str(&notice).unwrap();
        assert_eq!(notice["event"], "events_lost");
        let lost = notice["events"].as_u64().unwrap();
        assert_eq!(lost + printed as u64, (MAX_LINES + 10) as u64);
        assert_eq!(lines.next().unwrap(), "after");
        printer.finish().unwrap();
    }

    #[test]
    fn a_stuck_reader_does_not_keep_the_program() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let printer = Printer::new(ours);
        for _ in 0..MAX_LINES + 10 {
            printer.event(long(), Format::Text).unwrap();
        }
        // Answers wait for room until the program ends.
        let answering = printer.clone();
        let answer = thread::spawn(move || answering.answer("answer".into()));
        printer.finish_within(Duration::from_millis(10)).unwrap();
        answer.join().unwrap();
        printer.event("late".into(), Format::Text).unwrap();
        printer.finish().unwrap();
        drop(theirs);
    }

    #[test]
    fn a_reader_that_closes_is_an_error_of_what_follows() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let printer = Printer::new(ours);
        printer.event("first".into(), Format::Text).unwrap();
        assert!(printer.finish().is_err());
        assert!(printer.check().is_err() && printer.event("second".into(), Format::Text).is_err());
    }

    #[test]
    fn the_end_waits_for_what_is_still_to_be_written() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let printer = Printer::new(ours);
        let reader = thread::spawn(move || BufReader::new(theirs).lines().take(100).count());
        for n in 0..100 {
            printer.event(n.to_string(), Format::Text).unwrap();
        }
        printer.finish().unwrap();
        assert_eq!(reader.join().unwrap(), 100);
    }
}
