//! Identity of a path and of its connection requests.

use core::net::{IpAddr, SocketAddr};

use roce_verbs::provider::DeviceIx;

use crate::{admission::PathKey, proto::Uuid};

/// Identity of a path, known from its first connection request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathId {
    pub(crate) key: PathKey,
    /// The session that it says it is of.
    pub(crate) session: Uuid,
    /// The client's UUID of the path.
    pub(crate) uuid: Uuid,
    /// Our address on it.
    pub(crate) local: IpAddr,
    /// The device that it leads through.
    pub(crate) device: DeviceIx,
    /// The client's address on it.
    pub(crate) peer: SocketAddr,
    /// Connections that it is to have.
    pub(crate) connections: u16,
}

/// Names a connection request that a share has asked home about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Ask(pub(crate) u64);
