//! Default paths of control sockets, and connecting to one.

use std::{
    fs, io,
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::{Path, PathBuf},
    process,
};

use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use roce::{
    broker::{self, PRIVATE, prepare_dir},
    environment,
};

/// Environment variable with the socket.
const VARIABLE: &str = "FERROCE_CONTROL";
/// Folder of the system's daemon.
pub(crate) const SYSTEM: &str = "/run/ferroce-daemon";
const NAME: &str = "control.sock";
/// Begin of the names of LNet nodes' sockets; the number of the process follows.
const OF_LNET: &str = "lnet-";

fn named() -> Option<PathBuf> {
    environment::var_os(VARIABLE)
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// Returns the folder of the user's own daemon; `None` if the environment is another user's, as after `su`.
pub(crate) fn own_folder() -> Option<PathBuf> {
    let dir = environment::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)?;
    let is_ours = fs::metadata(&dir).is_ok_and(|meta| meta.uid() == geteuid().as_raw());
    is_ours.then(|| dir.join("ferroce"))
}

fn own() -> Option<PathBuf> {
    own_folder().map(|dir| dir.join(NAME))
}

fn of_system() -> PathBuf {
    Path::new(SYSTEM).join(NAME)
}

/// Returns the socket to connect to: that of the user's own daemon if there is one, or the system's.
pub(crate) fn usual_place() -> PathBuf {
    let own = || own().filter(|own| own.exists());
    named().or_else(own).unwrap_or_else(of_system)
}

/// Returns the socket that a daemon creates; `None`: the user has no folder for it.
pub(super) fn place_of_daemon() -> Option<PathBuf> {
    let usual = || if geteuid().is_root() { Some(of_system()) } else { own() };
    named().or_else(usual)
}

/// Returns the socket that `ferroce lnet serve` creates, so that `ferroce stat` finds it: in the user's folder for this network namespace,
/// which is created.
///
/// # Errors
/// When the folder can't be created, or another user could write to it.
pub(crate) fn of_lnet_node() -> Result<PathBuf, broker::Error> {
    let dir = rds_local::directory();
    prepare_dir(&dir, PRIVATE)?;
    Ok(dir.join(format!("{OF_LNET}{}.sock", process::id())))
}

/// Returns the sockets of processes that may have LNet nodes: [`of_lnet_node`], and the [`usual_place`].
pub(crate) fn of_lnet_nodes() -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(OF_LNET) && name.ends_with(".sock")
    };
    let files = fs::read_dir(rds_local::directory()).into_iter().flatten();
    let mut found: Vec<PathBuf> = files.flatten().map(|file| file.path()).filter(is_one).collect();
    found.sort();
    found.push(usual_place());
    found
}

/// Connects to a control socket, if a trusted user serves it: root, this user, or the owner of its folder.
///
/// # Errors
/// As `connect(2)`, and when another user serves the socket.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    let (server, own) = (getsockopt(&stream, PeerCredentials)?.uid(), geteuid().as_raw());
    let folder = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let owner = fs::metadata(folder.unwrap_or(Path::new(".")))?.uid();
    match [0, own, owner].contains(&server) {
        true => Ok(stream),
        false => Err(io::Error::other(format!(
            "user {server} serves it, who is neither root, nor you (user {own}), nor the owner of its folder (user {owner}): do not use it, and \
             remove it"
        ))),
    }
}
