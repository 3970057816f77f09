//! Changing faults on demand while a process runs: a socket for each set of rules, and its client.
//!
//! The socket's name is abstract and says whose it is: `ferroce-fault/PID/NAME`. It goes with the process, and is seen in the process's
//! network namespace. A connection is one request of one line, and one answer: `ok` or `error`, and lines of text. Only the process's own
//! user and root are answered.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use roce_fault::{Faults, RuleReport};
use roce_verbs::shown;
use socket2::SockRef;

use crate::{sys, unix_table};

/// The beginning of the sockets' names.
const PREFIX: &str = "ferroce-fault/";
/// Longest request and answer, bytes.
const MAX_REQUEST: u64 = 64 << 10;
const MAX_ANSWER: u64 = 1 << 20;
/// Time that either side has.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Sockets of one name and process.
const SAME_NAME: u32 = 64;
/// Longest name, bytes: that of a socket has 107 at most.
const MAX_NAME: usize = 64;

/// Lets `ferroce fault` show and change rules of this process, until it is dropped.
#[derive(Debug)]
pub struct FaultControl {
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    generation: u32,
}

/// Whether the name of a socket may have this character.
fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-:".contains(c)
}

/// A name as a part of a socket's name.
fn plain(name: &str) -> String {
    let plain = name.chars().map(|c| if is_plain(c) { c } else { '_' });
    plain.take(MAX_NAME).collect()
}

fn bind(name: &str) -> io::Result<UnixListener> {
    let base = format!("{PREFIX}{}/{}", std::process::id(), plain(name));
    let names = (1..=SAME_NAME).map(|n| match n {
        1 => base.clone(),
        _ => format!("{base}+{n}"),
    });
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for name in names {
        match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

/// Whether the other side is our own user or root, or we are root.
fn is_trusted(stream: &UnixStream) -> io::Result<bool> {
    let peer = getsockopt(stream, PeerCredentials)?.uid();
    let own = geteuid().as_raw();
    Ok(peer == own || peer == 0)
}

fn set_timeouts(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))
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
    set_timeouts(&stream)?;
    if !is_trusted(&stream)? {
        return stream.write_all(b"error\nit belongs to another user\n");
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
        let listener = Arc::new(bind(name)?);
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

/// Rules of a process that can be shown and changed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FaultTarget {
    /// Process id.
    pub pid: u32,
    /// Owner of the rules: the program's name, or that of a task.
    pub name: String,
}

impl FaultTarget {
    /// Lists those of this network namespace, of all users.
    ///
    /// # Errors
    /// When the system's list of sockets can't be read.
    pub fn all() -> io::Result<Vec<Self>> {
        let mut found: Vec<Self> = unix_table::listening(&unix_table::read()?)
            .filter_map(|(_, path)| Self::of_path(path))
            .collect();
        found.sort();
        Ok(found)
    }

    /// Parses the path of a listening socket. Anybody can listen under such a name, so one that [`FaultControl::start`] does not make is
    /// ignored.
    fn of_path(path: &str) -> Option<Self> {
        let (pid, name) = path.strip_prefix('@')?.strip_prefix(PREFIX)?.split_once('/')?;
        let name = Some(name).filter(|name| name.chars().all(|c| is_plain(c) || c == '+'))?;
        Some(Self {
            pid: pid.parse().ok()?,
            name: name.to_owned(),
        })
    }

    /// Makes a request. Only [`FaultRequest::Show`] returns rules.
    ///
    /// # Errors
    /// `PermissionDenied` when the process is another user's, `InvalidInput` with the text of a refusal, and those of the connection.
    pub fn ask(&self, request: &FaultRequest) -> io::Result<Vec<RuleStatus>> {
        let name = format!("{PREFIX}{}/{}", self.pid, self.name);
        let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
        set_timeouts(&stream)?;
        // Anybody can take a name.
        if !geteuid().is_root() && !is_trusted(&stream)? {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it belongs to another user",
            ));
        }
        let request = match request {
            FaultRequest::Show => "show".to_owned(),
            FaultRequest::Set(rules) => format!("set {rules}"),
            FaultRequest::Clear => "clear".to_owned(),
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

    fn own(name: &str) -> Vec<FaultTarget> {
        let all = FaultTarget::all().unwrap().into_iter();
        all.filter(|t| t.pid == std::process::id() && t.name.starts_with(name))
            .collect()
    }

    #[test]
    fn rules_are_shown_set_and_cleared() {
        let faults = Faults::default();
        let control = FaultControl::start("a task", &faults).unwrap();
        let targets = own("a_task");
        assert_eq!(targets.len(), 1, "{targets:?}");
        let ask = |request| targets[0].ask(&request);
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
    fn several_of_a_name_are_told_apart() {
        let faults = Faults::default();
        let _controls = [(); 3].map(|()| FaultControl::start("same", &faults).unwrap());
        let names: Vec<String> = own("same").into_iter().map(|t| t.name).collect();
        assert_eq!(names, ["same", "same+2", "same+3"]);
    }

    #[test]
    fn answers_of_strangers_do_no_harm() {
        for answer in ["", "ok", "no\n", "ok\nx\n", "ok\nlost 5\n", "ok\nrule a\nlost x\n"] {
            assert!(read_answer(answer).is_err(), "{answer:?}");
        }
        let target = |line: &str| unix_table::listening(line).find_map(|(_, path)| FaultTarget::of_path(path));
        assert_eq!(target("Num RefCount Protocol Flags Type St Inode Path"), None);
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 12345 @ferroce-fault/7/x";
        assert_eq!(target(line).map(|t| (t.pid, t.name)), Some((7, "x".into())));
        assert_eq!(target(&line.replace("00010000", "00000000")), None);
        for name in ["\u{1b}[2J", "a\u{9b}31m", "a\u{202e}b", "\u{fffd}", "a/b"] {
            assert_eq!(target(&line.replace("7/x", &format!("7/{name}"))), None, "{name:?}");
        }
        let refused = read_answer("error\nno\u{1b}[2J\n").unwrap_err();
        assert_eq!(refused.to_string(), "no\\u{1b}[2J");
    }

    #[test]
    fn a_socket_whose_name_is_no_text_hides_none() {
        let name = [b"no text \xff ", std::process::id().to_string().as_bytes()].concat();
        let _other = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        let _control = FaultControl::start("seen", &Faults::default()).unwrap();
        assert_eq!(own("seen").len(), 1);
    }
}
