//! Child processes that never outlive their use, and ctrl-C.

use std::{
    cell::Cell,
    ffi::OsStr,
    io::{BufRead, BufReader, Read},
    process::{Child, Command, ExitStatus, Output},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::Result;

/// Interval at which waits check the interrupt flag.
const TICK: Duration = Duration::from_millis(20);
/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Turns the first SIGINT or SIGTERM into [`interrupted`]; the second ends the process at once.
pub(crate) fn catch_signals() {
    let flag = INTERRUPTED.get_or_init(|| Arc::new(AtomicBool::new(false)));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // In this order: the flag is checked before it is set.
        let first = signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(flag));
        if let Err(e) = first.and_then(|_| signal_hook::flag::register(signal, Arc::clone(flag))) {
            eprintln!("warning: ctrl-C will not clean up: {e}");
        }
    }
}

/// Returns whether the user wants to stop.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|f| f.load(Ordering::Relaxed))
}

/// Fails once the user wants to stop.
pub(crate) fn check_interrupt() -> Result<()> {
    if interrupted() {
        Err("interrupted".into())
    } else {
        Ok(())
    }
}

thread_local! {
    static LOWEST_PRIORITY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, whose commands by [`command`] on this thread have the lowest priority.
pub(crate) fn at_lowest_priority<T>(work: impl FnOnce() -> T) -> T {
    LOWEST_PRIORITY.set(true);
    let done = work();
    LOWEST_PRIORITY.set(false);
    done
}

/// Returns a command with the priority of this thread's children.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    if !LOWEST_PRIORITY.get() {
        return Command::new(program);
    }
    let mut command = Command::new("nice");
    // The kernel adds it to our own and limits the sum to 19.
    command.args(["-n", "39"]).arg(program);
    command
}

/// Child process. The drop ends it.
pub(crate) struct Guard {
    name: String,
    child: Child,
}

impl Guard {
    /// Starts a child.
    pub(crate) fn spawn(name: &str, command: &mut Command) -> Result<Self> {
        check_interrupt()?;
        let child = command.spawn().map_err(|e| format!("can't start {name}: {e}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
        })
    }

    /// Returns the process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns lines of the piped standard output as they arrive.
    pub(crate) fn stdout_lines(&mut self) -> Receiver<String> {
        lines_of(self.child.stdout.take())
    }

    /// Returns lines of the piped standard error as they arrive.
    pub(crate) fn stderr_lines(&mut self) -> Receiver<String> {
        lines_of(self.child.stderr.take())
    }

    /// Calls `line` with each line of the piped standard output, and waits for the end of the child.
    pub(crate) fn for_each_line(&mut self, mut line: impl FnMut(&str)) -> Result<ExitStatus> {
        let lines = self.stdout_lines();
        loop {
            match lines.recv_timeout(TICK) {
                Ok(text) => line(&text),
                Err(RecvTimeoutError::Timeout) => check_interrupt()?,
                Err(RecvTimeoutError::Disconnected) => return self.wait(),
            }
        }
    }

    /// Returns the exit status if the child has exited.
    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(|e| format!("{}: {e}", self.name))
    }

    /// Waits for the end of the child, at most for `limit`.
    pub(crate) fn wait_for(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            let status = self.try_wait()?;
            if status.is_some() || Instant::now() >= end {
                return Ok(status);
            }
            check_interrupt()?;
            thread::sleep(TICK);
        }
    }

    /// Waits for the end of the child.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.wait_for(Duration::from_secs(3600))? {
                return Ok(status);
            }
        }
    }

    /// Sends SIGTERM and waits; kills the child after 5 s.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.try_wait()? {
            return Ok(status);
        }
        terminate(self.child.id());
        let end = Instant::now() + GRACE;
        while Instant::now() < end {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            thread::sleep(TICK);
        }
        let _ = self.child.kill();
        let status = self.child.wait().map_err(|e| format!("{}: {e}", self.name))?;
        Err(format!(
            "{} did not end within {} s of SIGTERM and was killed ({status})",
            self.name,
            GRACE.as_secs()
        ))
    }
}

/// Sends SIGTERM to a child that has not been waited for, so that the id is still its own.
pub(crate) fn terminate(id: u32) {
    if let Ok(id) = i32::try_from(id) {
        let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_)))
            && let Err(text) = self.stop()
        {
            eprintln!("warning: {text}");
        }
    }
}

/// Reads lines on a thread, so that waits for a line can be interrupted.
fn lines_of(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    if let Some(stream) = stream {
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

/// Runs a program to its end.
pub(crate) fn run(name: &str, command: &mut Command) -> Result<()> {
    let status = Guard::spawn(name, command)?.wait()?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{name} ended with {status}")),
    }
}

/// Runs a program to its end. If it fails, exits with its status: it has printed the reason.
pub(crate) fn hand_over(name: &str, command: &mut Command) -> Result<()> {
    let status = Guard::spawn(name, command)?.wait()?;
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => std::process::exit(code),
        None => Err(format!("{name} ended with {status}")),
    }
}

/// Runs a tool to its end and returns its output, which is also part of the error.
pub(crate) fn capture(name: &str, command: &mut Command) -> Result<Output> {
    check_interrupt()?;
    let output = command.output().map_err(|e| format!("can't start {name}: {e}"))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!(
        "{name} ended with {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}

#[cfg(test)]
mod tests {
    use super::{at_lowest_priority, command};

    #[test]
    fn commands_have_the_lowest_priority_where_it_is_asked_for_only() {
        let nice = || String::from_utf8(command("nice").output().unwrap().stdout).unwrap();
        let usual = nice();
        assert_eq!(at_lowest_priority(nice).trim(), "19");
        assert_eq!(nice(), usual);
    }
}
