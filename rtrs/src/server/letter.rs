//! Messages between the shares of a server.
//!
//! Between two shares letters keep their order. So what home says of a path comes before what it says of its connections; and when a
//! share says that nothing of a path is left, nothing else of that path is under way from there.

use core::net::SocketAddr;
use std::sync::Arc;

use roce_mem::Pages;
use roce_verbs::provider::{DeviceIx, Lent};

use crate::{
    PathError,
    admission::{ConnectRequest, PathKey},
    server::{
        cells::Cells,
        path_id::{Ask, PathId},
        request::SessionKey,
    },
};

/// A letter to another share, by [`Server::letter`](super::Server::letter).
#[derive(Debug)]
pub struct Letter(pub(crate) Message);

/// A path whose client has proved its address.
#[derive(Debug)]
pub(crate) struct Branch {
    pub(crate) session: SessionKey,
    /// The client's address on the session's first path.
    pub(crate) peer: SocketAddr,
    pub(crate) id: PathId,
    pub(crate) pd: Lent,
    /// By chunk, unless they are never renewed.
    pub(crate) keys: Vec<Lent>,
    pub(crate) cells: Arc<Cells>,
}

/// Parameters that a path's requests need.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) session: SessionKey,
    pub(crate) path: PathKey,
    /// The session's.
    pub(crate) name: String,
    /// Connections of the session's first path, the service connection included.
    pub(crate) connections: u16,
    pub(crate) memory: Arc<Pages>,
    /// The chunks as the path's device knows them.
    pub(crate) chunks: Lent,
}

/// A share's part of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) session: SessionKey,
    pub(crate) path: PathKey,
}

#[derive(Debug)]
pub(crate) enum Message {
    /// To home: a connection request has come; may it be accepted?
    Asks {
        ask: Ask,
        request: ConnectRequest,
        peer: SocketAddr,
        device: DeviceIx,
    },
    /// To home: it is over, whatever home says.
    AsksNoMore(Ask),
    /// From home: there is a path, some of whose connections belong here.
    Path(Box<Branch>),
    /// From home: accept this request, for the path.
    Accept(Ask, Part),
    /// From home: refuse this request.
    Refuse { ask: Ask, errno: i32 },
    /// From home: the path has asked for the chunks; are requests of the session at work?
    Settle(Part),
    /// To home: those that were are over.
    Settled(Part),
    /// From home: it need not wait for those of this path.
    Spare(Part, PathKey),
    /// From home: the path's connections are made; requests may come soon.
    Ready(Box<Terms>),
    /// To home: they may come.
    IsReady(Part),
    /// To home: the path can't go on.
    Lost(Part, PathError),
    /// From home: the path ends.
    Down(Part, PathError),
    /// To home: nothing of the path is left here, and the user has none of its requests.
    Gone(Part),
    /// From home: the session is over.
    Over(SessionKey, PathError),
    /// To home: requests of the session have come.
    Busy(SessionKey),
    /// To home: the user wants the session closed.
    Close(SessionKey),
    /// To all: who was at work in this chunk has left, and somebody waits.
    Free(SessionKey, u16),
}

#[cfg(test)]
mod tests {
    #[test]
    fn letters_go_to_other_threads() {
        fn is_send<T: Send + 'static>() {}
        is_send::<super::Letter>();
    }
}
