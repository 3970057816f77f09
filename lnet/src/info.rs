//! State of a node, to be shown.

use crate::proto::{Nid, Why};

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

/// Counts since the node's start.
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
    /// Pings answered.
    pub pings: u64,
    /// Interfaces of peers that were acknowledged (discovery).
    pub discoveries: u64,
    /// PUTs of peers that have ended well.
    pub puts: u64,
    /// Bytes of these.
    pub put_bytes: u64,
    /// GETs of peers that have ended well.
    pub gets: u64,
    /// Bytes of these.
    pub get_bytes: u64,
    /// PUTs and GETs of peers that have failed.
    pub failed: u64,
    /// Connections established.
    pub connected: u64,
    /// Established connections that have ended.
    pub disconnected: u64,
    /// Attempts to connect that were given up.
    pub connect_failures: u64,
    /// Connections, established or not, that ended because the peer took nothing or did not answer in time.
    pub connection_timeouts: u64,
    /// Operations of the user that ended because no answer came in time.
    pub operation_timeouts: u64,
    /// Connect requests of peers that were refused.
    pub rejects_sent: Rejects,
    /// Connect requests that peers have refused, those included that were made again with other parameters.
    pub rejects_received: Rejects,
}

impl Counters {
    /// All of them by name; of rejects the sums.
    pub fn named(&self) -> [(&'static str, u64); 19] {
        [
            ("sent", self.sent),
            ("sent_bytes", self.sent_bytes),
            ("received", self.received),
            ("received_bytes", self.received_bytes),
            ("dropped", self.dropped),
            ("pings", self.pings),
            ("discoveries", self.discoveries),
            ("puts", self.puts),
            ("put_bytes", self.put_bytes),
            ("gets", self.gets),
            ("get_bytes", self.get_bytes),
            ("failed", self.failed),
            ("connected", self.connected),
            ("disconnected", self.disconnected),
            ("connect_failures", self.connect_failures),
            ("connection_timeouts", self.connection_timeouts),
            ("operation_timeouts", self.operation_timeouts),
            ("rejects_sent", self.rejects_sent.sum()),
            ("rejects_received", self.rejects_received.sum()),
        ]
    }
}

/// Counts of rejects by their reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rejects([u64; Why::KNOWN + 1]);

impl Rejects {
    /// Counts a reject of o2iblnd, or with `None` one of the connection manager, as when nobody listens.
    pub(crate) fn add(&mut self, why: Option<Why>) {
        let index = why.map_or(0, |why| usize::from(why.0));
        self.0[if index > Why::KNOWN { 0 } else { index }] += 1;
    }

    /// Counts by reason, named as in the kernel (`IBLND_REJECT_…`). `OTHER` is the connection manager's, or unknown.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let name = |(why, count)| (Why(why).name().unwrap_or("OTHER"), count);
        (0..).zip(self.0).map(name)
    }

    /// All together.
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }
}
