//! Search for the node of this user, and its start by the first program that needs it.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use roce_broker::{Error, JoinConfig, PRIVATE, helper::Kind, prepare_dir, private_dir, runtime_dir};

use crate::{limits::SOCKET, record::connect};

/// The node as a program in the background.
pub const NODE: Kind = Kind {
    command: &["rds", "node"],
    start_lock: "rds-start.lock",
    log: "rds.log",
};

/// Directory of this user's node: that of the broker, or one of the user's if the broker serves several.
pub fn directory() -> PathBuf {
    private_dir(&JoinConfig::from_env().map_or_else(runtime_dir, |join| join.dir))
}

/// Connects to the node of a directory, and starts it if none is running. `program` as of [`JoinConfig`].
///
/// # Errors
/// When it does not start, or is another user's.
pub fn connect_or_start(dir: &Path, program: Option<&Path>) -> io::Result<OwnedFd> {
    let path = dir.join(SOCKET);
    if let Some(socket) = connect(&path)? {
        return Ok(socket);
    }
    prepare_dir(dir, PRIVATE).map_err(io::Error::other)?;
    let find = || {
        connect(&path).map_err(|source| Error::Io {
            context: format!("connecting to {}", path.display()),
            source,
        })
    };
    NODE.start(dir, program, find).map_err(io::Error::other)
}
