//! Changing faults on demand while a process runs: a [socket](crate::process_socket) for each set of rules, and its client.
//!
//! A connection is one request of one line, and one answer: `ok` or `error`, and lines of text.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
    thread::JoinHandle,
};

use roce_fault::{Faults, RuleReport};
use roce_verbs::shown;
use socket2::SockRef;

use crate::{
    process_socket::{ProcessName, ProcessSockets},
    sys,
};

/// Sockets of processes that take rules.
const SOCKETS: ProcessSockets = ProcessSockets::new("ferroce-fault");
/// Longest request and answer, bytes.
const MAX_REQUEST: u64 = 64 << 10;
const MAX_ANSWER: u64 = 1 << 20;

/// Lets `ferroce fault` show and change rules of this process, until it is dropped.
#[derive(Debug)]
pub struct FaultControl {
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    generation: u32,
}

fn listing(reports: &[RuleReport]) -> String {
    let mut out = String::from("ok\n");
    for report in reports {
        out += &format!("rule {}\n", report.rule);
        for (name, n) in &report.counts {
            out += &format!("{name} {n}\n");
        }
    }
    out
}

fn answer(faults: &Faults, request: &str) -> String {
    let (verb, rules) = request.split_once(' ').unwrap_or((request, ""));
    let done = match verb {
        "show" => return listing(&faults.report()),
        "clear" => {
            faults.clear();
            Ok(())
        }
        "set" => roce_fault::rules(rules)
            .and_then(|rules| faults.set(rules))
            .map_err(|e| e.to_string()),
        other => Err(format!("unknown request {other:?}")),
    };
    match done {
        Ok(()) => "ok\n".into(),
        Err(why) => format!("error\n{why}\n"),
    }
}

fn serve(faults: &Faults, mut stream: UnixStream) -> io::Result<()> {
    if let Err(e) = SOCKETS.admit(&stream) {
        return stream.write_all(format!("error\n{e}\n").as_bytes());
    }
    let mut request = String::new();
    (&stream).take(MAX_REQUEST).read_to_string(&mut request)?;
    stream.write_all(answer(faults, request.trim_end()).as_bytes())
}

impl FaultControl {
    /// Lets rules be changed. `name` tells them from others of the process.
    ///
    /// # Errors
    /// When the system has no socket or thread left.
    pub fn start(name: &str, faults: &Faults) -> io::Result<Self> {
        let listener = Arc::new(SOCKETS.listen(name)?);
        let (theirs, faults) = (listener.clone(), faults.clone());
        let thread = sys::start_thread("ferroce faults", move || {
            for stream in theirs.incoming() {
                // Dropping the control shuts the listener down.
                let Ok(stream) = stream else { return };
                if let Err(e) = serve(&faults, stream) {
                    tracing::debug!("a request to change faults was not answered: {e}");
                }
            }
        })?;
        Ok(Self {
            listener,
            thread: Some(thread),
            generation: sys::generation(),
        })
    }
}

impl Drop for FaultControl {
    fn drop(&mut self) {
        // In a forked child the socket and the thread are the parent's.
        if self.generation != sys::generation() {
            return;
        }
        let _ = SockRef::from(&self.listener.as_fd()).shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Request to a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FaultRequest {
    /// Show rules and counts.
    Show,
    /// Replace all rules.
    Set(String),
    /// Remove all rules.
    Clear,
}

/// A rule of a process and its counts by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleStatus {
    /// The rule as it was written.
    pub rule: String,
    /// Counts by name.
    pub counts: Vec<(String, u64)>,
}

impl FaultRequest {
    /// Lists the processes of this network namespace that take rules, of all users.
    ///
    /// # Errors
    /// When the system's list of sockets can't be read.
    pub fn processes() -> io::Result<Vec<ProcessName>> {
        SOCKETS.all()
    }

    /// Makes the request. Only [`FaultRequest::Show`] returns rules.
    ///
    /// # Errors
    /// `PermissionDenied` when the process is another user's, `InvalidInput` with the text of a refusal, and those of the connection.
    pub fn ask(&self, process: &ProcessName) -> io::Result<Vec<RuleStatus>> {
        let mut stream = SOCKETS.connect(process)?;
        let request = match self {
            Self::Show => "show".to_owned(),
            Self::Set(rules) => format!("set {rules}"),
            Self::Clear => "clear".to_owned(),
        };
        stream.write_all(request.as_bytes())?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = String::new();
        stream.take(MAX_ANSWER).read_to_string(&mut answer)?;
        read_answer(&answer)
    }
}

fn read_answer(answer: &str) -> io::Result<Vec<RuleStatus>> {
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "the answer makes no sense");
    let (verdict, rest) = answer.split_once('\n').ok_or_else(nonsense)?;
    match verdict {
        "ok" => {}
        "error" => {
            let text = shown(rest.trim_end()).to_string();
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        _ => return Err(nonsense()),
    }
    let mut rules: Vec<RuleStatus> = Vec::new();
    for line in rest.lines() {
        match line.split_once(' ').ok_or_else(nonsense)? {
            ("rule", rule) => rules.push(RuleStatus {
                rule: rule.to_owned(),
                counts: Vec::new(),
            }),
            (name, n) => {
                let n = n.parse().map_err(|_| nonsense())?;
                rules.last_mut().ok_or_else(nonsense)?.counts.push((name.to_owned(), n));
            }
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(name: &str) -> Vec<ProcessName> {
        let all = FaultRequest::processes().unwrap().into_iter();
        all.filter(|t| t.pid == std::process::id() && t.name.starts_with(name))
            .collect()
    }

    #[test]
    fn rules_are_shown_set_and_cleared() {
        let faults = Faults::default();
        let control = FaultControl::start("a task", &faults).unwrap();
        let targets = own("a_task");
        assert_eq!(targets.len(), 1, "{targets:?}");
        let ask = |request: FaultRequest| request.ask(&targets[0]);
        assert_eq!(ask(FaultRequest::Show).unwrap(), []);
        ask(FaultRequest::Set("reg_mr=ENOMEM,nth=2; loss=1%".into())).unwrap();
        assert_eq!([faults.registering(), faults.registering()], [None, Some(12)]);
        let rules = ask(FaultRequest::Show).unwrap();
        assert_eq!((&*rules[0].rule, &*rules[1].rule), ("reg_mr=ENOMEM,nth=2", "loss=1%"));
        assert!(rules[0].counts.contains(&("failed".into(), 1)), "{rules:?}");
        let refused = ask(FaultRequest::Set("lose=1%".into())).unwrap_err();
        assert!(refused.to_string().contains("unknown key"), "{refused}");
        assert_eq!(ask(FaultRequest::Show).unwrap().len(), 2, "nothing has changed");
        ask(FaultRequest::Clear).unwrap();
        assert_eq!(ask(FaultRequest::Show).unwrap(), []);
        drop(control);
        assert_eq!(own("a_task"), []);
        assert!(ask(FaultRequest::Show).is_err());
    }

    #[test]
    fn answers_of_strangers_do_no_harm() {
        for answer in ["", "ok", "no\n", "ok\nx\n", "ok\nlost 5\n", "ok\nrule a\nlost x\n"] {
            assert!(read_answer(answer).is_err(), "{answer:?}");
        }
        let refused = read_answer("error\nno\u{1b}[2J\n").unwrap_err();
        assert_eq!(refused.to_string(), "no\\u{1b}[2J");
    }
}
