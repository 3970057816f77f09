//! Events: packets with the part that they play in a conversation, for statistics and pictures.

use std::{net::IpAddr, time::Duration};

use roce_bth::{NakCode, Opcode};

/// Packet and the part that it plays in a conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// Frame that holds the packet, from 1.
    pub frame: u64,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Index of the conversation in [`Judge::conversations`](super::Judge::conversations).
    pub conversation: usize,
    /// Index of the endpoint that sent it.
    pub sender: usize,
    /// How often the sender's queue pair was connected again under the same number, as its requests show.
    pub generation: u32,
    /// Sender's address.
    pub src: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// Whether the packet carries "congestion experienced".
    pub congestion: bool,
    /// Bytes of payload.
    pub bytes: usize,
    /// Opcode.
    pub opcode: Opcode,
    /// Part that it plays.
    pub kind: EventKind,
}

/// Part of a packet in a conversation. PSNs are unwrapped: they go on beyond 2^24.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// Request packet.
    Request {
        /// PSN.
        psn: i64,
        /// PSNs that the request takes: more than one for a READ.
        psns: i64,
        /// Whether this PSN was sent before.
        repeated: bool,
        /// PSNs that were left out before it.
        skipped: i64,
        /// Whether it ends a message.
        ends: bool,
    },
    /// READ response.
    ReadResponse {
        /// PSN.
        psn: i64,
        /// Whether this response was sent before.
        repeated: bool,
        /// Nanoseconds since the READ was first sent, with its last response.
        latency_ns: Option<u64>,
    },
    /// Acknowledgement, also of an atomic operation.
    Ack {
        /// Last PSN that is acknowledged.
        psn: i64,
        /// Nanoseconds since that PSN was sent, if it was sent once.
        round_trip_ns: Option<u64>,
    },
    /// NAK.
    Nak {
        /// PSN that is refused.
        psn: i64,
        /// Reason.
        code: NakCode,
    },
    /// RNR NAK.
    Rnr {
        /// PSN that is refused.
        psn: i64,
        /// Least time that the requester must wait.
        wait: Duration,
    },
    /// Congestion notification packet.
    Cnp,
    /// Unreliable datagram.
    Datagram,
    /// Packet of which the part is not known: its conversation's other direction is not there, or its header is cut.
    Unknown,
}

impl EventKind {
    /// Returns its name in output for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Request { repeated: false, .. } => "request",
            Self::Request { repeated: true, .. } => "retransmission",
            Self::ReadResponse { repeated: false, .. } => "read_response",
            Self::ReadResponse { repeated: true, .. } => "repeated_read_response",
            Self::Ack { .. } => "ack",
            Self::Nak {
                code: NakCode::PsnSequenceError,
                ..
            } => "sequence_nak",
            Self::Nak { .. } => "fatal_nak",
            Self::Rnr { .. } => "rnr_nak",
            Self::Cnp => "cnp",
            Self::Datagram => "datagram",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the latency that the packet shows: the round trip of an acknowledgement, or that of a READ with its last response.
    pub const fn latency_ns(&self) -> Option<u64> {
        match *self {
            Self::Ack { round_trip_ns, .. } => round_trip_ns,
            Self::ReadResponse { latency_ns, .. } => latency_ns,
            _ => None,
        }
    }
}
