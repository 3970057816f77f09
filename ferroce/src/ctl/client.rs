//! The client of a control socket.

use std::{
    io::{self, BufRead, BufReader, IsTerminal, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use nix::unistd::geteuid;
use roce_verbs::shown;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{
    control::{
        VERSION,
        address::{connect, usual_place},
    },
    output::Failure,
    signals::Stop,
};

/// How often a wait checks whether the user wants to end.
const LOOK: Duration = Duration::from_millis(100);
/// After this time the user is shown that the answer is awaited.
const SILENCE: Duration = Duration::from_secs(1);
/// Bytes of an answer at most.
const MAX_ANSWER: u64 = 256 << 20;

/// A connection to a process.
pub(super) struct Client {
    stream: BufReader<UnixStream>,
    asked: u64,
    stop: Stop,
    pub(super) hello: Hello,
}

/// Greeting of the process.
#[derive(Clone, Default, serde::Deserialize)]
pub(super) struct Hello {
    pub(super) maps: bool,
    pub(super) serves: bool,
}

/// A request that was refused.
pub(super) struct NotDone {
    pub(super) errno: i64,
    pub(super) text: String,
}

impl From<NotDone> for Failure {
    fn from(refused: NotDone) -> Self {
        Self::failed(refused.text)
    }
}

/// Progress that a user is shown while an answer is long in coming.
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

    fn hear(&mut self, event: &Value) {
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

/// A line that came.
enum Line {
    Json(Value),
    /// The process has closed the connection.
    End,
    /// The user wants to end.
    Stopped,
}

impl Client {
    /// Connects to this socket, or to the one that there usually is.
    pub(super) fn connect(socket: Option<&Path>) -> Result<Self, Failure> {
        let path = socket.map_or_else(usual_place, Path::to_owned);
        let stream = connect(&path).map_err(|e| not_connected(&path, &e))?;
        let set = stream.set_read_timeout(Some(LOOK));
        set.map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?;
        let mut this = Self {
            stream: BufReader::new(stream),
            asked: 0,
            stop: Stop::on_signals()?,
            hello: Hello::default(),
        };
        let hello = this.ask(json!({ "do": "hello", "version": VERSION }))?;
        this.hello = read(hello)?;
        Ok(this)
    }

    /// Subscribes to events, to show them while a request takes long.
    pub(super) fn follow(&mut self) -> Result<(), Failure> {
        match io::stderr().is_terminal() {
            true => self.ask(json!({ "do": "subscribe" })).map(drop),
            false => Ok(()),
        }
    }

    /// Asks, and is not refused.
    pub(super) fn ask(&mut self, request: Value) -> Result<Value, Failure> {
        Ok(self.try_ask(request)??)
    }

    /// Asks; the answer, or why it was refused.
    pub(super) fn try_ask(&mut self, mut request: Value) -> Result<Result<Value, NotDone>, Failure> {
        self.asked += 1;
        request["id"] = self.asked.into();
        // A process that has refused the connection has said why, though it reads no more.
        let sent = self.stream.get_mut().write_all(format!("{request}\n").as_bytes());
        let mut progress = Progress::new();
        loop {
            let answer = match self.line(|| progress.show())? {
                Line::Json(answer) => answer,
                Line::Stopped => return Err(Failure::reported(130)),
                Line::End => {
                    let why = sent.err().map_or(String::new(), |e| format!(": {e}"));
                    return Err(Failure::failed(format!("the process has ended the connection{why}")));
                }
            };
            if answer["event"] != "answer" {
                progress.hear(&answer);
                continue;
            }
            if answer["id"] != self.asked && !answer["id"].is_null() {
                continue;
            }
            return Ok(match answer["ok"] == true {
                true => Ok(answer),
                false => Err(NotDone {
                    errno: answer["errno"].as_i64().unwrap_or_default(),
                    text: shown(answer["error"].as_str().unwrap_or("refused")).to_string(),
                }),
            });
        }
    }

    /// The next event; `None`: there are no more. `Stopped` by the user, it is no failure.
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
                // It has ended while something of ours was on its way to it.
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
            .map_err(|e| Failure::failed(format!("this is no control socket of ferroce: {e}")))
    }
}

/// Takes what an answer has in it.
pub(super) fn read<T: DeserializeOwned>(answer: Value) -> Result<T, Failure> {
    serde_json::from_value(answer).map_err(|e| Failure::failed(format!("the answer is not understood: {e}")))
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
