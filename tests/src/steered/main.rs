//! `ferroce` as it is, and steered by its standard input: a line with a JSON object there is a request, and gets one answer among the
//! events on standard output (so it is to be run with `--json`):
//!
//! ```text
//! {"id": 1, "do": "add_path", "path": "127.0.0.2,127.0.0.1"}
//! {"event": "answer", "id": 1, "ok": true}
//! {"event": "answer", "id": 1, "ok": false, "errno": 17, "error": "the session has the path ... already"}
//! ```
//!
//! Requests are answered as soon as they are done, so not always in their order, and all of them before the program ends. Those of
//! `map` are in [`map`], those of `serve` in [`serve`]. When standard input ends, it runs on.

mod map;
mod serve;

use std::{
    io::{self, BufRead, Write},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use ferroce::Steering;
use rnbd::Errno;
use rnbd_host::{
    LoopStats,
    control::{Refused, map::MapControl, serve::ServeControl},
};
use serde_json::{Map, Value, json};

/// How a request ended: what there is to tell, or why not.
type Outcome = Result<Map<String, Value>, Refused>;

/// Requests that may not have been answered.
type Open = Arc<Mutex<Vec<JoinHandle<()>>>>;

fn main() -> ExitCode {
    let steered = Steered::default();
    let code = ferroce::run(&steered);
    // What was not answered is, when the loops have ended.
    let open = std::mem::take(&mut *steered.0.lock().unwrap_or_else(PoisonError::into_inner));
    for request in open {
        let _ = request.join();
    }
    code
}

#[derive(Default)]
struct Steered(Open);

impl Steering for Steered {
    fn mapping(&self, control: MapControl) {
        listen(&self.0, move |request| map::comply(&control, request));
    }

    fn serving(&self, control: ServeControl) {
        listen(&self.0, move |request| serve::comply(&control, request));
    }
}

/// Reads requests, each of which may take its time.
fn listen(open: &Open, comply: impl Fn(&Value) -> Outcome + Send + Sync + 'static) {
    let (open, comply) = (open.clone(), Arc::new(comply));
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let comply = comply.clone();
            let answered = thread::spawn(move || {
                let request = serde_json::from_str(&line).unwrap_or(Value::Null);
                let outcome = match request {
                    Value::Null => Err(wrong(format!("no JSON: {line}"))),
                    _ => comply(&request),
                };
                answer(&request["id"], outcome);
            });
            let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
            open.retain(|request| !request.is_finished());
            open.push(answered);
        }
    });
}

fn answer(id: &Value, outcome: Outcome) {
    let mut line = Map::new();
    line.insert("event".into(), "answer".into());
    line.insert("id".into(), id.clone());
    line.insert("ok".into(), outcome.is_ok().into());
    match outcome {
        Ok(fields) => line.extend(fields),
        Err(refused) => {
            line.insert("errno".into(), refused.errno.raw().into());
            line.insert("error".into(), refused.text.into());
        }
    }
    let mut out = io::stdout().lock();
    // Who asked may have gone.
    let _ = writeln!(out, "{}", Value::Object(line)).and_then(|()| out.flush());
}

/// A request that makes no sense.
fn wrong(text: impl Into<String>) -> Refused {
    Refused {
        errno: Errno::EINVAL,
        text: text.into(),
    }
}

fn text<'a>(request: &'a Value, name: &str) -> Result<&'a str, Refused> {
    let found = request[name].as_str();
    found.ok_or_else(|| wrong(format!("{name:?} is to be a string")))
}

fn number(request: &Value, name: &str) -> Result<u64, Refused> {
    let found = request[name].as_u64();
    found.ok_or_else(|| wrong(format!("{name:?} is to be a number")))
}

fn fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => Map::from_iter([("value".into(), other)]),
    }
}

/// Objects that the loops have, and packets.
fn loops_shown(stats: &LoopStats) -> Value {
    let (usage, port) = (&stats.usage, stats.device().port);
    json!({
        "pds": usage.pds,
        "mrs": usage.mrs,
        "keys": usage.keys,
        "cqs": usage.cqs,
        "qps": usage.qps,
        "cms": usage.cms,
        "packets_sent": port.tx_packets,
        "packets_received": port.rx_packets,
        "retransmits": stats.device().retransmits(),
    })
}

fn nothing() -> Map<String, Value> {
    fields(json!({}))
}
