//! Where the broker is found, and how one is started: one per user, by whoever needs it first.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File},
    io::{self, BufRead, BufReader},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::FlockOperation,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::geteuid,
};

/// The socket's name in the broker's directory.
pub(crate) const SOCKET: &str = "broker.sock";
/// Held by the broker as long as it lives.
pub(crate) const LIFE_LOCK: &str = "broker.lock";
/// Held by whoever starts a broker.
const START_LOCK: &str = "start.lock";
/// What the broker logs.
const LOG: &str = "broker.log";
/// Where a system broker is.
pub(crate) const SYSTEM_DIR: &str = "/run/ferroce";
/// What a broker writes to standard output when it can be connected to.
pub(crate) const READY: &str = "ready";
/// How long starting may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// Why there is no broker.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The directory can't be used.
    #[error("the broker's directory {}: {text}", dir.display())]
    Directory {
        /// Which.
        dir: PathBuf,
        /// What is wrong, and what to do.
        text: String,
    },
    /// The socket is another user's.
    #[error("the broker at {} is run by user {uid}, whom user {own} does not trust", socket.display())]
    WrongUser {
        /// Its socket.
        socket: PathBuf,
        /// Its user.
        uid: u32,
        /// Our user.
        own: u32,
    },
    /// Nothing to start.
    #[error("no broker runs, and the program `ferroce` that would be one is not found: set FERROCE_BROKER to its path")]
    NoProgram,
    /// It did not come up.
    #[error("starting the broker ({} broker) failed: {text}", program.display())]
    Failed {
        /// The program.
        program: PathBuf,
        /// What it said.
        text: String,
    },
    /// A system call failed.
    #[error("{context}: {source}")]
    Io {
        /// What was tried.
        context: String,
        /// What the system said.
        source: io::Error,
    },
}

fn context(context: impl Into<String>) -> impl FnOnce(io::Error) -> StartError {
    let context = context.into();
    move |source| StartError::Io { context, source }
}

/// The directory of this user's broker: that of a system broker if there is one, else `$XDG_RUNTIME_DIR/ferroce` or, where
/// that is not this user's, `/run/user/UID/ferroce` or `/tmp/ferroce-UID`.
pub fn runtime_dir() -> PathBuf {
    let own = geteuid().as_raw();
    let system = Path::new(SYSTEM_DIR);
    if fs::symlink_metadata(system.join(SOCKET)).is_ok_and(|m| m.file_type().is_socket()) {
        return system.into();
    }
    let is_ours = |dir: &Path| fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.uid() == own);
    let xdg = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    xdg.into_iter()
        .chain([PathBuf::from(format!("/run/user/{own}"))])
        .find(|dir| dir.is_absolute() && is_ours(dir))
        .map_or_else(|| format!("/tmp/ferroce-{own}").into(), |dir| dir.join("ferroce"))
}

/// Permissions of a directory for this user alone.
pub(crate) const PRIVATE: u32 = 0o700;
/// Permissions of a directory whose socket others may use.
pub(crate) const SHARED: u32 = 0o755;

/// Makes the directory with these permissions if need be, and checks that nobody else can put things into it.
pub(crate) fn prepare_dir(dir: &Path, mode: u32) -> Result<(), StartError> {
    let fail = |text: String| Err(StartError::Directory { dir: dir.into(), text });
    match DirBuilder::new().mode(mode).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return fail(format!(
                "it can't be made: {e}; set FERROCE_BROKER_DIR to a directory of yours"
            ));
        }
        _ => {}
    }
    let meta = match fs::symlink_metadata(dir) {
        Ok(meta) => meta,
        Err(e) => return fail(format!("it can't be looked at: {e}")),
    };
    let own = geteuid().as_raw();
    if !meta.is_dir() {
        return fail("it is not a directory: remove it, or set FERROCE_BROKER_DIR".into());
    }
    if meta.uid() != own {
        return fail(format!(
            "it belongs to user {}, not to {own}: remove it, or set FERROCE_BROKER_DIR to a directory of yours",
            meta.uid()
        ));
    }
    if meta.mode() & 0o022 != 0 {
        return fail("others may write to it: `chmod go-w` it".into());
    }
    Ok(())
}

/// A socket that speaks the protocol's records.
pub(crate) fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Connects to the broker of a directory; `None` when none is running.
pub(crate) fn connect(dir: &Path) -> Result<Option<OwnedFd>, StartError> {
    use rustix::io::Errno;
    let path = dir.join(SOCKET);
    let io = |e: io::Error| context(format!("connecting to {}", path.display()))(e);
    let addr = SocketAddrUnix::new(&path).map_err(|e| io(e.into()))?;
    let socket = new_socket().map_err(io)?;
    match rustix::net::connect(&socket, &addr) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR) => return Ok(None),
        Err(Errno::ACCESS | Errno::PERM) => {
            return Err(StartError::Directory {
                dir: dir.into(),
                text: "no permission to connect to the broker there; for a system broker, join its group".into(),
            });
        }
        Err(e) => return Err(io(e.into())),
    }
    check_server(dir, &path, socket).map(Some)
}

/// Whoever answers hands us the sockets that we receive from: it must be us, root, or a directory's owner whom root let
/// have it.
fn check_server(dir: &Path, path: &Path, socket: OwnedFd) -> Result<OwnedFd, StartError> {
    let own = geteuid().as_raw();
    let io = |e: io::Error| context(format!("asking who serves {}", path.display()))(e);
    let (_, uid) = crate::sys::peer_credentials(socket.as_fd()).map_err(io)?;
    let system = dir == Path::new(SYSTEM_DIR) && fs::metadata(dir).is_ok_and(|m| m.uid() == uid);
    match uid == own || uid == 0 || system {
        true => Ok(socket),
        false => Err(StartError::WrongUser {
            socket: path.into(),
            uid,
            own,
        }),
    }
}

/// An exclusive lock that ends with the process, or with the value.
pub(crate) struct Lock(#[allow(dead_code, reason = "held, not used")] File);

impl Lock {
    /// Takes it, waiting until `deadline`; `None` when another has it for longer.
    pub(crate) fn take(dir: &Path, name: &str, deadline: Instant) -> io::Result<Option<Self>> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(dir.join(name))?;
        loop {
            match rustix::fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self(file))),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(PAUSE),
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Connects to the broker of a directory, starting it if need be.
pub(crate) fn connect_or_start(dir: &Path, program: Option<&Path>) -> Result<OwnedFd, StartError> {
    if let Some(socket) = connect(dir)? {
        return Ok(socket);
    }
    if dir == Path::new(SYSTEM_DIR) {
        return Err(StartError::Directory {
            dir: dir.into(),
            text: "the system broker does not run: `systemctl start ferroce-broker`".into(),
        });
    }
    prepare_dir(dir, PRIVATE)?;
    let deadline = Instant::now() + PATIENCE;
    let lock = Lock::take(dir, START_LOCK, deadline)
        .map_err(context(format!("locking {}", dir.join(START_LOCK).display())))?;
    // Whoever had the lock has started one.
    let mut last = None;
    while Instant::now() < deadline {
        if let Some(socket) = connect(dir)? {
            return Ok(socket);
        }
        if lock.is_some() {
            match spawn(dir, program) {
                // It may have found another at its end: then there is none a moment later.
                Err(e @ StartError::Failed { .. }) => last = Some(e),
                Err(e) => return Err(e),
                Ok(()) => continue,
            }
            if !last.as_ref().is_some_and(is_transient) {
                break;
            }
        }
        thread::sleep(PAUSE);
    }
    Err(last.unwrap_or_else(|| context(dir.display().to_string())(io::ErrorKind::TimedOut.into())))
}

/// What a broker says that found another one alive.
pub(crate) const RUNS_ALREADY: &str = "another broker runs";

fn is_transient(e: &StartError) -> bool {
    matches!(e, StartError::Failed { text, .. } if text.contains(RUNS_ALREADY))
}

/// Starts a broker and waits until it can be connected to.
fn spawn(dir: &Path, program: Option<&Path>) -> Result<(), StartError> {
    let program = find_program(program).ok_or(StartError::NoProgram)?;
    let failed = |text: String| StartError::Failed {
        program: program.clone(),
        text,
    };
    let log = File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(dir.join(LOG))
        .map_err(context(format!("opening {}", dir.join(LOG).display())))?;
    // Once more to get away from our child processes: a program may wait for any of its own.
    let mut child = Command::new(&program)
        .args([
            OsStr::new("broker"),
            OsStr::new("--detach"),
            OsStr::new("--dir"),
            dir.as_os_str(),
        ])
        .env_remove("LD_PRELOAD")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let mut said = String::new();
    if let Some(out) = child.stdout.take() {
        // Ends when the broker has closed its end, in either case.
        let _ = BufReader::new(out).read_line(&mut said);
    }
    // The program's own handler may have been faster.
    let _ = child.wait();
    match said.trim() {
        READY => Ok(()),
        "" => Err(failed(format!("it says nothing; see {}", dir.join(LOG).display()))),
        text => Err(failed(text.into())),
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
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path)
            .map(|dir| dir.join("ferroce"))
            .find(|p| p.is_file())
    })
}
