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

/// A path, as a server or one of its shares has it.
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

/// A session, as a server or one of its shares has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionListing {
    /// The session.
    pub session: SessionKey,
    /// As the client names it on the wire.
    pub uuid: Uuid,
    /// The name that the client gave; empty as long as it has given none.
    pub name: String,
    /// This share is its home, and knows best.
    pub home: bool,
    /// Its paths, in the order in which they came.
    pub paths: Vec<PathListing>,
}

impl SessionListing {
    /// Puts together what the shares of a server have: sessions as their homes have them, with the connections, requests and
    /// statistics of all.
    pub fn merge(shares: impl IntoIterator<Item = Vec<Self>>) -> Vec<Self> {
        let (mut sessions, parts): (Vec<_>, Vec<_>) = shares.into_iter().flatten().partition(|s| s.home);
        for part in parts {
            if let Some(session) = sessions.iter_mut().find(|s| s.session == part.session) {
                session.add(&part);
            }
        }
        sessions.sort_by_key(|s| s.session);
        sessions
    }

    fn add(&mut self, part: &Self) {
        for of_part in &part.paths {
            if let Some(path) = self.paths.iter_mut().find(|p| p.path == of_part.path) {
                path.made += of_part.made;
                path.requests += of_part.requests;
                path.rdma.add(&of_part.rdma);
            }
        }
    }
}
