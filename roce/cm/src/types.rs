//! Settings, arguments, events, errors and counters of a [`Manager`](crate::Manager).

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_verbs::{
    AddressVector, Mtu, PathMtus, Psn, QKey, Qpn,
    provider::{ConnParams, NoAnswer, RejectReason},
};

use crate::{
    cma::PortSpace,
    mad::{Attribute, MAD_LEN},
    state::State,
};

/// Identifies a connection. A manager never reuses one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(pub u64);

/// Identifies a listener. A manager never reuses one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ListenId(pub u64);

/// Current resource usage of a manager ([`Manager::usage`](crate::Manager::usage)). [`CmConfig`] limits each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Connections, including half-open and lingering ones.
    pub connections: usize,
    /// Half-open connections.
    pub half_open: usize,
    /// Largest number of half-open connections of one peer address (IPv6: one /64).
    pub half_open_of_peer: usize,
    /// Destroyed connections that linger to answer late MADs.
    pub lingering: usize,
    /// Peers whose MADs are rate-limited.
    pub rated_peers: usize,
    /// Outgoing MADs not yet polled.
    pub queued_mads: usize,
}

/// Rate limit of MADs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateLimit {
    /// MADs per second, at least 1.
    pub per_second: u32,
    /// MADs accepted at once after an idle time.
    pub burst: u32,
}

/// Settings of a manager.
#[derive(Clone, Debug)]
pub struct CmConfig {
    /// GUID of our channel adapter, in every REQ and REP. No two live devices may share one.
    /// Peers recognise duplicates and stale connections by it, communication IDs and queue pair numbers.
    pub ca_guid: u64,
    /// Largest supported path MTUs. A REQ with a larger one is rejected with reason 26 and our MTU.
    pub mtus: PathMtus,
    /// CM response timeout of both sides in our REQs, code t: 4.096 us * 2^t. `CMA_CM_RESPONSE_TIMEOUT`: 20, 4.3 s.
    /// Plus two packet lifetimes it is also the longest pause between two of our retransmissions.
    pub response_timeout: u8,
    /// Retransmissions of a REQ, REP or DREQ, also named in our REQs. `CMA_MAX_CM_RETRIES`: 15.
    pub max_retries: u8,
    /// Pause before the first retransmission; doubles each time.
    ///
    /// A REP is never repeated sooner, whatever response timeout the peer names. The kernel always waits the whole
    /// response timeout, but answers earlier duplicates.
    pub first_retry: Duration,
    /// Time after which an unanswered REQ, REP or DREQ fails, even if retries are left.
    ///
    /// [`ConnParams::patience`] overrides it for a REQ. An MRA restarts it at the end of the service timeout. A peer's
    /// request waits as long for the consumer, or longer if the peer repeats it.
    pub give_up: Duration,
    /// Packet lifetime code of paths. `CMA_IBOE_PACKET_LIFETIME`: 18.
    /// With `ca_ack_delay` it determines the local ACK timeout in REQs.
    pub packet_life_time: u8,
    /// Code of our ACK delay, in REPs as the target ACK delay. `RXE_LOCAL_CA_ACK_DELAY`: 15.
    pub ca_ack_delay: u8,
    /// Code of the service timeout in our MRAs. `CMA_CM_MRA_SETTING`: 24, 69 s.
    pub service_timeout: u8,
    /// Code of the longest service timeout accepted from a peer's MRA. Longer ones are cut to it.
    pub max_service_timeout: u8,
    /// Longest timewait, whatever ACK timeout the peer named.
    pub max_timewait: Duration,
    /// Largest number of connections, including half-open and lingering ones.
    pub max_connections: usize,
    /// Largest number of half-open connections, and separately of unanswered SIDR requests.
    /// Beyond it, the oldest whose peer address is unverified is evicted.
    pub max_half_open: usize,
    /// `max_half_open` of one peer address (IPv6: one /64).
    /// Beyond it, the oldest of that address is evicted if it is older than `first_retry`.
    pub max_half_open_per_peer: usize,
    /// Rate of MADs processed for one peer address (IPv6: one /64). More are dropped.
    /// Does not count MADs that name a connection by its communication ID or repeat a known request.
    pub mad_rate: RateLimit,
    /// Largest number of rate-limited addresses. Beyond it, those that have sent least are removed.
    pub max_rated_peers: usize,
    /// Rate at which repetitions of one request are answered.
    pub repeat_rate: RateLimit,
    /// Largest number of ended connections that linger to answer late MADs. Beyond it, the oldest is removed.
    pub max_lingering: usize,
    /// Largest number of outgoing MADs not yet polled. More are dropped; retransmission recovers them.
    pub max_queued_mads: usize,
    /// Range of our communication and SIDR request IDs, without 0. Processes at one address have disjoint ranges.
    pub comm_ids: (u32, u32),
    /// Queue [`ConnChange`]s, which must then be polled.
    pub report_changes: bool,
}

impl CmConfig {
    /// Returns the kernel's settings for a device with this GUID and path MTU.
    pub fn new(ca_guid: u64, mtu: Mtu) -> Self {
        Self {
            ca_guid,
            mtus: mtu.into(),
            response_timeout: 20,
            max_retries: 15,
            first_retry: Duration::from_millis(250),
            give_up: Duration::from_secs(10),
            packet_life_time: 18,
            ca_ack_delay: 15,
            service_timeout: 24,
            max_service_timeout: 25,
            max_timewait: Duration::from_secs(10),
            max_connections: 65_536,
            max_half_open: 4096,
            // All processes of a host are one peer, which may so occupy about 2 MiB.
            max_half_open_per_peer: 1024,
            // Burst: 128 processes on each of two hosts connect all to all. No application sustains a higher rate.
            mad_rate: RateLimit {
                per_second: 4096,
                burst: 16_384,
            },
            max_rated_peers: 4096,
            // Peers repeat after 0.2 s at the earliest; networks duplicate packets occasionally.
            repeat_rate: RateLimit {
                per_second: 16,
                burst: 16,
            },
            max_lingering: 4096,
            max_queued_mads: 4096,
            comm_ids: (1, u32::MAX),
            report_changes: false,
        }
    }
}

/// Start or end of a connection. A process that disconnects on behalf of dead ones needs both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnChange {
    /// Established; false: ended.
    pub established: bool,
    /// Our address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// Our communication ID.
    pub local_id: u32,
    /// The peer's communication ID.
    pub remote_id: u32,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
}

/// Transport of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ConnTransport {
    /// Reliable connection.
    #[default]
    Rc,
    /// Unreliable connection.
    Uc,
    /// Extended reliable connection: the initiator connects to the target (IBTA Annex A14).
    Xrc,
}

/// Arguments of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListenArgs {
    /// Local address. Unspecified: all of its IP version; `None`: all.
    pub addr: Option<IpAddr>,
    /// Port space.
    pub space: PortSpace,
    /// Port.
    pub port: u16,
    /// Accepted transport; `None`: any. Requests for another are rejected. Ignored in a datagram port space.
    pub transport: Option<ConnTransport>,
    /// Largest number of requests of one peer address (IPv6: one /64) that wait for the consumer, at least 1.
    ///
    /// All addresses together get a quarter more. Requests beyond that are dropped, and the peers repeat them. A request
    /// counts until the consumer answers it, destroys it or takes it over
    /// ([`Manager::leave_backlog`](crate::Manager::leave_backlog)), even if its peer has given up.
    pub backlog: u32,
}

impl ListenArgs {
    /// Creates arguments for RC in the TCP port space.
    pub const fn new(addr: Option<IpAddr>, port: u16, backlog: u32) -> Self {
        Self {
            addr,
            space: PortSpace::Tcp,
            port,
            transport: Some(ConnTransport::Rc),
            backlog,
        }
    }
}

/// Returns whether two addresses, in the form of [`ListenArgs::addr`], overlap.
pub fn overlap(a: Option<IpAddr>, b: Option<IpAddr>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a == b || (a.is_ipv4() == b.is_ipv4() && (a.is_unspecified() || b.is_unspecified())),
        _ => true,
    }
}

/// Arguments of a SIDR request.
#[derive(Clone, Debug)]
pub struct ResolveArgs {
    /// Our address and port; 0 for an ephemeral one.
    pub local: SocketAddr,
    /// The listener's address and port, of the same family.
    pub remote: SocketAddr,
    /// Port space.
    pub space: PortSpace,
    /// Private data, at most 180 bytes.
    pub private_data: Vec<u8>,
}

/// Answer to a SIDR request.
#[derive(Clone, Debug, Default)]
pub struct SidrAnswer {
    /// SIDR status ([`sidr_status`](crate::mad::sidr_status)); 0 on success.
    pub status: u8,
    /// Queue pair of the service.
    pub qpn: Qpn,
    /// Q_Key of the queue pair.
    pub qkey: QKey,
    /// Private data, at most 136 bytes.
    pub private_data: Vec<u8>,
}

/// Arguments of an active connection.
#[derive(Clone, Debug)]
pub struct ConnectArgs {
    /// Our address and port; 0 for an ephemeral one. The port shows only in the REQ's header.
    pub local: SocketAddr,
    /// The listener's address, of the same family, and port in `space`.
    pub remote: SocketAddr,
    /// Our queue pair.
    pub qpn: Qpn,
    /// First PSN that we expect: our RQ PSN, with which the peer starts sending (IBA 12.7.31).
    pub start_psn: Psn,
    /// Path MTU.
    pub mtu: Mtu,
    /// Private data (at most 56 bytes), depths, retries and type of service.
    pub params: ConnParams,
    /// Our queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// Our queue pair uses a shared receive queue.
    pub srq: bool,
    /// Port space of the listener.
    pub space: PortSpace,
    /// Transport of our queue pair.
    pub transport: ConnTransport,
    /// UDP source port of our queue pair's packets, if fixed. A ferroce peer drops packets from any other.
    pub src_port: Option<u16>,
}

impl ConnectArgs {
    /// Creates arguments for RC in the TCP port space, without flow control or SRQ.
    pub fn new(local: SocketAddr, remote: SocketAddr, qpn: Qpn, start_psn: Psn, mtu: Mtu) -> Self {
        Self {
            local,
            remote,
            qpn,
            start_psn,
            mtu,
            params: ConnParams::default(),
            flow_control: false,
            srq: false,
            space: PortSpace::Tcp,
            transport: ConnTransport::Rc,
            src_port: None,
        }
    }
}

/// Arguments of an accept.
#[derive(Clone, Debug)]
pub struct AcceptArgs {
    /// Our queue pair, already in RTS (see [`Manager::accept_path`](crate::Manager::accept_path)).
    pub qpn: Qpn,
    /// First PSN that we expect: our RQ PSN, with which the peer starts sending (IBA 12.7.31).
    pub start_psn: Psn,
    /// Private data (at most 196 bytes), depths, RNR retries and type of service. Depths are cut to the REQ's offer.
    pub params: ConnParams,
    /// Our queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// Our queue pair uses a shared receive queue.
    pub srq: bool,
    /// UDP source port of our queue pair's packets, if fixed.
    pub src_port: Option<u16>,
}

impl AcceptArgs {
    /// Creates arguments without flow control, SRQ or fixed source port.
    pub const fn new(qpn: Qpn, start_psn: Psn, params: ConnParams) -> Self {
        Self {
            qpn,
            start_psn,
            params,
            flow_control: false,
            srq: false,
            src_port: None,
        }
    }
}

/// The peer's attributes for moving our queue pair to RTS (`cm_init_qp_rtr_attr`, `cm_init_qp_rts_attr`).
///
/// Our RQ PSN is the `start_psn` of [`ConnectArgs`] or [`AcceptArgs`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteQp {
    /// Path to the peer.
    pub av: AddressVector,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// First PSN that the peer expects: our SQ PSN.
    pub sq_psn: Psn,
    /// Path MTU.
    pub mtu: Mtu,
    /// READs and atomics that we answer at a time (`max_dest_rd_atomic`). In a request: the most that the peer sends.
    pub responder_resources: u8,
    /// READs and atomics that we send at a time (`max_rd_atomic`). In a request: the most that the peer answers.
    pub initiator_depth: u8,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retry count.
    pub retry_cnt: u8,
    /// RNR retry count; 7: unlimited.
    pub rnr_retry: u8,
    /// Transport.
    pub transport: ConnTransport,
    /// The peer's queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// The peer's queue pair uses a shared receive queue.
    pub srq: bool,
    /// The peer's adapter supports selective ACK ([`guid`](crate::guid)).
    pub keeps_packets: bool,
    /// UDP source port of the peer's queue pair, if a ferroce peer has named it.
    pub src_port: Option<u16>,
}

/// Event of a connection, resolution or listener. None follows its destruction.
/// Its `Display` is one line, with the reason in words.
///
/// Order on the active side: `Reply`, `Rejected` or `Unreachable`. On the passive side: `Request`, then after accept
/// `Established`, `Rejected` or `Unreachable`. Of an established connection: `Disconnected`, then `TimewaitExit`.
///
/// A layer that moves queue pairs to RTS for others turns `Reply` into `Established` or `Failed`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Passive: a peer requests a connection. Answer with accept or reject.
    Request {
        /// Listener that got the request.
        listener: ListenId,
        /// The new half-open connection.
        conn: ConnId,
        /// Our address and port.
        local: SocketAddr,
        /// The peer's address and (ephemeral) port.
        remote: SocketAddr,
        /// The consumer's private data: 56 bytes, zero-padded.
        private_data: Vec<u8>,
        /// The peer's queue pair, and upper bounds for our depths.
        path: RemoteQp,
    },
    /// Passive: SIDR request of a peer. Answer with [`Manager::answer`](crate::Manager::answer).
    SidrRequest {
        /// Listener that got the request.
        listener: ListenId,
        /// The new resolution.
        conn: ConnId,
        /// Our address and port.
        local: SocketAddr,
        /// The peer's address and (ephemeral) port.
        remote: SocketAddr,
        /// Port space.
        space: PortSpace,
        /// The consumer's private data: 180 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: answer to a resolution, which has ended.
    Resolved {
        /// The resolution.
        conn: ConnId,
        /// SIDR status ([`sidr_status`](crate::mad::sidr_status)); 0 on success.
        status: u8,
        /// Queue pair of the service, if the status is 0.
        qpn: Qpn,
        /// Q_Key of the queue pair.
        qkey: QKey,
        /// Additional information as the status defines it, up to 72 bytes.
        info: Vec<u8>,
        /// The consumer's private data: 136 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: the peer accepted. Move the queue pair to RTS, then call `qp_ready` or `qp_failed`.
    ///
    /// The connection is established when `qp_ready` returns; no `Established` follows.
    Reply {
        /// The connection.
        conn: ConnId,
        /// The peer's queue pair, depths as negotiated.
        path: RemoteQp,
        /// The consumer's private data: 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Passive: the RTU arrived, or `communication_established` was called. Active: instead of `Reply`, the queue pair is in RTS.
    Established {
        /// The connection.
        conn: ConnId,
        /// Active: the peer's private data from the accept, 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: instead of `Reply`, the queue pair could not be moved to RTS. The connection has ended.
    Failed {
        /// The connection.
        conn: ConnId,
        /// Error text.
        text: String,
    },
    /// The peer rejected or withdrew the connection, which has ended.
    ///
    /// Passive also: the request waited too long for the consumer ([`RejectReason::TIMEOUT`]) or was evicted.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// Reject reason.
        reason: RejectReason,
        /// Additional reject information as the reason defines it, up to 72 bytes (IBA table 109).
        info: Vec<u8>,
        /// The consumer's private data: 148 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// The peer never answered our REQ (active) or REP (passive). The connection has ended.
    ///
    /// Passive also: newer connections evicted the half-open one.
    Unreachable {
        /// The connection.
        conn: ConnId,
        /// Timeout, or what ICMP said of our request.
        why: NoAnswer,
    },
    /// An established connection has ended. Both sides' queue pairs enter the error state.
    ///
    /// The peer disconnected, answered our DREQ, or never answered it.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// The peer never answered our DREQ.
        timed_out: bool,
    },
    /// Timewait has expired: the queue pair's number may be reused (IBA 12.9.8.4).
    TimewaitExit {
        /// The connection.
        conn: ConnId,
    },
}

impl Event {
    /// Returns the connection of the event.
    pub const fn conn(&self) -> ConnId {
        match self {
            Self::Request { conn, .. }
            | Self::SidrRequest { conn, .. }
            | Self::Resolved { conn, .. }
            | Self::Reply { conn, .. }
            | Self::Established { conn, .. }
            | Self::Failed { conn, .. }
            | Self::Rejected { conn, .. }
            | Self::Unreachable { conn, .. }
            | Self::Disconnected { conn, .. }
            | Self::TimewaitExit { conn } => *conn,
        }
    }

    /// Returns the listener and the new connection or resolution of a request.
    pub const fn request(&self) -> Option<(ListenId, ConnId)> {
        match self {
            Self::Request { listener, conn, .. } | Self::SidrRequest { listener, conn, .. } => Some((*listener, *conn)),
            _ => None,
        }
    }
}

/// Outgoing MAD: UD SEND ONLY from QP1 to QP1, Q_Key 0x80010000, P_Key 0xffff.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutMad {
    /// Our address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The MAD.
    pub mad: [u8; MAD_LEN],
}

/// Error of a call, which changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CmError {
    /// Another listener has this address and port.
    #[error("address and port are in use")]
    AddressInUse,
    /// Local and remote address have different families, or one is unspecified or multicast.
    #[error("local and remote address cannot be used together")]
    Address,
    /// Private data too long.
    #[error("{given} bytes of private data, at most {max}")]
    PrivateData {
        /// Bytes given.
        given: usize,
        /// Largest size in this message, bytes.
        max: usize,
    },
    /// [`CmConfig::max_connections`] reached.
    #[error("too many connections")]
    Limit,
    /// Unknown or destroyed connection.
    #[error("no such connection")]
    NoConnection,
    /// The connection's state does not permit the call.
    #[error("not possible in connection state {0:?}")]
    State(State),
    /// The SIDR request is no longer pending.
    #[error("SIDR request already answered")]
    Answered,
}

/// Reason why a MAD was dropped without effect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(usize)]
pub enum DropReason {
    /// Not 256 bytes.
    Length,
    /// Not base version 1, class 7 (communication management), class version 2, method Send.
    Header,
    /// Attribute that no CM message has, or that RoCE doesn't use (LAP, APR).
    Attribute,
    /// Field with an invalid value.
    Field,
    /// Unknown connection.
    UnknownConnection,
    /// Source address other than the connection's peer.
    WrongAddress,
    /// DREQ for another queue pair than the connection's.
    WrongQp,
    /// Unexpected in the connection's state.
    State,
    /// Duplicate that needs no answer.
    Duplicate,
    /// Request beyond the listener's backlog and the quarter more of all addresses together.
    Backlog,
    /// Request beyond the listener's backlog, which its peer address fills alone.
    BacklogPeer,
    /// Request beyond [`CmConfig::max_half_open`], and no connection can be evicted.
    HalfOpen,
    /// Request beyond [`CmConfig::max_half_open_per_peer`], and no connection can be evicted (yet).
    HalfOpenPeer,
    /// Beyond [`CmConfig::mad_rate`] or [`CmConfig::repeat_rate`].
    Rate,
    /// Request beyond [`CmConfig::max_connections`].
    Connections,
    /// Answer that did not fit into the queue of outgoing MADs.
    OutQueueFull,
}

impl DropReason {
    /// All reasons.
    pub const ALL: [Self; 16] = [
        Self::Length,
        Self::Header,
        Self::Attribute,
        Self::Field,
        Self::UnknownConnection,
        Self::WrongAddress,
        Self::WrongQp,
        Self::State,
        Self::Duplicate,
        Self::Backlog,
        Self::BacklogPeer,
        Self::HalfOpen,
        Self::HalfOpenPeer,
        Self::Rate,
        Self::Connections,
        Self::OutQueueFull,
    ];

    /// Returns a stable name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Header => "header",
            Self::Attribute => "attribute",
            Self::Field => "field",
            Self::UnknownConnection => "unknown_connection",
            Self::WrongAddress => "wrong_address",
            Self::WrongQp => "wrong_qp",
            Self::State => "state",
            Self::Duplicate => "duplicate",
            Self::Backlog => "backlog",
            Self::BacklogPeer => "backlog_peer",
            Self::HalfOpen => "half_open",
            Self::HalfOpenPeer => "half_open_peer",
            Self::Rate => "rate",
            Self::Connections => "connections",
            Self::OutQueueFull => "out_queue_full",
        }
    }
}

/// Counters of a manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    received: [u64; Attribute::ALL.len()],
    sent: [u64; Attribute::ALL.len()],
    retried: [u64; Attribute::ALL.len()],
    dropped: [u64; DropReason::ALL.len()],
    /// REJs sent, for any reason.
    pub rejects_sent: u64,
    /// Stale connections ended because the peer reused their queue pair or communication ID.
    pub stale: u64,
    /// MRAs that extended a timer.
    pub extended: u64,
    /// REQs, REPs and DREQs without an answer.
    pub timeouts: u64,
    /// REQs and SIDR_REQs that ICMP reported as undeliverable.
    pub undeliverable: u64,
    /// Lingering connections removed early to make room.
    pub forgotten: u64,
    /// Half-open connections and SIDR requests evicted for newer ones of other addresses.
    pub displaced: u64,
    /// Half-open connections and SIDR requests evicted for newer ones of the same address.
    pub displaced_peer: u64,
    /// Requests that expired before the consumer answered.
    pub expired: u64,
    /// MADs not sent because the peer address is unverified.
    pub withheld: u64,
}

impl Counters {
    /// Returns the number of MADs received with this attribute.
    pub fn received(&self, a: Attribute) -> u64 {
        self.received[a.index()]
    }

    /// Returns the number of MADs sent with this attribute, including retransmissions.
    pub fn sent(&self, a: Attribute) -> u64 {
        self.sent[a.index()]
    }

    /// Returns the number of MADs with this attribute retransmitted after a timeout.
    pub fn retried(&self, a: Attribute) -> u64 {
        self.retried[a.index()]
    }

    /// Returns the number of MADs dropped for this reason.
    pub fn dropped(&self, r: DropReason) -> u64 {
        self.dropped[r as usize]
    }

    /// Iterates over all counters with stable names for reports.
    pub fn named(&self) -> impl Iterator<Item = (String, u64)> {
        let by_attribute = |prefix: &'static str, n: [u64; Attribute::ALL.len()]| {
            let attributes = Attribute::ALL.into_iter().zip(n);
            attributes.map(move |(a, n)| (format!("cm_{prefix}_{}", a.name()), n))
        };
        let dropped = DropReason::ALL.into_iter().zip(self.dropped);
        let others = [
            ("rejects_sent", self.rejects_sent),
            ("stale", self.stale),
            ("extended", self.extended),
            ("timeouts", self.timeouts),
            ("undeliverable", self.undeliverable),
            ("forgotten", self.forgotten),
            ("displaced", self.displaced),
            ("displaced_peer", self.displaced_peer),
            ("expired", self.expired),
            ("withheld", self.withheld),
        ];
        by_attribute("received", self.received)
            .chain(by_attribute("sent", self.sent))
            .chain(by_attribute("retried", self.retried))
            .chain(dropped.map(|(r, n)| (format!("cm_drop_{}", r.name()), n)))
            .chain(others.map(|(name, n)| (format!("cm_{name}"), n)))
    }

    /// Adds another manager's counters.
    pub fn add(&mut self, other: &Self) {
        let tables = [
            (&mut self.received[..], &other.received[..]),
            (&mut self.sent[..], &other.sent[..]),
            (&mut self.retried[..], &other.retried[..]),
            (&mut self.dropped[..], &other.dropped[..]),
        ];
        for (ours, theirs) in tables {
            ours.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
        }
        self.rejects_sent += other.rejects_sent;
        self.stale += other.stale;
        self.extended += other.extended;
        self.timeouts += other.timeouts;
        self.undeliverable += other.undeliverable;
        self.forgotten += other.forgotten;
        self.displaced += other.displaced;
        self.displaced_peer += other.displaced_peer;
        self.expired += other.expired;
        self.withheld += other.withheld;
    }

    pub(crate) fn count_received(&mut self, a: Attribute) {
        self.received[a.index()] += 1;
    }

    pub(crate) fn count_sent(&mut self, a: Attribute) {
        self.sent[a.index()] += 1;
        self.rejects_sent += u64::from(a == Attribute::Rej);
    }

    pub(crate) fn count_retried(&mut self, a: Attribute) {
        self.retried[a.index()] += 1;
    }

    pub(crate) fn count_drop(&mut self, r: DropReason) {
        self.dropped[r as usize] += 1;
    }
}
