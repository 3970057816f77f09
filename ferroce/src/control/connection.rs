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
//! Each request has one answer, sent when it is done: fast requests overtake slow ones. On a socket the first request is `hello`.
//! After `subscribe` events come in between.

use std::{
    io::{self, BufRead, BufReader, Read},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rnbd::Errno;
use rnbd_host::control::Refused;
use serde_json::{Map, Value, json};

use super::{
    Shared, VERSION,
    events::{Subscription, as_line},
    ops,
    peer::Authority,
    sockets::{Place, write_within},
};
use crate::printer::Printer;

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
    /// An answer waits for room.
    fn answer(&self, text: String) {
        // The peer may have gone.
        match self {
            Self::Stdout => Printer::stdout().answer(text.trim_end_matches('\n').to_owned()),
            Self::Lines(lines) => drop(lines.send(text)),
        }
    }
}

/// Whether the peer has to agree on a version first.
#[derive(Clone, Copy)]
enum Greeting<'a> {
    /// It has, or it has started this process.
    Done,
    /// Its first request has to be `hello`. Until then its place is half-open.
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

/// Result of a read.
enum Input {
    Line(String),
    /// The peer sends no more.
    End,
    /// No request; where the next one begins is unknown.
    Wrong(Refused),
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

    /// Reads requests until there are no more, or one is malformed. Does not wait for the answers.
    fn read(&self, input: impl Read, mut greeting: Greeting<'_>) {
        let mut input = BufReader::new(input);
        loop {
            let text = match read_line(&mut input) {
                Ok(Input::Line(text)) => text,
                Ok(Input::End) | Err(_) => return,
                Ok(Input::Wrong(refused)) => return self.answer(&Value::Null, Err(refused)),
            };
            if text.trim().is_empty() {
                continue;
            }
            let request: Value = match serde_json::from_str(&text) {
                Ok(request @ Value::Object(_)) => request,
                Ok(_) => return self.answer(&Value::Null, Err(wrong("a request is a JSON object"))),
                Err(e) => return self.answer(&Value::Null, Err(wrong(format!("a request is a line of JSON: {e}")))),
            };
            match (&greeting, request["do"].as_str()) {
                (_, Some("hello")) => match self.hello(&request) {
                    // Evicted a moment ago.
                    Ok(_) if matches!(greeting, Greeting::Wanted(place) if !place.opened()) => return,
                    Ok(hello) => {
                        greeting = Greeting::Done;
                        self.answer(&request["id"], Ok(hello));
                    }
                    Err(refused) => return self.answer(&request["id"], Err(refused)),
                },
                (Greeting::Wanted(_), _) => {
                    let text = format!("the first request is {}", json!({ "do": "hello", "version": VERSION }));
                    return self.answer(&request["id"], Err(wrong(text)));
                }
                (Greeting::Done, _) if self.shared.is_ending() => {
                    self.answer(&request["id"], Err(Refused::new(Errno::ESHUTDOWN, "it is ending")));
                }
                (Greeting::Done, Some("subscribe")) => self.subscribe(&request["id"]),
                (Greeting::Done, _) => self.comply(request),
            }
        }
    }

    /// The answer to `hello`.
    fn hello(&self, request: &Value) -> ops::Outcome {
        let version = &request["version"];
        if *version != VERSION {
            return Err(wrong(format!("version {version} is not spoken here, but {VERSION}")));
        }
        let (maps, serves) = self.shared.services.kinds();
        Ok(ops::fields(json!({
            "version": VERSION,
            "program": concat!("ferroce ", env!("CARGO_PKG_VERSION")),
            "pid": std::process::id(),
            "maps": maps,
            "serves": serves,
            "sysfs": self.shared.sysfs(),
        })))
    }

    /// Sends events from here on.
    fn subscribe(&self, id: &Value) {
        match &self.output {
            Output::Lines(lines) => {
                // First, so that none comes before it.
                self.answer(id, Ok(Map::new()));
                let subscription = self.shared.events.subscribe(lines.clone());
                self.subscription.lock().get_or_insert(subscription);
            }
            Output::Stdout => self.answer(id, Err(wrong("events are on standard output with --json"))),
        }
    }

    /// Runs the request in its own thread, as it may take long.
    fn comply(&self, request: Value) {
        self.begin_one();
        let this = self.clone();
        let begun = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
            let outcome = ops::comply(&this.shared, &request, this.authority);
            this.answer(&request["id"], outcome);
            this.end_one();
        });
        if let Err(e) = begun {
            self.end_one();
            let refused = Refused::new(Errno::EAGAIN, format!("no thread: {e}"));
            self.answer(&Value::Null, Err(refused));
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

    /// Waits until all requests are answered; no events are sent any more.
    pub(crate) fn end(self) {
        let (open, changed) = &*self.open;
        changed.wait_while(&mut open.lock(), |open| *open > 0);
        let subscription = self.subscription.lock().take();
        drop(subscription);
    }

    fn answer(&self, id: &Value, outcome: ops::Outcome) {
        let mut fields = Map::new();
        fields.insert("event".into(), "answer".into());
        fields.insert("id".into(), id.clone());
        fields.insert("ok".into(), outcome.is_ok().into());
        match outcome {
            Ok(more) => fields.extend(more),
            Err(refused) => {
                fields.insert("errno".into(), refused.errno.raw().into());
                fields.insert("error".into(), refused.text.into());
            }
        }
        self.output.answer(as_line(&fields.into()));
    }
}

/// Requests and answers, to the end of the connection.
pub(super) fn converse(shared: &Arc<Shared>, stream: &UnixStream, place: &Place) {
    let Ok(writing) = stream.try_clone() else { return };
    let (lines, to_write) = sync_channel::<String>(MAX_LINES);
    let writer = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
        for line in to_write {
            if write_within(&writing, line.as_bytes(), WRITE_TIME).is_err() {
                break;
            }
        }
        // The reader is not to wait for more either.
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
    // It is not joined: nothing ends a read of standard input.
    thread::spawn(move || reading.read(io::stdin().lock(), Greeting::Done));
    requests
}

/// A refusal of the connection, before any request.
pub(super) fn refusal(refused: &Refused) -> String {
    as_line(&json!({
        "event": "answer",
        "id": null,
        "ok": false,
        "errno": refused.errno.raw(),
        "error": refused.text,
    }))
}

fn wrong(text: impl Into<String>) -> Refused {
    Refused::new(Errno::EINVAL, text)
}

/// Reads a line that is not longer than it may be.
fn read_line(input: &mut impl BufRead) -> io::Result<Input> {
    let mut bytes = Vec::new();
    let limit = MAX_REQUEST as u64 + 1;
    input.by_ref().take(limit).read_until(b'\n', &mut bytes)?;
    Ok(match bytes.pop() {
        None => Input::End,
        Some(b'\n') => match String::from_utf8(bytes) {
            Ok(text) => Input::Line(text),
            Err(_) => Input::Wrong(wrong("a request is UTF-8")),
        },
        Some(_) if bytes.len() >= MAX_REQUEST => {
            let text = format!("a request has at most {MAX_REQUEST} bytes");
            Input::Wrong(Refused::new(Errno::EMSGSIZE, text))
        }
        Some(_) => Input::Wrong(wrong("the last line has no end")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Input {
        read_line(&mut BufReader::new(bytes)).unwrap()
    }

    #[test]
    fn a_request_is_a_line_that_is_not_too_long() {
        assert!(matches!(read(b""), Input::End));
        assert!(matches!(read(b"{}\n{}"), Input::Line(text) if text == "{}"));
        let longest = [vec![b' '; MAX_REQUEST], vec![b'\n']].concat();
        assert!(matches!(read(&longest), Input::Line(text) if text.len() == MAX_REQUEST));
        for (bytes, errno) in [
            (vec![b' '; MAX_REQUEST + 1], Errno::EMSGSIZE),
            (vec![b' '; 10 * MAX_REQUEST], Errno::EMSGSIZE),
            (b"{\"do\"".to_vec(), Errno::EINVAL),
            (b"\xff\n".to_vec(), Errno::EINVAL),
        ] {
            assert!(
                matches!(read(&bytes), Input::Wrong(refused) if refused.errno == errno),
                "{errno}"
            );
        }
    }
}
