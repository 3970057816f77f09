//! The two ferroce processes and what they report.

use std::{
    collections::VecDeque,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{Receiver, TryRecvError},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{Result, process};

/// Time for a process to open its device or to connect.
const START: Duration = Duration::from_secs(30);

/// The end-of-run numbers of a process that are shown.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) packets_sent: u64,
    pub(crate) retransmits: u64,
    pub(crate) icrc_errors: u64,
}

impl Counters {
    fn from_json(json: &Value) -> Result<Self> {
        let number = |key: &str| {
            json[key]
                .as_u64()
                .ok_or_else(|| format!("a ferroce report has no number `{key}`: {json}"))
        };
        Ok(Self {
            bytes_read: number("bytes_read")?,
            bytes_written: number("bytes_written")?,
            packets_sent: number("packets_sent")?,
            retransmits: number("retransmits")?,
            icrc_errors: number("icrc_errors")?,
        })
    }
}

/// A running `ferroce --json` command.
pub(crate) struct Ferroce {
    name: String,
    child: process::Guard,
    events: Receiver<String>,
    errors: Receiver<String>,
    last_errors: VecDeque<String>,
    latest: Counters,
    /// Events that [`Ferroce::check`] has read and nobody has taken.
    seen: VecDeque<Value>,
}

impl Ferroce {
    /// Starts a program with these arguments, and prints its process id.
    pub(crate) fn start(name: &str, program: &Path, args: &[&str]) -> Result<Self> {
        let started = Self::spawn(name, Command::new(program).args(args))?;
        println!("{name}: process {}", started.id());
        Ok(started)
    }

    /// Starts a command.
    pub(crate) fn spawn(name: &str, command: &mut Command) -> Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = process::Guard::spawn(name, command)?;
        let (events, errors) = (child.stdout_lines(), child.stderr_lines());
        Ok(Self {
            name: name.to_owned(),
            child,
            events,
            errors,
            last_errors: VecDeque::new(),
            latest: Counters::default(),
            seen: VecDeque::new(),
        })
    }

    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for an event, dropping others.
    pub(crate) fn wait_for(&mut self, event: &str) -> Result<Value> {
        while let Some(json) = self.seen.pop_front() {
            if json["event"] == event {
                return Ok(json);
            }
        }
        let end = Instant::now() + START;
        loop {
            process::check_interrupt()?;
            match self.events.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => {
                    let json = self.take(&line)?;
                    if json["event"] == event {
                        return Ok(json);
                    }
                }
                Err(_) => self.check_running()?,
            }
            if Instant::now() > end {
                let said = self.said();
                return Err(format!(
                    "{}: no `{event}` within {} s\n{said}",
                    self.name,
                    START.as_secs()
                ));
            }
        }
    }

    /// Reads what came, and fails if the process has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        loop {
            match self.events.try_recv() {
                Ok(line) => {
                    let json = self.take(&line)?;
                    self.seen.extend((json["event"] != "stats").then_some(json));
                }
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return self.check_running(),
            }
        }
    }

    /// Takes the oldest event that [`Ferroce::check`] has read.
    pub(crate) fn next_event(&mut self) -> Option<Value> {
        self.seen.pop_front()
    }

    /// Bytes read and written so far.
    pub(crate) fn moved(&self) -> u64 {
        self.latest.bytes_read + self.latest.bytes_written
    }

    /// Ends it orderly and returns its summary.
    pub(crate) fn finish(mut self) -> Result<Counters> {
        let status = self.child.stop()?;
        let mut summary = None;
        while let Ok(line) = self.events.recv() {
            let json = self.take(&line)?;
            if json["event"] == "summary" {
                summary = Some(Counters::from_json(&json)?);
            }
        }
        if !status.success() {
            let said = self.said();
            return Err(format!("{} ended with {status}\n{said}", self.name));
        }
        summary.ok_or_else(|| format!("{} printed no summary", self.name))
    }

    fn take(&mut self, line: &str) -> Result<Value> {
        let json: Value = serde_json::from_str(line)
            .map_err(|e| format!("{} printed something else than JSON: {line}: {e}", self.name))?;
        if json["event"] == "stats" {
            self.latest = Counters::from_json(&json)?;
        }
        Ok(json)
    }

    fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => {
                let said = self.said();
                Err(format!("{} ended early with {status}\n{said}", self.name))
            }
        }
    }

    /// The last of its standard error.
    fn said(&mut self) -> String {
        // Its end may still be on the way through the pipe.
        while let Ok(line) = self.errors.recv_timeout(Duration::from_millis(100)) {
            self.last_errors.push_back(line);
            if self.last_errors.len() > 20 {
                self.last_errors.pop_front();
            }
        }
        self.last_errors
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join("\n")
    }
}
