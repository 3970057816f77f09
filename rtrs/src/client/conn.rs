//! A connection of a path: its queue pair and what is to be posted with it.

use roce_verbs::{
    DeviceLimits, QpCaps, Sge,
    provider::{CmRef, MrInfo, QpId},
};

use crate::{
    client::buffers::MAX_PIECES,
    proto::{Imm, RkeyRsp},
    sendq::{MIN_SEND_WR, SendQueue, Work},
};

/// Work that a client posts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Post {
    /// The request that has this permit.
    Request {
        permit: u16,
        /// Slots that it takes: its own, and those of the key that it opens.
        slots: u32,
    },
    /// The end of the key of a request's buffer.
    Revoke(u16),
    /// A heartbeat message.
    Imm(Imm),
    /// The information request.
    Info(Sge),
}

impl Work for Post {
    fn cost(&self) -> u32 {
        match self {
            Self::Request { slots, .. } => *slots,
            Self::Revoke(_) | Self::Imm(_) | Self::Info(_) => 1,
        }
    }

    fn signalled(&self) -> bool {
        matches!(self, Self::Revoke(_))
    }

    fn heartbeat(&self) -> Option<Imm> {
        match self {
            Self::Imm(imm) => Some(*imm),
            _ => None,
        }
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) cm: CmRef,
    /// Made when the way to the server is known.
    pub(super) qp: Option<QpId>,
    pub(super) queue: SendQueue<Post>,
    /// Its receives' places among the path's: first and number.
    pub(super) receives: (u32, u32),
    /// Receives that have completed and go back with the turn.
    pub(super) used: Vec<u32>,
    /// It is on the client's list of connections that have something to post.
    pub(super) dirty: bool,
    /// The server has accepted it.
    pub(super) established: bool,
    /// Nothing of it is under way after the drain.
    pub(super) drained: bool,
    /// The connection manager says that it is over.
    pub(super) left: bool,
}

impl Conn {
    pub(super) fn new(cm: CmRef) -> Self {
        Self {
            cm,
            qp: None,
            queue: SendQueue::new(MIN_SEND_WR),
            receives: (0, 0),
            used: Vec::new(),
            dirty: false,
            established: false,
            drained: false,
            left: false,
        }
    }
}

/// Queue sizes of a connection: `send` and `recv` work requests, cut to what the device can.
pub(super) fn caps(limits: &DeviceLimits, send: u32, recv: u32) -> QpCaps {
    QpCaps {
        max_send_wr: send.max(MIN_SEND_WR).min(limits.max_qp_wr),
        max_recv_wr: recv.min(limits.max_qp_wr),
        // Data, and the header.
        max_send_sge: (MAX_PIECES as u32 + 1).min(limits.max_sge),
        max_recv_sge: 1,
        max_inline_data: 16,
    }
}

/// Buffer of a receive: 8 bytes of the region if key responses are expected.
pub(super) fn key_sge(region: Option<&MrInfo>, index: u32) -> Option<Sge> {
    region.map(|region| Sge {
        addr: region.addr + u64::from(index) * RkeyRsp::LEN as u64,
        length: RkeyRsp::LEN as u32,
        lkey: region.lkey,
    })
}
