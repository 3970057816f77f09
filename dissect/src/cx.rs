//! Parts that the layers of a connection work with.

use std::net::SocketAddr;

use crate::{
    conns::{Conn, Direction},
    exchange::{ExchangeId, Exchanges, Note, Open},
    field::Layer,
    paths::Paths,
};

/// Frame of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meta {
    /// Number of the frame.
    pub frame: u64,
    /// Time of the frame, nanoseconds since any fixed moment.
    pub time_ns: u64,
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
}

impl Meta {
    /// Creates an exchange that begins with this frame.
    pub(crate) const fn open(&self, id: ExchangeId, note: Note) -> Open {
        Open {
            id,
            frame: self.frame,
            time_ns: self.time_ns,
            note,
        }
    }
}

/// Context of a packet on a connection.
pub(crate) struct Cx<'a> {
    pub(crate) meta: &'a Meta,
    pub(crate) conn: &'a mut Conn,
    pub(crate) direction: Direction,
    pub(crate) exchanges: &'a mut Exchanges,
    pub(crate) paths: &'a mut Paths,
}

/// Layers of a message, and the exchange that it belongs to.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) layers: Vec<Layer>,
    pub(crate) exchange: Option<ExchangeId>,
}

impl Found {
    pub(crate) fn layer(layer: Layer, exchange: Option<ExchangeId>) -> Self {
        Self {
            layers: vec![layer],
            exchange,
        }
    }
}
