//! Sessions and their paths as they are at a moment, for the operator.

use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use roce_verbs::provider::{DeviceIx, KeyStrategy};

use crate::{
    admission::PathKey,
    proto::Uuid,
    server::{request::SessionKey, state::PathState},
    stats::RdmaStats,
};

/// A path of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathListing {
    /// Its number, of which no other path has had the same.
    pub path: PathKey,
    /// The client's UUID of the path: the same when it connects it again.
    pub uuid: Uuid,
    /// The client's address on it.
    pub client: SocketAddr,
    /// The server's.
    pub server: IpAddr,
    /// The device that it leads through.
    pub device: DeviceIx,
    /// Name of the device, if it is one of the system's RDMA devices.
    pub hca: Option<Arc<str>>,
    /// Strategy of the keys that open the chunks to the client.
    pub keys: KeyStrategy,
    /// State of the path.
    pub state: PathState,
    /// Connections that it is to have, the service connection included.
    pub connections: u16,
    /// Connections that it has.
    pub made: usize,
    /// Requests that are with the server's user.
    pub requests: usize,
    /// Traffic of the path.
    pub rdma: RdmaStats,
}

/// A session of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionListing {
    /// The session.
    pub session: SessionKey,
    /// As the client names it on the wire.
    pub uuid: Uuid,
    /// The name that the client gave; empty as long as it has given none.
    pub name: String,
    /// Its paths, in the order in which they came.
    pub paths: Vec<PathListing>,
}
