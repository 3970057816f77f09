//! Whom a server asks about who gets in: an [`Admission`] of its own, or one that it shares with other servers, each of which is
//! the part of one server that runs in a loop of its own.

use core::net::IpAddr;

use roce_verbs::Instant;

use crate::admission::{Admission, Admitted, ConnectRequest, Opened, PathKey, Refusal};

/// The calls of [`Admission`] that a server makes; see there. If the admission is shared, limits are those of all servers
/// together, and a path of another server may have to give way: that server is then told
/// ([`Server::gave_way`](crate::server::Server::gave_way)).
pub trait Doorkeeper: Send {
    /// A connection request came.
    ///
    /// # Errors
    /// Why it is refused.
    fn request(&mut self, now: Instant, request: &ConnectRequest) -> Result<Admitted, Refusal>;
    /// Connection 0 of a path stands. `None` if the path is not half-open (any more).
    ///
    /// # Errors
    /// Why there is no room for it; the path is forgotten then.
    fn established(&mut self, path: PathKey) -> Option<Result<Opened, Refusal>>;
    /// The client says what its session is called.
    ///
    /// # Errors
    /// When a session of this name may not come from there, or another has the name.
    fn name(&mut self, path: PathKey, name: &str) -> Result<(), Refusal>;
    /// The handshake of a path is complete.
    fn up(&mut self, path: PathKey);
    /// A path is about to end.
    fn closing(&mut self, path: PathKey);
    /// Nothing of a path is left.
    fn ended(&mut self, path: PathKey);
    /// A client has used a key that it had no right to.
    fn access_error(&mut self, now: Instant, peer: IpAddr);
    /// When [`expired`](Self::expired) wants to be called.
    fn next_deadline(&self) -> Option<Instant>;
    /// Takes a path of this server whose handshake has not ended in time.
    fn expired(&mut self, now: Instant) -> Option<PathKey>;
}

impl Doorkeeper for Admission {
    fn request(&mut self, now: Instant, request: &ConnectRequest) -> Result<Admitted, Refusal> {
        self.request(now, request)
    }

    fn established(&mut self, path: PathKey) -> Option<Result<Opened, Refusal>> {
        self.established(path)
    }

    fn name(&mut self, path: PathKey, name: &str) -> Result<(), Refusal> {
        self.name(path, name)
    }

    fn up(&mut self, path: PathKey) {
        self.up(path);
    }

    fn closing(&mut self, path: PathKey) {
        self.closing(path);
    }

    fn ended(&mut self, path: PathKey) {
        self.ended(path);
    }

    fn access_error(&mut self, now: Instant, peer: IpAddr) {
        self.access_error(now, peer);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline()
    }

    fn expired(&mut self, now: Instant) -> Option<PathKey> {
        self.expired(now)
    }
}
