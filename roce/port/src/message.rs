//! Messages between the shards of an address and its GSI.
//!
//! A shard is a [`Port`](crate::Port). Where an address has several, one of them has the GSI: the connection manager and QP1.

use roce_bth::{Psn, Qpn};
use roce_cm::{ConnId, ConnTransport, RemoteQp};
use roce_verbs::provider::VerbsError;

use crate::rx::RxMeta;

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

/// Queue pair that its shard has reserved for a connection, with what a REQ or REP says of it.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    pub(crate) qp: QpKey,
    /// First PSN that the queue pair expects.
    pub(crate) start_psn: Psn,
    pub(crate) transport: ConnTransport,
    pub(crate) srq: bool,
    pub(crate) src_port: Option<u16>,
}

impl Offer {
    /// Returns the queue pair.
    pub const fn qp(&self) -> QpKey {
        self.qp
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
    /// Copies a packet that a shard of this process has received.
    pub fn captured(meta: &RxMeta, bytes: &[u8]) -> Self {
        Self {
            meta: *meta,
            bytes: bytes.to_vec(),
            captured: true,
        }
    }

    /// Copies a packet that another process has received.
    pub fn forwarded(meta: &RxMeta, bytes: &[u8]) -> Self {
        Self {
            captured: false,
            ..Self::captured(meta, bytes)
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
    /// The connection is established: its first packet is no news any more.
    Established(QpKey),
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
            Self::BringUp { qp, .. } | Self::Established(qp) | Self::Fail { qp, .. } | Self::Release(qp) => *qp,
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
