//! Log of the library: lines on standard error, as `ferroce run -v` and `FERROCE_LOG` ask for.
//!
//! Failed verbs, error completions and failed queue pairs are one line each, at level INFO: programs try features that may be missing,
//! so that a failure matters to debugging and is not an error of ferroce. While the level is lower, nothing is
//! formatted, and a verb that succeeds has no cost.

use std::{
    any::type_name,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd},
    sync::{Mutex, Once},
    time::{Duration, Instant},
};

use libc::c_int;
use roce::environment;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::Level;
use tracing_subscriber::{filter::Targets, fmt::MakeWriter, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::{
    config,
    errno::{self, Errno},
};

/// Log filter, such as `info` or `roce_port=trace,info`.
const FILTER: &str = "FERROCE_LOG";
/// Filter when none is given: what the user has to know anyway, such as a capture that has stopped.
const USUAL: Level = Level::ERROR;
/// Time within which the same line is not written again, but counted.
const REPEATED: Duration = Duration::from_secs(1);

/// Installs the subscriber, once. Called before a program can do anything else with devices, and not at load, since a preloaded
/// library is in every program.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let text = environment::var(FILTER);
        let filter = match text.as_deref().map(str::parse::<Targets>) {
            None => Targets::new().with_default(USUAL),
            Some(Ok(filter)) => filter,
            Some(Err(e)) => {
                config::complain(format_args!(
                    "{FILTER}: {e}; expected a level (error, warn, info, debug, trace) or TARGET=LEVEL, separated by commas"
                ));
                Targets::new().with_default(USUAL)
            }
        };
        let lines = tracing_subscriber::fmt::layer()
            .without_time()
            .with_level(false)
            .with_target(false)
            .with_ansi(false)
            .with_writer(Stderr);
        // A program that has this library as a part of itself may have a subscriber, which gets the events then.
        let _ = tracing_subscriber::registry().with(lines).with(filter).try_init();
    });
}

/// Logs a verb that failed. `F` is the closure of its entry point, whose name is the verb's.
#[cold]
pub(crate) fn failed_verb<F>(error: Errno) {
    // Answers that programs ask for in loops: nothing is there yet, or no more.
    if errno::is_logged() && error != Errno::AGAIN && error != Errno::NODATA {
        failed(&verb_of(type_name::<F>()), error);
    }
}

/// Logs something that failed under its name.
#[cold]
pub(crate) fn failed(name: &str, error: Errno) {
    if !errno::is_logged() {
        return;
    }
    let errno = error_text(error.0);
    match error.take_reason() {
        Some(reason) => tracing::info!("{name} failed: {reason} ({errno})"),
        None => tracing::info!("{name} failed: {errno}"),
    }
}

/// Text of an error number, as strerror(3) has it.
pub(crate) fn error_text(number: c_int) -> String {
    let text = io::Error::from_raw_os_error(number).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// The verb that a closure is the body of: `ferroce_verbs::cq::poll_cq::{{closure}}` is that of `ibv_poll_cq`.
fn verb_of(closure: &str) -> String {
    let path = closure.split("::{{").next().unwrap_or(closure);
    let name = path.rsplit("::").next().unwrap_or(path).trim_start_matches('_');
    let prefix = if path.contains("::rdmacm::") { "rdma" } else { "ibv" };
    match name.starts_with("ibv_") || name.starts_with("rdma_") {
        true => name.to_owned(),
        false => format!("{prefix}_{}", name.trim_start_matches("compat_")),
    }
}

/// Standard error. A line is one system call, so that those of several threads and processes don't mix.
pub(crate) struct Stderr;

/// The last line, when it was written, and how often it has come again since.
static LAST: Mutex<Option<(Vec<u8>, Instant, u64)>> = Mutex::new(None);

impl MakeWriter<'_> for Stderr {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let repeated = suppressed(line);
        let more = match repeated {
            None => return Ok(line.len()),
            Some(0) => String::new(),
            Some(times) => format!("ferroce: the last line again {times} times\n"),
        };
        let text = [more.as_bytes(), b"ferroce: ", line].concat();
        let stderr = io::stderr();
        if is_ready(stderr.as_fd()) {
            // What can't be written is lost: it could not be reported either.
            let _ = rustix::io::write(stderr, &text);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns how often the line before was suppressed, or `None` if this one is to be.
fn suppressed(line: &[u8]) -> Option<u64> {
    // Held by another thread, or by one that a forked child doesn't have.
    let Ok(mut last) = LAST.try_lock() else {
        return Some(0);
    };
    let now = Instant::now();
    let again = match &mut *last {
        Some((same, at, again)) if same == line => {
            *again += 1;
            if now.duration_since(*at) < REPEATED {
                return None;
            }
            // This one is written.
            *again - 1
        }
        Some((_, _, again)) => *again,
        None => 0,
    };
    *last = Some((line.to_vec(), now, 0));
    Some(again)
}

/// Whether a line can be written without waiting for a reader: lines are written under locks that traffic needs.
fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut entry = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    let ready = poll(&mut entry, Some(&Timespec::default()));
    ready.is_ok() && entry[0].revents().contains(PollFlags::OUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of<F: FnOnce()>(_: F) -> &'static str {
        type_name::<F>()
    }

    fn ibv_create_thing() -> &'static str {
        name_of(|| ())
    }

    fn compat_query_thing() -> &'static str {
        name_of(|| ())
    }

    #[test]
    fn closures_are_named_after_their_verbs() {
        assert_eq!(verb_of(ibv_create_thing()), "ibv_create_thing");
        assert_eq!(verb_of(compat_query_thing()), "ibv_query_thing");
        assert_eq!(
            verb_of("ferroce_verbs::query::_ibv_query_gid_ex::{{closure}}"),
            "ibv_query_gid_ex"
        );
        assert_eq!(
            verb_of("ferroce_verbs::post::post_send::{{closure}}::{{closure}}"),
            "ibv_post_send"
        );
    }

    #[test]
    fn lines_that_come_again_are_counted() {
        assert_eq!(suppressed(b"a"), Some(0));
        assert_eq!((suppressed(b"a"), suppressed(b"a")), (None, None));
        assert_eq!(suppressed(b"b"), Some(2));
        assert_eq!(suppressed(b"a"), Some(0));
    }

    #[test]
    fn a_full_pipe_is_not_waited_for() {
        use std::os::fd::AsRawFd;
        let (reader, writer) = io::pipe().unwrap();
        assert!(is_ready(writer.as_fd()));
        // SAFETY: a descriptor of this test.
        let capacity = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_GETPIPE_SZ) };
        let all = vec![0; usize::try_from(capacity).unwrap()];
        (&writer).write_all(&all).unwrap();
        assert!(!is_ready(writer.as_fd()));
        drop(reader);
    }
}
