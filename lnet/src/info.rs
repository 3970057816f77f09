//! State of a node, to be shown.

use crate::proto::Nid;

/// Parameters of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Negotiated {
    /// Messages each way.
    pub depth: u16,
    /// Fragments of a descriptor.
    pub frags: u16,
    /// The peer's incarnation.
    pub incarnation: u64,
}

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// The peer.
    pub peer: Nid,
    /// Both sides may send.
    pub is_established: bool,
    /// Parameters.
    pub negotiated: Negotiated,
    /// Credits.
    pub credits: CreditInfo,
    /// Messages that wait to be sent.
    pub queued: usize,
    /// Messages on their way.
    pub in_flight: usize,
    /// Answers of the peer that we wait for, each with a receive of its own.
    pub asked: usize,
    /// Transfers of the peer into our memory that it has not ended.
    pub promised: usize,
}

/// State of a connection's credits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreditInfo {
    /// All that there are, each way.
    pub depth: u16,
    /// Messages that we may send.
    pub available: u16,
    /// Answers that we may ask for.
    pub reserved: u16,
    /// Messages that the peer may send.
    pub theirs: u16,
    /// Credits that go back with the next message.
    pub outstanding: u16,
}

/// Counts of LNet messages since the node's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Messages sent, or that wait to be sent.
    pub sent: u64,
    /// Bytes of their data.
    pub sent_bytes: u64,
    /// Messages received. An answer that came without a message of its own (GET_DONE) counts, too.
    pub received: u64,
    /// Bytes of their data.
    pub received_bytes: u64,
    /// Messages received for which there was nothing here.
    pub dropped: u64,
}
