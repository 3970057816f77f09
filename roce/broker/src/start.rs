//! Joining: search for the broker, and its start: one per user, by the first process that needs it.

use std::{
    fs::{self, DirBuilder},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use roce_net::{
    environment,
    holder::{BROKER_DIR_VARIABLE, BROKER_SOCKET, BROKER_VARIABLE},
};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::geteuid,
};

use crate::{
    error::{Error, context},
    helper::{Kind, Lock},
    proto::Place,
};

/// The broker as a program that is started in the background.
pub(crate) const BROKER: Kind = Kind {
    command: &["broker"],
    start_lock: START_LOCK,
    log: "broker.log",
};
/// The socket's name in the broker's directory.
pub(crate) const SOCKET: &str = BROKER_SOCKET;
/// Held by the broker as long as it lives.
pub(crate) const LIFE_LOCK: &str = "broker.lock";
/// Held by a process that starts a broker.
const START_LOCK: &str = "start.lock";
/// Directory of a system broker.
pub(crate) const SYSTEM_DIR: &str = "/run/ferroce";
/// Prefix of the directories of network namespaces.
const NETWORK: &str = "net-";
/// After so long without a broker such a directory is of no use.
const UNUSED: Duration = Duration::from_secs(24 * 3600);
/// Parameters of joining.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Directory of the broker's socket.
    pub dir: PathBuf,
    /// The program to start as `PROGRAM broker …`; `None`: this one if it is called `ferroce`, or else that of the search
    /// path.
    pub program: Option<PathBuf>,
    /// Name of this process.
    pub name: String,
}

impl JoinConfig {
    /// Returns the number of queue pairs that a process can have in any case, as far as is known before it joins.
    pub fn sure_numbers(&self) -> u32 {
        let place = match is_of_others(&self.dir) {
            // A broker of several users gives a process a generation at least.
            true => Place { slot: 1, generation: 0 },
            false => Place::whole(1),
        };
        place.numbers().qpns().count()
    }

    /// By the environment: `FERROCE_BROKER` (a program, or `off`) and `FERROCE_BROKER_DIR`, neither of which a program with
    /// rights that its user hasn't believes. `None` when it is switched off.
    pub fn from_env() -> Option<Self> {
        let program = environment::var_os(BROKER_VARIABLE).map(PathBuf::from);
        if program.as_deref() == Some(Path::new("off")) {
            return None;
        }
        let dir = environment::var_os(BROKER_DIR_VARIABLE).map(PathBuf::from);
        let exe = std::env::current_exe().unwrap_or_default();
        Some(Self {
            dir: dir.unwrap_or_else(runtime_dir),
            program,
            name: exe.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        })
    }
}

/// Number of names to try in `/tmp`: another user may have the first, such as one with our user's number in another user namespace.
const HOMES: usize = 16;

/// The directory of this user's broker: that of a system broker if there is one, else one for each network namespace in
/// what [`make_home`] makes.
pub fn runtime_dir() -> PathBuf {
    let system = Path::new(SYSTEM_DIR);
    if fs::symlink_metadata(system.join(SOCKET)).is_ok_and(|m| m.file_type().is_socket()) {
        return system.into();
    }
    home().join(network())
}

/// Returns this user's directory for other helpers than the broker: that of the broker, unless it serves several users.
pub fn private_dir(broker: &Path) -> PathBuf {
    match is_of_others(broker) || broker == Path::new(SYSTEM_DIR) {
        true => home().join(network()),
        false => broker.into(),
    }
}

/// Returns whether the directory of a broker belongs to another user, who runs it for several.
pub(crate) fn is_of_others(dir: &Path) -> bool {
    fs::metadata(dir).is_ok_and(|m| m.uid() != geteuid().as_raw())
}

fn home() -> PathBuf {
    let own = geteuid().as_raw();
    let is_ours = |dir: &Path| fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.uid() == own);
    let xdg = environment::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    xdg.into_iter()
        .chain([PathBuf::from(format!("/run/user/{own}"))])
        .find(|dir| dir.is_absolute() && is_ours(dir))
        .map_or_else(|| home_in(Path::new("/tmp"), own), |dir| dir.join("ferroce"))
}

/// Returns this user's directory within one for all users: an existing one, or else the first free name.
fn home_in(base: &Path, own: u32) -> PathBuf {
    let names = (0..HOMES).map(|n| match n {
        0 => base.join(format!("ferroce-{own}")),
        _ => base.join(format!("ferroce-{own}.{n}")),
    });
    let metas = names.map(|dir| (fs::symlink_metadata(&dir), dir));
    let (mut free, mut first) = (None, None);
    for (meta, dir) in metas {
        match meta {
            Ok(m) if m.is_dir() && m.uid() == own && m.mode() & 0o022 == 0 => return dir,
            Err(e) if e.kind() == io::ErrorKind::NotFound => free = free.or(Some(dir)),
            // Preparing it reports the fault.
            _ => first = first.or(Some(dir)),
        }
    }
    free.or(first).unwrap_or_else(|| base.into())
}

/// Returns a name for this thread's network namespace, as sockets of one are of no use in another.
fn network() -> String {
    let number = fs::metadata("/proc/thread-self/ns/net").map_or(0, |m| m.ino());
    format!("{NETWORK}{number}")
}

/// This user's directory: `$XDG_RUNTIME_DIR/ferroce` or, where that is not this user's, `/run/user/UID/ferroce` or
/// `/tmp/ferroce-UID`, or, where another user has that, `/tmp/ferroce-UID.1` and so on. Made if need be.
///
/// # Errors
/// When it can't be made, or another user could write to it.
pub fn make_home() -> Result<PathBuf, Error> {
    let home = home();
    prepare_dir(&home, PRIVATE)?;
    Ok(home)
}

/// Permissions of a directory for this user alone.
pub const PRIVATE: u32 = 0o700;
/// Permissions of a directory whose socket others may use.
pub(crate) const SHARED: u32 = 0o755;

/// Makes the directory with these permissions if need be, and checks that no other user can write to it.
///
/// # Errors
/// When it can't be made, or another user could write to it.
pub fn prepare_dir(dir: &Path, mode: u32) -> Result<(), Error> {
    let fail = |text: String| Err(Error::Directory { dir: dir.into(), text });
    if let Some(parent) = dir.parent().filter(|parent| *parent == home()) {
        prepare_dir(parent, PRIVATE)?;
    }
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

/// Removes the directories of network namespaces beside `dir` that have had no broker for a day.
pub(crate) fn sweep(dir: &Path) {
    if let Some(home) = dir.parent().filter(|parent| *parent == home()) {
        sweep_in(home, dir, UNUSED);
    }
}

fn sweep_in(home: &Path, keep: &Path, unused: Duration) {
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        let dir = entry.path();
        let changed = entry.metadata().and_then(|m| m.modified()).ok();
        let old = changed
            .and_then(|at| at.elapsed().ok())
            .is_some_and(|age| age >= unused);
        if dir == keep || !old || !entry.file_name().to_string_lossy().starts_with(NETWORK) {
            continue;
        }
        let locks = [START_LOCK, LIFE_LOCK].map(|name| Lock::take(&dir, name, Instant::now()).ok().flatten());
        if locks.iter().all(Option::is_some) {
            let _ = fs::remove_dir_all(&dir);
        }
    }
}

/// Creates a socket for the protocol's records.
pub(crate) fn new_socket() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Connects to the broker of a directory; `None` when none is running.
pub(crate) fn connect(dir: &Path) -> Result<Option<OwnedFd>, Error> {
    let path = dir.join(SOCKET);
    let io = |e: Errno| context(format!("connecting to {}", path.display()))(e.into());
    let addr = SocketAddrUnix::new(&path).map_err(io)?;
    let socket = new_socket().map_err(io)?;
    match rustix::net::connect(&socket, &addr) {
        Ok(()) => check_server(dir, &path, socket).map(Some),
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR) => Ok(None),
        Err(Errno::ACCESS | Errno::PERM) => Err(Error::Directory {
            dir: dir.into(),
            text: "no permission to connect to the broker there; for a system broker, join its group".into(),
        }),
        Err(e) => Err(io(e)),
    }
}

/// Checks who answers, as it hands us the sockets that we receive from: it must be us, root, or a directory's owner whom root let
/// have it.
fn check_server(dir: &Path, path: &Path, socket: OwnedFd) -> Result<OwnedFd, Error> {
    let own = geteuid().as_raw();
    let io = |e: io::Error| context(format!("asking who serves {}", path.display()))(e);
    let (_, uid) = crate::sys::peer_credentials(socket.as_fd()).map_err(io)?;
    let system = dir == Path::new(SYSTEM_DIR) && fs::metadata(dir).is_ok_and(|m| m.uid() == uid);
    match uid == own || uid == 0 || system {
        true => Ok(socket),
        false => Err(Error::WrongUser {
            socket: path.into(),
            uid,
            own,
        }),
    }
}

/// Connects to the broker of a directory, starting it if need be.
pub(crate) fn connect_or_start(dir: &Path, program: Option<&Path>) -> Result<OwnedFd, Error> {
    if let Some(socket) = connect(dir)? {
        return Ok(socket);
    }
    if dir == Path::new(SYSTEM_DIR) {
        return Err(Error::Directory {
            dir: dir.into(),
            text: "the system broker does not run: `systemctl start ferroce-broker`".into(),
        });
    }
    prepare_dir(dir, PRIVATE)?;
    BROKER.start(dir, program, || connect(dir))
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_directory_of_somebody_else_is_passed_over() {
        let base = tempfile::tempdir().unwrap();
        let own = geteuid().as_raw();
        let at = |name: &str| base.path().join(format!("ferroce-{own}{name}"));
        std::os::unix::fs::symlink("/", at("")).unwrap();
        assert_eq!(home_in(base.path(), own), at(".1"), "not there yet");
        fs::create_dir(at(".1")).unwrap();
        fs::set_permissions(at(".1"), Permissions::from_mode(0o777)).unwrap();
        assert_eq!(home_in(base.path(), own), at(".2"), "others may write to the second");
        fs::create_dir(at(".2")).unwrap();
        fs::remove_file(at("")).unwrap();
        assert_eq!(
            home_in(base.path(), own),
            at(".2"),
            "once made it stays, whatever becomes free"
        );
    }

    #[test]
    fn only_dead_networks_are_swept() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        for name in ["net-1", "net-2", "net-3", "sysfs-1"] {
            fs::create_dir(at(name)).unwrap();
        }
        let alive = Lock::take(&at("net-3"), LIFE_LOCK, Instant::now()).unwrap();
        sweep_in(home.path(), &at("net-1"), UNUSED);
        assert!(at("net-2").exists(), "used today");
        sweep_in(home.path(), &at("net-1"), Duration::ZERO);
        let left = ["net-1", "net-2", "net-3", "sysfs-1"].map(|name| at(name).exists());
        assert_eq!(left, [true, false, true, true]);
        drop(alive);
    }
}
