//! Types shared by all kinds of connections.

use core::{fmt, time::Duration};

use roce_bth::RnrTimer;

/// Parameters of a connection (`rdma_conn_param`).
#[derive(Clone, Debug)]
pub struct ConnParams {
    /// Bytes for the peer's event; at most 56 in a connect, 196 in an accept, 148 in a reject.
    pub private_data: Vec<u8>,
    /// READs and atomics that we answer at a time.
    pub responder_resources: u8,
    /// READs and atomics that we send at a time.
    pub initiator_depth: u8,
    /// Retries, 0 to 7.
    pub retry_count: u8,
    /// RNR retries, 7 = for ever.
    pub rnr_retry_count: u8,
    /// How long a connect may stay without any answer; `None`: as the connection manager has it (in software 10 s). In
    /// software its retries end after about a minute; a connection manager of hardware goes by its own times.
    pub timeout: Option<Duration>,
    /// Type of service (IPv4) or traffic class (IPv6) of the queue pair's packets: DSCP and ECN bits. A connect tells it to
    /// the peer, whose packets have it as well if its accept has `None`. `None` in a connect: 0.
    pub tos: Option<u8>,
    /// How long the peer is to pause when no receive work request waits for its message; `None`: as the device has it.
    pub min_rnr_timer: Option<RnrTimer>,
}

impl Default for ConnParams {
    fn default() -> Self {
        Self {
            private_data: Vec::new(),
            responder_resources: 16,
            initiator_depth: 16,
            retry_count: 7,
            rnr_retry_count: 7,
            timeout: None,
            tos: None,
            min_rnr_timer: None,
        }
    }
}

/// Reason for which a peer counts as unreachable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum NoAnswer {
    /// No answer in time, or no route.
    #[default]
    Timeout,
    /// ICMP: nobody receives on the RoCE port there.
    PortUnreachable,
    /// ICMP: a firewall on the way, or at the peer, forbids it.
    Prohibited,
}

impl NoAnswer {
    /// Linux's error number (positive), which `rdma_cm_event::status` has negated.
    pub const fn errno(self) -> i32 {
        match self {
            Self::Timeout => 110,
            Self::PortUnreachable => 111,
            Self::Prohibited => 113,
        }
    }
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "no answer",
            Self::PortUnreachable => "nobody receives RoCE there (ICMP: UDP port 4791 is unreachable)",
            Self::Prohibited => "a firewall forbids it (ICMP: administratively prohibited)",
        })
    }
}

/// Why the peer (or we) refused: IBA table 110, kept as the number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No queue pair available.
    pub const NO_QP: Self = Self(1);
    /// No end-to-end context, also "no resources".
    pub const NO_RESOURCES: Self = Self(3);
    /// The request timed out.
    pub const TIMEOUT: Self = Self(4);
    /// Nobody listens at this service ID.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The queue pair is in a connection already.
    pub const STALE_CONNECTION: Self = Self(10);
    /// The path MTU can't be done.
    pub const INVALID_MTU: Self = Self(26);
    /// The consumer refused.
    pub const CONSUMER: Self = Self(28);
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::NO_QP => "no queue pair",
            Self::NO_RESOURCES => "no resources",
            Self::TIMEOUT => "timeout",
            Self::INVALID_SERVICE_ID => "nothing listens at the service ID",
            Self::STALE_CONNECTION => "stale connection",
            Self::INVALID_MTU => "path MTU not supported",
            Self::CONSUMER => "refused by the program",
            Self(number) => return write!(f, "CM reject reason {number}"),
        };
        write!(f, "{name} (CM reject reason {})", self.0)
    }
}
