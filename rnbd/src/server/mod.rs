//! The server: offers [`Exports`] to RNBD clients over RTRS.

mod io;
mod session;

use std::{
    collections::HashMap,
    fmt,
    io::Error as StdError,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::RwLock;
use roce_verbs::provider::Provider;
use rtrs::server::{Request, ServerConfig, ServerOps, SessionHandle};

use crate::backend::{Exports, Pool, Throttle};
use session::Session;

/// Time for files to be written back when a server ends.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(30);

/// How to serve.
#[derive(Debug)]
pub struct ServerOptions {
    /// What is offered.
    pub exports: Arc<Exports>,
    /// Threads that do I/O.
    pub threads: usize,
    /// Devices that one session may have open.
    pub max_devices: usize,
    /// Devices that all sessions together may have open, those included that are being closed. One that is open for writing
    /// takes two descriptors, any other one.
    pub max_open: usize,
}

impl ServerOptions {
    /// Twice as many threads as processors, 256 devices a session, 1024 in all.
    pub fn new(exports: Arc<Exports>) -> Self {
        Self {
            exports,
            threads: Pool::default_threads(),
            max_devices: 256,
            max_open: 1024,
        }
    }
}

/// What a server has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServerCounters {
    /// Devices opened.
    pub opens: u64,
    /// Open requests refused.
    pub refused: u64,
    /// Of these, because the session or the server had as many devices open as it may have.
    pub refused_limit: u64,
    /// Devices open now, those included that are being closed.
    pub open: u64,
    /// Block requests answered.
    pub requests: u64,
    /// Of these, with an error.
    pub failed: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Messages that were malformed or unexpected.
    pub malformed: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) opens: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) refused_limit: AtomicU64,
    pub(crate) open: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) malformed: AtomicU64,
}

/// Log lines that clients can cause. The throttles are the server's: those of a session would start again with the next.
pub(crate) struct Logs {
    sessions: Throttle,
    devices: Throttle,
    refused: Throttle,
    malformed: Throttle,
}

/// What all sessions share.
pub(crate) struct Shared {
    pub(crate) exports: Arc<Exports>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) max_devices: usize,
    pub(crate) max_open: usize,
    pub(crate) counters: Counters,
    pub(crate) logs: Logs,
}

/// RNBD's part of an RTRS server.
struct Ops<P: Provider> {
    shared: Arc<Shared>,
    sessions: RwLock<HashMap<u64, Arc<Session<P>>>>,
}

impl<P: Provider> ServerOps<P> for Ops<P> {
    fn session_opened(&self, session: &SessionHandle) {
        if let Some(suppressed) = self.shared.logs.sessions.pass() {
            tracing::info!(session = session.name(), peer = %session.peer(), suppressed, "session opened");
        }
        let s = Arc::new(Session::new(self.shared.clone(), session.name()));
        self.sessions.write().insert(session.id(), s);
    }

    fn rdma_request(&self, request: Request<P>) {
        let session = self.sessions.read().get(&request.session().id()).cloned();
        match session {
            Some(s) => s.request(request),
            None => request.complete(libc::ENODEV),
        }
    }

    fn session_closed(&self, session: &SessionHandle) {
        if let Some(suppressed) = self.shared.logs.sessions.pass() {
            tracing::info!(session = session.name(), peer = %session.peer(), suppressed, "session closed");
        }
        if let Some(s) = self.sessions.write().remove(&session.id()) {
            // Closing syncs files.
            self.shared.pool.run(move || drop(s));
        }
    }
}

/// A running RNBD server. Dropping it ends its sessions; what they wrote is made durable.
pub struct Server<P: Provider> {
    rtrs: rtrs::server::Server<P>,
    shared: Arc<Shared>,
}

impl<P: Provider> fmt::Debug for Server<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("addr", &self.rtrs.local_addr())
            .finish_non_exhaustive()
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// RTRS could not.
    #[error(transparent)]
    Rtrs(#[from] rtrs::Error),
    /// No threads.
    #[error("I/O threads: {0}")]
    Threads(#[source] StdError),
}

impl<P: Provider> Server<P> {
    /// Listens, and serves from then on.
    ///
    /// # Errors
    /// When the address or port can't be listened on, or the system has no threads.
    pub fn start(provider: &P, config: ServerConfig, options: ServerOptions) -> Result<Self, StartError> {
        let pool = Arc::new(Pool::new(options.threads).map_err(StartError::Threads)?);
        let shared = Arc::new(Shared {
            exports: options.exports,
            pool,
            max_devices: options.max_devices,
            max_open: options.max_open,
            counters: Counters::default(),
            logs: Logs {
                sessions: Throttle::new(),
                devices: Throttle::new(),
                refused: Throttle::new(),
                malformed: Throttle::new(),
            },
        });
        let ops = Arc::new(Ops {
            shared: shared.clone(),
            sessions: RwLock::default(),
        });
        let rtrs = rtrs::server::Server::listen(provider, config, ops)?;
        Ok(Self { rtrs, shared })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.rtrs.local_addr()
    }

    /// The RTRS server below.
    pub fn rtrs(&self) -> &rtrs::server::Server<P> {
        &self.rtrs
    }

    /// What it has done so far.
    pub fn counters(&self) -> ServerCounters {
        let c = &self.shared.counters;
        ServerCounters {
            opens: c.opens.load(Relaxed),
            refused: c.refused.load(Relaxed),
            refused_limit: c.refused_limit.load(Relaxed),
            open: c.open.load(Relaxed),
            requests: c.requests.load(Relaxed),
            failed: c.failed.load(Relaxed),
            read_bytes: c.read_bytes.load(Relaxed),
            written_bytes: c.written_bytes.load(Relaxed),
            malformed: c.malformed.load(Relaxed),
        }
    }

    /// Stops to listen, ends all sessions in good order and waits until what they wrote is durable.
    pub fn shutdown(&self) {
        self.rtrs.shutdown();
        if !self.shared.pool.wait_idle(SHUTDOWN_WAIT) {
            tracing::warn!("devices are still being written back at shutdown");
        }
    }
}

impl<P: Provider> Drop for Server<P> {
    fn drop(&mut self) {
        self.shutdown();
    }
}
