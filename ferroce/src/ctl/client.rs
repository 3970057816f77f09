//! The client of a control socket.

use std::{
    io::{self, BufRead, BufReader, IsTerminal, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use nix::unistd::geteuid;
use rnbd_host::control::{Greeting, ProcessRequest, Refused, Request, VERSION};
use roce_verbs::shown;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    control::address::{connect, usual_place},
    output::Failure,
    signals::Stop,
};

/// Interval at which a wait checks for signals.
const LOOK: Duration = Duration::from_millis(100);
/// Time without an answer after which progress is shown.
const SILENCE: Duration = Duration::from_secs(1);
/// Bytes of an answer at most.
const MAX_ANSWER: u64 = 256 << 20;

/// A connection to a process.
pub(super) struct Client {
    stream: BufReader<UnixStream>,
    /// Requests so far.
    requests: u64,
    stop: Stop,
    pub(super) greeting: Greeting,
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        Self::failed(shown(&refused.text).to_string())
    }
}

/// Progress display of a request that takes long.
struct Progress {
    since: Instant,
    bar: Option<ProgressBar>,
    /// The last event.
    event: String,
}

impl Progress {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            bar: None,
            event: String::new(),
        }
    }

    fn event(&mut self, event: &Value) {
        if let Some(line) = event["text"].as_str().and_then(|text| text.lines().next()) {
            self.event = format!(", {}", shown(line));
        }
    }

    /// Shown on a terminal only.
    fn show(&mut self) {
        if self.bar.is_none() && self.since.elapsed() >= SILENCE && io::stderr().is_terminal() {
            let style =
                ProgressStyle::with_template("{spinner} {elapsed} not done yet (ctrl-C: do not wait for it){wide_msg}");
            let bar = ProgressBar::new_spinner().with_elapsed(self.since.elapsed());
            self.bar = Some(style.map_or(bar.clone(), |style| bar.with_style(style)));
        }
        if let Some(bar) = &self.bar {
            bar.set_message(self.event.clone());
            bar.tick();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Result of waiting for a line.
enum Line {
    Json(Value),
    /// The process has closed the connection.
    End,
    /// Interrupted by a signal.
    Stopped,
}

impl Client {
    /// Connects to this socket, or to the default one.
    pub(super) fn connect(socket: Option<&Path>) -> Result<Self, Failure> {
        let path = socket.map_or_else(usual_place, Path::to_owned);
        let stream = connect(&path).map_err(|e| not_connected(&path, &e))?;
        let set = stream.set_read_timeout(Some(LOOK));
        set.map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?;
        let mut this = Self {
            stream: BufReader::new(stream),
            requests: 0,
            stop: Stop::on_signals()?,
            greeting: Greeting::default(),
        };
        let greeting: Value = this.ask(ProcessRequest::Hello { version: VERSION })?;
        this.greeting = check_version(greeting)?;
        Ok(this)
    }

    /// Subscribes to events, to show them while a request takes long.
    pub(super) fn follow(&mut self) -> Result<(), Failure> {
        match io::stderr().is_terminal() {
            true => self.done(ProcessRequest::Subscribe {}),
            false => Ok(()),
        }
    }

    /// Sends a request whose answer has no fields.
    pub(super) fn done(&mut self, request: impl Into<Request>) -> Result<(), Failure> {
        self.ask::<Value>(request).map(drop)
    }

    /// Sends a request; a refusal is a failure.
    pub(super) fn ask<T: DeserializeOwned>(&mut self, request: impl Into<Request>) -> Result<T, Failure> {
        Ok(self.try_ask(request)??)
    }

    /// Sends a request, and returns its answer or its refusal.
    pub(super) fn try_ask<T: DeserializeOwned>(
        &mut self,
        request: impl Into<Request>,
    ) -> Result<Result<T, Refused>, Failure> {
        self.requests += 1;
        let line = Numbered {
            id: self.requests,
            request: request.into(),
        };
        let mut line = serde_json::to_vec(&line).map_err(|e| Failure::failed(format!("the request: {e}")))?;
        line.push(b'\n');
        // A process that has refused the connection has sent the reason, though it reads no more.
        let sent = self.stream.get_mut().write_all(&line);
        let mut progress = Progress::new();
        loop {
            let mut answer = match self.line(|| progress.show())? {
                Line::Json(answer) => answer,
                Line::Stopped => return Err(Failure::reported(130)),
                Line::End => {
                    let why = sent.err().map_or(String::new(), |e| format!(": {e}"));
                    return Err(Failure::failed(format!("the process has closed the connection{why}")));
                }
            };
            if answer["event"] != "answer" {
                progress.event(&answer);
                continue;
            }
            if answer["id"] != self.requests && !answer["id"].is_null() {
                continue;
            }
            let done = answer["ok"] == true;
            if let Some(fields) = answer.as_object_mut() {
                fields.retain(|name, _| !["event", "id", "ok"].contains(&name.as_str()));
            }
            return Ok(match done {
                true => Ok(read(answer)?),
                false => Err(read(answer)?),
            });
        }
    }

    /// Waits for the next event; `None`: the connection is closed. A signal ends the command with status 0.
    pub(super) fn event(&mut self) -> Result<Option<Value>, Failure> {
        match self.line(|| ())? {
            Line::Json(event) => Ok(Some(event)),
            Line::End => Ok(None),
            Line::Stopped => Err(Failure::reported(0)),
        }
    }

    fn line(&mut self, mut waiting: impl FnMut()) -> Result<Line, Failure> {
        let mut bytes = Vec::new();
        loop {
            let room = (MAX_ANSWER - bytes.len() as u64).max(1);
            match self.stream.by_ref().take(room).read_until(b'\n', &mut bytes) {
                Ok(_) => break,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if self.stop.requested() {
                        return Ok(Line::Stopped);
                    }
                    waiting();
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // The process has exited with a request of ours unread.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => break,
                Err(e) => return Err(Failure::failed(format!("the connection: {e}"))),
            }
        }
        if bytes.is_empty() {
            return Ok(Line::End);
        }
        let parsed = serde_json::from_slice(&bytes);
        parsed
            .map(Line::Json)
            .map_err(|e| Failure::failed(format!("not a control socket of ferroce: {e}")))
    }
}

/// A request with the number that its answer has.
#[derive(Serialize)]
struct Numbered {
    id: u64,
    #[serde(flatten)]
    request: Request,
}

fn read<T: DeserializeOwned>(answer: Value) -> Result<T, Failure> {
    serde_json::from_value(answer).map_err(|e| Failure::failed(format!("malformed answer: {e}")))
}

/// Reads a greeting of our version.
fn check_version(greeting: Value) -> Result<Greeting, Failure> {
    match &greeting["version"] {
        version if *version == VERSION => read(greeting),
        version => Err(Failure::failed(format!(
            "the process, {}, has version {version} of the control protocol, this program, ferroce {}, has {VERSION}: use the `ferroce` that \
             started it",
            shown(greeting["program"].as_str().unwrap_or("unknown")),
            env!("CARGO_PKG_VERSION"),
        ))),
    }
}

fn not_connected(path: &Path, e: &io::Error) -> Failure {
    use std::os::unix::fs::MetadataExt;
    let hint = match e.kind() {
        io::ErrorKind::NotFound => {
            "\nstart `ferroce daemon`, or `ferroce serve` or `ferroce map` with --control SOCKET and name that with --socket or \
             $FERROCE_CONTROL"
                .to_owned()
        }
        io::ErrorKind::ConnectionRefused => "\nthe process that had it is gone".to_owned(),
        io::ErrorKind::PermissionDenied => match path.metadata() {
            Ok(meta) => format!(
                "\nit is for root, user {} and the members of group {}; you are user {}",
                meta.uid(),
                meta.gid(),
                geteuid()
            ),
            Err(_) => String::new(),
        },
        _ => String::new(),
    };
    Failure::failed(format!("control socket {}: {e}{hint}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_process_of_another_version_is_refused_with_both_versions() {
        let mut greeting = json!({ "version": VERSION, "program": "ferroce 9", "pid": 1, "maps": true, "serves": false, "sysfs": null });
        assert!(check_version(greeting.clone()).unwrap().maps);
        greeting = json!({ "version": VERSION + 1, "program": "ferroce 9", "surprise": [] });
        let text = check_version(greeting).unwrap_err();
        let text = text.text().unwrap();
        for part in [
            "ferroce 9",
            &format!("version {}", VERSION + 1),
            &format!("has {VERSION}"),
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
