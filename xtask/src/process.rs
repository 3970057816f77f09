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

/// How often waits look at the interrupt flag.
const TICK: Duration = Duration::from_millis(20);
/// What a child gets between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Turns the first SIGINT or SIGTERM into [`interrupted`]; the second ends the process at once.
pub(crate) fn catch_signals() {
    let flag = INTERRUPTED.get_or_init(|| Arc::new(AtomicBool::new(false)));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // In this order: the flag is looked at before it is set.
        let first = signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(flag));
        if let Err(e) = first.and_then(|_| signal_hook::flag::register(signal, Arc::clone(flag))) {
            eprintln!("warning: ctrl-C will not clean up: {e}");
        }
    }
}

/// Whether the user wants to stop.
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

/// What `work` starts by [`command`] on this thread gets the processor time that nobody else wants.
pub(crate) fn at_lowest_priority<T>(work: impl FnOnce() -> T) -> T {
    LOWEST_PRIORITY.set(true);
    let done = work();
    LOWEST_PRIORITY.set(false);
    done
}

/// A command of the priority that this thread's children have.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    if !LOWEST_PRIORITY.get() {
        return Command::new(program);
    }
    let mut command = Command::new("nice");
    // It is added to our own, which may be raised; the kernel stops at 19.
    command.args(["-n", "39"]).arg(program);
    command
}

/// A child that is ended when this goes out of scope.
pub(crate) struct Guard {
    name: String,
    child: Child,
}

impl Guard {
    /// Starts it.
    pub(crate) fn spawn(name: &str, command: &mut Command) -> Result<Self> {
        check_interrupt()?;
        let child = command.spawn().map_err(|e| format!("can't start {name}: {e}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
        })
    }

    /// Its id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Lines of its piped standard output, as they come. Ends with the output.
    pub(crate) fn stdout_lines(&mut self) -> Receiver<String> {
        lines_of(self.child.stdout.take())
    }

    /// Lines of its piped standard error, as they come. Ends with the output.
    pub(crate) fn stderr_lines(&mut self) -> Receiver<String> {
        lines_of(self.child.stderr.take())
    }

    /// Gives each line of its piped standard output to `line` and waits for its end.
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

    /// Its exit status if it has ended.
    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(|e| format!("{}: {e}", self.name))
    }

    /// Waits for its end, calling `tick` in between.
    pub(crate) fn wait_with(&mut self, mut tick: impl FnMut()) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            check_interrupt()?;
            tick();
            thread::sleep(TICK);
        }
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        self.wait_with(|| ())
    }

    /// Asks it to end (SIGTERM) and waits; kills it after five seconds.
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

/// Asks a child to end that has not been waited for, so that the id is still its own.
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

/// Reads on a thread of its own, so that nobody who waits for a line is deaf to ctrl-C.
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

/// Runs a program that does a task to its end. If that is no success, its exit status is ours: it has said why.
pub(crate) fn hand_over(name: &str, command: &mut Command) -> Result<()> {
    let status = Guard::spawn(name, command)?.wait()?;
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => std::process::exit(code),
        None => Err(format!("{name} ended with {status}")),
    }
}

/// Runs a tool to its end and gives its output, which is also part of the error.
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
