//! A session on the server: its chunks and its paths.

use core::{fmt, net::SocketAddr};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use roce_verbs::{
    AccessFlags,
    provider::{Provider, VerbsError},
};

use super::{ServerConfig, path::Path};
use crate::proto::Uuid;

/// Names a session to the server's user. Clones are the same session.
#[derive(Clone)]
pub struct SessionHandle(Arc<HandleInner>);

struct HandleInner {
    id: u64,
    uuid: Uuid,
    peer: SocketAddr,
    opened: OnceLock<Opened>,
    queue_depth: u32,
    max_io_size: u32,
}

/// What is known of a session once its first path is complete.
struct Opened {
    name: String,
    connections: u16,
}

impl SessionHandle {
    /// A number that no other session of the server has had.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// The name that the client gave.
    pub fn name(&self) -> &str {
        self.0.opened.get().map_or("", |o| &o.name)
    }

    /// Connections of its first path, the service connection included; 0 until that path is complete.
    pub fn connections(&self) -> u16 {
        self.0.opened.get().map_or(0, |o| o.connections)
    }

    /// The client's address (of its first path).
    pub fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    /// The session's UUID.
    pub fn uuid(&self) -> Uuid {
        self.0.uuid
    }

    /// Requests in flight at most.
    pub fn queue_depth(&self) -> u32 {
        self.0.queue_depth
    }

    /// Largest data of a request, bytes.
    pub fn max_io_size(&self) -> u32 {
        self.0.max_io_size
    }

    /// The first path, now complete, gives the session its name; later ones keep it.
    pub(super) fn set_name(&self, name: &str, connections: u16) {
        self.0.opened.get_or_init(|| Opened {
            name: name.into(),
            connections,
        });
    }
}

impl fmt::Debug for SessionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionHandle")
            .field("id", &self.id())
            .field("name", &self.name())
            .field("peer", &self.peer())
            .finish_non_exhaustive()
    }
}

impl PartialEq for SessionHandle {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for SessionHandle {}

/// A session's memory and paths.
pub(super) struct SrvSession<P: Provider> {
    pub(super) handle: SessionHandle,
    /// Of its own: what another session knows of our keys opens nothing to it.
    pub(super) pd: P::Pd,
    /// All chunks in one region, one after the other: the only large allocation.
    pub(super) chunks: P::Mr,
    pub(super) paths: Mutex<Vec<Arc<Path<P>>>>,
    /// Paths that finished the handshake and are not gone yet.
    pub(super) established: Mutex<usize>,
}

impl<P: Provider> SrvSession<P> {
    pub(super) fn new(
        provider: &P,
        pd: &P::Pd,
        config: &ServerConfig,
        id: u64,
        uuid: Uuid,
        peer: SocketAddr,
    ) -> Result<Self, VerbsError> {
        let access = match config.always_invalidate {
            // Only revocable keys open the chunks.
            true => AccessFlags::LOCAL_WRITE | AccessFlags::MW_BIND,
            false => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
        };
        let bytes = usize::try_from(config.session_bytes()).map_err(|_| VerbsError::Limit("address space"))?;
        Ok(Self {
            handle: SessionHandle(Arc::new(HandleInner {
                id,
                uuid,
                peer,
                opened: OnceLock::new(),
                queue_depth: config.queue_depth,
                max_io_size: config.max_io_size(),
            })),
            pd: pd.clone(),
            chunks: provider.alloc_mr(pd, bytes, access)?,
            paths: Mutex::new(Vec::new()),
            established: Mutex::new(0),
        })
    }
}
