//! Why somebody is not let in.

use crate::proto::errno;

/// Why a connection request is refused, or a path that was half-open ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Refusal {
    /// No rule allows the address.
    #[error("the address is not on the access list")]
    Address,
    /// The session's name is for other addresses.
    #[error("the session's name is not for this address")]
    Name,
    /// Another session has the name.
    #[error("another session has this name")]
    NameTaken,
    /// More connections than a path may have.
    #[error("more connections than a path may have")]
    ConnectionsOfPath,
    /// A path without I/O connection.
    #[error("a path without I/O connection")]
    NoIoConnection,
    /// It wants to join a session that does not exist.
    #[error("no such session")]
    NoSession,
    /// A further connection of a path that does not exist.
    #[error("no such path")]
    NoPath,
    /// The path does not expect this connection (any more), or has it.
    #[error("the path does not expect this connection")]
    Unexpected,
    /// The session has a path between these addresses.
    #[error("a path between these addresses exists")]
    SamePath,
    /// As many sessions as allowed.
    #[error("as many sessions as allowed")]
    Sessions,
    /// As many sessions of one client as allowed.
    #[error("as many sessions as allowed for one address")]
    SessionsOfClient,
    /// As many paths as allowed.
    #[error("as many paths as allowed")]
    Paths,
    /// As many paths of one session as possible.
    #[error("too many paths")]
    PathsOfSession,
    /// As many connections of all paths as allowed.
    #[error("as many connections as allowed")]
    Connections,
    /// Too many requests wait for connection 0 to be established.
    #[error("too many requests wait for the service connection")]
    Held,
    /// The client's sessions have ended with access errors again and again.
    #[error("sessions of this address used keys that were not theirs: it has to wait")]
    SlowedDown,
}

impl Refusal {
    /// Error number sent to the client.
    pub const fn errno(self) -> i32 {
        match self {
            Self::Address | Self::Name => errno::EACCES,
            Self::ConnectionsOfPath | Self::NoIoConnection | Self::NoPath | Self::Unexpected | Self::PathsOfSession => {
                errno::ECONNRESET
            }
            Self::NoSession => errno::ENXIO,
            Self::SamePath | Self::NameTaken => errno::EEXIST,
            Self::Sessions | Self::SessionsOfClient | Self::Paths | Self::Connections => errno::EUSERS,
            Self::Held | Self::SlowedDown => errno::EBUSY,
        }
    }
}
