//! Configuration, events and errors of a server.

use core::time::Duration;
use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rnbd::server::Limits;
use rnbd_disk::{DiskConfig, Exports};
use roce::{
    reactor::{ReactorConfig, ReactorError},
    verbs::provider::VerbsError,
};
use rtrs::{
    PathError,
    addr::PathAddr,
    server::{ServerConfig, request::SessionOpened},
};

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Sessions.
    pub rtrs: ServerConfig,
    /// Devices.
    pub limits: Limits,
    /// Exports.
    pub exports: Arc<Exports>,
    /// The disks.
    pub disk: DiskConfig,
    /// The loop.
    pub reactor: ReactorConfig,
    /// Time for sessions to end and files to be written back when it stops.
    pub grace: Duration,
}

/// Event of a server.
#[derive(Debug)]
pub enum ServeEvent {
    /// A client has opened a session.
    SessionOpened(SessionOpened),
    /// A session is over.
    SessionClosed(SessionOpened, PathError),
    /// A path of a session is up: its first one, or one more.
    PathUp(ServedPath),
    /// A path is gone, and why. A session is over after its last one.
    PathDown(ServedPath, PathError),
    /// So many events were dropped, as [`Serving::next`](super::Serving::next) was not called.
    Lost(u64),
    /// All loops have ended; or, with an error, one that nobody asked to. Then the others end as well.
    Stopped(Option<String>),
}

/// A path of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServedPath {
    /// The session's name.
    pub session: String,
    /// The client's address.
    pub client: SocketAddr,
    /// Ours.
    pub server: IpAddr,
}

impl core::fmt::Display for ServedPath {
    /// As its client and the kernel name it, `ip:CLIENT@ip:SERVER`.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let path = PathAddr {
            src: Some(self.client.ip().to_canonical()),
            dst: SocketAddr::new(self.server.to_canonical(), 0),
        };
        path.fmt(f)
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address or the port can't be had, or an argument is wrong.
    #[error(transparent)]
    Rtrs(#[from] rtrs::Error),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] VerbsError),
    /// The system gives no thread, descriptor or random bytes.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The loop ended at once.
    #[error(transparent)]
    Loop(#[from] ReactorError),
}
