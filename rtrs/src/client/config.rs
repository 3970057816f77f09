//! How a session is opened, and what it can do.

use core::time::Duration;

use crate::{
    Error,
    addr::PathAddr,
    client::policy::Policy,
    heartbeat::HeartbeatConfig,
    proto::{MAX_CONNECTIONS, info::check_name},
};

/// How to open a session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name; the server knows the session by it. No slash, no dot.
    pub name: String,
    /// The paths to the server, 1 to [`MAX_PATHS`](Self::MAX_PATHS).
    pub paths: Vec<PathAddr>,
    /// Policy that chooses the path of a request.
    pub policy: Policy,
    /// The session is open as soon as one of its paths is up, and goes on trying the others. Off, as in the kernel: if one can't be
    /// connected the session can't be opened.
    pub connect_any: bool,
    /// Connections for I/O per path, at least 1 (the service connection comes on top). Requests of a turn leave in one train
    /// per connection, so one is the fastest unless the server spreads its work by connection. Default: 1.
    pub connections: u16,
    /// Longest time for each step of connecting. Default: 30 s, as the kernel's (`RTRS_CONNECT_TIMEOUT_MS`, `rtrs-clt.c`).
    pub connect_timeout: Duration,
    /// Heartbeats.
    pub heartbeat: HeartbeatConfig,
    /// Longest user header of a request, bytes; the server's limit holds as well.
    pub max_user_header: u16,
    /// Have the server revoke the key of each read's buffer when the read is done, as the kernel's client does. Off,
    /// all buffers stay open for the server's writes while the session lives; that spares two work requests per read.
    pub invalidate_reads: bool,
    /// Registered bytes for I/O buffers at most; `None`: what all requests in flight can use.
    pub buffer_bytes: Option<usize>,
    /// Attempts to connect a path again after it was lost, at most [`MAX_RECONNECTS`](Self::MAX_RECONNECTS), or
    /// [`FOREVER`](Self::FOREVER); 0: a lost path stays so.
    pub max_reconnects: u32,
    /// Time between two attempts, of which up to half more is drawn at random (`RTRS_RECONNECT_SEED`).
    pub reconnect_delay: Duration,
}

impl SessionConfig {
    /// Paths of a session at most (`MAX_PATHS_NUM`, `rtrs-pri.h`).
    pub const MAX_PATHS: usize = 128;
    /// The largest number of attempts (`MAX_MAX_RECONN_ATT`, `rtrs-clt-sysfs.c`).
    pub const MAX_RECONNECTS: u32 = 9999;
    /// Attempts without end; the kernel's -1.
    pub const FOREVER: u32 = u32::MAX;

    /// A session over one path, everything else by default.
    pub fn new(name: impl Into<String>, path: PathAddr) -> Self {
        Self {
            name: name.into(),
            paths: vec![path],
            policy: Policy::default(),
            connect_any: false,
            connections: 1,
            connect_timeout: Duration::from_secs(30),
            heartbeat: HeartbeatConfig::default(),
            // RNBD's longest message (open) has 264.
            max_user_header: 320,
            invalidate_reads: true,
            buffer_bytes: None,
            max_reconnects: 0,
            reconnect_delay: Duration::from_secs(10),
        }
    }

    /// Checks what is wrong by itself.
    ///
    /// # Errors
    /// Says what.
    pub fn check(&self) -> Result<(), Error> {
        let config = |m: &str| Err(Error::Config(m.into()));
        if let Err(e) = check_name(&self.name) {
            return Err(Error::Config(e.to_string()));
        }
        if self.connections == 0 || self.connections >= MAX_CONNECTIONS {
            return config("a path needs 1 to 4095 I/O connections");
        }
        if self.heartbeat.interval.is_zero() || self.connect_timeout.is_zero() {
            return config("the heartbeat interval and the connect timeout must not be zero");
        }
        if self.paths.is_empty() || self.paths.len() > Self::MAX_PATHS {
            return config("a session needs 1 to 128 paths");
        }
        for (n, path) in self.paths.iter().enumerate() {
            if self.paths[..n].contains(path) {
                return Err(Error::Config(format!("the path {path} is there twice")));
            }
        }
        check_reconnects(self.max_reconnects)
    }
}

pub(super) fn check_reconnects(attempts: u32) -> Result<(), Error> {
    match attempts {
        0..=SessionConfig::MAX_RECONNECTS | SessionConfig::FOREVER => Ok(()),
        _ => Err(Error::Config(
            "attempts to reconnect are at most 9999, or without end".into(),
        )),
    }
}

/// Kind of connection that a request uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConType {
    /// The service connection: user messages other than I/O.
    Admin,
    /// An I/O connection; equal hints (a CPU or queue number) give the same one.
    Io(usize),
}

/// Abilities of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionInfo {
    /// Largest data of a request, bytes.
    pub max_io_size: u32,
    /// Requests in flight at most.
    pub queue_depth: u32,
    /// Pieces of memory that a request's data may have: one buffer.
    pub max_segments: u32,
    /// Longest user header, bytes.
    pub max_user_header: u32,
    /// The server changes the key of a chunk with every request (`always_invalidate`).
    pub new_rkeys: bool,
}
