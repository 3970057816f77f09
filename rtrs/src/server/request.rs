//! A client's request in the hands of the server's user.

use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use roce_verbs::mem::Pages;
use smallvec::SmallVec;

pub use crate::admission::SessionKey;
use crate::{Direction, PathError, proto::Uuid};

/// Names a request until it is answered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestKey {
    /// The session.
    pub session: SessionKey,
    /// The chunk that it came in.
    pub chunk: u16,
    /// Tells it from earlier requests in that chunk.
    pub serial: u32,
}

/// A request. The client waits until it is answered, with [`Server::answer`](super::Server::answer).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Its name.
    pub key: RequestKey,
    /// Read or write, seen from the client.
    pub direction: Direction,
    /// The connection that it came over; 0 is the service connection.
    pub connection: u16,
    /// The user's header: a copy, which the client can't change any more.
    pub header: SmallVec<[u8; 64]>,
    /// Bytes of data that the client sent, or has room for.
    pub data_len: u32,
    /// Offset of the data in the session's [memory](super::Server::memory). Without always_invalidate the client can
    /// change the bytes at any time.
    pub data_offset: usize,
}

/// A session, as its user hears of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionOpened {
    /// The session.
    pub session: SessionKey,
    /// The name that the client gave.
    pub name: String,
    /// The client's address (of the first path).
    pub peer: SocketAddr,
    /// Connections of the first path, the service connection included.
    pub connections: u16,
}

/// A session of a server: one whose first path is up, or is being made by a client that has proved its address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionSummary {
    /// The session.
    pub session: SessionKey,
    /// As the client names it on the wire.
    pub uuid: Uuid,
    /// The name that the client gave; empty as long as it has given none.
    pub name: String,
    /// The client's address (of the first path).
    pub peer: SocketAddr,
    /// Connections of the path that gave the name, the service connection included; 0 as long as none has.
    pub connections: u16,
    /// Paths that are up.
    pub paths: usize,
    /// Requests that are with the user.
    pub requests: usize,
}

/// Names memory that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// Report of a server to its user.
#[derive(Debug)]
pub enum Output {
    /// A session's first path is up. No request of it came before.
    SessionOpened(SessionOpened),
    /// A client wants something done.
    Request(Request),
    /// The session's last path is gone, and all its requests have been answered.
    /// While one of its paths is being connected the session stays, up or not: its client may not know yet that the others are down, and uses
    /// what it has open.
    SessionClosed {
        /// The session.
        session: SessionKey,
        /// Why the last path went.
        why: PathError,
    },
    /// A path of a session is up.
    PathUp {
        /// The session.
        session: SessionKey,
        /// The client's address on it.
        peer: SocketAddr,
        /// Ours.
        local: IpAddr,
        /// How many connections it has. The session has requests by those of all of its paths.
        connections: u16,
    },
    /// A path that was up is gone, and all of its requests have been answered.
    PathDown {
        /// The session.
        session: SessionKey,
        /// The client's address on it.
        peer: SocketAddr,
        /// Ours.
        local: IpAddr,
        /// Why.
        why: PathError,
    },
    /// Memory for a session is wanted: `bytes` of it, zeroed, by [`Server::ready`](super::Server::ready). It may take
    /// a moment to get, so the loop has another thread do it.
    Allocate {
        /// Names the answer.
        ticket: Ticket,
        /// How much.
        bytes: usize,
    },
    /// Memory that is not wanted any more, and that no device touches. To drop it may take a moment, if much of it was used,
    /// so the loop has another thread do it.
    Free(Arc<Pages>),
}
