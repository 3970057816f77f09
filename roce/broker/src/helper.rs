//! Programs that run in the background for all processes of a user, and are started by the first that needs them.

use std::{
    ffi::OsStr,
    fs::{self, File, TryLockError},
    io::{self, BufRead, BufReader, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use roce_net::environment;

use crate::{
    error::{Error, RUNS_ALREADY, context},
    sys,
};

/// Line that a helper writes to standard output when it accepts connections.
const READY: &str = "ready";
/// Time that starting may take.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// Variables that a helper does not get: a library to load, and those of a service manager, which are for this process.
const NOT_ITS_OWN: [&str; 7] = [
    "LD_PRELOAD",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];

/// Kind of a helper: how it is started, in which directory it has its files.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Subcommand of `ferroce`. `--dir DIR` follows, and `--detach` or `--announce`.
    pub command: &'static [&'static str],
    /// Lock of a process that starts one.
    pub start_lock: &'static str,
    /// Its log.
    pub log: &'static str,
}

impl Kind {
    /// Connects to the helper of a directory, and starts it if `connect` finds none.
    ///
    /// # Errors
    /// Errors of `connect`, and when it does not start.
    pub fn start<T>(
        &self,
        dir: &Path,
        program: Option<&Path>,
        connect: impl Fn() -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + TIMEOUT;
        let lock = Lock::take(dir, self.start_lock, deadline)
            .map_err(context(format!("locking {}", dir.join(self.start_lock).display())))?;
        // The process that had the lock has started one.
        let mut last = None;
        while Instant::now() < deadline {
            if let Some(socket) = connect()? {
                return Ok(socket);
            }
            if lock.is_some() {
                match self.spawn(dir, program) {
                    Ok(()) => continue,
                    // It has found another one about to exit: then there is none a moment later.
                    Err(e) if is_transient(&e) => last = Some(e),
                    Err(e) => return Err(e),
                }
            }
            thread::sleep(PAUSE);
        }
        Err(last.unwrap_or_else(|| context(dir.display().to_string())(io::ErrorKind::TimedOut.into())))
    }

    /// Starts one and waits until it can be connected to.
    fn spawn(&self, dir: &Path, program: Option<&Path>) -> Result<(), Error> {
        let program = find_program(program).ok_or(Error::NoProgram)?;
        let failed = |text: String| Error::Failed {
            command: format!("{} {}", program.display(), self.command.join(" ")),
            text,
        };
        let log = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(dir.join(self.log))
            .map_err(context(format!("opening {}", dir.join(self.log).display())))?;
        // Once more to get away from our child processes: a program may wait for any of its own.
        let mut command = Command::new(&program);
        if environment::is_secure() {
            // The helper has our rights, and the environment is our user's.
            command.env_clear();
        }
        for name in NOT_ITS_OWN {
            command.env_remove(name);
        }
        let mut child = command
            .args(self.command)
            .args(["--detach", "--dir"])
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        let mut said = String::new();
        if let Some(out) = child.stdout.take() {
            // Ends when the helper has closed its end, in either case.
            let _ = BufReader::new(out).read_line(&mut said);
        }
        // The program's own handler may have been faster.
        let _ = child.wait();
        match said.trim() {
            READY => Ok(()),
            "" => Err(failed(format!("it says nothing; see {}", dir.join(self.log).display()))),
            text => Err(failed(text.into())),
        }
    }

    /// Starts this program again as one that is nobody's child. Only for a program that has opened nothing: what the starting one left
    /// open is closed.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn detach(&self, dir: &Path) -> Result<(), Error> {
        // SAFETY: the caller has opened nothing.
        unsafe { sys::close_from(3) }.map_err(context("closing what the starting program left open"))?;
        // Not of the terminal, so that its ctrl-C is none of ours.
        let _ = rustix::process::setsid();
        let program = std::env::current_exe().map_err(context("finding the own program"))?;
        let child = Command::new(program)
            .args(self.command)
            .args(["--announce", "--dir"])
            .arg(dir)
            // It outlives the process that needed it first, and must keep no file system busy.
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::inherit())
            .stderr(Stdio::inherit())
            .spawn();
        child.map(drop).map_err(context("starting again in the background"))
    }
}

/// Notifies the process that started this helper, and closes standard output.
///
/// # Errors
/// When it can't be written to.
pub fn announce() -> io::Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{READY}")?;
    out.flush()?;
    let null = fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(null)?;
    Ok(())
}

fn is_transient(e: &Error) -> bool {
    matches!(e, Error::Failed { text, .. } if text.contains(RUNS_ALREADY))
}

/// An exclusive lock that ends with the process, or with the value.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "held, not used")] File);

impl Lock {
    /// Takes it, waiting until `deadline`; `None` when another has it for longer.
    ///
    /// # Errors
    /// Errors of the file.
    pub fn take(dir: &Path, name: &str, deadline: Instant) -> io::Result<Option<Self>> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(dir.join(name))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self(file))),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(TryLockError::Error(e)) => return Err(e),
            }
        }
    }
}

/// The program that is given, or that we are, or that the search path has.
fn find_program(given: Option<&Path>) -> Option<PathBuf> {
    if let Some(given) = given {
        return Some(given.into());
    }
    let own = std::env::current_exe()
        .ok()
        .filter(|p| p.file_name() == Some(OsStr::new("ferroce")));
    own.or_else(|| {
        let mut programs = environment::search_path().into_iter().map(|dir| dir.join("ferroce"));
        programs.find(|p| p.is_file())
    })
}
