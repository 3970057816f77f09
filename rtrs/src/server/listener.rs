//! The server as a whole: what it listens on, its sessions, its counters.

use core::{
    fmt,
    net::SocketAddr,
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

use super::{ServerConfig, ServerOps, SessionHandle, desk::Desk, path::Path, session::SrvSession};
use crate::{
    Error, PathError,
    admission::{Admission, PathKey, Refusal},
    poller::Handler,
    proto::{ChunkLayout, Uuid},
};

/// Connection requests that may wait to be looked at, beside those that are held.
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

        impl ServerCounters {
            /// All of them, with their names.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
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
    /// Connection requests refused, for whatever reason.
    connections_refused,
    /// Of those: from addresses that no rule allows.
    refused_address,
    /// Sessions, or further paths of sessions, whose name is not for their address.
    refused_name,
    /// As many sessions as allowed.
    refused_sessions,
    /// As many sessions of one client as allowed.
    refused_sessions_of_client,
    /// As many paths as allowed.
    refused_paths,
    /// More connections than a path may have, or as many of all paths as allowed.
    refused_connections,
    /// Clients that have to wait because their sessions ended with access errors.
    refused_slowed_down,
    /// Clients that had not answered and gave way to newcomers.
    half_open_gave_way,
    /// Requests for further connections that waited until the first was known to stand.
    requests_held,
    /// Paths closed because memory, threads or other resources ran out.
    no_resources,
    /// Paths closed because the client broke the protocol.
    protocol_errors,
    /// Paths closed because the client used a key that it had no right to.
    access_errors,
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

    /// Counts a request that is refused.
    pub(super) fn denied(&self, refusal: Option<Refusal>) {
        Self::add(&self.connections_refused);
        if let Some(refusal) = refusal {
            self.refused(refusal);
        }
    }

    fn refused(&self, refusal: Refusal) {
        let counter = match refusal {
            Refusal::Address => &self.refused_address,
            Refusal::Name => &self.refused_name,
            Refusal::Sessions => &self.refused_sessions,
            Refusal::SessionsOfClient => &self.refused_sessions_of_client,
            Refusal::Paths | Refusal::PathsOfSession => &self.refused_paths,
            Refusal::Connections | Refusal::ConnectionsOfPath => &self.refused_connections,
            Refusal::SlowedDown => &self.refused_slowed_down,
            // What the client should know better.
            Refusal::NoIoConnection
            | Refusal::NoSession
            | Refusal::NoPath
            | Refusal::Unexpected
            | Refusal::SamePath
            | Refusal::Held => return,
        };
        Self::add(counter);
    }

    /// Counts the end of a path.
    pub(super) fn count(&self, why: &PathError) {
        match why {
            PathError::Protocol(_) | PathError::Unexpected(_) => Self::add(&self.protocol_errors),
            PathError::HeartbeatLost(_) => Self::add(&self.heartbeats_lost),
            PathError::HandshakeTimeout(_) => Self::add(&self.handshakes_lost),
            PathError::AccessError => Self::add(&self.access_errors),
            PathError::Refused(refusal) => self.refused(*refusal),
            PathError::Completion { .. } | PathError::Flushed | PathError::Post(_) => Self::add(&self.transfer_errors),
            _ => {}
        }
    }
}

/// Who is there, and which path each connection belongs to.
pub(super) struct Registry<P: Provider> {
    pub(super) admission: Admission,
    pub(super) sessions: HashMap<Uuid, Arc<SrvSession<P>>>,
    pub(super) paths: HashMap<PathKey, Weak<Path<P>>>,
    pub(super) connections: HashMap<u64, Weak<Path<P>>>,
}

/// What all threads of a server share. Lock order: registry, paths of a session, state of a path.
pub(super) struct Shared<P: Provider> {
    pub(super) provider: P,
    pub(super) config: ServerConfig,
    pub(super) layout: ChunkLayout,
    pub(super) ops: Arc<dyn ServerOps<P>>,
    pub(super) registry: Mutex<Registry<P>>,
    session_gone: Condvar,
    pub(super) counters: Counters,
    pub(super) closing: AtomicBool,
    next_session: AtomicU64,
    started: Instant,
}

impl<P: Provider> Shared<P> {
    /// The time as the admission counts it.
    pub(super) fn now(&self) -> roce_verbs::Instant {
        roce_verbs::Instant::ZERO + self.started.elapsed()
    }

    /// A number for a session that no other has had.
    pub(super) fn next_session(&self) -> u64 {
        self.next_session.fetch_add(1, Ordering::Relaxed)
    }

    /// Gives the path's session its name, and the number of connections of the path that asks, unless it may not have it
    /// or another has it. One that is only still being cleaned up does not count: its client may be back already.
    pub(super) fn take_name(&self, name: &str, path: &Path<P>) -> Result<(), PathError> {
        let session = &path.session;
        // Held until the name is given: two sessions may ask for one at the same time.
        let mut registry = self.registry.lock();
        let taken = registry.sessions.values().any(|s| {
            let lives = || s.paths.lock().iter().any(|p| !p.stopped());
            s.handle != session.handle && s.handle.name() == name && lives()
        });
        if taken {
            return Err(PathError::NameTaken(name.into()));
        }
        registry.admission.name(path.id.key, name)?;
        session.handle.set_name(name, path.id.con_num);
        Ok(())
    }

    /// A path has finished its handshake.
    pub(super) fn path_up(&self, path: &Path<P>) {
        self.registry.lock().admission.up(path.id.key);
        let session = &path.session;
        // Held during the call, so that opened and closed come in order.
        let mut established = session.established.lock();
        *established += 1;
        if *established == 1 {
            Counters::add(&self.counters.sessions_opened);
            self.ops.session_opened(&session.handle);
        }
    }

    /// A path is going down; perhaps because its client used a key that it had no right to.
    pub(super) fn path_closing(&self, path: &Path<P>, access_error: bool) {
        let now = self.now();
        let mut registry = self.registry.lock();
        registry.admission.closing(path.id.key);
        if access_error {
            registry.admission.access_error(now, path.id.peer.ip());
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
        registry.admission.ended(path.id.key);
        registry.paths.remove(&path.id.key);
        registry.connections.retain(|_, p| !core::ptr::eq(p.as_ptr(), path));
        let mut paths = session.paths.lock();
        paths.retain(|p| p.id.key != path.id.key);
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
        let listener = provider.listen(&channel, config.listen_addr(), BACKLOG + config.limits().held as u32)?;
        let local = listener.local_addr();
        let shared = Arc::new(Shared {
            provider: provider.clone(),
            registry: Mutex::new(Registry {
                admission: Admission::new(config.limits(), config.allow.clone()),
                sessions: HashMap::new(),
                paths: HashMap::new(),
                connections: HashMap::new(),
            }),
            config,
            layout,
            ops,
            session_gone: Condvar::new(),
            counters: Counters::default(),
            closing: AtomicBool::new(false),
            next_session: AtomicU64::new(1),
            started: Instant::now(),
        });
        let desk = Desk::new(shared.clone());
        let thread = Builder::new()
            .name("rtrs-srv-cm".into())
            .spawn(move || desk.serve(&channel, listener))
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

    /// Sessions that exist, also those still being opened by clients that have proved their address.
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
