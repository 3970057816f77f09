//! The server as a whole: what it listens on, its sessions, its counters.

use core::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    thread::{Builder, JoinHandle},
    time::Instant,
};

use parking_lot::{Condvar, Mutex};
use roce_verbs::provider::{CmId, Provider};

use super::{ServerConfig, ServerOps, SessionHandle, path::Path, session::SrvSession};
use crate::{
    Error, PathError,
    poller::Handler,
    proto::{ChunkLayout, Uuid},
};

/// Connection requests that may wait.
const BACKLOG: u32 = 64;
/// How long a shutdown waits for sessions to end.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(10);

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Events since the server was started.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct ServerCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub(super) $name: AtomicU64,)*
        }

        impl Counters {
            fn snapshot(&self) -> ServerCounters {
                ServerCounters {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                }
            }
        }
    };
}

counters! {
    /// Sessions announced to the user.
    sessions_opened,
    /// Connections accepted.
    connections_accepted,
    /// Connection requests refused.
    connections_refused,
    /// Paths closed because the client broke the protocol.
    protocol_errors,
    /// Paths closed because the client gave no sign of life.
    heartbeats_lost,
    /// Paths closed because the handshake was not finished in time.
    handshakes_lost,
    /// Paths closed because a transfer failed.
    transfer_errors,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a path.
    pub(super) fn count(&self, why: &PathError) {
        match why {
            PathError::Protocol(_) | PathError::Unexpected(_) => Self::add(&self.protocol_errors),
            PathError::HeartbeatLost(_) => Self::add(&self.heartbeats_lost),
            PathError::HandshakeTimeout(_) => Self::add(&self.handshakes_lost),
            PathError::Completion { .. } | PathError::Flushed | PathError::Post(_) => Self::add(&self.transfer_errors),
            _ => {}
        }
    }
}

/// Sessions, and which path each connection belongs to.
pub(super) struct Registry<P: Provider> {
    pub(super) sessions: HashMap<Uuid, Arc<SrvSession<P>>>,
    pub(super) connections: HashMap<u64, Weak<Path<P>>>,
    pub(super) next_id: u64,
}

impl<P: Provider> Registry<P> {
    /// Sessions of a client address.
    pub(super) fn sessions_of(&self, ip: IpAddr) -> usize {
        self.sessions.values().filter(|s| s.handle.peer().ip() == ip).count()
    }
}

/// What all threads of a server share. Lock order: registry, paths of a session, state of a path.
pub(super) struct Shared<P: Provider> {
    pub(super) provider: P,
    pub(super) pd: P::Pd,
    pub(super) config: ServerConfig,
    pub(super) layout: ChunkLayout,
    pub(super) ops: Arc<dyn ServerOps<P>>,
    pub(super) registry: Mutex<Registry<P>>,
    session_gone: Condvar,
    pub(super) counters: Counters,
    pub(super) closing: AtomicBool,
}

impl<P: Provider> Shared<P> {
    /// Gives a session its name, and the number of connections of the path that asks, unless another has that name. One
    /// that is only still being cleaned up does not count: its client may be back already.
    pub(super) fn take_name(&self, name: &str, connections: u16, session: &SrvSession<P>) -> bool {
        // Held until the name is given: two sessions may ask for one at the same time.
        let registry = self.registry.lock();
        let taken = registry.sessions.values().any(|s| {
            let lives = || s.paths.lock().iter().any(|p| !p.stopped());
            s.handle != session.handle && s.handle.name() == name && lives()
        });
        if !taken {
            session.handle.set_name(name, connections);
        }
        !taken
    }

    /// A path has finished its handshake.
    pub(super) fn path_up(&self, session: &SrvSession<P>) {
        // Held during the call, so that opened and closed come in order.
        let mut established = session.established.lock();
        *established += 1;
        if *established == 1 {
            Counters::add(&self.counters.sessions_opened);
            self.ops.session_opened(&session.handle);
        }
    }

    /// A path is closed and the user has none of its requests any more.
    pub(super) fn path_gone(&self, path: &Path<P>, was_established: bool) {
        let session = &path.session;
        if was_established {
            let mut established = session.established.lock();
            *established = established.saturating_sub(1);
            if *established == 0 {
                self.ops.session_closed(&session.handle);
            }
        }
        let mut registry = self.registry.lock();
        registry.connections.retain(|_, p| !core::ptr::eq(p.as_ptr(), path));
        let mut paths = session.paths.lock();
        paths.retain(|p| p.id.uuid != path.id.uuid);
        if paths.is_empty()
            && registry
                .sessions
                .get(&session.handle.uuid())
                .is_some_and(|s| Arc::ptr_eq(s, session))
        {
            registry.sessions.remove(&session.handle.uuid());
            self.session_gone.notify_all();
        }
    }
}

/// A server. It runs on its own threads until it is shut down or dropped.
pub struct Server<P: Provider> {
    shared: Arc<Shared<P>>,
    local: SocketAddr,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<P: Provider> fmt::Debug for Server<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("local", &self.local)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl<P: Provider> Server<P> {
    /// Starts a server.
    ///
    /// # Errors
    /// Says what is wrong with the configuration, or why the address can't be listened on.
    pub fn listen(provider: &P, config: ServerConfig, ops: Arc<dyn ServerOps<P>>) -> Result<Self, Error> {
        let layout = config.check(&provider.limits())?;
        let channel = provider.create_cm_channel()?;
        let listener = provider.listen(&channel, config.listen_addr(), BACKLOG)?;
        let local = listener.local_addr();
        let shared = Arc::new(Shared {
            provider: provider.clone(),
            pd: provider.alloc_pd()?,
            config,
            layout,
            ops,
            registry: Mutex::new(Registry {
                sessions: HashMap::new(),
                connections: HashMap::new(),
                next_id: 1,
            }),
            session_gone: Condvar::new(),
            counters: Counters::default(),
            closing: AtomicBool::new(false),
        });
        let theirs = shared.clone();
        let thread = Builder::new()
            .name("rtrs-srv-cm".into())
            .spawn(move || theirs.serve(&channel, listener))
            .map_err(|e| Error::System("starting a thread", e))?;
        tracing::info!(%local, "RTRS server listens");
        Ok(Self {
            shared,
            local,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Its configuration.
    pub fn config(&self) -> &ServerConfig {
        &self.shared.config
    }

    /// Events so far.
    pub fn counters(&self) -> ServerCounters {
        self.shared.counters.snapshot()
    }

    /// Sessions that exist, also those still being opened.
    pub fn sessions(&self) -> Vec<SessionHandle> {
        self.shared
            .registry
            .lock()
            .sessions
            .values()
            .map(|s| s.handle.clone())
            .collect()
    }

    /// Disconnects a session; false when there is none of this number. Its end is reported to the user as usual.
    pub fn close_session(&self, id: u64) -> bool {
        let session = self
            .shared
            .registry
            .lock()
            .sessions
            .values()
            .find(|s| s.handle.id() == id)
            .cloned();
        let Some(session) = session else { return false };
        close_paths(&session);
        true
    }

    /// Stops listening, disconnects all sessions and waits until their requests are completed, at most 10 s. Not to be
    /// called from [`ServerOps`].
    pub fn shutdown(&self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
        let deadline = Instant::now() + SHUTDOWN_WAIT;
        let sessions: Vec<_> = self.shared.registry.lock().sessions.values().cloned().collect();
        for session in &sessions {
            close_paths(session);
        }
        let mut registry = self.shared.registry.lock();
        while !registry.sessions.is_empty() {
            if self.shared.session_gone.wait_until(&mut registry, deadline).timed_out() {
                tracing::warn!(
                    sessions = registry.sessions.len(),
                    "requests are still being worked on at shutdown"
                );
                break;
            }
        }
    }
}

impl<P: Provider> Drop for Server<P> {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn close_paths<P: Provider>(session: &SrvSession<P>) {
    let paths: Vec<_> = session.paths.lock().clone();
    for path in paths {
        path.fail(PathError::Closed);
    }
}
