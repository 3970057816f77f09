//! Running `ferroce` and reading what it reports.

use std::{
    collections::VecDeque,
    ffi::OsStr,
    fmt::Debug,
    fs::{self, Permissions},
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Arc, LazyLock, Mutex,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, dup},
};
use serde_json::Value;

/// How long anything may take before a test calls it hung. No test asserts that something is faster.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// What a finished command left.
#[derive(Debug)]
pub struct Finished {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// The JSON objects of its standard output, one a line.
    ///
    /// # Panics
    /// When a line is something else.
    pub fn json(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{l}: {e}")))
            .collect()
    }
}

/// Runs `ferroce` with these arguments to its end.
///
/// # Panics
/// When it does not start or takes too long.
pub fn run<S: AsRef<OsStr> + Debug>(args: &[S]) -> Finished {
    let mut running = Running::start(args);
    let status = running.wait();
    running.finished(status)
}

/// Kills (SIGKILL) the broker of this test program's processes.
///
/// # Panics
/// When there is none.
pub fn kill_broker() {
    kill_broker_of(&run(&BROKER));
}

/// What tells of a broker.
pub(crate) const BROKER: [&str; 2] = ["stat", "--json"];

/// Kills the broker that [`BROKER`] has told of.
pub(crate) fn kill_broker_of(stat: &Finished) {
    let pid = stat.json().first().and_then(|stat| stat["pid"].as_i64());
    let pid = pid.unwrap_or_else(|| panic!("no broker: {}{}", stat.stdout, stat.stderr));
    kill(
        Pid::from_raw(i32::try_from(pid).expect("a process id")),
        Signal::SIGKILL,
    )
    .expect("it runs");
}

const RUNTIME_PREFIX: &str = "ferroce-tests-";

/// Where the processes of this test program have what they have in `XDG_RUNTIME_DIR` otherwise.
fn runtime_dir() -> &'static Path {
    static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
        let temp = std::env::temp_dir();
        remove_left_over(&temp);
        let dir = temp.join(format!("{RUNTIME_PREFIX}{}", std::process::id()));
        let made = fs::create_dir_all(&dir).and_then(|()| fs::set_permissions(&dir, Permissions::from_mode(0o700)));
        made.unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        dir
    });
    &DIR
}

/// Removes what test programs that have ended had there: no destructor runs for a static variable.
fn remove_left_over(temp: &Path) {
    for entry in fs::read_dir(temp).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(RUNTIME_PREFIX));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A `ferroce` process, killed when dropped.
pub struct Running {
    child: Child,
    what: String,
    lines: Receiver<String>,
    stdout: Vec<String>,
    stderr: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
    /// Of one that is steered.
    stdin: Option<ChildStdin>,
    /// Requests so far.
    asked: u64,
    /// Events that came before an answer, and are still to be told.
    kept: VecDeque<Value>,
}

impl Running {
    /// Starts it.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn start<S: AsRef<OsStr> + Debug>(args: &[S]) -> Self {
        let mut command = Command::new(crate::ferroce());
        command.args(args);
        Self::start_command(command, format!("ferroce {args:?}"))
    }

    /// Starts `ferroce serve` or `ferroce map` with these arguments, and with its standard input as a control socket: [`ask`](Self::ask) it.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn steered<S: AsRef<OsStr> + Debug>(args: &[S]) -> Self {
        let mut command = Command::new(crate::ferroce());
        command.args(args);
        Self::steered_by(command, format!("ferroce {args:?}"))
    }

    /// Starts it by another program, such as `nsenter`.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn steered_by(mut command: Command, what: String) -> Self {
        command.args(["--control", "-"]).stdin(Stdio::piped());
        Self::spawn(command, what)
    }

    /// Starts it as systemd starts what its sockets activate: with these descriptors, from 3 on, and these names of them.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn activated<S: AsRef<OsStr> + Debug>(sockets: &[BorrowedFd<'_>], names: Option<&str>, args: &[S]) -> Self {
        // The variables name the process that the shell becomes. Numbers ascend, and none is below where it goes.
        const BECOME: &str = r#"n=3
            while [ "$1" != -- ]; do
                [ "$1" = $n ] || eval "exec $n<&$1 $1<&-"
                n=$((n+1)); shift
            done
            shift
            export LISTEN_PID=$$ LISTEN_FDS=$((n-3))
            exec "$@""#;
        // Unlike the sockets themselves these are not closed when the shell starts.
        let copies: Vec<OwnedFd> = sockets
            .iter()
            .map(|socket| dup(socket).expect("a descriptor"))
            .collect();
        let mut command = Command::new("bash");
        command.args(["-c", BECOME, "bash"]);
        command.args(copies.iter().map(|copy| copy.as_raw_fd().to_string()));
        command.arg("--").arg(crate::ferroce()).args(args);
        if let Some(names) = names {
            command.env("LISTEN_FDNAMES", names);
        }
        Self::start_command(command, format!("ferroce {args:?}"))
    }

    /// Starts it by another program, such as `unshare`.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn start_command(mut command: Command, what: String) -> Self {
        command.stdin(Stdio::null());
        Self::spawn(command, what)
    }

    fn spawn(mut command: Command, what: String) -> Self {
        // A broker for the addresses of this test alone.
        if !command.get_envs().any(|(name, _)| name == "XDG_RUNTIME_DIR") {
            command.env("XDG_RUNTIME_DIR", runtime_dir());
        }
        command
            .env("FERROCE_BROKER", crate::ferroce())
            .env("FERROCE_BROKER_LINGER", "1")
            .env_remove("FERROCE_BROKER_DIR")
            .env_remove("FERROCE_LOG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{what}: {e}"));
        let (sender, lines) = mpsc::channel();
        let stdout = child.stdout.take().expect("piped");
        let out_reader = thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let stderr = Arc::new(Mutex::new(String::new()));
        let (mut pipe, text) = (child.stderr.take().expect("piped"), Arc::clone(&stderr));
        let err_reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                text.lock()
                    .expect("not poisoned")
                    .push_str(&String::from_utf8_lossy(&buffer[..n]));
            }
        });
        Self {
            stdin: child.stdin.take(),
            child,
            what,
            lines,
            stdout: Vec::new(),
            stderr,
            readers: vec![out_reader, err_reader],
            asked: 0,
            kept: VecDeque::new(),
        }
    }

    /// Asks a [steered](Self::steered) process for something; the answer. Events that come before it are told later.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn ask(&mut self, request: Value) -> Value {
        let id = self.begin(request);
        self.answer(id)
    }

    /// Asks, and is not refused; the answer.
    ///
    /// # Panics
    /// When it is.
    pub fn done(&mut self, request: Value) -> Value {
        let answer = self.ask(request.clone());
        assert_eq!(answer["ok"], true, "{request}: {answer}");
        answer
    }

    /// Asks, and is refused with this errno.
    ///
    /// # Panics
    /// When it is not.
    pub fn refused(&mut self, request: Value, errno: i32) {
        let answer = self.ask(request.clone());
        assert_eq!(answer["errno"], errno, "{request}: {answer}");
    }

    /// Asks without waiting for the [answer](Self::answer); the request's number.
    ///
    /// # Panics
    /// When it can't be asked.
    pub fn begin(&mut self, mut request: Value) -> u64 {
        self.asked += 1;
        request["id"] = self.asked.into();
        let stdin = self.stdin.as_mut().expect("it is steered");
        writeln!(stdin, "{request}").unwrap_or_else(|e| panic!("{}: {e}", self.what));
        self.asked
    }

    /// Waits for the answer to a request.
    ///
    /// # Panics
    /// When there is none.
    pub fn answer(&mut self, id: u64) -> Value {
        let is = |event: &Value| event["event"] == "answer" && event["id"] == id;
        if let Some(at) = self.kept.iter().position(is) {
            return self.kept.remove(at).expect("it is there");
        }
        loop {
            let event = self.read_event();
            if is(&event) {
                return event;
            }
            self.kept.push_back(event);
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to standard error so far.
    ///
    /// # Panics
    /// When a reader has panicked.
    pub fn stderr(&self) -> String {
        self.stderr.lock().expect("not poisoned").clone()
    }

    /// Waits for a JSON event on standard output.
    ///
    /// # Panics
    /// When the process ends or is silent for too long.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            let json = self.next_event();
            if json["event"] == name {
                return json;
            }
        }
    }

    /// Waits for the next JSON event on standard output, whatever it is.
    ///
    /// # Panics
    /// When the process ends or is silent for too long.
    pub fn next_event(&mut self) -> Value {
        self.kept.pop_front().unwrap_or_else(|| self.read_event())
    }

    fn read_event(&mut self) -> Value {
        match self.lines.recv_timeout(TIMEOUT) {
            Ok(line) => {
                let json: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
                self.stdout.push(line);
                json
            }
            Err(e) => {
                let why = if e == RecvTimeoutError::Timeout {
                    "nothing came"
                } else {
                    "it ended"
                };
                // What it said last may still be on its way through the pipe.
                thread::sleep(Duration::from_millis(100));
                panic!(
                    "{}: no event: {why}\n{}\n{}",
                    self.what,
                    self.stdout.join("\n"),
                    self.stderr()
                );
            }
        }
    }

    /// The next line on standard output, if there is one; `None` also when no more will come.
    pub fn new_line(&mut self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.id()).expect("a process id")), signal).expect("it runs");
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// When it can't be told.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it takes too long.
    pub fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + TIMEOUT;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                return status;
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("{} has not ended\n{}", self.what, self.stderr());
    }

    /// Ends it with SIGTERM; what it left.
    ///
    /// # Panics
    /// When it takes too long.
    pub fn stop(mut self) -> Finished {
        if !self.has_ended() {
            self.signal(Signal::SIGTERM);
        }
        let status = self.wait();
        self.finished(status)
    }

    /// Waits for its end; what it left.
    ///
    /// # Panics
    /// When it takes too long.
    pub fn end(mut self) -> Finished {
        let status = self.wait();
        self.finished(status)
    }

    fn finished(&mut self, status: ExitStatus) -> Finished {
        for reader in self.readers.drain(..) {
            reader.join().expect("readers do not panic");
        }
        self.stdout.extend(self.lines.try_iter());
        Finished {
            code: status.code(),
            stdout: self.stdout.iter().fold(String::new(), |all, line| all + line + "\n"),
            stderr: self.stderr(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- {} said:\n{}", self.what, self.stderr());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
