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
//! Each request has one answer, which comes when it is done: those that take long may be overtaken. On a socket the first one is
//! `hello`. After `subscribe` events come in between.

use std::{
    io::{self, BufRead, BufReader, Read},
    sync::{Arc, mpsc::SyncSender},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use rnbd::Errno;
use rnbd_host::control::Refused;
use serde_json::{Map, Value, json};

use super::{
    Shared, VERSION,
    events::{Subscription, as_line},
    ops,
};
use crate::printer::Printer;

/// Bytes of a request at most.
pub(crate) const MAX_REQUEST: usize = 64 << 10;
/// Requests of a connection that may be under way together; further ones wait to be read.
pub(crate) const MAX_OPEN: usize = 16;
/// What is to be said in that time by who has connected.
pub(crate) const HELLO_TIME: Duration = Duration::from_secs(10);

/// Where answers go.
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
        // Who asked may have gone.
        match self {
            Self::Stdout => Printer::stdout().answer(text.trim_end_matches('\n').to_owned()),
            Self::Lines(lines) => drop(lines.send(text)),
        }
    }
}

/// Whether the other side has to say first that it speaks our version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Greeting {
    /// It has, or it has started us.
    Done,
    /// It has to say hello until then.
    Until(Instant),
}

/// What has been asked by a connection.
#[derive(Clone)]
pub(crate) struct Requests {
    shared: Arc<Shared>,
    output: Output,
    /// Requests that are not answered.
    open: Arc<(Mutex<usize>, Condvar)>,
    subscription: Arc<Mutex<Option<Subscription>>>,
}

/// What was read.
enum Input {
    Line(String),
    /// The other side has said all.
    End,
    /// What can't be understood, so that what follows can't be either.
    Wrong(Refused),
}

impl Requests {
    pub(crate) fn new(shared: Arc<Shared>, output: Output) -> Self {
        Self {
            shared,
            output,
            open: Arc::default(),
            subscription: Arc::default(),
        }
    }

    /// Reads requests until there are no more, or what is read makes no sense. It does not wait for the answers.
    pub(crate) fn read(&self, input: impl Read, mut greeting: Greeting) {
        let mut input = BufReader::new(input);
        loop {
            let text = match read_line(&mut input, greeting) {
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
                (_, Some("hello")) => match self.greet(&request) {
                    Ok(()) => greeting = Greeting::Done,
                    Err(refused) => return self.answer(&request["id"], Err(refused)),
                },
                (Greeting::Until(_), _) => {
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

    fn greet(&self, request: &Value) -> Result<(), Refused> {
        let version = &request["version"];
        if *version != VERSION {
            return Err(wrong(format!("version {version} is not spoken here, but {VERSION}")));
        }
        let (maps, serves) = self.shared.roster.kinds();
        let hello = json!({
            "version": VERSION,
            "program": concat!("ferroce ", env!("CARGO_PKG_VERSION")),
            "pid": std::process::id(),
            "maps": maps,
            "serves": serves,
            "sysfs": self.shared.sysfs(),
        });
        self.answer(&request["id"], Ok(ops::fields(hello)));
        Ok(())
    }

    /// From here on events are told as well.
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

    /// In a thread of its own: it may take long.
    fn comply(&self, request: Value) {
        self.take_place();
        let this = self.clone();
        let begun = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
            let outcome = ops::comply(&this.shared, &request);
            this.answer(&request["id"], outcome);
            this.leave_place();
        });
        if let Err(e) = begun {
            self.leave_place();
            let refused = Refused::new(Errno::EAGAIN, format!("no thread: {e}"));
            self.answer(&Value::Null, Err(refused));
        }
    }

    fn take_place(&self) {
        let (open, changed) = &*self.open;
        let mut open = open.lock();
        changed.wait_while(&mut open, |open| *open >= MAX_OPEN);
        *open += 1;
    }

    fn leave_place(&self) {
        let (open, changed) = &*self.open;
        *open.lock() -= 1;
        changed.notify_all();
    }

    /// Waits until all is answered; events are not told any more.
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

/// A line as a message that something is wrong, for who has not come so far that he could ask.
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

/// Reads a line that is not longer than it may be. The stream wakes up now and then while somebody has to say hello.
fn read_line(input: &mut impl BufRead, greeting: Greeting) -> io::Result<Input> {
    let mut bytes = Vec::new();
    loop {
        let room = (MAX_REQUEST + 1 - bytes.len()) as u64;
        match input.by_ref().take(room).read_until(b'\n', &mut bytes) {
            Ok(_) => break,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(e) => return Err(e),
        }
        if matches!(greeting, Greeting::Until(until) if Instant::now() >= until) {
            let text = format!("nothing was said for {} s", HELLO_TIME.as_secs());
            return Ok(Input::Wrong(Refused::new(Errno::ETIMEDOUT, text)));
        }
    }
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
        read_line(&mut BufReader::new(bytes), Greeting::Done).unwrap()
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

    #[test]
    fn hello_is_waited_for_so_long() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let until = Instant::now() + Duration::from_millis(20);
        let read = read_line(&mut BufReader::new(&ours), Greeting::Until(until)).unwrap();
        assert!(matches!(read, Input::Wrong(refused) if refused.errno == Errno::ETIMEDOUT));
        assert!(Instant::now() >= until);
    }
}
