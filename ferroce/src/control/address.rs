//! Where control sockets are if nobody says otherwise.

use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use roce::environment;

/// The environment variable with the socket.
const VARIABLE: &str = "FERROCE_CONTROL";
/// The folder of root's daemon.
const SYSTEM: &str = "/run/ferroce";
const NAME: &str = "control.sock";

fn named() -> Option<PathBuf> {
    environment::var_os(VARIABLE)
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// In the user's own folder.
fn own() -> Option<PathBuf> {
    environment::var_os("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("ferroce").join(NAME))
}

fn of_system() -> PathBuf {
    Path::new(SYSTEM).join(NAME)
}

/// The socket to connect to: the user's own daemon's, or else root's.
pub(crate) fn usual_place() -> PathBuf {
    let own = || own().filter(|own| own.exists());
    named().or_else(own).unwrap_or_else(of_system)
}

/// The socket that a daemon makes; `None`: a user who has no folder for it.
pub(super) fn place_of_daemon() -> Option<PathBuf> {
    let usual = || if geteuid().is_root() { Some(of_system()) } else { own() };
    named().or_else(usual)
}
