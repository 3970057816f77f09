//! Messages between the shards of an address and its GSI.
//!
//! A shard is a [`Port`](crate::Port). Where an address has several, one of them has the GSI: the connection manager and QP1.

use crate::cm::{ConnId, LocalQp, RemoteQp};
use roce_bth::Qpn;
use roce_verbs::provider::VerbsError;

use crate::meta::RxMeta;

/// Queue pair as the GSI names it: a later queue pair with the same number has another key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpKey {
    pub(crate) qpn: Qpn,
    /// Place in the order in which its shard created queue pairs.
    pub(crate) serial: u32,
}

impl QpKey {
    /// Returns the queue pair number, which names the shard.
    pub const fn qpn(self) -> Qpn {
        self.qpn
    }
}

/// Queue pair that its shard has reserved for a connection, with its attributes in a REQ or REP.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    pub(crate) qp: LocalQp,
    pub(crate) serial: u32,
}

impl Offer {
    /// Returns the queue pair.
    pub const fn qp(&self) -> QpKey {
        QpKey {
            qpn: self.qp.qpn,
            serial: self.serial,
        }
    }
}

/// Message to a shard.
#[derive(Debug)]
pub enum ToShard {
    /// Packet for the shard that another shard or process has received.
    Packet(HandedOver),
    /// Command of the GSI.
    Command(QpCommand),
    /// Report of another shard to the GSI, which this shard has.
    Report(FromShard),
}

/// Packet that reached the socket of another shard or process.
#[derive(Debug)]
pub struct HandedOver {
    /// Network header.
    pub meta: RxMeta,
    /// The packet.
    pub bytes: Vec<u8>,
    /// A shard of this process received the packet, whose capture has it already.
    pub captured: bool,
}

impl HandedOver {
    /// Copies a packet. `captured`: a shard of this process has received it.
    pub fn new(meta: &RxMeta, bytes: &[u8], captured: bool) -> Self {
        Self {
            meta: *meta,
            bytes: bytes.to_vec(),
            captured,
        }
    }
}

/// Command about a queue pair. It changes nothing if the queue pair is gone.
#[derive(Debug)]
pub enum QpCommand {
    /// The peer has accepted: move the queue pair to RTS. [`FromShard::BroughtUp`] answers.
    BringUp {
        /// The queue pair.
        qp: QpKey,
        /// Its connection.
        conn: ConnId,
        /// The peer's queue pair and the path to it.
        path: Box<RemoteQp>,
    },
    /// The connection has ended: move the queue pair to error. [`FromShard::Failed`] answers.
    Fail {
        /// The queue pair.
        qp: QpKey,
        /// Its connection.
        conn: ConnId,
    },
    /// The queue pair is free for another connection.
    Release(QpKey),
}

impl QpCommand {
    /// Returns the queue pair that the command is about.
    pub const fn qp(&self) -> QpKey {
        match self {
            Self::BringUp { qp, .. } | Self::Fail { qp, .. } | Self::Release(qp) => *qp,
        }
    }
}

/// Message of a shard to the GSI.
#[derive(Debug)]
pub enum FromShard {
    /// The peer's first packet has arrived at the queue pair of an accepted connection, before its RTU.
    FirstPacket(ConnId),
    /// Result of [`QpCommand::BringUp`].
    BroughtUp(ConnId, Result<(), VerbsError>),
    /// The queue pair of a connection that has ended is in error, or gone.
    Failed(ConnId),
}
