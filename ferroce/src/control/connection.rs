//! Requests as lines of JSON, and their answers.
//!
//! ```text
//! {"id": 1, "do": "hello", "version": 1}
//! {"event": "answer", "id": 1, "ok": true, "version": 1, "program": "ferroce 0.1.0", "pid": 7, "maps": true, "serves": false,
//!  "sysfs": null}
//! {"id": 2, "do": "add_path", "path": "127.0.0.2,127.0.0.1"}
//! {"event": "answer", "id": 2, "ok": false, "errno": 17, "error": "the session has the path ... already"}
//! ```
//!
//! Each request has one answer, sent when it is done: fast requests overtake slow ones. On a socket the first request is `hello`,
//! whose version must be that of the process. After `subscribe` events come in between.

use std::{
    io::{self, BufRead, BufReader, Read},
    net::Shutdown,
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rnbd::Errno;
use rnbd_host::control::{self, Answer, ProcessRequest, Refused, Request, VERSION};
use serde::Serialize;
use serde_json::{Map, Value, json};
use socket2::Socket;

use super::{
    events::Subscription,
    execute::execute,
    peer::Authority,
    shared::Shared,
    sockets::{Place, write_within},
};
use crate::{output::json_text, printer::Printer};

/// Program that greets.
const PROGRAM: &str = concat!("ferroce ", env!("CARGO_PKG_VERSION"));
/// Bytes of a request at most.
pub(crate) const MAX_REQUEST: usize = 64 << 10;
/// Requests of a connection that may be in progress together; further ones wait to be read.
pub(crate) const MAX_OPEN: usize = 16;
/// Lines that may wait for a connection that reads slowly.
const MAX_LINES: usize = 64;
/// A connection that does not take a line within this time is closed.
const WRITE_TIME: Duration = Duration::from_secs(30);

/// Destination of answers.
#[derive(Clone)]
pub(crate) enum Output {
    /// To standard output, among the events that are written there anyway.
    Stdout,
    /// To a socket's writer, events as well if they are asked for.
    Lines(SyncSender<String>),
}

impl Output {
    /// Queues an answer; waits for room.
    fn answer(&self, text: String) {
        // The peer may be gone.
        match self {
            Self::Stdout => Printer::stdout().answer(text.trim_end_matches('\n').to_owned()),
            Self::Lines(lines) => drop(lines.send(text)),
        }
    }
}

/// State of the greeting.
#[derive(Clone, Copy)]
enum Greeting<'a> {
    /// Received, or not needed: the peer has started this process.
    Done,
    /// The first request must be `hello`. Until then the place of the connection is half-open.
    Wanted(&'a Place),
}

/// The requests of a connection.
#[derive(Clone)]
pub(crate) struct Requests {
    shared: Arc<Shared>,
    output: Output,
    authority: Authority,
    /// Requests that are not answered yet.
    open: Arc<(Mutex<usize>, Condvar)>,
    subscription: Arc<Mutex<Option<Subscription>>>,
}

impl Requests {
    pub(crate) fn new(shared: Arc<Shared>, output: Output, authority: Authority) -> Self {
        Self {
            shared,
            output,
            authority,
            open: Arc::default(),
            subscription: Arc::default(),
        }
    }

    /// Reads requests until there are no more, or one is no JSON object. Does not wait for the answers.
    fn read(&self, input: impl Read, mut greeting: Greeting<'_>) {
        let mut input = BufReader::new(input);
        while let Some(line) = read_line(&mut input) {
            let mut fields = match line.and_then(|text| parse(&text)) {
                Ok(Some(fields)) => fields,
                Ok(None) => continue,
                // The start of the next request is unknown.
                Err(refused) => return self.answer(&Value::Null, Err(refused)),
            };
            let id = fields.remove("id").unwrap_or_default();
            // The version decides how the rest of the greeting is read.
            let request = check_version(&fields).and_then(|()| Request::try_from(fields));
            match (&greeting, request) {
                (_, Ok(Request::Process(ProcessRequest::Hello { .. }))) => {
                    if matches!(greeting, Greeting::Wanted(place) if !place.opened()) {
                        // Evicted a moment ago.
                        return;
                    }
                    greeting = Greeting::Done;
                    self.answer(&id, Ok(Answer::Greeting(self.greeting())));
                }
                (Greeting::Wanted(_), Ok(_)) => {
                    let text = format!(
                        "the first request must be {}",
                        json!({ "do": "hello", "version": VERSION })
                    );
                    return self.answer(&id, Err(wrong(text)));
                }
                (Greeting::Wanted(_), Err(refused)) => return self.answer(&id, Err(refused)),
                (Greeting::Done, _) if self.shared.is_ending() => {
                    self.answer(&id, Err(Refused::new(Errno::ESHUTDOWN, "the process is ending")));
                }
                (Greeting::Done, Err(refused)) => self.answer(&id, Err(refused)),
                (Greeting::Done, Ok(Request::Process(ProcessRequest::Subscribe {}))) => self.subscribe(&id),
                (Greeting::Done, Ok(request)) => self.execute(id, request),
            }
        }
    }

    fn greeting(&self) -> control::Greeting {
        let (maps, serves) = self.shared.services.kinds();
        control::Greeting {
            version: VERSION,
            program: PROGRAM.to_owned(),
            pid: std::process::id(),
            maps,
            serves,
            sysfs: self.shared.sysfs().map(|dir| dir.display().to_string()),
        }
    }

    /// Sends events from here on.
    fn subscribe(&self, id: &Value) {
        match &self.output {
            Output::Lines(lines) => {
                // First, so that no event precedes it.
                self.answer(id, Ok(Answer::Done {}));
                let subscription = self.shared.events.subscribe(lines.clone());
                self.subscription.lock().get_or_insert(subscription);
            }
            Output::Stdout => self.answer(id, Err(wrong("events are on standard output with --json"))),
        }
    }

    /// Runs the request in its own thread, as it may take long.
    fn execute(&self, id: Value, request: Request) {
        self.begin_one();
        let (this, of) = (self.clone(), id.clone());
        let spawned = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
            let outcome = execute(&this.shared, request, this.authority);
            this.answer(&of, outcome);
            this.end_one();
        });
        if let Err(e) = spawned {
            self.end_one();
            let refused = Refused::new(Errno::EAGAIN, format!("no thread for the request: {e}"));
            self.answer(&id, Err(refused));
        }
    }

    fn begin_one(&self) {
        let (open, changed) = &*self.open;
        let mut open = open.lock();
        changed.wait_while(&mut open, |open| *open >= MAX_OPEN);
        *open += 1;
    }

    fn end_one(&self) {
        let (open, changed) = &*self.open;
        *open.lock() -= 1;
        changed.notify_all();
    }

    /// Ends the subscription, after all requests are answered.
    pub(crate) fn end(self) {
        let (open, changed) = &*self.open;
        changed.wait_while(&mut open.lock(), |open| *open > 0);
        let subscription = self.subscription.lock().take();
        drop(subscription);
    }

    fn answer(&self, id: &Value, outcome: Result<Answer, Refused>) {
        self.output.answer(answer_line(id, outcome));
    }
}

/// Requests and answers, to the end of the connection.
pub(super) fn converse(shared: &Arc<Shared>, stream: &Socket, place: &Place) {
    let Ok(writing) = stream.try_clone() else { return };
    let (lines, to_write) = sync_channel::<String>(MAX_LINES);
    let writer = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
        for line in to_write {
            if write_within(&writing, line.as_bytes(), WRITE_TIME).is_err() {
                break;
            }
        }
        // Ends the reader, too.
        let _ = writing.shutdown(Shutdown::Both);
    });
    let requests = Requests::new(shared.clone(), Output::Lines(lines), place.authority());
    requests.read(stream, Greeting::Wanted(place));
    requests.end();
    if let Ok(writer) = writer {
        let _ = writer.join();
    }
}

/// Answers requests of standard input on standard output, for the program that has started this one.
pub(super) fn converse_on_stdio(shared: &Arc<Shared>) -> Requests {
    let requests = Requests::new(shared.clone(), Output::Stdout, Authority::Full);
    let reading = requests.clone();
    // Not joined: nothing ends a read of standard input.
    thread::spawn(move || reading.read(io::stdin().lock(), Greeting::Done));
    requests
}

/// Line that refuses a connection, before any request.
pub(super) fn refusal(refused: Refused) -> String {
    answer_line(&Value::Null, Err(refused))
}

fn answer_line(id: &Value, outcome: Result<Answer, Refused>) -> String {
    /// An answer as a line.
    #[derive(Serialize)]
    struct Line<'a> {
        event: &'static str,
        id: &'a Value,
        ok: bool,
        #[serde(flatten)]
        answer: Option<Answer>,
        #[serde(flatten)]
        refused: Option<Refused>,
    }
    let line = Line {
        event: "answer",
        id,
        ok: outcome.is_ok(),
        refused: outcome.as_ref().err().cloned(),
        answer: outcome.ok(),
    };
    json_text(&line) + "\n"
}

/// Refuses the greeting of a client with another version.
fn check_version(fields: &Map<String, Value>) -> Result<(), Refused> {
    if fields.get("do").is_some_and(|name| name == "hello") {
        let version = fields.get("version").unwrap_or(&Value::Null);
        if *version != VERSION {
            return Err(wrong(format!(
                "protocol version {version} of the client is not supported: this process, {PROGRAM}, has version {VERSION}"
            )));
        }
    }
    Ok(())
}

fn wrong(text: impl Into<String>) -> Refused {
    Refused::new(Errno::EINVAL, text)
}

/// Reads the fields of a request; `None`: the line is empty.
fn parse(text: &str) -> Result<Option<Map<String, Value>>, Refused> {
    match text.trim().is_empty() {
        true => Ok(None),
        false => serde_json::from_str(text)
            .map(Some)
            .map_err(|e| wrong(format!("a request is a line with a JSON object: {e}"))),
    }
}

/// Reads a line of at most [`MAX_REQUEST`] bytes; `None` at the end of the input.
fn read_line(input: &mut impl BufRead) -> Option<Result<String, Refused>> {
    let mut bytes = Vec::new();
    let limit = MAX_REQUEST as u64 + 1;
    input.by_ref().take(limit).read_until(b'\n', &mut bytes).ok()?;
    Some(match bytes.pop()? {
        b'\n' => String::from_utf8(bytes).map_err(|_| wrong("a request is UTF-8")),
        _ if bytes.len() >= MAX_REQUEST => {
            let text = format!("a request has at most {MAX_REQUEST} bytes");
            Err(Refused::new(Errno::EMSGSIZE, text))
        }
        _ => Err(wrong("the last line has no newline")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Option<Result<String, Refused>> {
        read_line(&mut BufReader::new(bytes))
    }

    #[test]
    fn a_request_is_a_line_that_is_not_too_long() {
        assert_eq!(read(b""), None);
        assert_eq!(read(b"{}\n{}"), Some(Ok("{}".to_owned())));
        let longest = [vec![b' '; MAX_REQUEST], vec![b'\n']].concat();
        assert_eq!(read(&longest).unwrap().unwrap().len(), MAX_REQUEST);
        for (bytes, errno) in [
            (vec![b' '; MAX_REQUEST + 1], Errno::EMSGSIZE),
            (vec![b' '; 10 * MAX_REQUEST], Errno::EMSGSIZE),
            (b"{\"do\"".to_vec(), Errno::EINVAL),
            (b"\xff\n".to_vec(), Errno::EINVAL),
        ] {
            assert_eq!(read(&bytes).unwrap().unwrap_err().errno, errno);
        }
    }
}
