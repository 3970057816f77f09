//! Captures that a command reads: files, or standard input.

use std::{
    fs::File,
    io::{self, Read, StdinLock},
    path::Path,
};

use roce_pcap::{
    Capture, Checker, Error, Setup,
    judge::{Endpoint, Event, Observed, Stated},
};

use crate::{output::Failure, signals::Stop};

/// Capture of a file or of standard input.
pub(super) enum Stream {
    File(Capture<File>),
    /// Standard input, which may be a capture that is still being taken: the first ctrl-C ends it.
    Live(Capture<StdinLock<'static>>, Stop),
}

impl Stream {
    /// Opens a file; `-` is standard input. The inner error is the file's.
    pub(super) fn open(file: &Path) -> Result<Result<Self, String>, Failure> {
        let opened = if file.as_os_str() == "-" {
            let stop = Stop::on_signals()?;
            Capture::new(io::stdin().lock()).map(|capture| Self::Live(capture, stop))
        } else {
            Capture::open(file).map(Self::File)
        };
        Ok(opened.map_err(|e| named(&file.display().to_string(), &e)))
    }

    /// Reads to the end, and calls `each` with every packet that belongs to a conversation. Returns the checker, and why the
    /// capture breaks off, if it does.
    pub(super) fn follow(
        self,
        stated: &[Stated],
        each: impl FnMut(&Event, &Observed<'_>),
    ) -> (Checker, Option<String>) {
        let setup = Setup {
            stated: stated.to_vec(),
            upper: None,
        };
        let mut checker = Checker::with("", &setup);
        let broken = match self {
            Self::File(capture) => follow(capture, &mut checker, || false, each),
            Self::Live(capture, stop) => follow(capture, &mut checker, || stop.requested(), each),
        };
        (checker, broken)
    }
}

fn follow<R: Read>(
    mut capture: Capture<R>,
    checker: &mut Checker,
    ended: impl Fn() -> bool,
    mut each: impl FnMut(&Event, &Observed<'_>),
) -> Option<String> {
    while let Some(frame) = capture.next_frame() {
        match frame {
            Ok(frame) => drop(checker.frame(&frame, &mut each)),
            Err(e) => {
                checker.broken(&e);
                return Some(e.to_string());
            }
        }
        if ended() {
            break;
        }
    }
    None
}

/// Returns an error's text with the file's name in it.
pub(super) fn named(name: &str, e: &Error) -> String {
    let text = e.to_string();
    if text.contains(name) {
        text
    } else {
        format!("{name}: {text}")
    }
}

/// Writes a queue pair as `ADDRESS:QPN`.
pub(super) fn end(end: &Endpoint) -> String {
    match end.qpn {
        Some(qpn) => format!("{}:{qpn:#x}", end.addr),
        None => format!("{}:?", end.addr),
    }
}
