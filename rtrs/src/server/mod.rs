//! The server: accepts sessions, keeps their chunks, and hands requests to its user.

mod config;
mod desk;
mod listener;
mod path;
mod post;
mod request;
mod session;

pub use config::ServerConfig;
pub use listener::{Server, ServerCounters};
pub use request::Request;
pub use session::SessionHandle;

use roce_verbs::provider::Provider;

/// What the user of a server does with its sessions.
///
/// The calls come from the server's threads: they must not block, or other requests of that path wait (heartbeats are
/// answered nevertheless, as long as service messages don't block).
pub trait ServerOps<P: Provider>: Send + Sync + 'static {
    /// A session's first path is up. No request of it came before.
    fn session_opened(&self, session: &SessionHandle);
    /// A client wants something done. [`Request::complete`] may be called at once or later, from any thread.
    fn rdma_request(&self, request: Request<P>);
    /// The session's last path is gone, and all its requests have been completed or dropped.
    fn session_closed(&self, session: &SessionHandle);
}
